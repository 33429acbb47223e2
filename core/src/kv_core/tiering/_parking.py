"""Blocks that a tier wants, but that are still being written to the primary tier.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_core.contract import ReqContext
    from kv_core.keys import OffloadKey

__all__ = ["ParkedRequest", "Parking"]


@dataclass(slots=True)
class ParkedRequest:
    """A request with blocks that wait.

    Attributes:
        context: The request.
        tiers: Tiers (by index) that want its blocks.
        keys: Its blocks that still wait.
        has_ended: Whether the request has ended. Its tiers hear of it after its last block.
    """

    context: ReqContext
    tiers: frozenset[int]
    keys: set[OffloadKey] = field(default_factory=set)
    has_ended: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the request has ended and nothing of it waits any more."""
        return self.has_ended and not self.keys


@final
class Parking:
    """Parks cascades until their block is readable, and holds back the end of the request.

    A tier that wants every block of a request is told that the request has ended only after it
    was given all of them.
    """

    def __init__(self) -> None:
        self._by_key: dict[OffloadKey, dict[str, ParkedRequest]] = {}
        self._by_request: dict[str, ParkedRequest] = {}

    def __len__(self) -> int:
        return sum(len(parked.keys) for parked in self._by_request.values())

    def __bool__(self) -> bool:
        return bool(self._by_request)

    def park(self, keys: Iterable[OffloadKey], context: ReqContext, tiers: frozenset[int]) -> None:
        """Park blocks for a request and the tiers (by index) that want them."""
        for key in keys:
            parked = self._by_request.setdefault(context.req_id, ParkedRequest(context, tiers))
            parked.keys.add(key)
            self._by_key.setdefault(key, {})[context.req_id] = parked

    def take(self, keys: Iterable[OffloadKey]) -> list[tuple[ParkedRequest, list[OffloadKey]]]:
        """End the wait of blocks, which are readable now or never will be.

        Returns:
            Each request that waited, and for which of the blocks, in their order.
        """
        if not self._by_key:
            return []
        taken: dict[str, tuple[ParkedRequest, list[OffloadKey]]] = {}
        for key in keys:
            for req_id, parked in self._by_key.pop(key, {}).items():
                parked.keys.discard(key)
                taken.setdefault(req_id, (parked, []))[1].append(key)
        for req_id, (parked, _) in taken.items():
            if not parked.keys:
                del self._by_request[req_id]
        return list(taken.values())

    def hold_end(self, req_id: str) -> frozenset[int]:
        """Note the end of a request.

        Returns:
            The tiers that must hear of it later.
        """
        parked = self._by_request.get(req_id)
        if parked is None:
            return frozenset()
        parked.has_ended = True
        return parked.tiers

    def give_up(self, req_id: str) -> ParkedRequest | None:
        """Forget what waits for a request, if anything does."""
        parked = self._by_request.get(req_id)
        if parked is not None:
            for key in tuple(parked.keys):
                del self._by_key[key][req_id]
                if not self._by_key[key]:
                    del self._by_key[key]
            parked.keys.clear()
            del self._by_request[req_id]
        return parked

    def clear(self) -> list[ParkedRequest]:
        """Forget everything that waits.

        Returns:
            The requests that had something waiting.
        """
        forgotten = list(self._by_request.values())
        for parked in forgotten:
            parked.keys.clear()
        self._by_key.clear()
        self._by_request.clear()
        return forgotten
