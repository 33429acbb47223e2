"""Blocks that a tier wants, but that are still being written to the primary tier.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_core.contract import ReqContext
    from kv_core.keys import OffloadKey

__all__ = ["Parking"]


@final
class Parking:
    """Parks cascades until their block is readable, and holds back the end of the request.

    A tier that wants every block of a request is told that the request has ended only after it
    was given all of them.
    """

    def __init__(self) -> None:
        self._by_key: dict[OffloadKey, dict[str, tuple[ReqContext, frozenset[int]]]] = {}
        self._num_parked: dict[str, int] = {}
        # Requests that have ended, with the tiers that must hear of it later.
        self._ended: dict[str, frozenset[int]] = {}
        self._tiers: dict[str, frozenset[int]] = {}

    def __len__(self) -> int:
        return sum(self._num_parked.values())

    def park(self, key: OffloadKey, context: ReqContext, tiers: frozenset[int]) -> None:
        """Park a block for a request and the tiers (by index) that want it."""
        requests = self._by_key.setdefault(key, {})
        if context.req_id not in requests:
            requests[context.req_id] = (context, tiers)
            self._num_parked[context.req_id] = self._num_parked.get(context.req_id, 0) + 1
            self._tiers[context.req_id] = tiers

    def take(
        self, keys: Iterable[OffloadKey]
    ) -> list[tuple[ReqContext, frozenset[int], list[OffloadKey]]]:
        """Return what was parked for these blocks: request, tiers, and the blocks."""
        if not self._by_key:
            return []
        taken: dict[str, tuple[ReqContext, frozenset[int], list[OffloadKey]]] = {}
        for key in keys:
            for req_id, (context, tiers) in self._by_key.pop(key, {}).items():
                taken.setdefault(req_id, (context, tiers, []))[2].append(key)
                self._num_parked[req_id] -= 1
        return list(taken.values())

    def hold_end(self, req_id: str) -> frozenset[int]:
        """Note the end of a request.

        Returns:
            The tiers that must hear of it later.
        """
        if not self._num_parked.get(req_id):
            self._num_parked.pop(req_id, None)
            self._tiers.pop(req_id, None)
            return frozenset()
        self._ended[req_id] = self._tiers[req_id]
        return self._ended[req_id]

    def finish(self, req_id: str) -> frozenset[int]:
        """Return the tiers that must hear now that a request has ended; none if it has not."""
        if self._num_parked.get(req_id):
            return frozenset()
        self._num_parked.pop(req_id, None)
        self._tiers.pop(req_id, None)
        return self._ended.pop(req_id, frozenset())
