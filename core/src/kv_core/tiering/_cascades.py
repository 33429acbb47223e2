"""Cascades: copies of blocks of the primary tier to the tiers below, now or later.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, final

from kv_core.contract import JobErrorKind
from kv_core.tiering._health import Activity
from kv_core.tiering._jobs import job_ranges
from kv_core.tiering._options import TierMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_core.contract import JobId, ReqContext
    from kv_core.cpu import CPUPrimaryTierOffloadingManager
    from kv_core.keys import OffloadKey
    from kv_core.tiering._config import TieringConfig
    from kv_core.tiering._guard import GuardedTier, TierJob
    from kv_core.tiering._jobs import JobFactory

__all__ = ["Cascades"]


@final
class Cascades:
    """Submits stores, and remembers what a tier did not get.

    A tier that is degraded, throttled, under pressure or failing misses blocks. They are
    remembered for as long as the primary tier has them, and stored when a request offers or loads
    them again. Nothing retries by itself: a block that nobody wants is not worth a second try.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        jobs: JobFactory,
        config: TieringConfig,
    ) -> None:
        self._primary = primary
        self._jobs = jobs
        self._max_inflight_bytes = config.max_inflight_store_bytes
        # Tiers (by index) that miss a block of the primary tier.
        self._missed: dict[OffloadKey, set[int]] = {}
        # In order of submission, so in order of their deadlines.
        self._under_way: OrderedDict[JobId, tuple[GuardedTier, TierJob]] = OrderedDict()
        self._is_closed = False

    @property
    def has_under_way(self) -> bool:
        """Whether a store is under way that is not overdue."""
        return bool(self._under_way)

    @property
    def num_missed(self) -> int:
        """Blocks of the primary tier that some tier misses."""
        return len(self._missed)

    def store(
        self, tiers: Iterable[GuardedTier], keys: Sequence[OffloadKey], context: ReqContext
    ) -> list[tuple[GuardedTier, TierJob]]:
        """Give tiers a copy of readable blocks, as far as each of them takes some.

        Returns:
            Jobs that a tier did not take. They have ended.
        """
        refused: list[tuple[GuardedTier, TierJob]] = []
        if self._is_closed:
            return refused
        for tier in tiers:
            if tier.options.mode is TierMode.READ_ONLY:
                continue
            admitted = self._admit(tier, keys)
            given = 0
            for part in job_ranges(tier, len(admitted)):
                some = tuple(admitted[part])
                job = self._jobs.store(some, self._primary.prepare_read(some), context)
                job_id = job.metadata.job_id
                tier.inflight_store_bytes += self._bytes(job)
                tier.health.submitted(job_id)
                self._under_way[job_id] = (tier, job)
                if not tier.submit(job):
                    refused.append((tier, job))
                given = part.stop
            if given < len(admitted):
                self._refuse(tier, admitted, given, "blocks_skipped")
        return refused

    def close(self) -> None:
        """Store nothing any more: the tiers are about to be closed."""
        self._is_closed = True

    def _admit(self, tier: GuardedTier, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the blocks that go to a tier now; remember the others."""
        if not tier.may_use():
            return self._refuse(tier, keys, 0, "blocks_skipped")
        if not tier.pressure.admits():
            return self._refuse(tier, keys, 0, "blocks_dropped")
        room = self._max_inflight_bytes - tier.inflight_store_bytes
        # One block always fits an idle tier, however small the limit.
        fitting = max(room // self._primary.block_bytes, 0 if tier.inflight_store_bytes else 1)
        if fitting < len(keys):
            return self._refuse(tier, keys, fitting, "blocks_throttled")
        return keys

    def _refuse(
        self, tier: GuardedTier, keys: Sequence[OffloadKey], start: int, count: str
    ) -> Sequence[OffloadKey]:
        tier.counts[count] += len(keys) - start
        self._remember(tier, keys[start:])
        return keys[:start]

    def _remember(self, tier: GuardedTier, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if self._primary.is_ready(key):
                self._missed.setdefault(key, set()).add(tier.index)

    def catch_up(
        self,
        tiers: Sequence[GuardedTier],
        keys: Iterable[OffloadKey],
        context: ReqContext,
        spared: frozenset[int] = frozenset(),
    ) -> list[tuple[GuardedTier, TierJob]]:
        """Store blocks that are of use again to the tiers that missed them.

        Args:
            tiers: All tiers.
            keys: The blocks.
            context: The request that uses them.
            spared: Tiers (by index) that are given them anyway.

        Returns:
            Jobs that a tier did not take. They have ended.
        """
        if not self._missed:
            return []
        by_tier: dict[int, list[OffloadKey]] = {}
        for key in keys:
            if key in self._missed and self._primary.is_ready(key):
                for index in self._missed.pop(key) - spared:
                    by_tier.setdefault(index, []).append(key)
        refused = []
        for index, missed in by_tier.items():
            refused += self.store((tiers[index],), missed, context)
        return refused

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Note that blocks have left the primary tier."""
        if self._missed:
            for key in keys:
                self._missed.pop(key, None)

    def forget_all(self) -> None:
        """Note that every block has left the primary tier."""
        self._missed.clear()

    def end(self, tier: GuardedTier, job: TierJob) -> None:
        """Unpin the slots of a job that has ended and note what did not arrive."""
        self._under_way.pop(job.metadata.job_id, None)
        self._primary.complete_read(job.block_ids)
        tier.inflight_store_bytes -= self._bytes(job)
        if job.is_overdue:
            tier.note_overdue(-len(job.block_ids))
        tier.counts["blocks_stored"] += len(job.succeeded)
        if len(job.succeeded) < len(job.metadata.keys):
            failed = [key for key in job.metadata.keys if key not in job.succeeded]
            declined = job.error is not None and job.error.kind is JobErrorKind.DECLINED
            tier.counts["blocks_declined" if declined else "blocks_failed"] += len(failed)
            self._remember(tier, failed)

    def expire(self, now: float) -> None:
        """Count stores that are past their deadline. Their slots stay pinned: the tier reads."""
        while self._under_way:
            job_id, (tier, job) = next(iter(self._under_way.items()))
            if job.deadline > now:
                break
            del self._under_way[job_id]
            job.is_overdue = True
            tier.counts["jobs_stalled"] += 1
            tier.note_overdue(len(job.block_ids))
            tier.pressure.store_failed()
            tier.health.failed(Activity.STORE, "a store was not reported by its deadline")

    def _bytes(self, job: TierJob) -> int:
        return len(job.block_ids) * self._primary.block_bytes
