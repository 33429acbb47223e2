"""The tiering manager: cascade downwards, promotion upwards.

All state belongs to the one thread that calls the manager, usually the scheduler's. Tiers work
on threads of their own, and the manager hears of it only by polling.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from kv_core.contract import OffloadPolicy, RequestOffloadingContext
from kv_core.engine import CPULoadStoreSpec, LookupResult, OffloadingManager, PrepareStoreOutput
from kv_core.tiering._cascades import Cascades
from kv_core.tiering._config import TieringConfig
from kv_core.tiering._guard import GuardedTier
from kv_core.tiering._health import HealthState
from kv_core.tiering._jobs import JobFactory
from kv_core.tiering._observer import JobObserver, JobReport
from kv_core.tiering._options import TierMode, TierOptions
from kv_core.tiering._parking import ParkedRequest, Parking
from kv_core.tiering._patience import LookupPatience
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
        self._overdue_limit = config.overdue_blocks(primary.num_blocks, len(tiers))
        self._tiers = [self._guard(tier, index) for index, tier in enumerate(tiers)]
        # Tiers of earlier epochs that have not reported all of their jobs.
        self._former_tiers: list[GuardedTier] = []
        self._requests = RequestTable()
        limit = config.lease_blocks(primary.num_blocks)
        self._share = PrimaryShare(limit, config.lease_deadline_s, primary)
        jobs = JobFactory(config, clock)
        self._promotions = Promotions(primary, self._requests, self._share, jobs, clock)
        self._cascades = Cascades(primary, jobs, config)
        self._parking = Parking()
        # Blocks that an offer was told are known while they were still being written.
        self._told_known: set[OffloadKey] = set()
        self._lost: set[OffloadKey] = set()
        self._hits_by_level = {"cpu": 0, **dict.fromkeys((tier.name for tier in tiers), 0)}
        self._patience = LookupPatience(config, clock)
        # The method of a ledger that is never exchanged: looking it up shows in every lookup.
        self._look_in_primary = primary.lookup
        self._polled_this_step = False
        self._resetting = False
        self._idle_since: float | None = None
        self._is_shut_down = False
        # Jobs that no shutdown could stop; not known before every tier was shut down.
        self._stuck_jobs: list[JobId] | None = None

    def _guard(self, tier: OpenTier, index: int) -> GuardedTier:
        options = self._options.get(tier.name, TierOptions())
        return GuardedTier(
            tier, index, options, self._config, self._clock, overdue_limit=self._overdue_limit
        )

    # -- lookup and load ------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._polled_this_step:
            self._poll()
            self._polled_this_step = True
        answer = self._look_in_primary(key, req_context)
        if not self._tiers and answer is _HIT and not self._requests.has_wishes:
            return answer
        if answer is _MISS and (self._resetting or not self._tiers):
            return answer
        state = self._requests.find(req_context.req_id) or self._requests.state(req_context)
        if not state.may_load:
            return _MISS
        if answer is _HIT:
            if self._tiers:
                self._requests.note_hit(state, key)
            return answer
        if state.waiting and self._patience.is_exhausted(state):
            return _MISS
        if answer is _MISS:
            answer = self._lookup_below(key, state) if state.may_promote else _MISS
            if answer is _MISS:
                return answer
        if not state.waiting:
            self._requests.wait(state, self._clock())
        return answer

    def _lookup_below(self, key: OffloadKey, state: RequestState) -> LookupResult:
        """Ask the tiers in order; the first that has the block promotes it."""
        answer = _MISS
        for tier in self._tiers:
            if not tier.may_use() or (state.failed and (key, tier) in state.failed):
                continue
            found = tier.lookup(key, state)
            if found:
                if state.unknown_since:
                    state.unknown_since.pop((key, tier), None)
                return self._promotions.reserve(key, tier, state, self._forget)
            if found is None and self._patience.may_still_know(key, tier, state):
                answer = _RETRY
        return answer

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
        if not self._primary.finish_load(keys, req_context):
            return
        if success:
            self._count_hits(keys, req_context)
        self._submit_again(keys, req_context)

    def _count_hits(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Count delivered blocks: for the tier that provided them, to this request only.

        What a request gets after its end counts nowhere: it is of use to nobody.
        """
        state = self._requests.find(req_context.req_id)
        if state is None:
            return
        from_cpu = len(keys)
        if state.promoted:
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
        state = self._requests.state(req_context)
        if state.waiting:
            # It runs, or has ended. Not every scheduler says so for a request that it resumes.
            self._settle(req_context)
        if not state.may_store:
            return PrepareStoreOutput((), CPULoadStoreSpec(()))
        output = self._primary.prepare_store(keys, req_context)
        if output is not None and self._tiers:
            self._forget(output.evicted_keys)
            self._note_known(keys, output, state)
            if state.request_level_tiers:
                self._parking.park(output.keys_to_store, state.context, state.request_level_tiers)
        return output

    def _note_known(
        self, keys: Sequence[OffloadKey], output: PrepareStoreOutput, state: RequestState
    ) -> None:
        """Deal with offered blocks that the primary tier has, or is about to have."""
        if len(output.keys_to_store) + len(output.declined_keys) == len(keys):
            return
        new = {*output.keys_to_store, *output.declined_keys}
        ready: list[OffloadKey] = []
        pending: list[OffloadKey] = []
        for key in dict.fromkeys(keys):
            if key not in new:
                (ready if self._primary.is_ready(key) else pending).append(key)
        self._told_known.update(pending)
        self._submit_again(ready, state.context, spared=state.request_level_tiers)
        if state.request_level_tiers:
            # They want every block of a request, also what the primary tier had already.
            tiers = self._tiers_at(state.request_level_tiers)
            self._end_all(self._cascades.store(tiers, ready, state.context))
            self._parking.park(pending, state.context, state.request_level_tiers)

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        ended = self._primary.finish_store(keys, success=success)
        if not self._tiers or not ended:
            return
        if success:
            self._end_all(self._cascades.store(self._tiers, ended, req_context))
            self._became_ready(ended, given_for=req_context.req_id)
        else:
            self._were_lost(ended)

    def _became_ready(self, keys: Sequence[OffloadKey], *, given_for: str | None = None) -> None:
        """Release what waited for blocks to become readable.

        Args:
            keys: The blocks.
            given_for: The request for which every tier was given them already.
        """
        if self._told_known:
            self._told_known.difference_update(keys)
        for parked, wanted in self._parking.take(keys):
            if parked.context.req_id != given_for:
                tiers = self._tiers_at(parked.tiers)
                self._end_all(self._cascades.store(tiers, wanted, parked.context))
            self._finish_parked(parked)

    def _were_lost(self, keys: Iterable[OffloadKey]) -> None:
        """Note blocks whose write failed: whoever was told that they are known offers them."""
        gone = [key for key in keys if self._primary.block_id_of(key) is None]
        self._lost.update(self._told_known.intersection(gone))
        self._told_known.difference_update(gone)
        for parked, _ in self._parking.take(gone):
            self._finish_parked(parked)

    def _finish_parked(self, parked: ParkedRequest) -> None:
        """Tell tiers of the end of a request that was held back."""
        if parked.is_over:
            for tier in self._tiers_at(parked.tiers):
                if tier.health.state is not HealthState.DETACHED:
                    tier.on_request_finished(parked.context)

    def _tiers_at(self, indices: Iterable[int]) -> list[GuardedTier]:
        return [self._tiers[index] for index in sorted(indices)]

    @override
    def take_lost_keys(self) -> Collection[OffloadKey]:
        lost, self._lost = self._lost, set()
        return lost

    def _submit_again(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        spared: frozenset[int] = frozenset(),
    ) -> None:
        self._end_all(self._cascades.catch_up(self._tiers, keys, req_context, spared))

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
                self._end_reported(tier)
        if self._former_tiers:
            for tier in self._former_tiers:
                self._end_reported(tier)
            self._former_tiers = [tier for tier in self._former_tiers if tier.jobs]

    def _end_reported(self, tier: GuardedTier) -> None:
        for job in tier.finished():
            self._end_job(tier, job)

    def _end_all(self, ended: Iterable[tuple[GuardedTier, TierJob]]) -> None:
        for tier, job in ended:
            self._end_job(tier, job)

    def _end_job(self, tier: GuardedTier, job: TierJob) -> None:
        metadata = job.metadata
        tier.judge(job, self._primary.block_bytes)
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
                    seconds=self._clock() - metadata.submit_time,
                    error=job.error,
                )
            )

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
        former = self._parking.give_up(req_context.req_id)
        if former is not None:
            # Tiers must not take the late end of a request for the end of its namesake.
            self._finish_parked(former)
        state = self._requests.state(req_context)
        self._announce(state)
        if state.request_level_tiers:
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext(OffloadPolicy.BLOCK_LEVEL)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._settle(req_context)
        self._requests.remove(req_context.req_id)
        self._primary.on_request_finished(req_context)
        told_later = self._parking.hold_end(req_context.req_id)
        for tier in self._usable_tiers():
            if tier.index not in told_later:
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
        for req_id in context.preempted_req_ids:
            state = self._requests.find(req_id)
            if state is not None:
                # It ran: whatever it waited for when it was resumed, nobody has said so.
                self._settle(state.context)
        self._keep_promises()
        refused, given_back = self._promotions.flush()
        self._end_all(refused)
        self._were_lost(given_back)
        self._expire()
        self._primary.on_schedule_end(context)
        for tier in self._usable_tiers():
            tier.on_schedule_end(context)

    def _keep_promises(self) -> None:
        """Lease the hits of requests that have to wait for other blocks, oldest first."""
        now = self._clock()
        self._share.expire(now)
        for state in self._requests.take_answered():
            if state.waiting and state.step_hits:
                self._share.lease(state, state.step_hits, now)
            state.step_hits.clear()

    def _expire(self) -> None:
        now = self._clock()
        self._were_lost(self._promotions.expire(now))
        self._cascades.expire(now)

    def block_id_of(self, key: OffloadKey) -> int | None:
        """Return the slot of a key that is present or being written, else ``None``."""
        return self._primary.block_id_of(key)

    @property
    def num_jobs_in_flight(self) -> int:
        """Jobs between the primary tier and secondary tiers that have not been reported."""
        return sum(len(tier.jobs) for tier in (*self._tiers, *self._former_tiers))

    @override
    def has_pending_work(self) -> bool:
        if self._promotions.has_queued or self._parking or self._has_live_jobs():
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
        if self._promotions.has_under_way or self._cascades.has_under_way:
            return True
        # The rest is overdue: worth it for a while.
        now = self._clock() - self._config.quarantine_grace_s
        longest_s = max(self._config.promotion_deadline_s, self._config.store_deadline_s)
        for tier in (*self._tiers, *self._former_tiers):
            # From the newest: lost jobs may be many, and all before a very old one are older.
            for job in reversed(tier.jobs.values()):
                if job.deadline > now:
                    return True
                if job.metadata.submit_time + longest_s <= now:
                    break
        return False

    # -- resets ---------------------------------------------------------------------------------

    @override
    def reset_cache(self) -> None:
        self._promotions.drop_queued()
        for state in self._requests:
            self._settle(state.context)
        self._drain()
        for state in self._requests:
            state.promoted.clear()
        for parked in self._parking.clear():
            self._finish_parked(parked)
        self._told_known.clear()
        self._lost.clear()
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

        A tier that cannot be re-opened is detached: under the namespace of the old weights it
        must not be asked. May block.
        """
        self.reset_cache()
        for index, tier in enumerate(self._tiers):
            self._shut_down(tier)
            self._tiers[index] = self._open_again(tier, epoch)
        for state in self._requests:
            self._announce(state)

    def _open_again(self, former: GuardedTier, epoch: int) -> GuardedTier:
        if self._reopen is None:
            former.health.detach("no way to re-open it under a new epoch")
            return former
        try:
            opened = self._reopen(former.name, epoch)
        except Exception as error:  # noqa: BLE001 - constructors of tiers may raise anything
            former.health.detach(f"it cannot be re-opened for epoch {epoch}: {error}")
            return former
        tier = self._guard(opened, former.index)
        tier.replace(former)
        if former.jobs:
            self._former_tiers.append(former)
        return tier

    def _announce(self, state: RequestState) -> None:
        """Tell tiers of a request, and learn which of them want every block of it."""
        state.request_level_tiers = frozenset(
            tier.index
            for tier in self._usable_tiers()
            if tier.on_new_request(state.context).policy is OffloadPolicy.REQUEST_LEVEL
            and tier.options.mode is not TierMode.READ_ONLY
        )

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
        stats["requests_waiting"] = self._requests.num_waiting
        stats["lookup_deadlines_passed"] = self._patience.deadlines_passed
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
            self._cascades.close()
            self._flush_stores()
            stuck: list[JobId] = []
            for tier in (*self._tiers, *self._former_tiers):
                stuck.extend(self._shut_down(tier))
            self._stuck_jobs = stuck
        if self._stuck_jobs is None:
            _LOGGER.error("the shutdown was interrupted; the primary tier stays mapped")
        elif self._stuck_jobs:
            _LOGGER.error(
                "%d tier job(s) could not be stopped; the primary tier stays mapped",
                len(self._stuck_jobs),
            )
        else:
            self._primary.shutdown()

    def _flush_stores(self) -> None:
        """Let stores under way end, for as long as the configuration says."""
        # Of real time: whatever the engine's clock does, somebody waits for this process.
        flush_until = time.monotonic() + self._config.shutdown_flush_s
        for tier in self._usable_tiers():
            patience_s = flush_until - time.monotonic()
            if tier.jobs and patience_s > 0:
                tier.drain_jobs(patience_s)
        self._poll()

    def _shut_down(self, tier: GuardedTier) -> Collection[JobId]:
        stuck = tier.shutdown(tier.limits.job_deadline_s + self._config.quarantine_grace_s)
        self._end_reported(tier)
        return stuck
