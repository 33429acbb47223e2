"""The ledger of offloaded blocks, as the scheduler sees it."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_core.contract import OffloadPolicy, RequestOffloadingContext

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kv_core.contract import (
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from kv_core.engine._load_store_specs import LoadStoreSpec

__all__ = ["LookupResult", "OffloadingManager", "PrepareStoreOutput"]


class LookupResult(enum.Enum):
    """The four answers of a lookup at the engine's level."""

    HIT = "hit"
    """In the primary tier and ready: stays loadable until ``on_schedule_end``."""
    MISS = "miss"
    """In no tier."""
    PENDING = "pending"
    """Found, but being written or promoted. Ask again in a later step."""
    RETRY = "retry"
    """Not known yet. Ask again in a later step."""


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """What came of an offer of blocks.

    Attributes:
        keys_to_store: Blocks to copy, in the order offered. Offered keys that are neither here
            nor declined are present (or being written) already.
        store_spec: Where to copy them; its ids are in the order of ``keys_to_store``.
        evicted_keys: Blocks that had to leave the primary tier.
        declined_keys: Blocks that found no room; offer them again later.
    """

    keys_to_store: tuple[OffloadKey, ...]
    store_spec: LoadStoreSpec
    evicted_keys: tuple[OffloadKey, ...] = ()
    declined_keys: tuple[OffloadKey, ...] = ()


class OffloadingManager(ABC):
    """Keeps the books of offloaded blocks; moves no bytes.

    All methods are called from one thread at a time, usually the scheduler's, and never block;
    only ``reset_cache`` and ``shutdown`` may. Within a step the order is: ``on_new_request``;
    ``lookup``; ``prepare_load``; at the end of the step ``prepare_store`` for scheduled and then
    for finished requests; ``on_request_finished``; ``on_schedule_end``. Completions arrive
    between steps and may follow ``on_request_finished``.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say where a block stands, for one request."""

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin blocks for a copy to the GPU and say where they are.

        All keys are checked before any is pinned. Each call is matched by one
        ``complete_load`` with the same keys.

        Raises:
            EngineStateError: A key is not present and ready. Nothing was pinned.
        """

    @abstractmethod
    def complete_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        """Unpin blocks whose copy to the GPU has ended, well or badly.

        Only what was delivered counts as a hit.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve slots for those of the offered blocks that are not known yet.

        All or nothing: when room for the new blocks cannot be made, the answer is ``None`` and
        nothing has changed; offer them again later. Of a batch larger than the whole tier the
        leading part is taken and the rest declined. When every key is known the output is
        empty, not ``None``.

        Args:
            keys: Blocks in prefix order.
            req_context: The request that computed them.
        """

    @abstractmethod
    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        """Make stored blocks readable, or free their slots after a failed copy.

        Acts only on keys that are present and not ready, so a repetition is harmless.
        """

    def take_lost_keys(self) -> Collection[OffloadKey]:
        """Return blocks that an offer was told are known, and whose write failed after that.

        Whoever offered them offers them again; otherwise the prefix keeps a hole.
        """
        return ()

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """Note that a request uses blocks, also those it found on the GPU.

        Args:
            keys: Blocks in prefix order; unknown ones are ignored.
            req_context: The request. Each (request, key) counts once.
        """

    def release(self, req_context: ReqContext) -> None:  # noqa: B027
        """Give up what lookups promised to a request that will not load it."""

    def hit_level(self, key: OffloadKey, req_context: ReqContext) -> str:  # noqa: ARG002
        """Name the level that a hit of this request came from.

        Returns:
            The name of the secondary tier when the block was promoted on behalf of this very
            request, else ``"cpu"``. Meaningful from the hit to ``complete_load``.
        """
        return "cpu"

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call."""
        return ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Note a new request and say which of its blocks to offer."""
        return RequestOffloadingContext(OffloadPolicy.BLOCK_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """Forget a request. Does not mean that its blocks are persisted."""

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: B027
        """Note the end of a step; the last call of the step."""

    def has_pending_work(self) -> bool:
        """Say whether further steps are needed although no request is left."""
        return False

    def reset_cache(self) -> None:  # noqa: B027
        """Empty the primary tier. Secondary tiers keep their data. May block.

        Until :meth:`on_reset_flushed`, keys that are not in the primary tier are misses, and
        slots with a transfer in flight stay out of use.
        """

    def on_reset_flushed(self) -> None:  # noqa: B027
        """Note that no worker reads or writes pre-reset blocks any more."""

    def reset(self, epoch: int) -> None:  # noqa: ARG002
        """Forget everything that was stored so far, everywhere, because the weights changed.

        Ends like :meth:`reset_cache`, with :meth:`on_reset_flushed`. May block.

        Args:
            epoch: Counts the weight updates; larger than in any reset before.
        """
        self.reset_cache()

    def get_stats(self) -> Mapping[str, float]:
        """Return measurements by name."""
        return {}

    def shutdown(self) -> None:  # noqa: B027
        """Release everything. Idempotent. May block."""
