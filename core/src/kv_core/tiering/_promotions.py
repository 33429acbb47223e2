"""Promotions: from a lookup that found a block below to a block in the primary tier.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, final

import numpy as np

from kv_core.engine import LookupResult
from kv_core.tiering._jobs import split_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.contract import Clock, ReqContext
    from kv_core.cpu import CPUPrimaryTierOffloadingManager
    from kv_core.keys import OffloadKey
    from kv_core.tiering._config import TieringConfig
    from kv_core.tiering._guard import GuardedTier, TierJob
    from kv_core.tiering._jobs import JobFactory
    from kv_core.tiering._requests import RequestState, RequestTable
    from kv_core.tiering._share import PrimaryShare

__all__ = ["Promotions"]


@final
class _Queued:
    """Slots reserved in this step for one (tier, request), waiting for the end of the step."""

    __slots__ = ("block_ids", "context", "generations", "keys", "tier")

    def __init__(self, tier: GuardedTier, context: ReqContext) -> None:
        self.tier = tier
        self.context = context
        self.keys: list[OffloadKey] = []
        self.block_ids: list[int] = []
        self.generations: list[int] = []


@final
class Promotions:
    """Reserves slots, submits loads, and deals with what comes of them, or does not.

    A load that has not been reported by its deadline is given up: its keys are absent at once,
    so whoever waited sees a miss, and its slots are quarantined, because the tier may still write
    to them. They count against the share until the tier reports; a late success may be adopted
    then (see ``CPUPrimaryTierOffloadingManager.complete_write``).

    Attributes:
        counts: What became of promotions, in blocks, and of requests for room.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        requests: RequestTable,
        share: PrimaryShare,
        jobs: JobFactory,
        config: TieringConfig,
        clock: Clock,
    ) -> None:
        self.counts = {
            "promotions": 0,
            "promotions_failed": 0,
            "promotions_abandoned": 0,
            "promotions_adopted": 0,
            "promotions_without_room": 0,
        }
        self._primary = primary
        self._requests = requests
        self._share = share
        self._jobs = jobs
        self._config = config
        self._clock = clock
        self._queued: dict[tuple[int, str], _Queued] = {}
        # In order of submission, so in order of their deadlines.
        self._under_way: deque[tuple[GuardedTier, TierJob]] = deque()

    @property
    def has_queued(self) -> bool:
        """Whether reservations wait for the end of the step."""
        return bool(self._queued)

    def reserve(
        self,
        key: OffloadKey,
        tier: GuardedTier,
        state: RequestState,
        evicted: Callable[[tuple[OffloadKey, ...]], None],
    ) -> LookupResult:
        """Reserve a slot for a block that a tier has.

        Args:
            key: The block.
            tier: The tier that has it.
            state: The request that wants it.
            evicted: Told of blocks that had to leave.

        Returns:
            ``PENDING`` with a slot. Without one, ``RETRY`` for a request that is not the oldest
            of those waiting, since older ones give their slots back; and ``MISS`` for the oldest,
            which runs with a shorter prefix instead of waiting for itself.
        """
        prepared = None
        if self._share.used < self._share.limit or self._share.has_room(state):
            prepared = self._primary.prepare_write((key,))
            while prepared is None and self._share.revoke_younger(state):
                prepared = self._primary.prepare_write((key,))
        if prepared is None:
            self.counts["promotions_without_room"] += 1
            if not self._requests.is_oldest_waiting(state):
                return LookupResult.RETRY
            # Promised by the tier, declined by us: to the request it is a miss.
            tier.resolve(key, state, "misses")
            return LookupResult.MISS
        if prepared.evicted_keys:
            evicted(prepared.evicted_keys)
        self._share.reserved += 1
        queued = self._queued.get((tier.index, state.context.req_id))
        if queued is None:
            queued = _Queued(tier, state.context)
            self._queued[tier.index, state.context.req_id] = queued
        queued.keys.append(key)
        queued.block_ids.append(prepared.block_ids[0])
        queued.generations.append(prepared.generations[0])
        return LookupResult.PENDING

    def flush(self) -> list[tuple[GuardedTier, TierJob]]:
        """Submit what was reserved in this step: one job per tier and request, or more.

        Returns:
            Jobs that the tier did not take. They have ended.
        """
        refused = []
        queued, self._queued = self._queued, {}
        for promotion in queued.values():
            tier = promotion.tier
            block_ids = np.array(promotion.block_ids, dtype=np.int32)
            for part in split_keys(len(promotion.keys), tier.limits.max_job_keys):
                job = self._jobs.load(
                    tuple(promotion.keys[part]),
                    block_ids[part],
                    tuple(promotion.generations[part]),
                    promotion.context,
                )
                tier.health.submitted()
                if tier.submit(job):
                    self._under_way.append((tier, job))
                else:
                    refused.append((tier, job))
        return refused

    def drop_queued(self) -> None:
        """Give back what was reserved in this step. Nothing has failed: it may be asked again."""
        for promotion in self._queued.values():
            for reservation in zip(
                promotion.keys, promotion.block_ids, promotion.generations, strict=True
            ):
                self._primary.complete_write(*reservation, success=False)
            self._share.reserved -= len(promotion.keys)
        self._queued.clear()

    def end(self, tier: GuardedTier, job: TierJob) -> list[OffloadKey]:
        """Turn the reservations of a reported job into leases, or give their slots back.

        Returns:
            The blocks that became readable.
        """
        state = self._requests.find(job.metadata.req_context.req_id)
        if job.is_overdue:
            self._share.quarantined -= len(job.block_ids)
        else:
            self._share.reserved -= len(job.block_ids)
        ready = []
        for key, block_id, generation in zip(
            job.metadata.keys, job.block_ids, job.generations, strict=True
        ):
            succeeded = key in job.succeeded
            is_ready = self._primary.complete_write(key, block_id, generation, succeeded)
            if is_ready:
                ready.append(key)
            if job.is_overdue:
                # It was counted and its request told when it was given up.
                self.counts["promotions_adopted"] += is_ready
                continue
            self.counts["promotions" if succeeded else "promotions_failed"] += 1
            self._note_outcome(tier, state, key, succeeded=succeeded)
        if state is not None and ready and not job.is_overdue:
            state.promoted.update(dict.fromkeys(ready, tier.name))
            if state.waiting:
                self._share.lease(state, ready, self._clock())
        return ready

    def _note_outcome(
        self, tier: GuardedTier, state: RequestState | None, key: OffloadKey, *, succeeded: bool
    ) -> None:
        if state is None:
            # The request has ended; what the tier was asked still counts.
            tier.counts["hits" if succeeded else "errors"] += 1
            return
        tier.resolve(key, state, "hits" if succeeded else "errors")
        if not succeeded:
            state.failed.add((key, tier.index))

    def expire(self, now: float) -> list[OffloadKey]:
        """Give up loads that are past their deadline.

        Returns:
            Keys that are absent now and that a request may have been told are known.
        """
        gone: list[OffloadKey] = []
        while self._under_way:
            tier, job = self._under_way[0]
            if job.metadata.job_id in tier.jobs:
                if job.deadline > now:
                    break
                gone += self._abandon(tier, job)
            self._under_way.popleft()
        return gone

    def _abandon(self, tier: GuardedTier, job: TierJob) -> list[OffloadKey]:
        job.is_overdue = True
        tier.counts["jobs_stalled"] += 1
        state = self._requests.find(job.metadata.req_context.req_id)
        for key, block_id, generation in zip(
            job.metadata.keys, job.block_ids, job.generations, strict=True
        ):
            self._primary.abandon_write(key, block_id, generation)
            self._note_outcome(tier, state, key, succeeded=False)
        self._share.reserved -= len(job.block_ids)
        self._share.quarantined += len(job.block_ids)
        self.counts["promotions_abandoned"] += len(job.block_ids)
        tier.health.failed("a load was not reported by its deadline")
        return list(job.metadata.keys)
