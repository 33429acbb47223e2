"""The tiering manager: cascade downwards, promotion upwards.

All state belongs to the one thread that calls the manager, usually the scheduler's. Tiers work
on threads of their own, and the manager hears of it only by polling.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from kv_core.contract import JobErrorKind, OffloadPolicy, RequestOffloadingContext
from kv_core.engine import CPULoadStoreSpec, LookupResult, OffloadingManager, PrepareStoreOutput
from kv_core.errors import KVCoreError
from kv_core.tiering._cascades import Cascades
from kv_core.tiering._config import TieringConfig
from kv_core.tiering._guard import GuardedTier
from kv_core.tiering._health import HealthState
from kv_core.tiering._jobs import JobFactory
from kv_core.tiering._observer import JobObserver, JobReport
from kv_core.tiering._options import TierMode, TierOptions
from kv_core.tiering._parking import Parking
from kv_core.tiering._promotions import Promotions
from kv_core.tiering._requests import RequestState, RequestTable
from kv_core.tiering._share import PrimaryShare

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from kv_core.contract import (
        Clock,
        JobId,
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from kv_core.cpu import CPUPrimaryTierOffloadingManager
    from kv_core.engine import LoadStoreSpec
    from kv_core.plugins import OpenTier
    from kv_core.tiering._guard import TierJob

__all__ = ["TieringOffloadingManager"]

_LOGGER: Final = logging.getLogger(__name__)

# Looking a member up on its enum class costs as much as the rest of a lookup on Python 3.11.
_HIT: Final = LookupResult.HIT
_MISS: Final = LookupResult.MISS
_PENDING: Final = LookupResult.PENDING
_RETRY: Final = LookupResult.RETRY

# What a failed job says of the tier's health: these say nothing, or that the tier answers.
_HARMLESS: Final = frozenset({JobErrorKind.DECLINED})
_ANSWERED: Final = frozenset({JobErrorKind.MISSING, JobErrorKind.DAMAGED})


@final
class TieringOffloadingManager(OffloadingManager):
    """Combines the primary tier with secondary tiers, in lookup order.

    A block that a tier has is promoted: its slot is reserved at the lookup, the load is
    submitted at the end of the step (one job per tier and request), and the block becomes a hit
    when the tier reports. It is then *leased* to the request that asked, pinned until that
    request loads it, so that other promotions do not evict it unread. Hits of a request that has
    to wait for other blocks are leased as well. Reservations, leases and quarantined slots
    together stay within ``lease_share`` of the primary tier. When the share is used up, an older
    request takes leases from younger ones, younger ones are told to ask again, and the oldest
    waiting one is told "miss" where its own blocks fill the share: it runs with a shorter prefix,
    so some request always makes progress.

    A tier that fails, stalls or lies costs recomputation, never a request: every call into it is
    fenced (:mod:`kv_core.tiering._guard`), every wait has a deadline, and after repeated failures
    it is left alone for a while (:mod:`kv_core.tiering._health`).
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[OpenTier],
        *,
        options: Mapping[str, TierOptions] | None = None,
        config: TieringConfig | None = None,
        clock: Clock = time.monotonic,
        observer: JobObserver | None = None,
        reopen: Callable[[str, int], OpenTier] | None = None,
    ) -> None:
        """Take ownership of the primary tier and of open tiers.

        Args:
            primary: The primary tier.
            tiers: Secondary tiers in lookup order; may be empty.
            options: Options of tiers by name; default for those that are missing.
            config: Settings of the engine.
            clock: Monotonic seconds, the clock the tiers were given.
            observer: Told of every finished job.
            reopen: Opens a tier, given by name, under the namespace of an epoch; may block. Only
                :meth:`reset` needs it.
        """
        self._primary = primary
        self._config = config = config or TieringConfig()
        self._clock = clock
        self._observer = observer
        self._reopen = reopen
        self._options = dict(options or {})
        self._tiers = [self._guard(tier, index) for index, tier in enumerate(tiers)]
        # Tiers of earlier epochs that have not reported all of their jobs.
        self._former_tiers: list[GuardedTier] = []
        self._requests = RequestTable()
        limit = config.lease_blocks(primary.num_blocks)
        self._share = PrimaryShare(limit, primary, self._requests)
        jobs = JobFactory(config, clock)
        self._promotions = Promotions(primary, self._requests, self._share, jobs, config, clock)
        self._cascades = Cascades(primary, jobs, config)
        self._parking = Parking()
        # Blocks that an offer was told are known while they were still being written.
        self._told_known: set[OffloadKey] = set()
        self._lost: set[OffloadKey] = set()
        self._hits_by_level = {"cpu": 0, **dict.fromkeys((tier.name for tier in tiers), 0)}
        self._lookup_deadlines_passed = 0
        self._polled_this_step = False
        self._resetting = False
        self._idle_since: float | None = None
        self._is_shut_down = False
        self._stuck_jobs: list[JobId] = []

    def _guard(self, tier: OpenTier, index: int) -> GuardedTier:
        options = self._options.get(tier.name, TierOptions())
        return GuardedTier(tier, index, options, self._config, self._clock)

    # -- lookup and load ------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._polled_this_step:
            self._poll()
            self._polled_this_step = True
        answer = self._primary.lookup(key, req_context)
        if answer is _MISS and (self._resetting or not self._tiers):
            return answer
        state = self._requests.state(req_context)
        if not state.may_load:
            return _MISS
        if answer is _HIT:
            if self._tiers:
                state.step_hits.append(key)
            return answer
        if self._is_past_deadline(state):
            return _MISS
        if answer is _MISS:
            answer = self._lookup_below(key, state)
            if answer is _MISS:
                return answer
        self._requests.wait(state, self._clock())
        return answer

    def _lookup_below(self, key: OffloadKey, state: RequestState) -> LookupResult:
        """Ask the tiers in order; the first that has the block promotes it."""
        answer = _MISS
        for tier in self._tiers:
            if not tier.health.may_ask() or (key, tier.index) in state.failed:
                continue
            found = tier.lookup(key, state)
            if found:
                return self._promotions.reserve(key, tier, state, self._forget)
            if found is None and self._may_still_know(key, tier, state):
                answer = _RETRY
        return answer

    def _may_still_know(self, key: OffloadKey, tier: GuardedTier, state: RequestState) -> bool:
        """Hold a tier to its lookup deadline: what it does not know by then is absent."""
        now = self._clock()
        since = state.unknown_since.setdefault((key, tier.index), now)
        if now - since <= tier.limits.lookup_deadline_s:
            return True
        if (key, tier.index) not in state.resolved:
            tier.resolve(key, state, "errors")
            tier.health.failed("a lookup was not answered by its deadline")
        state.failed.add((key, tier.index))
        return False

    def _is_past_deadline(self, state: RequestState) -> bool:
        if state.first_unknown_at is None or state.gave_up:
            return state.gave_up
        waited_s = self._clock() - state.first_unknown_at
        if waited_s > self._config.request_lookup_deadline_s:
            state.gave_up = True
            self._lookup_deadlines_passed += 1
        return state.gave_up

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec: LoadStoreSpec = self._primary.prepare_load(keys, req_context)
        # The load's own pins protect the blocks from here on.
        self._settle(req_context)
        return spec

    @override
    def complete_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self._primary.complete_load(keys, req_context, success=success)
        if success:
            self._count_hits(keys, req_context)
        self._submit_again(keys, req_context)

    def _count_hits(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Count delivered blocks: for the tier that provided them, to this request only."""
        state = self._requests.find(req_context.req_id)
        from_cpu = len(keys)
        if state is not None and state.promoted:
            for key in keys:
                tier_name = state.promoted.pop(key, None)
                if tier_name is not None:
                    self._hits_by_level[tier_name] += 1
                    from_cpu -= 1
        self._hits_by_level["cpu"] += from_cpu

    @override
    def hit_level(self, key: OffloadKey, req_context: ReqContext) -> str:
        state = self._requests.find(req_context.req_id)
        return "cpu" if state is None else state.promoted.get(key, "cpu")

    @override
    def release(self, req_context: ReqContext) -> None:
        self._settle(req_context)

    def _settle(self, req_context: ReqContext) -> None:
        """End what a request was promised: it loads, runs without, or is gone."""
        state = self._requests.find(req_context.req_id)
        if state is not None:
            self._requests.stop_waiting(state)
            self._share.end_leases(state)

    # -- store ----------------------------------------------------------------------------------

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        # Every time, not once per step: finished cascades are what makes blocks evictable.
        self._poll()
        if not self._requests.state(req_context).may_store:
            return PrepareStoreOutput((), CPULoadStoreSpec(()))
        output = self._primary.prepare_store(keys, req_context)
        if output is not None:
            self._forget(output.evicted_keys)
            if self._tiers:
                self._note_known(keys, output, req_context)
        return output

    def _note_known(
        self, keys: Sequence[OffloadKey], output: PrepareStoreOutput, req_context: ReqContext
    ) -> None:
        """Deal with offered blocks that the primary tier has, or is about to have."""
        if len(output.keys_to_store) + len(output.declined_keys) == len(keys):
            return
        new = {*output.keys_to_store, *output.declined_keys}
        known = [key for key in keys if key not in new]
        ready = []
        for key in known:
            if self._primary.is_ready(key):
                ready.append(key)
            else:
                self._told_known.add(key)
        self._submit_again(ready, req_context)
        state = self._requests.state(req_context)
        if state.request_level_tiers:
            self._offer_whole_request(state, known, ready)

    def _offer_whole_request(
        self, state: RequestState, known: Sequence[OffloadKey], ready: Sequence[OffloadKey]
    ) -> None:
        """Give tiers that want every block of a request those the primary tier had already."""
        tiers = [self._tiers[index] for index in sorted(state.request_level_tiers)]
        self._end_all(self._cascades.store(tiers, ready, state.context))
        pending = set(known).difference(ready)
        for key in known:
            if key in pending:
                self._parking.park(key, state.context, state.request_level_tiers)

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self._primary.complete_store(keys, req_context, success=success)
        if not self._tiers:
            return
        if success:
            ready = [key for key in keys if self._primary.is_ready(key)]
            self._became_ready(ready)
            self._end_all(self._cascades.store(self._tiers, ready, req_context))
        else:
            self._were_lost(keys)

    def _became_ready(self, keys: Iterable[OffloadKey]) -> None:
        """Release what waited for blocks to become readable."""
        self._told_known.difference_update(keys)
        for context, indices, parked in self._parking.take(keys):
            tiers = [self._tiers[index] for index in sorted(indices)]
            self._end_all(self._cascades.store(tiers, parked, context))
            self._finish_parked(context)

    def _were_lost(self, keys: Iterable[OffloadKey]) -> None:
        """Note blocks whose write failed: whoever was told that they are known offers them."""
        gone = [key for key in keys if self._primary.block_id_of(key) is None]
        self._lost.update(self._told_known.intersection(gone))
        self._told_known.difference_update(gone)
        for context, _, _ in self._parking.take(gone):
            self._finish_parked(context)

    def _finish_parked(self, context: ReqContext) -> None:
        for index in self._parking.finish(context.req_id):
            self._tiers[index].on_request_finished(context)

    @override
    def take_lost_keys(self) -> Collection[OffloadKey]:
        lost, self._lost = self._lost, set()
        return lost

    def _submit_again(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._end_all(self._cascades.catch_up(self._tiers, keys, req_context))

    def _forget(self, evicted_keys: Iterable[OffloadKey]) -> None:
        self._cascades.forget(evicted_keys)

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._primary.touch(keys, req_context)
        for tier in self._usable_tiers():
            tier.touch(keys, req_context)

    # -- results --------------------------------------------------------------------------------

    def _poll(self) -> None:
        for tier in self._tiers:
            if tier.jobs:
                for job in tier.finished():
                    self._end_job(tier, job)
        if self._former_tiers:
            self._poll_former_tiers()

    def _poll_former_tiers(self) -> None:
        for tier in self._former_tiers:
            for job in tier.finished():
                self._end_job(tier, job)
        self._former_tiers = [tier for tier in self._former_tiers if tier.jobs]

    def _end_all(self, ended: Iterable[tuple[GuardedTier, TierJob]]) -> None:
        for tier, job in ended:
            self._end_job(tier, job)

    def _end_job(self, tier: GuardedTier, job: TierJob) -> None:
        metadata = job.metadata
        seconds = self._clock() - metadata.submit_time
        self._judge(tier, job, seconds)
        if metadata.is_promotion:
            ready = self._promotions.end(tier, job)
            self._became_ready(ready)
            if len(ready) < len(metadata.keys):
                self._were_lost(metadata.keys)
            self._fill(tier, ready, metadata.req_context)
        else:
            self._cascades.end(tier, job)
        if self._observer is not None:
            self._observer.job_finished(
                JobReport(
                    tier=tier.name,
                    is_promotion=metadata.is_promotion,
                    blocks=len(metadata.keys),
                    blocks_succeeded=len(job.succeeded),
                    seconds=seconds,
                    error=job.error,
                )
            )

    def _judge(self, tier: GuardedTier, job: TierJob, seconds: float) -> None:
        """Draw conclusions on the tier's health and speed."""
        complete = len(job.succeeded) == len(job.metadata.keys)
        kind = None if job.error is None else job.error.kind
        if complete or kind in _ANSWERED:
            tier.health.succeeded()
        elif kind in _HARMLESS or job.is_overdue:
            # Declined says nothing; overdue was held against the tier at its deadline.
            tier.health.settled()
        elif job.was_taken:
            word = "failed" if kind is None else kind.value
            tier.health.failed(f"a {'load' if job.metadata.is_promotion else 'store'} {word}")
        if not job.metadata.is_promotion and job.metadata.keys:
            if complete:
                num_bytes = len(job.metadata.keys) * self._primary.block_bytes
                tier.pressure.store_ended(seconds, num_bytes)
            else:
                tier.pressure.store_failed()

    def _fill(self, source: GuardedTier, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        """Copy blocks that a tier provided to the tiers above it that asked for that."""
        above = [tier for tier in self._tiers[: source.index] if tier.options.fill_on_promotion]
        if above and keys:
            self._end_all(self._cascades.store(above, keys, context))

    # -- requests and steps ---------------------------------------------------------------------

    def _usable_tiers(self) -> list[GuardedTier]:
        return [tier for tier in self._tiers if tier.health.state is not HealthState.DETACHED]

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._primary.on_new_request(req_context)
        state = self._requests.state(req_context)
        state.request_level_tiers = frozenset(
            tier.index
            for tier in self._usable_tiers()
            if tier.on_new_request(req_context).policy is OffloadPolicy.REQUEST_LEVEL
            and tier.options.mode is not TierMode.READ_ONLY
        )
        if state.request_level_tiers:
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext(OffloadPolicy.BLOCK_LEVEL)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._settle(req_context)
        self._requests.remove(req_context.req_id)
        self._primary.on_request_finished(req_context)
        parked = self._parking.hold_end(req_context.req_id)
        for tier in self._usable_tiers():
            if tier.index not in parked:
                tier.on_request_finished(req_context)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if not self._polled_this_step:
            self._poll()
        self._polled_this_step = False
        for req_id in context.new_req_ids:
            state = self._requests.find(req_id)
            if state is not None:
                # Scheduled, with a load or without: nothing more is held for it.
                self._settle(state.context)
        self._keep_promises()
        self._end_all(self._promotions.flush())
        self._expire()
        self._primary.on_schedule_end(context)
        for tier in self._usable_tiers():
            tier.on_schedule_end(context)

    def _keep_promises(self) -> None:
        """Lease the hits of requests that have to wait for other blocks, oldest first."""
        now = self._clock()
        for state in self._requests.oldest_first() if self._requests.waiting else ():
            if state.leases and now - state.leased_at > self._config.lease_deadline_s:
                self._share.end_leases(state)
            elif state.step_hits:
                self._share.lease(state, state.step_hits, now)
        for state in self._requests:
            if state.step_hits:
                state.step_hits.clear()

    def _expire(self) -> None:
        now = self._clock()
        self._were_lost(self._promotions.expire(now))
        self._cascades.expire(now)

    @property
    def num_jobs_in_flight(self) -> int:
        """Jobs between the primary tier and secondary tiers that have not been reported."""
        return sum(len(tier.jobs) for tier in (*self._tiers, *self._former_tiers))

    @override
    def has_pending_work(self) -> bool:
        if self._promotions.has_queued or self._has_live_jobs():
            self._idle_since = None
            return True
        if len(self._requests):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._clock()
        elif self._clock() - self._idle_since > self._config.quarantine_grace_s:
            # Nothing is in flight and nobody asks: a tier's own word counts only so long.
            return False
        return any(tier.has_pending_work() for tier in self._usable_tiers())

    def _has_live_jobs(self) -> bool:
        """Say whether a job is in flight that is worth stepping for."""
        now = self._clock() - self._config.quarantine_grace_s
        return any(
            not job.is_overdue or job.deadline > now
            for tier in (*self._tiers, *self._former_tiers)
            for job in tier.jobs.values()
        )

    # -- resets ---------------------------------------------------------------------------------

    @override
    def reset_cache(self) -> None:
        self._promotions.drop_queued()
        for state in self._requests:
            self._settle(state.context)
        self._drain()
        for state in self._requests:
            state.promoted.clear()
        self._told_known.clear()
        self._cascades.forget_all()
        self._resetting = True
        self._primary.reset_cache()

    def _drain(self) -> None:
        for tier in self._usable_tiers():
            if tier.jobs:
                tier.drain_jobs(tier.limits.job_deadline_s + self._config.quarantine_grace_s)
        self._poll()

    @override
    def on_reset_flushed(self) -> None:
        self._primary.on_reset_flushed()
        self._resetting = False

    @override
    def reset(self, epoch: int) -> None:
        """Empty the primary tier and re-open every tier under the namespace of an epoch.

        A tier that cannot be re-opened is detached: without new weights' own namespace it must
        not be asked. May block.
        """
        self.reset_cache()
        for index, tier in enumerate(self._tiers):
            self._shut_down(tier)
            if tier.jobs:
                self._former_tiers.append(tier)
            self._tiers[index] = self._open_again(tier, epoch)
        for state in self._requests:
            state.failed.clear()
            state.resolved.clear()
            self._announce(state)

    def _open_again(self, tier: GuardedTier, epoch: int) -> GuardedTier:
        if self._reopen is None:
            tier.health.detach("no way to re-open it under a new epoch")
            return tier
        try:
            return self._guard(self._reopen(tier.name, epoch), tier.index)
        except (KVCoreError, OSError) as error:
            tier.health.detach(f"it cannot be re-opened for epoch {epoch}: {error}")
            return tier

    def _announce(self, state: RequestState) -> None:
        for tier in self._usable_tiers():
            tier.on_new_request(state.context)

    # -- observation and end --------------------------------------------------------------------

    @override
    def take_events(self) -> list[OffloadingEvent]:
        events = list(self._primary.take_events())
        for tier in self._tiers:
            events.extend(tier.take_events())
        return events

    def tier_health(self) -> dict[str, tuple[HealthState, str]]:
        """Return the health of each tier, and why it is not healthy."""
        return {tier.name: (tier.health.state, tier.health.reason) for tier in self._tiers}

    @override
    def get_stats(self) -> Mapping[str, float]:
        """Return the primary's measurements, the manager's own, and ``tier.NAME.X`` per tier.

        ``hits.LEVEL`` counts blocks that were delivered to the GPU.
        """
        stats: dict[str, float] = {**self._primary.get_stats(), **self._promotions.counts}
        stats["share_blocks_limit"] = self._share.limit
        stats["share_blocks_used"] = self._share.used
        stats["share_blocks_reserved"] = self._share.reserved
        stats["share_blocks_leased"] = self._share.leased
        stats["share_blocks_quarantined"] = self._share.quarantined
        stats["leases_revoked"] = self._share.revoked
        stats["requests_waiting"] = len(self._requests.waiting)
        stats["lookup_deadlines_passed"] = self._lookup_deadlines_passed
        stats["blocks_missed_by_tiers"] = self._cascades.num_missed
        for level, hits in self._hits_by_level.items():
            stats[f"hits.{level}"] = hits
        for tier in self._tiers:
            for name, value in tier.get_stats().items():
                stats[f"tier.{tier.name}.{name}"] = value
        return stats

    @override
    def shutdown(self) -> None:
        """Flush, then close the tiers, then the primary tier. Idempotent. May block.

        Blocks that were confirmed in the primary tier reach the tiers, as far as
        ``shutdown_flush_s`` allows.
        """
        if not self._is_shut_down:
            self._is_shut_down = True
            flush_until = time.monotonic() + self._config.shutdown_flush_s
            for tier in self._usable_tiers():
                if tier.jobs:
                    tier.drain_jobs(max(0.0, flush_until - time.monotonic()))
            self._poll()
            for tier in (*self._tiers, *self._former_tiers):
                self._stuck_jobs.extend(self._shut_down(tier))
        if self._stuck_jobs:
            _LOGGER.error(
                "%d tier job(s) could not be stopped; the primary tier stays mapped",
                len(self._stuck_jobs),
            )
        else:
            self._primary.shutdown()

    def _shut_down(self, tier: GuardedTier) -> Collection[JobId]:
        stuck = tier.shutdown(tier.limits.job_deadline_s + self._config.quarantine_grace_s)
        for job in tier.finished():
            self._end_job(tier, job)
        return stuck
