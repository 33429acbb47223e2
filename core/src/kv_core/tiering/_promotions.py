"""Promotions: from a lookup that found a block below to a block in the primary tier.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_core.engine import LookupResult
from kv_core.tiering._health import Activity
from kv_core.tiering._jobs import job_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_core.contract import Clock, JobId
    from kv_core.cpu import CPUPrimaryTierOffloadingManager
    from kv_core.keys import OffloadKey
    from kv_core.tiering._guard import GuardedTier, TierJob
    from kv_core.tiering._jobs import JobFactory
    from kv_core.tiering._requests import RequestState, RequestTable
    from kv_core.tiering._share import PrimaryShare

__all__ = ["Promotions"]

# Looking a member up on its enum class costs as much as the rest of a lookup on Python 3.11.
_MISS: Final = LookupResult.MISS
_PENDING: Final = LookupResult.PENDING
_RETRY: Final = LookupResult.RETRY


@final
class _Queued:
    """Slots reserved in this step for one (tier, request), waiting for the end of the step."""

    __slots__ = ("block_ids", "keys", "state", "tier")

    def __init__(self, tier: GuardedTier, state: RequestState) -> None:
        self.tier = tier
        self.state = state
        self.keys: list[OffloadKey] = []
        self.block_ids: list[int] = []


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
        block_id = None
        has_room = self._share.has_room(state)
        if has_room:
            block_id = self._primary.reserve(key, evicted)
            while block_id is None and self._share.revoke_younger(state, spare_answered=True):
                block_id = self._primary.reserve(key, evicted)
        if block_id is None:
            self.counts["promotions_without_room"] += 1
            if has_room:
                # Running requests hold the primary; how long, nobody knows.
                is_final = self._requests.is_oldest_waiting(state)
            else:
                is_final = self._share.is_filled_by(state)
            if not is_final:
                return _RETRY
            # Promised by the tier, declined by us: to the request it is a miss.
            tier.resolve(key, state, "misses")
            return _MISS
        self._share.reserved += 1
        state.reserved += 1
        queued = self._queued.get((tier.index, state.context.req_id))
        if queued is None:
            queued = _Queued(tier, state)
            self._queued[tier.index, state.context.req_id] = queued
        queued.keys.append(key)
        queued.block_ids.append(block_id)
        return _PENDING

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
            generations = self._primary.generations_of(promotion.block_ids)
            given = 0
            for part in job_ranges(tier, len(promotion.keys)):
                job = self._jobs.load(
                    tuple(promotion.keys[part]),
                    block_ids[part],
                    generations[part],
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
        block_ids = promotion.block_ids[start:]
        generations = self._primary.generations_of(block_ids)
        self._primary.complete_writes(promotion.keys[start:], block_ids, generations, ())
        self._unreserve(promotion.state, len(block_ids))

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
        keys = job.metadata.keys
        ready = self._primary.complete_writes(keys, job.block_ids, job.generations, job.succeeded)
        if job.is_overdue:
            # It was counted and its request told when it was given up.
            self.counts["promotions_adopted"] += len(ready)
            return ready
        num_succeeded = len(job.succeeded)
        self.counts["promotions"] += len(ready)
        # Good, but no longer wanted: the primary tier was reset meanwhile.
        self.counts["promotions_discarded"] += num_succeeded - len(ready)
        self.counts["promotions_failed"] += len(keys) - num_succeeded
        if state is not None:
            # Also when the request has ended.
            tier.resolve_all(job.succeeded, state, "hits")
            if num_succeeded < len(keys):
                self._note_failed(tier, state, [key for key in keys if key not in job.succeeded])
            if ready:
                state.promoted.update(dict.fromkeys(ready, tier.name))
                if state.waiting:
                    self._share.lease(state, ready, self._clock())
        return ready

    @staticmethod
    def _note_failed(tier: GuardedTier, state: RequestState, keys: Sequence[OffloadKey]) -> None:
        """Count lookups whose block was not delivered; its request does not ask the tier again."""
        tier.resolve_all(keys, state, "errors")
        state.failed.update((key, tier) for key in keys)

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
        if job.state is not None:
            self._note_failed(tier, job.state, job.metadata.keys)
        self._unreserve(job.state, len(job.block_ids))
        self._share.quarantined += len(job.block_ids)
        tier.note_overdue(len(job.block_ids))
        self.counts["promotions_abandoned"] += len(job.block_ids)
        tier.health.failed(Activity.LOAD, "a load was not reported by its deadline")
