"""The tiering manager: cascade downwards, promotion upwards.

All state belongs to the one thread that calls the manager, usually the scheduler's. Tiers work
on threads of their own, and the manager hears of it only by polling.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, final

import numpy as np
from typing_extensions import override

from kv_core.contract import (
    JobId,
    JobMetadata,
    OffloadPolicy,
    RequestOffloadingContext,
)
from kv_core.engine import LookupResult, OffloadingManager
from kv_core.tiering._config import TieringConfig
from kv_core.tiering._guard import GuardedTier, TierJob
from kv_core.tiering._observer import JobObserver, JobReport
from kv_core.tiering._requests import RequestState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from kv_core.contract import (
        Clock,
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from kv_core.cpu import CPUPrimaryTierOffloadingManager
    from kv_core.engine import LoadStoreSpec, PrepareStoreOutput
    from kv_core.plugins import OpenTier

__all__ = ["TieringOffloadingManager"]

_LOGGER: Final = logging.getLogger(__name__)


@final
class _QueuedPromotions:
    """Slots reserved in this step for one (tier, request), waiting for the end of the step."""

    __slots__ = ("block_ids", "context", "generations", "keys", "tier")

    def __init__(self, tier: GuardedTier, context: ReqContext) -> None:
        self.tier = tier
        self.context = context
        self.keys: list[OffloadKey] = []
        self.block_ids: list[int] = []
        self.generations: list[int] = []


@final
class TieringOffloadingManager(OffloadingManager):
    """Combines the primary tier with secondary tiers, in lookup order.

    A block that a tier has is promoted: its slot is reserved at the lookup, the load is
    submitted at the end of the step (one job per tier and request), and the block becomes a hit
    when the tier reports. It is then *leased* to the request that asked, pinned until that
    request loads it, so that other promotions do not evict it unread. Reservations and leases
    together stay within ``lease_share`` of the primary tier. When the share is used up, younger
    requests are told to ask again and the oldest waiting one is told "miss": it runs with a
    shorter prefix, so some request always makes progress.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[OpenTier],
        *,
        config: TieringConfig | None = None,
        clock: Clock = time.monotonic,
        observer: JobObserver | None = None,
    ) -> None:
        """Take ownership of the primary tier and of open tiers.

        Args:
            primary: The primary tier.
            tiers: Secondary tiers in lookup order; may be empty.
            config: Settings of the engine.
            clock: Monotonic seconds, the clock the tiers were given.
            observer: Told of every finished job.
        """
        self._primary = primary
        self._tiers = tuple(GuardedTier(tier, index) for index, tier in enumerate(tiers))
        self._config = config or TieringConfig()
        self._clock = clock
        self._observer = observer
        self._share_blocks = max(1, int(primary.num_blocks * self._config.lease_share))
        self._share_used = 0
        self._next_job_id = 0
        self._next_sequence = 0
        self._requests: dict[str, RequestState] = {}
        self._waiting: dict[str, RequestState] = {}
        self._queued: dict[tuple[int, str], _QueuedPromotions] = {}
        self._polled_this_step = False
        self._resetting = False
        self._is_shut_down = False
        self._stuck_jobs: list[JobId] = []
        self._counts = {
            "promotions": 0,
            "promotions_failed": 0,
            "promotions_without_room": 0,
            "lookup_deadlines_passed": 0,
        }

    # -- lookup and load ------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._polled_this_step:
            self._poll()
            self._polled_this_step = True
        answer = self._primary.lookup(key, req_context)
        if answer is LookupResult.HIT:
            return answer
        if answer is LookupResult.MISS:
            if not self._tiers or self._resetting:
                return answer
            state = self._state(req_context)
            if self._is_past_deadline(state):
                return answer
            answer = self._lookup_below(key, state)
            if answer is LookupResult.MISS:
                return answer
        else:
            state = self._state(req_context)
        return self._unknown(answer, state)

    def _lookup_below(self, key: OffloadKey, state: RequestState) -> LookupResult:
        """Ask the tiers in order; the first that has the block promotes it."""
        answer = LookupResult.MISS
        for tier in self._tiers:
            if state.failed and (key, tier.index) in state.failed:
                continue
            found = tier.lookup(key, state.context)
            if found:
                return self._reserve(key, tier, state)
            if found is None:
                answer = LookupResult.RETRY
        return answer

    def _reserve(self, key: OffloadKey, tier: GuardedTier, state: RequestState) -> LookupResult:
        prepared = None
        if self._share_used < self._share_blocks:
            prepared = self._primary.prepare_write((key,))
        if prepared is None:
            self._counts["promotions_without_room"] += 1
            return LookupResult.MISS if self._is_oldest_waiting(state) else LookupResult.RETRY
        self._share_used += 1
        queue = self._queued.get((tier.index, state.context.req_id))
        if queue is None:
            queue = _QueuedPromotions(tier, state.context)
            self._queued[tier.index, state.context.req_id] = queue
        queue.keys.append(key)
        queue.block_ids.append(int(prepared.block_ids[0]))
        queue.generations.append(int(prepared.generations[0]))
        return LookupResult.PENDING

    def _unknown(self, answer: LookupResult, state: RequestState) -> LookupResult:
        """Leave a request waiting, unless it has waited long enough."""
        if self._is_past_deadline(state):
            return LookupResult.MISS
        if state.first_unknown_at is None:
            state.first_unknown_at = self._clock()
        if not state.waiting:
            state.waiting = True
            self._waiting[state.context.req_id] = state
        return answer

    def _is_past_deadline(self, state: RequestState) -> bool:
        if state.first_unknown_at is None or state.gave_up:
            return state.gave_up
        waited_s = self._clock() - state.first_unknown_at
        if waited_s > self._config.request_lookup_deadline_s:
            state.gave_up = True
            self._counts["lookup_deadlines_passed"] += 1
        return state.gave_up

    def _is_oldest_waiting(self, state: RequestState) -> bool:
        """Say whether no older request holds or waits for a part of the share."""
        return all(other.sequence >= state.sequence for other in self._waiting.values())

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = self._primary.prepare_load(keys, req_context)
        # The load's own pins protect the blocks from here on.
        self._settle(req_context)
        return spec

    @override
    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._primary.complete_load(keys, req_context)
        state = self._requests.get(req_context.req_id)
        if state is not None and state.promoted:
            for key in keys:
                state.promoted.pop(key, None)

    @override
    def hit_level(self, key: OffloadKey, req_context: ReqContext) -> str:
        state = self._requests.get(req_context.req_id)
        return "cpu" if state is None else state.promoted.get(key, "cpu")

    @override
    def release(self, req_context: ReqContext) -> None:
        self._settle(req_context)

    def _settle(self, req_context: ReqContext) -> None:
        """End what a request was promised: it loads, runs without, or is gone."""
        state = self._requests.get(req_context.req_id)
        if state is None:
            return
        state.first_unknown_at = None
        state.gave_up = False
        if state.waiting:
            state.waiting = False
            del self._waiting[req_context.req_id]
        if state.leases:
            self._primary.complete_read(state.leases.values())
            self._share_used -= len(state.leases)
            state.leases.clear()

    # -- store ----------------------------------------------------------------------------------

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        # Every time, not once per step: finished cascades are what makes blocks evictable.
        self._poll()
        return self._primary.prepare_store(keys, req_context)

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self._primary.complete_store(keys, req_context, success=success)
        if success and keys and self._tiers:
            self._cascade(tuple(keys), req_context)

    def _cascade(self, keys: tuple[OffloadKey, ...], req_context: ReqContext) -> None:
        """Give every secondary tier a copy of blocks that just became readable."""
        if not all(map(self._primary.is_ready, keys)):
            keys = tuple(key for key in keys if self._primary.is_ready(key))
        for tier in self._tiers:
            for start, stop in _splits(len(keys), tier.max_job_keys):
                part = keys if stop - start == len(keys) else keys[start:stop]
                block_ids = self._primary.prepare_read(part)
                self._submit(tier, part, block_ids, req_context)

    def _submit(
        self,
        tier: GuardedTier,
        keys: tuple[OffloadKey, ...],
        block_ids: npt.NDArray[np.int32],
        req_context: ReqContext,
        generations: tuple[int, ...] | None = None,
    ) -> None:
        """Hand over one job: a promotion when generations are given, else a store."""
        job_id = JobId(self._next_job_id)
        self._next_job_id += 1
        is_promotion = generations is not None
        job = TierJob(
            JobMetadata(job_id, keys, block_ids, is_promotion, req_context, self._clock()),
            generations or (),
        )
        if not tier.submit(job):
            self._end_job(tier, job)

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._primary.touch(keys, req_context)
        for tier in self._tiers:
            tier.touch(keys, req_context)

    # -- results --------------------------------------------------------------------------------

    def _poll(self) -> None:
        for tier in self._tiers:
            if not tier.jobs:
                continue
            for job in tier.finished():
                self._end_job(tier, job)

    def _end_job(self, tier: GuardedTier, job: TierJob) -> None:
        metadata = job.metadata
        if metadata.is_promotion:
            self._end_reservations(tier, job)
        else:
            self._primary.complete_read(job.block_ids)
        if self._observer is not None:
            self._observer.job_finished(
                JobReport(
                    tier=tier.name,
                    is_promotion=metadata.is_promotion,
                    blocks=len(metadata.keys),
                    blocks_succeeded=len(job.succeeded),
                    seconds=self._clock() - metadata.submit_time,
                    error=job.error,
                )
            )

    def _end_reservations(self, tier: GuardedTier, job: TierJob) -> None:
        """Turn the reservations of a promotion into leases, or give their slots back."""
        state = self._requests.get(job.metadata.req_context.req_id)
        for key, block_id, generation in zip(
            job.metadata.keys, job.block_ids, job.generations, strict=True
        ):
            succeeded = key in job.succeeded
            self._counts["promotions" if succeeded else "promotions_failed"] += 1
            is_ready = self._primary.complete_write(key, block_id, generation, succeeded)
            if state is not None:
                if not succeeded:
                    state.failed.add((key, tier.index))
                elif is_ready:
                    state.promoted[key] = tier.name
                    if state.waiting:
                        # The block's part of the share moves from reservation to lease.
                        state.leases[key] = int(self._primary.prepare_read((key,))[0])
                        continue
            self._share_used -= 1

    # -- requests and steps ---------------------------------------------------------------------

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._primary.on_new_request(req_context)
        self._state(req_context)
        for tier in self._tiers:
            policy = tier.on_new_request(req_context).policy
            if policy is not OffloadPolicy.BLOCK_LEVEL:
                _LOGGER.debug("tier %r asks for %s; blocks are offered once", tier.name, policy)
        return RequestOffloadingContext(OffloadPolicy.BLOCK_LEVEL)

    def _state(self, req_context: ReqContext) -> RequestState:
        state = self._requests.get(req_context.req_id)
        if state is None:
            state = RequestState(req_context, self._next_sequence)
            self._next_sequence += 1
            self._requests[req_context.req_id] = state
        return state

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._settle(req_context)
        self._requests.pop(req_context.req_id, None)
        self._primary.on_request_finished(req_context)
        for tier in self._tiers:
            tier.on_request_finished(req_context)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if not self._polled_this_step:
            self._poll()
        self._polled_this_step = False
        for req_id in context.new_req_ids:
            state = self._requests.get(req_id)
            if state is not None:
                # Scheduled, with a load or without: nothing more is held for it.
                self._settle(state.context)
        self._flush_promotions()
        self._primary.on_schedule_end(context)
        for tier in self._tiers:
            tier.on_schedule_end(context)

    def _flush_promotions(self) -> None:
        queued, self._queued = self._queued, {}
        for promotions in queued.values():
            tier, context = promotions.tier, promotions.context
            block_ids = np.array(promotions.block_ids, dtype=np.int32)
            for start, stop in _splits(len(promotions.keys), tier.max_job_keys):
                part = slice(start, stop)
                keys = tuple(promotions.keys[part])
                generations = tuple(promotions.generations[part])
                self._submit(tier, keys, block_ids[part], context, generations)

    @property
    def num_jobs_in_flight(self) -> int:
        """Jobs between the primary tier and secondary tiers that have not been reported."""
        return sum(len(tier.jobs) for tier in self._tiers)

    @override
    def has_pending_work(self) -> bool:
        return bool(self._queued) or any(tier.has_pending_work() for tier in self._tiers)

    # -- reset, observation, end ----------------------------------------------------------------

    @override
    def reset_cache(self) -> None:
        for promotions in self._queued.values():
            # Nothing has failed: the tier may be asked for these blocks again.
            for reservation in zip(
                promotions.keys, promotions.block_ids, promotions.generations, strict=True
            ):
                self._primary.complete_write(*reservation, success=False)
            self._share_used -= len(promotions.keys)
        self._queued.clear()
        for state in list(self._waiting.values()):
            self._settle(state.context)
        for tier in self._tiers:
            tier.drain_jobs()
        self._poll()
        for state in self._requests.values():
            state.promoted.clear()
        self._resetting = True
        self._primary.reset_cache()

    @override
    def on_reset_flushed(self) -> None:
        self._primary.on_reset_flushed()
        self._resetting = False

    @override
    def take_events(self) -> list[OffloadingEvent]:
        events = list(self._primary.take_events())
        for tier in self._tiers:
            events.extend(tier.take_events())
        return events

    @override
    def get_stats(self) -> Mapping[str, float]:
        """Return the primary's measurements, the manager's own, and ``tier.NAME.X`` per tier."""
        stats = {**self._primary.get_stats(), **self._counts}
        stats["share_blocks_used"] = self._share_used
        stats["requests_waiting"] = len(self._waiting)
        for tier in self._tiers:
            for name, value in tier.get_stats().items():
                stats[f"tier.{tier.name}.{name}"] = value
        return stats

    @override
    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            for tier in self._tiers:
                # Drained first: what was confirmed in the primary reaches the tier.
                tier.drain_jobs()
            self._poll()
            for tier in self._tiers:
                self._stuck_jobs.extend(tier.shutdown())
        if self._stuck_jobs:
            _LOGGER.error(
                "%d tier job(s) could not be stopped; the primary tier stays mapped",
                len(self._stuck_jobs),
            )
        else:
            self._primary.shutdown()


def _splits(length: int, max_keys: int | None) -> list[tuple[int, int]]:
    """Cut ``length`` keys into ranges of at most ``max_keys``; no range for no keys."""
    step = max_keys or length or 1
    return [(start, min(start + step, length)) for start in range(0, length, step)]
