"""The ledger of blocks in CPU memory."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kv_core.contract import OffloadingEvent
from kv_core.cpu._blocks import BlockTable
from kv_core.cpu._protection import protect
from kv_core.cpu.policies import create_policy
from kv_core.engine import CPULoadStoreSpec, LookupResult, OffloadingManager, PrepareStoreOutput
from kv_core.errors import ConfigError, EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from kv_core.contract import OffloadKey, ReqContext, ScheduleEndContext

__all__ = ["CPUOffloadingManager"]

_logger = logging.getLogger(__name__)

# Looking a member up on its enum class costs as much as the rest of a lookup on Python 3.11.
_HIT: Final = LookupResult.HIT
_MISS: Final = LookupResult.MISS
_PENDING: Final = LookupResult.PENDING


class CPUOffloadingManager(OffloadingManager):
    """Keeps the books of a fixed number of slots in CPU memory; moves no bytes.

    Beyond the interface it promises:

    * A key that :meth:`lookup` answered as a hit is not evicted before ``on_schedule_end``.
    * A use counts once for each (request, key): a load, a store of a known block and a
      :meth:`touch` are one use together, and so is the insertion by the request itself.
    * Whoever holds a slot gives it back the way he took it. The copies to and from the GPU are
      known by key; a reset takes their keys away, and ``on_reset_flushed`` ends them all at once.
      Until then such a key is not stored again, so that a late completion of the old copy is
      never taken for one of a new copy.
    * Duplicate keys in one call are one key.

    One thread at a time; nothing blocks.

    Attributes:
        num_blocks: Slots in total.
        medium: Name of the medium in events.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: str = "lru",
        *,
        enable_events: bool = False,
        medium: str = "CPU",
        slot_freed: Callable[[int], None] | None = None,
    ) -> None:
        """Make an empty ledger.

        Args:
            num_blocks: Slots in total, at least 1.
            policy: Name of the eviction policy.
            enable_events: Whether to record events; they pile up until ``take_events``.
            medium: Name of the medium in events.
            slot_freed: Called with a slot whose content has just become meaningless (evicted,
                failed, reset), before anything can reuse it.

        Raises:
            ConfigError: There is no slot, or no such policy.
        """
        if num_blocks < 1:
            raise ConfigError(
                f"the primary tier needs at least one block, found num_blocks={num_blocks}",
                setting="cpu_bytes_to_use",
            )
        self.num_blocks = num_blocks
        self.medium = medium
        self._policy_name = policy
        self._slot_freed = slot_freed
        self._table = BlockTable(num_blocks)
        self._policy = create_policy(policy, num_blocks, self._table.ref_counts)
        self._slot_of = self._policy.getter()
        self._num_pinned = 0
        self._num_writing = 0
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._step_hits: set[OffloadKey] = set()
        self._used_keys: dict[str, set[OffloadKey]] = {}
        # (request, keys) of each prepare_load: how often, and the slots it pinned.
        self._loads: dict[tuple[str, tuple[OffloadKey, ...]], tuple[int, list[int]]] = {}
        # Slots that have no key any more but are still held; of those, the ones the GPU holds,
        # and the keys these had.
        self._orphans: set[int] = set()
        self._unflushed_orphans: set[int] = set()
        self._unflushed_keys: set[OffloadKey] = set()
        self._counts: Counter[str] = Counter()

    # -- lookups and loads ----------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        block_id = self._slot_of(key)
        if block_id is None:
            return _MISS
        if self._table.ref_counts[block_id] < 0:
            return _PENDING
        self._step_hits.add(key)
        return _HIT

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        block_ids = self._pin(keys)
        load = (req_context.req_id, tuple(keys))
        count, _ = self._loads.get(load, (0, block_ids))
        self._loads[load] = (count + 1, block_ids)
        self._policy.touch(self._first_uses(keys, req_context.req_id))
        return CPULoadStoreSpec(block_ids)

    @override
    def complete_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self.finish_load(keys, req_context)

    def finish_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> bool:
        """Note the end of a load, as :meth:`complete_load` does.

        Returns:
            Whether there was such a load.
        """
        load = (req_context.req_id, tuple(keys))
        count, block_ids = self._loads.get(load, (0, []))
        if not count:
            _logger.debug(
                "ignored the completion of an unknown load of %d blocks for request %s: it "
                "precedes a reset, or came twice",
                len(keys),
                req_context.req_id,
            )
            return False
        if count == 1:
            del self._loads[load]
        else:
            self._loads[load] = (count - 1, block_ids)
        self._unpin(block_ids)
        return True

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._policy.touch(self._first_uses(keys, req_context.req_id))

    # -- stores ---------------------------------------------------------------------------------

    @override
    def prepare_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        *,
        protected: Collection[OffloadKey] = (),
    ) -> PrepareStoreOutput | None:
        """Reserve slots for those of the offered blocks that are not known yet.

        As the interface says, and:

        Args:
            keys: Blocks in prefix order.
            req_context: The request that computed them.
            protected: Further keys that must not be evicted, besides those of this call and the
                hits of this step.
        """
        slot_of = self._slot_of
        new: list[OffloadKey] = []
        known: list[OffloadKey] = []
        for key in dict.fromkeys(keys):
            (new if slot_of(key) is None else known).append(key)
        # A call with more keys than slots could never be served whole.
        room = self.num_blocks - len(known)
        declined = new[room:]
        del new[room:]
        evicted = self._make_room(new, known, protected)
        if evicted is None:
            self._counts["stores_declined"] += 1
            return None
        req_id = req_context.req_id
        # Ghosts learn before the insertion removes them. Known keys come after it, so that the
        # head of the prefix ends up more recent than the new tail.
        self._policy.touch(self._first_uses(new, req_id))
        block_ids = self._insert(new)
        if known:
            self._policy.touch(self._first_uses(known, req_id))
        return PrepareStoreOutput(tuple(new), CPULoadStoreSpec(block_ids), evicted, tuple(declined))

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self.finish_store(keys, success=success)

    def finish_store(self, keys: Sequence[OffloadKey], *, success: bool) -> list[OffloadKey]:
        """Note the end of a store, as :meth:`complete_store` does.

        Returns:
            The blocks whose store has ended just now: readable, or gone.
        """
        slot_of, ref_counts = self._slot_of, self._table.ref_counts
        slot_holds = self._table.slot_holds
        done: list[OffloadKey] = []
        block_ids: list[int] = []
        for key in keys:
            block_id = slot_of(key)
            # A slot held by id belongs to a promotion, which no store can complete.
            if block_id is None or ref_counts[block_id] >= 0 or slot_holds[block_id]:
                continue
            if success:
                ref_counts[block_id] = 0
            else:
                self._policy.remove(key)
                block_ids.append(block_id)
            done.append(key)
        self._num_writing -= len(done)
        if success:
            self._record(done, removed=False)
        else:
            self._counts["stores_failed"] += len(done)
            self._free(block_ids)
        return done

    # -- steps, requests, resets ----------------------------------------------------------------

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._used_keys.pop(req_context.req_id, None)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._step_hits.clear()

    @override
    def reset_cache(self) -> None:
        """Empty the ledger.

        Slots that nobody holds are free at once. Slots with a GPU copy in flight are free after
        :meth:`on_reset_flushed`, which speaks for all resets before it. Slots held by id are
        free when the holder gives them back, whenever that is.
        """
        ref_counts, slot_holds = self._table.ref_counts, self._table.slot_holds
        ready: list[OffloadKey] = []
        unused: list[int] = []
        for key, block_id in self._policy.items():
            ref_count = ref_counts[block_id]
            if ref_count >= 0:
                ready.append(key)
            if ref_count == 0:
                unused.append(block_id)
                continue
            self._orphans.add(block_id)
            if abs(ref_count) > slot_holds[block_id]:
                self._unflushed_orphans.add(block_id)
                self._unflushed_keys.add(key)
        # A new policy: what the old one learned is about blocks that are gone.
        self._policy = create_policy(self._policy_name, self.num_blocks, ref_counts)
        self._slot_of = self._policy.getter()
        self._num_pinned = self._num_writing = 0
        self._loads.clear()
        self._used_keys.clear()
        self._step_hits.clear()
        self._record(ready, removed=True)
        self._free(unused)

    @override
    def on_reset_flushed(self) -> None:
        slot_holds = self._table.slot_holds
        unused = [block_id for block_id in self._unflushed_orphans if not slot_holds[block_id]]
        self._unflushed_orphans.clear()
        self._unflushed_keys.clear()
        self._orphans.difference_update(unused)
        self._free(unused)

    @override
    def get_stats(self) -> Mapping[str, float]:
        """Return the state of the slots and what happened so far.

        ``blocks_free + blocks_evictable + blocks_pinned + blocks_writing + blocks_orphaned`` is
        ``blocks_total``. An orphaned slot lost its key while it was held and is out of use until
        its holder gives it back.
        """
        return {
            "blocks_total": self.num_blocks,
            "blocks_free": self._table.num_free,
            "blocks_cached": len(self._policy) - self._num_writing,
            "blocks_evictable": self._num_evictable,
            "blocks_pinned": self._num_pinned,
            "blocks_writing": self._num_writing,
            "blocks_orphaned": len(self._orphans),
            "blocks_evicted": self._counts["blocks_evicted"],
            "stores_declined": self._counts["stores_declined"],
            "stores_failed": self._counts["stores_failed"],
        }

    # -- for the primary tier, too --------------------------------------------------------------

    @property
    def _num_evictable(self) -> int:
        """Ready blocks without a pin, protected or not."""
        return len(self._policy) - self._num_pinned - self._num_writing

    def _pin(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Pin ready blocks, or none of them."""
        slot_of, ref_counts = self._slot_of, self._table.ref_counts
        block_ids: list[int] = []
        for key in keys:
            block_id = slot_of(key)
            if block_id is None or ref_counts[block_id] < 0:
                state = "not present" if block_id is None else "still being written"
                raise EngineStateError(
                    f"block {key.hex()} is {state}; only blocks that lookup answered as a hit "
                    "can be read. Nothing was pinned."
                )
            block_ids.append(block_id)
        for block_id in block_ids:
            ref_count = ref_counts[block_id]
            if not ref_count:
                self._num_pinned += 1
            ref_counts[block_id] = ref_count + 1
        return block_ids

    def _unpin(self, block_ids: Iterable[int]) -> None:
        """Take one pin each off blocks that have a key."""
        ref_counts = self._table.ref_counts
        for block_id in block_ids:
            ref_count = ref_counts[block_id] - 1
            ref_counts[block_id] = ref_count
            if not ref_count:
                self._num_pinned -= 1

    def _make_room(
        self, new: Sequence[OffloadKey], *protected: Collection[OffloadKey]
    ) -> tuple[OffloadKey, ...] | None:
        """Evict until there are free slots for all of the new keys, or change nothing.

        Args:
            new: Distinct absent keys.
            protected: What must stay, besides the hits of this step.

        Returns:
            The evicted keys; ``None`` when the new keys cannot be inserted now.
        """
        if self._unflushed_keys and not self._unflushed_keys.isdisjoint(new):
            return None
        count = len(new) - self._table.num_free
        if count <= 0:
            return ()
        if count > self._num_evictable:
            return None
        victims = self._policy.evict(count, protect(self._step_hits, *protected))
        if victims is None:
            return None
        slots = {block_id for _, block_id in victims}
        if len(slots) != count or any(map(self._table.ref_counts.__getitem__, slots)):
            # An installed policy may be wrong; a slot that is read or written must not be reused.
            raise EngineStateError(
                f"the eviction policy {self._policy_name!r} was asked for {count} evictable "
                f"blocks and gave {len(slots)}, or blocks in use. Choose another "
                "'eviction_policy', and report this to its author"
            )
        evicted = tuple([key for key, _ in victims])
        self._counts["blocks_evicted"] += count
        self._record(evicted, removed=True)
        self._free([block_id for _, block_id in victims])
        return evicted

    def _insert(self, new: Sequence[OffloadKey]) -> list[int]:
        """Give absent keys free slots, in order; the first key ends up the most recent one."""
        block_ids = self._table.allocate(len(new))
        self._num_writing += len(new)
        insert = self._policy.insert
        for key, block_id in zip(reversed(new), reversed(block_ids), strict=True):
            insert(key, block_id)
        return block_ids

    def _free(self, block_ids: Sequence[int]) -> None:
        if self._slot_freed is not None:
            for block_id in block_ids:
                self._slot_freed(block_id)
        self._table.free(block_ids)

    def _record(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(tuple(keys), self.medium, removed))

    def _first_uses(self, keys: Sequence[OffloadKey], req_id: str) -> Sequence[OffloadKey]:
        """Return those keys that the request uses for the first time, and remember them."""
        used = self._used_keys.get(req_id)
        if used is None:
            first = [*dict.fromkeys(keys)]
            self._used_keys[req_id] = set(first)
            return first
        first = [key for key in dict.fromkeys(keys) if key not in used]
        used.update(first)
        return first
