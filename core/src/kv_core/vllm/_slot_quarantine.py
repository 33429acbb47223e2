"""Keeps slots of vLLM's primary tier out of use while one of our tiers may still write to them.

vLLM has no word for "this load is given up, but its memory is not free yet": a failed load gives
its slots back at once, to the list of free ones. They are taken from there, and put back when the
tier has let go of them.

Used by the thread that drives vLLM's tiering manager.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, final

from kv_core.vllm import _compat

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SlotQuarantine"]

_LOGGER: Final = logging.getLogger(__name__)


@final
class SlotQuarantine:
    """The slots that are out of use on behalf of one tier."""

    def __init__(self, offloading_spec: Any) -> None:
        """Begin with none.

        Args:
            offloading_spec: vLLM's spec, whose manager is made after its tiers.
        """
        self._spec = offloading_spec

    @property
    def is_possible(self) -> bool:
        """Whether this vLLM has the list that it needs."""
        return _compat.free_slots(self._spec) is not None

    def hold(self, slots: Iterable[int]) -> None:
        """Take slots out of use that vLLM has got back this moment."""
        free = _compat.free_slots(self._spec)
        for slot in slots:
            if free is not None and slot in free:
                free.remove(slot)
            else:
                # It would be written to while it holds something else: better to know.
                _LOGGER.critical(
                    "slot %d of vLLM's primary tier was given back and is not free; a tier may "
                    "still write to it. Restart this engine",
                    slot,
                )

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back that the tier has let go of."""
        free = _compat.free_slots(self._spec)
        if free is not None:
            free.extend(slots)
