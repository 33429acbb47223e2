"""The tier of layout ``segments``.

**Who owns what.** The engine's thread owns the index: it looks up, notes where the blocks of a job
are when the job is submitted, and enters what a job has brought when the job is reported. Pool
threads get what they need in the plan of their job, and add what they have done to it. What other
threads find out (followers of other writers, the collector) is queued in the index and applied on
the engine's thread. Reader, writer and space have locks of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, final

from typing_extensions import override

from kv_core.contract import TierUsage
from kv_core.errors import BlockDamagedError, BlockMissingError
from kv_core.tierkit import RETIRING_KINDS, BatchOutcome, BatchTier
from kv_tier_fs.segments._reader import count_runs
from kv_tier_fs.segments._storage import SegmentStorage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kv_core.contract import (
        JobResult,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
    )
    from kv_core.tierkit import BlockFailure
    from kv_tier_fs._config import FsConfig
    from kv_tier_fs.segments._index import Place
    from kv_tier_fs.segments._segment import Segment
    from kv_tier_fs.segments._writer import Stored

__all__ = ["SegmentTier"]


@final
@dataclass(slots=True, eq=False)
class _StorePlan:
    """A store in flight.

    Attributes:
        keys: Its keys.
        present: Where blocks were that were present at submission, by index: nothing to do, if
            they are still what was stored.
        pinned: Segments that must stay until the end.
        stored: What batches have stored, and under which keys.
        invalid: Indices of blocks that were present, but not what was stored.
    """

    keys: Sequence[OffloadKey]
    present: Mapping[int, Place]
    pinned: Collection[Segment]
    stored: list[tuple[Sequence[OffloadKey], Stored]] = field(default_factory=list)
    invalid: list[int] = field(default_factory=list)


@final
@dataclass(slots=True, eq=False)
class _LoadPlan:
    """A load in flight.

    Attributes:
        keys: Its keys.
        places: Where each block was at submission; ``None`` where it was absent.
        pinned: Segments that must stay until the end.
    """

    keys: Sequence[OffloadKey]
    places: Sequence[Place | None]
    pinned: Collection[Segment]


class SegmentTier(BatchTier[_StorePlan, _LoadPlan]):
    """Jobs appended to large files, found through an index in memory."""

    emits_events: ClassVar[bool] = True
    # Half of it keeps a fast disk less busy (a tenth, from blocks of 1 MiB on); larger ones are not
    # faster, and a load waits for those of the stores that are under way.
    batch_bytes: ClassVar[int] = 2 << 20

    config: FsConfig

    # -- life -----------------------------------------------------------------------------------

    @override
    def open(self) -> None:
        self._storage = SegmentStorage(self.context, self.config, self.run_soon)
        self._storage.open(self._source)
        self._index = self._storage.index
        self._index.listen(self.note_all_stored, self.note_all_removed)

    @override
    def close(self) -> None:
        # Also after an open() that did not get as far as that.
        storage: SegmentStorage | None = getattr(self, "_storage", None)
        if storage is not None:
            storage.close()

    # -- the engine's thread --------------------------------------------------------------------

    @override
    def exists(self, key: OffloadKey) -> bool:
        return key in self._index

    @override
    def plan_store(self, keys: Sequence[OffloadKey]) -> _StorePlan:
        self._index.apply()
        self._index.count_use()
        present = {}
        for index, key in enumerate(keys):
            # Most are absent, which this finds out faster than locate().
            place = self._index.locate(key) if key in self._index else None
            if place is not None:
                present[index] = place
        pinned = _pin(present.values())
        if not all(map(_stays, pinned)):
            present = {index: place for index, place in present.items() if _stays(place[0])}
        return _StorePlan(keys, present, pinned)

    @override
    def plan_load(self, keys: Sequence[OffloadKey]) -> _LoadPlan:
        # A load without a lookup finds what others have stored, too.
        self._index.apply()
        self._index.count_use()
        places = [self._index.locate(key) for key in keys]
        pinned = _pin(place for place in places if place is not None)
        if not all(map(_stays, pinned)):
            # Removed between the two, and perhaps written over: what is pinned now, is too late.
            places = [place if place and _stays(place[0]) else None for place in places]
        return _LoadPlan(keys, places, pinned)

    @override
    def count_calls(self, plan: _LoadPlan) -> int:
        return count_runs(plan.places)

    @override
    def settle_store(self, plan: _StorePlan, failures: Mapping[int, BlockFailure]) -> None:
        _unpin(plan.pinned)
        for index in plan.invalid:
            segment, slot, _ = plan.present[index]
            self._index.remove(plan.keys[index], segment, slot)
        for keys, stored in plan.stored:
            self._index.put(stored.segment, keys, stored.slots, stored.checksums)

    @override
    def settle_load(self, plan: _LoadPlan, failures: Mapping[int, BlockFailure]) -> None:
        _unpin(plan.pinned)
        for index, failure in failures.items():
            place = plan.places[index]
            if failure.kind in RETIRING_KINDS and place is not None:
                self._index.remove(plan.keys[index], place[0], place[1])

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = super().get_finished_jobs()
        self._index.apply()
        return results

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        # After a pause without steps: what others have stored meanwhile can be found at once.
        self._index.apply()
        return super().on_new_request(req_context)

    @override
    def usage(self) -> TierUsage:
        self.check_process()
        return TierUsage(
            blocks=len(self._index),
            bytes=self._storage.used_bytes,
            capacity_bytes=self.config.capacity_bytes,
        )

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        self.check_process()
        removed: list[tuple[OffloadKey, Segment, int]] = []
        for key in keys:
            for segment, slot, _ in self._index.places(key):
                self._index.remove(key, segment, slot)
                removed.append((key, segment, slot))
        if removed:
            self._storage.removals_due.append(removed)
            self.run_soon(self._storage.write_removals)

    # -- pool threads ---------------------------------------------------------------------------

    @override
    def write_batch(
        self,
        plan: _StorePlan,
        start: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> BatchOutcome:
        wanted: Sequence[int] = range(len(keys))
        if plan.present:
            wanted = [index for index in wanted if not self._is_stored(plan, start + index)]
            if not wanted:
                return BatchOutcome(0)
            keys = [keys[index] for index in wanted]
            blocks = [blocks[index] for index in wanted]
        stored, failures = self._storage.store(keys, blocks)
        num_stored = 0
        for part in stored:
            num_stored += len(part.slots)
            plan.stored.append((keys[part.start : part.start + len(part.slots)], part))
        return BatchOutcome(
            num_stored * self.context.block_bytes,
            {wanted[index]: error for index, error in failures.items()},
        )

    def _is_stored(self, plan: _StorePlan, index: int) -> bool:
        place = plan.present.get(index)
        if place is None:
            return False
        try:
            self._storage.check(place, plan.keys[index])
        except (BlockDamagedError, BlockMissingError):
            plan.invalid.append(index)
        except OSError:
            # It may be intact. To store it once more costs space only, if that can be done.
            pass
        else:
            # Removed after it was read, by another process or by hand: nobody would find it.
            return not place[0].gone
        return False

    @override
    def read_batch(
        self,
        plan: _LoadPlan,
        start: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> BatchOutcome:
        places: list[Place] = []
        found: list[int] = []
        failures: dict[int, BaseException] = {}
        for index, key in enumerate(keys):
            place = plan.places[start + index]
            if place is None:
                failures[index] = BlockMissingError(f"block {key.hex()} is not in the index")
            else:
                places.append(place)
                found.append(index)
        if failures:
            keys = [keys[index] for index in found]
            blocks = [blocks[index] for index in found]
        bad = self._storage.load(places, keys, blocks)
        for index, error in bad.items():
            failures[found[index]] = error
        return BatchOutcome((len(found) - len(bad)) * self.context.block_bytes, failures)


def _pin(places: Iterable[Place]) -> Collection[Segment]:
    """Keep the segments of some places from being collected; return them. Engine's thread."""
    segments = {place[0] for place in places}
    for segment in segments:
        segment.pins += 1
    return segments


def _stays(segment: Segment) -> bool:
    """Say whether a segment that has been pinned was so in time."""
    return not (segment.gone or segment.leaving)


def _unpin(segments: Collection[Segment]) -> None:
    for segment in segments:
        segment.pins -= 1
