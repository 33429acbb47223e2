"""Events: what became present in, or left, a storage medium."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_core.keys import OffloadKey

__all__ = ["OffloadingEvent"]


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """A change of what one medium holds.

    Replaying all events of a medium onto its listing at the start gives its listing now.

    Attributes:
        keys: The blocks concerned, in the order in which it happened.
        medium: ``"CPU"`` for the primary tier, else the tier's name.
        removed: ``False`` when the blocks became present, ``True`` when they left.
    """

    keys: tuple[OffloadKey, ...]
    medium: str
    removed: bool
