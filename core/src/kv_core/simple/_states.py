"""What the scheduler remembers of requests and of transfers in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_core.keys import OffloadKey
    from kv_core.simple._matching import BlockNames
    from kv_core.simple._protocol import SimpleRequest

__all__ = [
    "NO_TRANSFER",
    "LoadBatch",
    "LoadRequestState",
    "StoreBatch",
    "StoreRequestState",
    "TransferBatch",
    "TransferMeta",
]


@dataclass(frozen=True, slots=True)
class TransferMeta:
    """The two sides of one transfer; equal positions belong together.

    Attributes:
        gpu_block_ids: Blocks on the GPU.
        cpu_block_ids: Blocks in CPU memory, as many.
    """

    gpu_block_ids: tuple[int, ...] = ()
    cpu_block_ids: tuple[int, ...] = ()


NO_TRANSFER: Final = TransferMeta()
"""Nothing to copy."""


@dataclass(slots=True, eq=False)
class LoadRequestState:
    """Blocks that were promised to a request, from the lookup to the end of their load.

    Attributes:
        request: The request.
        start_token: Tokens that the GPU had when the promise was made.
        num_tokens: Tokens that were promised after those.
        pinned: For each group, the pinned CPU blocks by their index within the request.
        transfer: The load, once GPU blocks are allocated.
        finished: Whether the request has ended meanwhile: nobody waits for the load any more.
        is_outdated: Whether CPU memory was reset since: what the load brings is of no use.
    """

    request: SimpleRequest
    start_token: int
    num_tokens: int
    pinned: tuple[Mapping[int, int], ...]
    transfer: TransferMeta = NO_TRANSFER
    finished: bool = False
    is_outdated: bool = False

    def all_pinned(self) -> list[int]:
        """Return the pinned CPU blocks, each group's in prefix order."""
        return [block_id for group in self.pinned for block_id in group.values()]


@dataclass(slots=True, eq=False, kw_only=True)
class TransferBatch:
    """The transfers of one direction and step.

    Attributes:
        reports_due: Ranks that have not reported yet.
        failed: Whether a rank reported failure.
    """

    reports_due: int
    failed: bool = False

    def take_reports(self, count: int, *, failed: bool) -> bool:
        """Take in the reports of some ranks.

        Returns:
            Whether every rank has reported.
        """
        self.reports_due -= count
        self.failed |= failed
        return self.reports_due <= 0


@dataclass(slots=True, eq=False, kw_only=True)
class LoadBatch(TransferBatch):
    """The loads of one step.

    Attributes:
        states: The loads.
    """

    states: Sequence[LoadRequestState]


@dataclass(slots=True, eq=False)
class StoreRequestState:
    """How far a request's blocks have been stored.

    Attributes:
        req_id: The request.
        names: Keys of its blocks.
        cursors: For each group, its first block that was not taken yet.
        store_events: Its stores in flight.
        finished: Whether the request has ended; the state goes with its last store.
        is_outdated: Whether it may hold KV from before a reset, which is not stored.
    """

    req_id: str
    names: BlockNames
    cursors: list[int]
    store_events: set[int] = field(default_factory=set)
    finished: bool = False
    is_outdated: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class StoreBatch(TransferBatch):
    """The stores of one step.

    Attributes:
        keys: The blocks.
        transfer: Where they go.
        requests: The requests they were taken from; none when the free queue gave them.
    """

    keys: tuple[OffloadKey, ...] = ()
    transfer: TransferMeta = NO_TRANSFER
    requests: Sequence[StoreRequestState] = ()
