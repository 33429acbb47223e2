"""Promotions: from a lookup that found a block below to a block in the primary tier.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, final

import numpy as np

from kv_core.engine import LookupResult
from kv_core.tiering._health import Activity
from kv_core.tiering._jobs import job_ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.contract import Clock, JobId
    from kv_core.cpu import CPUPrimaryTierOffloadingManager
    from kv_core.keys import OffloadKey
    from kv_core.tiering._guard import GuardedTier, TierJob
    from kv_core.tiering._jobs import JobFactory
    from kv_core.tiering._requests import RequestState, RequestTable
    from kv_core.tiering._share import PrimaryShare

__all__ = ["Promotions"]


@final
class _Queued:
    """Slots reserved in this step for one (tier, request), waiting for the end of the step."""

    __slots__ = ("block_ids", "generations", "keys", "state", "tier")

    def __init__(self, tier: GuardedTier, state: RequestState) -> None:
        self.tier = tier
        self.state = state
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
        clock: Clock,
    ) -> None:
        self.counts = {
            "promotions": 0,
            "promotions_failed": 0,
            "promotions_abandoned": 0,
            "promotions_adopted": 0,
            "promotions_discarded": 0,
            "promotions_without_room": 0,
        }
        self._primary = primary
        self._requests = requests
        self._share = share
        self._jobs = jobs
        self._clock = clock
        self._queued: dict[tuple[int, str], _Queued] = {}
        # In order of submission, so in order of their deadlines.
        self._under_way: OrderedDict[JobId, tuple[GuardedTier, TierJob]] = OrderedDict()

    @property
    def has_under_way(self) -> bool:
        """Whether a load is under way that was not given up."""
        return bool(self._under_way)

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
            ``PENDING`` with a slot. Without one, ``RETRY`` when others will give slots back, and
            ``MISS`` when they will not, or cannot: the request runs with a shorter prefix instead
            of waiting for itself.
        """
        prepared = None
        has_room = self._share.has_room(state)
        if has_room:
            prepared = self._primary.prepare_write((key,))
            while prepared is None and self._share.revoke_younger(state, spare_answered=True):
                prepared = self._primary.prepare_write((key,))
        if prepared is None:
            self.counts["promotions_without_room"] += 1
            if has_room:
                # Running requests hold the primary; how long, nobody knows.
                is_final = self._requests.is_oldest_waiting(state)
            else:
                is_final = self._share.is_filled_by(state)
            if not is_final:
                return LookupResult.RETRY
            # Promised by the tier, declined by us: to the request it is a miss.
            tier.resolve(key, state, "misses")
            return LookupResult.MISS
        if prepared.evicted_keys:
            evicted(prepared.evicted_keys)
        self._share.reserved += 1
        state.reserved += 1
        queued = self._queued.get((tier.index, state.context.req_id))
        if queued is None:
            queued = _Queued(tier, state)
            self._queued[tier.index, state.context.req_id] = queued
        queued.keys.append(key)
        queued.block_ids.append(prepared.block_ids[0])
        queued.generations.append(prepared.generations[0])
        return LookupResult.PENDING

    def flush(self) -> tuple[list[tuple[GuardedTier, TierJob]], list[OffloadKey]]:
        """Submit what was reserved in this step: one job per tier and request, or more.

        Returns:
            Jobs that the tier did not take, which have ended; and keys whose reservation was
            given back, because their tier is not to be used any more or gets one job at a time.
        """
        refused = []
        given_back: list[OffloadKey] = []
        queued, self._queued = self._queued, {}
        for promotion in queued.values():
            tier = promotion.tier
            block_ids = np.array(promotion.block_ids, dtype=np.int32)
            given = 0
            for part in job_ranges(tier, len(promotion.keys)):
                job = self._jobs.load(
                    tuple(promotion.keys[part]),
                    block_ids[part],
                    tuple(promotion.generations[part]),
                    promotion.state,
                )
                job_id = job.metadata.job_id
                tier.health.submitted(job_id)
                self._under_way[job_id] = (tier, job)
                if not tier.submit(job):
                    refused.append((tier, job))
                given = part.stop
            if given < len(promotion.keys):
                given_back += promotion.keys[given:]
                self._give_back(promotion, given)
        return refused, given_back

    def drop_queued(self) -> None:
        """Give back what was reserved in this step. Nothing has failed: it may be asked again."""
        for promotion in self._queued.values():
            self._give_back(promotion, 0)
        self._queued.clear()

    def _give_back(self, promotion: _Queued, start: int) -> None:
        for key, block_id, generation in zip(
            promotion.keys[start:],
            promotion.block_ids[start:],
            promotion.generations[start:],
            strict=True,
        ):
            self._primary.complete_write(key, block_id, generation, success=False)
        self._unreserve(promotion.state, len(promotion.keys) - start)

    def _unreserve(self, state: RequestState | None, count: int) -> None:
        self._share.reserved -= count
        if state is not None:
            state.reserved -= count

    def end(self, tier: GuardedTier, job: TierJob) -> list[OffloadKey]:
        """Turn the reservations of an ended job into leases, or give their slots back.

        Returns:
            The blocks that became readable.
        """
        self._under_way.pop(job.metadata.job_id, None)
        state = job.state
        if job.is_overdue:
            self._share.quarantined -= len(job.block_ids)
            tier.note_overdue(-len(job.block_ids))
        else:
            self._unreserve(state, len(job.block_ids))
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
            if is_ready:
                self.counts["promotions"] += 1
            else:
                # Good, but no longer wanted: the primary tier was reset meanwhile.
                count = "promotions_discarded" if succeeded else "promotions_failed"
                self.counts[count] += 1
            self._note_outcome(tier, state, key, succeeded=succeeded)
        if state is not None and ready and not job.is_overdue:
            state.promoted.update(dict.fromkeys(ready, tier.name))
            if state.waiting:
                self._share.lease(state, ready, self._clock())
        return ready

    @staticmethod
    def _note_outcome(
        tier: GuardedTier, state: RequestState | None, key: OffloadKey, *, succeeded: bool
    ) -> None:
        """Count what became of a lookup, also when its request has ended."""
        if state is not None:
            tier.resolve(key, state, "hits" if succeeded else "errors")
            if not succeeded:
                state.failed.add((key, tier))

    def expire(self, now: float) -> list[OffloadKey]:
        """Give up loads that are past their deadline.

        Returns:
            Keys that are absent now and that a request may have been told are known.
        """
        gone: list[OffloadKey] = []
        while self._under_way:
            job_id, (tier, job) = next(iter(self._under_way.items()))
            if job.deadline > now:
                break
            del self._under_way[job_id]
            self._abandon(tier, job)
            gone += job.metadata.keys
        return gone

    def _abandon(self, tier: GuardedTier, job: TierJob) -> None:
        job.is_overdue = True
        tier.counts["jobs_stalled"] += 1
        for key, block_id, generation in zip(
            job.metadata.keys, job.block_ids, job.generations, strict=True
        ):
            self._primary.abandon_write(key, block_id, generation)
            self._note_outcome(tier, job.state, key, succeeded=False)
        self._unreserve(job.state, len(job.block_ids))
        self._share.quarantined += len(job.block_ids)
        tier.note_overdue(len(job.block_ids))
        self.counts["promotions_abandoned"] += len(job.block_ids)
        tier.health.failed(Activity.LOAD, "a load was not reported by its deadline")
