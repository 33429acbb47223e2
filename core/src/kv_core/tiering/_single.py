"""One tier under the tiering manager of another engine.

Such an engine has its own primary tier, its own jobs and its own ideas of when to load and store;
it trusts its tiers. Between the two stands :class:`SingleTier`, with what our own manager gives a
tier: the fence, deadlines, health and back-pressure.

All state belongs to the thread that drives the engine's manager. While :meth:`SingleTier.drain`
waits, a thread of its own writes to the log how long it has waited; it owns nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from kv_core.contract import JobErrorKind
from kv_core.tiering._config import TieringConfig
from kv_core.tiering._guard import GuardedTier
from kv_core.tiering._health import Activity, HealthState
from kv_core.tiering._jobs import JobFactory, job_ranges
from kv_core.tiering._options import TierMode, TierOptions
from kv_core.tiering._requests import RequestTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_core.contract import (
        Clock,
        JobId,
        LookupAnswer,
        OffloadingEvent,
        OffloadKey,
        OffloadPolicy,
        ReqContext,
        ScheduleEndContext,
    )
    from kv_core.plugins import OpenTier
    from kv_core.tiering._guard import TierJob
    from kv_core.tiering._requests import RequestState

__all__ = ["JobOutcome", "SingleTier"]

_LOGGER: Final = logging.getLogger(__name__)
_LOG_EVERY_S: Final = 5.0
_POLL_EVERY_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of one job of the engine.

    Attributes:
        job_id: The engine's id of the job.
        is_promotion: Whether it was a load.
        succeeded: Keys that were stored or loaded, in job order.
        is_complete: Whether that is all of them.
        busy_s: Seconds that the tier took at least.
        busy_slots: Slots that the tier may still write to, for a load that was given up. They must
            not be used until :meth:`SingleTier.take_released` returns them.
    """

    job_id: int
    is_promotion: bool
    succeeded: tuple[OffloadKey, ...]
    is_complete: bool
    busy_s: float
    busy_slots: tuple[int, ...] = ()


@final
class _EngineJob:
    """A job of the engine, and those of its parts that the tier has not reported."""

    __slots__ = ("busy_s", "is_reported", "job_id", "keys", "parts", "succeeded")

    def __init__(self, job_id: int, keys: tuple[OffloadKey, ...]) -> None:
        self.job_id = job_id
        self.keys = keys
        self.parts: dict[JobId, TierJob] = {}
        self.succeeded: set[OffloadKey] = set()
        self.busy_s = 0.0
        self.is_reported = False

    def outcome(self, *, is_promotion: bool) -> JobOutcome:
        self.is_reported = True
        succeeded = tuple(key for key in self.keys if key in self.succeeded)
        busy_slots: list[int] = []
        for part in self.parts.values():
            busy_slots += part.block_ids
        return JobOutcome(
            self.job_id,
            is_promotion,
            succeeded,
            len(succeeded) == len(self.keys),
            self.busy_s,
            tuple(busy_slots),
        )


