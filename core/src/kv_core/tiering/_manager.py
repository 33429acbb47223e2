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
from kv_core.tiering._guard import GuardedTier
from kv_core.tiering._observer import JobObserver, JobReport
from kv_core.tiering._requests import RequestState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from kv_core.contract import (
        Clock,
        JobResult,
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
            if (key, tier.index) in state.failed:
                continue
            found = tier.lookup(key, state.context)
            if found:
                return self._reserve(key, tier, state)
            if found is None:
                answer = LookupResult.RETRY
        return answer

    def _reserve(self, key: OffloadKey, tier: GuardedTier, state: RequestState) -> LookupResult:
        if self._deadline_passed(state):
            return LookupResult.MISS
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
        if self._deadline_passed(state):
            self._counts["lookup_deadlines_passed"] += 1
            return LookupResult.MISS
        if state.first_unknown_at is None:
            state.first_unknown_at = self._clock()
        if not state.waiting:
            state.waiting = True
            self._waiting[state.context.req_id] = state
        return answer

    def _deadline_passed(self, state: RequestState) -> bool:
        if state.first_unknown_at is None:
            return False
        waited_s = self._clock() - state.first_unknown_at
        return waited_s > self._config.request_lookup_deadline_s

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
                if not self._submit(tier, part, block_ids, req_context):
                    self._primary.complete_read(block_ids)

    def _submit(
        self,
        tier: GuardedTier,
        keys: tuple[OffloadKey, ...],
        block_ids: npt.NDArray[np.int32],
        req_context: ReqContext,
        generations: tuple[int, ...] | None = None,
    ) -> bool:
        """Hand over one job: a promotion when generations are given, else a store."""
        job_id = JobId(self._next_job_id)
        self._next_job_id += 1
        is_promotion = generations is not None
        job = JobMetadata(job_id, keys, block_ids, is_promotion, req_context, self._clock())
        return tier.submit(job, generations or ())

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
            for job, generations, result in tier.finished():
                if job.is_promotion:
                    succeeded = self._finish_promotion(tier, job, generations, result)
                else:
                    succeeded = self._finish_store(job, result)
                if self._observer is not None:
                    self._observer.job_finished(
                        JobReport(
                            tier=tier.name,
                            is_promotion=job.is_promotion,
                            blocks=len(job.keys),
                            blocks_succeeded=succeeded,
                            seconds=self._clock() - job.submit_time,
                            error=result.error,
                        )
                    )

    def _finish_store(self, job: JobMetadata, result: JobResult) -> int:
        self._primary.complete_read(job.block_ids)
        return len(job.keys) if result.success else len(result.successful_keys)

    def _finish_promotion(
        self,
        tier: GuardedTier,
        job: JobMetadata,
        generations: tuple[int, ...],
        result: JobResult,
    ) -> int:
        succeeded = job.keys if result.success else result.successful_keys
        return self._end_reservations(
            tier, job.req_context, job.keys, job.block_ids, generations, frozenset(succeeded)
        )

    def _end_reservations(
        self,
        tier: GuardedTier,
        req_context: ReqContext,
        keys: tuple[OffloadKey, ...],
        block_ids: npt.NDArray[np.int32],
        generations: tuple[int, ...],
        succeeded: frozenset[OffloadKey],
    ) -> int:
        """Turn reservations into leases, or give their slots back.

        Returns:
            Number of blocks that became readable.
        """
        state = self._requests.get(req_context.req_id)
        ready = 0
        for key, block_id, generation in zip(keys, block_ids.tolist(), generations, strict=True):
            if self._primary.complete_write(key, block_id, generation, key in succeeded):
                ready += 1
                if state is not None:
                    state.promoted[key] = tier.name
                    if state.waiting:
                        # The block's part of the share moves from reservation to lease.
                        state.leases[key] = int(self._primary.prepare_read((key,))[0])
                        continue
            elif state is not None:
                state.failed.add((key, tier.index))
            self._share_used -= 1
        self._counts["promotions"] += ready
        self._counts["promotions_failed"] += len(keys) - ready
        return ready

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
                if not self._submit(tier, keys, block_ids[part], context, generations):
                    self._end_reservations(
                        tier, context, keys, block_ids[part], generations, succeeded=frozenset()
                    )

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
        queued, self._queued = self._queued, {}
        for promotions in queued.values():
            block_ids = np.array(promotions.block_ids, dtype=np.int32)
            self._end_reservations(
                promotions.tier,
                promotions.context,
                tuple(promotions.keys),
                block_ids,
                tuple(promotions.generations),
                succeeded=frozenset(),
            )
        for state in list(self._waiting.values()):
            self._settle(state.context)
        for tier in self._tiers:
            tier.drain_jobs()
        self._poll()
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
        if self._is_shut_down:
            return
        self._is_shut_down = True
        stuck: list[JobId] = []
        for tier in self._tiers:
            # Drained first: what was confirmed in the primary reaches the tier.
            tier.drain_jobs()
        self._poll()
        for tier in self._tiers:
            stuck.extend(tier.shutdown())
        if stuck:
            _LOGGER.error(
                "%d tier job(s) could not be stopped; the primary tier stays mapped", len(stuck)
            )
            return
        self._primary.shutdown()


def _splits(length: int, max_keys: int | None) -> list[tuple[int, int]]:
    """Cut ``length`` keys into ranges of at most ``max_keys``; no range for no keys."""
    step = max_keys or length or 1
    return [(start, min(start + step, length)) for start in range(0, length, step)]