@final
class SingleTier:
    """Drives one open tier for an engine that is not ours.

    Nothing that the tier does comes through: no exception, no result that is late, repeated or of
    no job. Every job of the engine has exactly one outcome. A tier that fails repeatedly is left
    alone, which is to the engine a tier that has nothing and takes nothing.

    A load that is not reported by its deadline is given up when the engine can keep its slots out
    of use (``can_hold_slots``), and otherwise waited for: memory that a tier may still write to is
    given to nobody else. A store that is overdue is waited for in either case, for the tier may
    still read its slots.

    Attributes:
        guard: The fence around the tier, with its health and counts.
    """

    def __init__(
        self,
        tier: OpenTier,
        *,
        num_blocks: int,
        block_bytes: int,
        can_hold_slots: Callable[[], bool],
        options: TierOptions | None = None,
        config: TieringConfig | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Take ownership of an open tier.

        Args:
            tier: The tier.
            num_blocks: Slots of the engine's primary tier.
            block_bytes: Payload bytes of a block.
            can_hold_slots: Says whether slots of a load that was given up can be kept out of use.
            options: What the user said of the tier.
            config: Deadlines, health and back-pressure; the shares of the primary tier that it
                speaks of are the engine's affair.
            clock: Monotonic seconds, the clock that the tier was given.
        """
        self._config = config = config or TieringConfig()
        self._clock = clock
        self._block_bytes = block_bytes
        self._can_hold_slots = can_hold_slots
        self.guard = GuardedTier(
            tier,
            0,
            options or TierOptions(),
            config,
            clock,
            overdue_limit=config.overdue_blocks(num_blocks, 1),
        )
        self._requests = RequestTable()
        self._factory = JobFactory(config, clock)
        self._jobs: dict[JobId, _EngineJob] = {}
        # Parts that are not overdue, in order of submission for each of the two kinds.
        self._loads: dict[JobId, TierJob] = {}
        self._stores: dict[JobId, TierJob] = {}
        self._outcomes: list[JobOutcome] = []
        self._released: list[int] = []

    # -- lookup ---------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        """Ask the tier for a block; ``None`` is "ask again in a later step"."""
        guard = self.guard
        state = self._requests.state(req_context)
        if not state.may_load or (key, guard) in state.failed or not guard.may_use():
            return False
        answer = guard.lookup(key, state)
        if answer is None and self._may_still_know(key, state):
            return None
        if state.unknown_since:
            state.unknown_since.pop((key, guard), None)
        if not state.unknown_since:
            state.first_unknown_at = None
        return bool(answer)

    def _may_still_know(self, key: OffloadKey, state: RequestState) -> bool:
        """Hold the tier to its own deadline, and each request to that of the configuration."""
        guard, now = self.guard, self._clock()
        since = state.unknown_since.setdefault((key, guard), now)
        if state.first_unknown_at is None:
            state.first_unknown_at = now
        patience_s = self._config.request_lookup_deadline_s
        if now - since <= guard.limits.lookup_deadline_s and (
            now - state.first_unknown_at <= patience_s
        ):
            return True
        if not guard.has_resolved(key, state):
            guard.resolve(key, state, "errors")
            # Not what was asked a moment ago by a request that has waited for something else.
            if now - since > min(guard.limits.lookup_deadline_s, patience_s / 2):
                guard.health.failed(Activity.CALL, "a lookup was not answered by its deadline")
        state.failed.add((key, guard))
        return False

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Pass on a use of blocks."""
        if self._is_attached():
            self.guard.touch(keys, req_context)

    # -- jobs -----------------------------------------------------------------------------------

    def admits(self, num_blocks: int) -> bool:
        """Say whether a store of this many blocks is to be given to the tier now.

        Counts them when it is not: dropped, throttled, or skipped.
        """
        guard = self.guard
        if guard.options.mode is TierMode.READ_ONLY:
            return False
        if not guard.may_use():
            refused = "blocks_skipped"
        elif not guard.pressure.admits():
            refused = "blocks_dropped"
        elif not self._has_room(num_blocks):
            refused = "blocks_throttled"
        else:
            return True
        guard.counts[refused] += num_blocks
        return False

    def _has_room(self, num_blocks: int) -> bool:
        # An idle tier gets any store, however small the limit.
        in_flight = self.guard.inflight_store_bytes
        limit = self._config.max_inflight_store_bytes
        return not in_flight or in_flight + num_blocks * self._block_bytes <= limit

    def submit_store(
        self,
        job_id: int,
        keys: tuple[OffloadKey, ...],
        block_ids: npt.NDArray[np.int32],
        req_context: ReqContext,
    ) -> None:
        """Give the tier copies of blocks, or what it takes of them.

        Args:
            job_id: The engine's id of the job.
            keys: The blocks, distinct.
            block_ids: Their slots, ``int32``, shape ``(len(keys),)``.
            req_context: The request.
        """
        job = _EngineJob(job_id, keys)
        state = self._requests.state(req_context)
        given = 0
        if state.may_store and self.guard.options.mode is not TierMode.READ_ONLY:
            for part in job_ranges(self.guard, len(keys)):
                store = self._factory.store(keys[part], block_ids[part], req_context)
                self.guard.inflight_store_bytes += self._bytes(store)
                self._stores[store.metadata.job_id] = store
                self._submit(job, store)
                given = part.stop
            self.guard.counts["blocks_skipped"] += len(keys) - given
        self._report_if_done(job, is_promotion=False)

    def submit_load(
        self,
        job_id: int,
        keys: tuple[OffloadKey, ...],
        block_ids: npt.NDArray[np.int32],
        req_context: ReqContext,
    ) -> None:
        """Have the tier load blocks; for the arguments see :meth:`submit_store`."""
        job = _EngineJob(job_id, keys)
        state = self._requests.state(req_context)
        for part in job_ranges(self.guard, len(keys)):
            load = self._factory.load(keys[part], block_ids[part], (), state)
            self._loads[load.metadata.job_id] = load
            self._submit(job, load)
        self._report_if_done(job, is_promotion=True)

    def _submit(self, job: _EngineJob, part: TierJob) -> None:
        part_id = part.metadata.job_id
        job.parts[part_id] = part
        self._jobs[part_id] = job
        self.guard.health.submitted(part_id)
        if not self.guard.submit(part):
            self._end(part)

    def _report_if_done(self, job: _EngineJob, *, is_promotion: bool) -> None:
        if not job.parts and not job.is_reported:
            self._outcomes.append(job.outcome(is_promotion=is_promotion))

    def poll(self) -> list[JobOutcome]:
        """Return the outcomes of jobs that have ended, or were given up, since the last call."""
        self._take_reports()
        self._expire()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_released(self) -> list[int]:
        """Return slots of loads that were given up and that the tier has let go of since."""
        released, self._released = self._released, []
        return released

    @property
    def num_jobs(self) -> int:
        """Jobs of the tier that it has not reported, those that were given up among them."""
        return len(self._jobs)

    def _take_reports(self) -> None:
        if not self._jobs:
            return
        for part in self.guard.finished():
            job = self._jobs[part.metadata.job_id]
            self._end(part)
            self._report_if_done(job, is_promotion=part.metadata.is_promotion)

    def _end(self, part: TierJob) -> None:
        """Note the end of a part: reported by the tier, or never taken."""
        metadata, guard = part.metadata, self.guard
        job = self._jobs.pop(metadata.job_id)
        del job.parts[metadata.job_id]
        guard.judge(part, self._block_bytes)
        if part.is_overdue:
            guard.note_overdue(-len(part.block_ids))
        if metadata.is_promotion:
            self._loads.pop(metadata.job_id, None)
            if job.is_reported:
                # Late: the engine has been told, and no longer wants what may have come.
                self._released += part.block_ids
                return
            self._note_loaded(part)
        else:
            self._stores.pop(metadata.job_id, None)
            self._note_stored(part)
        job.succeeded |= part.succeeded
        job.busy_s = max(job.busy_s, part.busy_s)

    def _note_loaded(self, part: TierJob) -> None:
        state = part.state
        if state is None:
            return
        for key in part.metadata.keys:
            succeeded = key in part.succeeded
            self.guard.resolve(key, state, "hits" if succeeded else "errors")
            if not succeeded:
                state.failed.add((key, self.guard))

    def _note_stored(self, part: TierJob) -> None:
        guard = self.guard
        guard.inflight_store_bytes -= self._bytes(part)
        guard.counts["blocks_stored"] += len(part.succeeded)
        declined = part.error is not None and part.error.kind is JobErrorKind.DECLINED
        failed = len(part.metadata.keys) - len(part.succeeded)
        guard.counts["blocks_declined" if declined else "blocks_failed"] += failed

    def _expire(self) -> None:
        now = self._clock()
        for parts in (self._loads, self._stores):
            while parts:
                part_id, part = next(iter(parts.items()))
                if part.deadline > now:
                    break
                del parts[part_id]
                self._note_overdue(part)
                if part.metadata.is_promotion and self._can_hold_slots():
                    self._give_up(self._jobs[part_id])

    def _note_overdue(self, part: TierJob) -> None:
        guard = self.guard
        part.is_overdue = True
        guard.counts["jobs_stalled"] += 1
        guard.note_overdue(len(part.block_ids))
        if part.metadata.is_promotion:
            guard.health.failed(Activity.LOAD, "a load was not reported by its deadline")
        else:
            guard.pressure.store_failed()
            guard.health.failed(Activity.STORE, "a store was not reported by its deadline")

    def _give_up(self, job: _EngineJob) -> None:
        if job.is_reported:
            return
        for part in job.parts.values():
            self._note_loaded(part)
        self._outcomes.append(job.outcome(is_promotion=True))

    def _bytes(self, part: TierJob) -> int:
        return len(part.block_ids) * self._block_bytes

    # -- requests and steps ---------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> OffloadPolicy:
        """Announce a request; returns which of its blocks the tier wants to be offered."""
        # Of an earlier request of that name nothing may be left.
        self._requests.remove(req_context.req_id)
        self._requests.state(req_context)
        return self.guard.on_new_request(req_context).policy

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Announce the end of a request."""
        self._requests.remove(req_context.req_id)
        if self._is_attached():
            self.guard.on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Announce the end of a step."""
        for req_id in context.new_req_ids:
            state = self._requests.find(req_id)
            if state is not None:
                # It runs, with a load or without: its wait is over.
                self._requests.stop_waiting(state)
        if self._is_attached():
            self.guard.on_schedule_end(context)

    def has_pending_work(self) -> bool:
        """Say whether the tier asks for further steps, or an outcome waits to be taken."""
        return bool(self._outcomes) or (self._is_attached() and self.guard.has_pending_work())

    def take_events(self) -> list[OffloadingEvent]:
        """Return the tier's events."""
        return self.guard.take_events() if self._is_attached() else []

    def _is_attached(self) -> bool:
        return self.guard.health.state is not HealthState.DETACHED

    # -- end ------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Bring all jobs to an end: afterwards no I/O touches the primary tier. May block.

        Not only for a while: the engine is about to give the memory to others. What keeps it is in
        the log every five seconds. Their outcomes are there at the next :meth:`poll`.
        """
        self._take_reports()
        if not self._jobs:
            return
        with self._logged_wait("drain"):
            stuck = frozenset(self.guard.drain_jobs(self._patience_s()))
            self._take_reports()
            # It says that it touches none of these any more, and has not reported them.
            self._end_lost(stuck)
            while self._jobs:
                time.sleep(_POLL_EVERY_S)
                self._take_reports()

    def _end_lost(self, stuck: frozenset[JobId]) -> None:
        for part_id in [part_id for part_id in self._jobs if part_id not in stuck]:
            job = self._jobs[part_id]
            part = self.guard.jobs.pop(part_id, None) or job.parts[part_id]
            _LOGGER.warning(
                "tier %r has drained without a result for one of its jobs; it counts as failed",
                self.guard.name,
            )
            self._end(part)
            self._report_if_done(job, is_promotion=part.metadata.is_promotion)

    def shutdown(self) -> int:
        """Let stores under way end, then close the tier. May block.

        Returns:
            Number of jobs whose I/O could not be stopped: the primary tier must stay mapped.
        """
        self._take_reports()
        if self._jobs and self._is_attached():
            self.guard.drain_jobs(self._config.shutdown_flush_s)
        stuck = self.guard.shutdown(self._patience_s())
        self._take_reports()
        return len(stuck)

    def _patience_s(self) -> float:
        return self.guard.limits.job_deadline_s + self._config.quarantine_grace_s

    @contextmanager
    def _logged_wait(self, what: str) -> Iterator[None]:
        started, over = time.monotonic(), threading.Event()

        def log() -> None:
            while not over.wait(_LOG_EVERY_S):
                _LOGGER.warning(
                    "tier %r: the %s has waited %.0f s for %d job(s) whose I/O is under way",
                    self.guard.name,
                    what,
                    time.monotonic() - started,
                    len(self._jobs),
                )

        thread = threading.Thread(target=log, name=f"kv-wait-{self.guard.name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
