"""A fence around one tier: nothing it raises gets past here.

All state belongs to the thread that drives the tiering manager. A blocking call, a drain or a
shutdown, is made on a thread of its own, which owns nothing but the queue it answers to; while it
is inside the tier no other call is made.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Final, TypeVar, final

from kv_core.contract import (
    ABSENT,
    Capability,
    JobError,
    JobErrorKind,
    JobResult,
    RequestOffloadingContext,
)
from kv_core.errors import TierClosedError
from kv_core.tiering._health import Activity, HealthState, TierHealth
from kv_core.tiering._pressure import StorePressure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kv_core.contract import (
        Clock,
        JobId,
        JobMetadata,
        LookupAnswer,
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from kv_core.plugins import OpenTier
    from kv_core.tiering._config import TieringConfig
    from kv_core.tiering._options import TierOptions
    from kv_core.tiering._requests import RequestState

__all__ = ["GuardedTier", "TierJob"]

_LOGGER: Final = logging.getLogger(__name__)
_LOG_EVERY: Final = 1000
_MESSAGE_CHARS: Final = 400
_COUNTS: Final = (
    "hits",
    "misses",
    "errors",
    "blocks_stored",
    "blocks_failed",
    "blocks_declined",
    "blocks_dropped",
    "blocks_throttled",
    "blocks_skipped",
    "jobs_stalled",
)

_HEALTH_VALUES: Final = {
    HealthState.HEALTHY: 0,
    HealthState.DEGRADED: 1,
    HealthState.DETACHED: 2,
}

_PASSED_ON: Final = (KeyboardInterrupt, SystemExit)

# What a failed job says of the tier's health: these say nothing, or that the tier answers.
_HARMLESS: Final = frozenset({JobErrorKind.DECLINED})
_ANSWERED: Final = frozenset({JobErrorKind.MISSING, JobErrorKind.DAMAGED})

_ACTIVITIES: Final = {"submit_load": Activity.LOAD, "submit_store": Activity.STORE}

T = TypeVar("T")


@final
class TierJob:
    """A job on its way through a tier, and its outcome once the tier has reported it.

    Attributes:
        metadata: As the tier got it.
        block_ids: The slots. A list of the engine's own: the array in the metadata is the
            tier's to sort, and slots are given back by what the engine reserved.
        generations: Generation of each slot; only for loads.
        state: The request that a load is for; it may have ended, and another may have its name.
        deadline: When the engine stops waiting for it, seconds on its clock.
        is_overdue: Whether that has happened. The slots stay out of use until the report.
        was_taken: Whether the tier took it; an exception in submit is held against it already.
        busy_s: Seconds that the tier took at least. The time to the report would hold the
            engine's own steps against the tier, which are when the engine looks.
        succeeded: Keys that were stored or loaded; none before the report.
        error: Why keys failed, or ``None``.
    """

    __slots__ = (
        "block_ids",
        "busy_s",
        "deadline",
        "error",
        "generations",
        "is_overdue",
        "metadata",
        "state",
        "succeeded",
        "was_taken",
    )

    def __init__(
        self,
        metadata: JobMetadata,
        deadline: float,
        generations: tuple[int, ...] = (),
        state: RequestState | None = None,
    ) -> None:
        self.metadata = metadata
        self.deadline = deadline
        self.is_overdue = False
        self.was_taken = True
        self.busy_s = 0.0
        self.block_ids: list[int] = metadata.block_ids.tolist()
        self.generations = generations
        self.state = state
        self.succeeded: frozenset[OffloadKey] = frozenset()
        self.error: JobError | None = None

    def describe_failure(self) -> str:
        """Say in one line what went wrong, in the words of the tier."""
        activity = "load" if self.metadata.is_promotion else "store"
        failure = f"a {activity} failed"
        if self.error is None:
            return failure
        if self.error.kind is not JobErrorKind.FAILED:
            failure = f"{failure} ({self.error.kind.value})"
        message: object = self.error.message
        if not isinstance(message, str):
            return failure
        # A tier of one's own may hand over a page.
        return f"{failure}: {' '.join(message[:_MESSAGE_CHARS].split())}"


@final
class GuardedTier:
    """One open tier, as the tiering manager calls it.

    An exception in a tier costs a recompute, never the engine: each call answers with the
    harmless outcome instead ("absent", "not accepted", "nothing finished"), the exception is
    counted, and the first of every thousand per method is logged with its traceback. Every
    exception is a failure for the tier's health. So it is with answers that make no sense. What is
    contained need not be an ``Exception``: panics of native code and cancelled tasks are none. An
    interrupt and an exit pass, for they are the engine's own: signals come in a tier's calls, too.

    Attributes:
        name: Name of the tier.
        index: Position in the lookup order.
        options: What the user said of the tier.
        limits: What the tier declares in numbers.
        capabilities: What it promises beyond the core clauses. The optional method behind a
            capability that it does not declare may raise, and is never called.
        health: Whether the tier is to be used at all.
        pressure: How many of its stores to drop.
        counts: Lookups by outcome and what became of stores, in blocks.
        inflight_store_bytes: Bytes of stores that were not reported yet.
        overdue_blocks: Blocks of jobs that were not reported by their deadline, nor since. Their
            slots are out of use, so a tier that has too many of them gets no more work.
        exceptions: Number of exceptions contained so far.
        ignored_results: Number of results that were late, repeated, unknown or no results.
        jobs: Jobs handed over and not yet reported.
    """

    __slots__ = (
        "_blocking_call",
        "_clock",
        "_exceptions_by_method",
        "_failed_jobs",
        "_manager",
        "_overdue_limit",
        "_polled_at",
        "capabilities",
        "counts",
        "exceptions",
        "health",
        "ignored_results",
        "index",
        "inflight_store_bytes",
        "jobs",
        "limits",
        "name",
        "options",
        "overdue_blocks",
        "pressure",
    )

    def __init__(
        self,
        tier: OpenTier,
        index: int,
        options: TierOptions,
        config: TieringConfig,
        clock: Clock,
        *,
        overdue_limit: int,
    ) -> None:
        self.name = tier.name
        self.index = index
        self.options = options
        self.limits = tier.limits
        self.capabilities = tier.spec.capabilities
        self.health = TierHealth(tier.name, config, clock)
        self.pressure = StorePressure(config.store_seconds_per_mib, clock)
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.inflight_store_bytes = 0
        self.overdue_blocks = 0
        self._overdue_limit = overdue_limit
        self.exceptions = 0
        self.ignored_results = 0
        self.jobs: dict[JobId, TierJob] = {}
        self._manager = tier.manager
        self._clock = clock
        self._polled_at = clock()
        self._exceptions_by_method: dict[str, int] = {}
        self._failed_jobs = 0
        # The thread of a blocking call that has not come back, as far as is known.
        self._blocking_call: threading.Thread | None = None

    def may_use(self) -> bool:
        """Say whether the tier may be asked and given work now."""
        return self.overdue_blocks < self._overdue_limit and self.health.may_use()

    def note_overdue(self, blocks: int) -> None:
        """Count blocks of a job that passed its deadline, or less those of one that ended.

        Job by job, a tier that loses one of a thousand never looks ill, and would take the whole
        primary tier out of use in the end.
        """
        before = self.overdue_blocks
        self.overdue_blocks += blocks
        if before < self._overdue_limit <= self.overdue_blocks:
            _LOGGER.warning(
                "tier %r holds %d block(s) of jobs that it has not reported in time; it gets no "
                "more work until it reports some of them",
                self.name,
                self.overdue_blocks,
            )

    def replace(self, former: GuardedTier) -> None:
        """Take the place of the same tier as it was in another epoch, and go on counting."""
        self.counts = former.counts
        self.exceptions = former.exceptions
        self.ignored_results = former.ignored_results
        self.health.follow(former.health)

    def lookup(self, key: OffloadKey, state: RequestState) -> LookupAnswer:
        """Ask the tier; an exception is "absent", and counts as an error instead of a miss."""
        try:
            answer = self._manager.lookup(key, state.context)
            if answer is None:
                return None
            is_present = bool(answer)
        except _PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001 - see the class docstring
            self._contained("lookup", error)
            self.resolve(key, state, "errors")
            return ABSENT
        if self.health.has_failed_calls:
            self.health.succeeded(Activity.CALL)
        if is_present:
            return True
        self.resolve(key, state, "misses")
        return ABSENT

    def resolve(self, key: OffloadKey, state: RequestState, outcome: str) -> None:
        """Count a lookup as a hit, a miss or an error: once for each request and key."""
        resolved = state.resolved.get(self)
        if resolved is None:
            resolved = state.resolved[self] = set()
        if key not in resolved:
            resolved.add(key)
            self.counts[outcome] += 1

    def resolve_all(self, keys: Iterable[OffloadKey], state: RequestState, outcome: str) -> None:
        """Count lookups that ended alike, as :meth:`resolve` does for each."""
        resolved = state.resolved.setdefault(self, set())
        before = len(resolved)
        resolved.update(keys)
        self.counts[outcome] += len(resolved) - before

    def has_resolved(self, key: OffloadKey, state: RequestState) -> bool:
        """Say whether a request's lookup of a key counts already."""
        return key in state.resolved.get(self, ())

    def submit(self, job: TierJob) -> bool:
        """Hand a job over.

        Returns:
            ``False`` when the tier raised: it has not taken the job and does not touch its
            slots.
        """
        metadata = job.metadata
        self.jobs[metadata.job_id] = job
        try:
            if metadata.is_promotion:
                self._manager.submit_load(metadata)
            else:
                self._manager.submit_store(metadata)
        except _PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001 - see the class docstring
            del self.jobs[metadata.job_id]
            job.was_taken = False
            self._contained("submit_load" if metadata.is_promotion else "submit_store", error)
            return False
        return True

    def finished(self) -> list[TierJob]:
        """Return newly reported jobs; what is no result of a job in flight is ignored."""
        finished: list[TierJob] = []
        if self._is_blocked():
            return finished
        polled_before, now = self._polled_at, self._clock()
        self._polled_at = now
        try:
            # One by one: when the tier raises half-way, what it has reported by then counts.
            for result in self._manager.get_finished_jobs():
                job = self._take_report(result)
                if job is not None:
                    submitted_at = job.metadata.submit_time
                    # Not what it says alone: some count milliseconds, and some not at all.
                    busy_s = max(job.busy_s, polled_before - submitted_at)
                    job.busy_s = min(busy_s, now - submitted_at)
                    finished.append(job)
        except _PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001 - see the class docstring
            self._contained("get_finished_jobs", error)
        return finished

    def _take_report(self, result: object) -> TierJob | None:
        job = None
        if isinstance(result, JobResult) and isinstance(result.job_id, int):
            job = self.jobs.pop(result.job_id, None)
        if job is None or not isinstance(result, JobResult):
            self.ignored_results += 1
            if self.ignored_results % _LOG_EVERY == 1:
                _LOGGER.warning(
                    "tier %r reported %s, which is the result of no job in flight; ignored",
                    self.name,
                    # Not its own words: they may be long, and may raise.
                    f"job {result.job_id!r}"
                    if isinstance(result, JobResult)
                    else f"a {type(result).__name__}",
                )
            return None
        try:
            _read_result(job, result)
        except Exception as error:  # noqa: BLE001 - a tier may put anything there; the job has ended
            job.succeeded = frozenset()
            self._contained("get_finished_jobs", error)
        return job

    def note_failed_job(self, failure: str) -> None:
        """Log the first of every thousand jobs that failed, for whatever the tier says of it."""
        self._failed_jobs += 1
        if self._failed_jobs % _LOG_EVERY == 1:
            _LOGGER.warning("tier %r: %s", self.name, failure)

    def judge(self, job: TierJob, block_bytes: int) -> None:
        """Draw conclusions on the tier's health and speed from a job that has ended."""
        is_complete = len(job.succeeded) == len(job.metadata.keys)
        kind = None if job.error is None else job.error.kind
        activity = Activity.LOAD if job.metadata.is_promotion else Activity.STORE
        # What is overdue was held against the tier at its deadline, and no success makes up for
        # it: a tier that is always late would never be left alone. Declined says nothing.
        if not job.is_overdue and job.was_taken:
            failure = "" if is_complete or kind in _HARMLESS else job.describe_failure()
            if is_complete or kind in _ANSWERED:
                self.health.succeeded(activity)
            elif failure:
                self.health.failed(activity, failure)
            if failure:
                self.note_failed_job(failure)
        self.health.settled(job.metadata.job_id)
        if activity is Activity.STORE:
            if is_complete:
                self.pressure.store_ended(job.busy_s, len(job.metadata.keys) * block_bytes)
            elif not job.is_overdue:
                self.pressure.store_failed()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Announce a request; an exception, or no policy, is the default policy."""
        answer: object = self._call(
            "on_new_request", lambda: self._manager.on_new_request(req_context), None
        )
        if isinstance(answer, RequestOffloadingContext):
            return answer
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Announce the end of a request."""
        self._call(
            "on_request_finished", lambda: self._manager.on_request_finished(req_context), None
        )

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Announce the end of a step."""
        self._call("on_schedule_end", lambda: self._manager.on_schedule_end(context), None)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Pass on a use of blocks, to a tier that declares ``TOUCH``."""
        if Capability.TOUCH not in self.capabilities:
            return
        self._call("touch", lambda: self._manager.touch(keys, req_context), None)

    def has_pending_work(self) -> bool:
        """Say whether the tier itself asks for further steps; an exception is "no"."""
        return self._call("has_pending_work", self._manager.has_pending_work, default=False)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events of a tier that declares ``EVENTS``."""
        if Capability.EVENTS not in self.capabilities:
            return []
        return self._call("take_events", lambda: list(self._manager.take_events()), [])

    def get_stats(self) -> dict[str, float]:
        """Return the tier's own measurements, and under ``engine_`` what the engine saw of it.

        ``engine_queries = engine_hits + engine_misses + engine_errors``, each counted when it is
        known: a hit when the block was delivered to the primary tier.
        """
        empty: dict[str, float] = {}
        stats = self._call("get_stats", lambda: dict(self._manager.get_stats()), empty)
        for name, count in self.counts.items():
            stats[f"engine_{name}"] = count
        stats["engine_queries"] = sum(self.counts[name] for name in ("hits", "misses", "errors"))
        stats["health"] = _HEALTH_VALUES[self.health.state]
        stats["health_changes"] = self.health.changes
        stats["store_drop_rate"] = self.pressure.drop_rate()
        stats["inflight_store_bytes"] = self.inflight_store_bytes
        stats["overdue_blocks"] = self.overdue_blocks
        stats["contained_exceptions"] = self.exceptions
        stats["ignored_results"] = self.ignored_results
        stats["jobs_in_flight"] = len(self.jobs)
        return stats

    def drain_jobs(self, deadline_s: float) -> Collection[JobId]:
        """Drain the tier. Blocks until the deadline at most.

        Returns:
            Ids of jobs that may still be running: what the tier says, or all of them when it
            raised or did not come back in time.
        """
        return self._within(deadline_s, "drain_jobs", self._manager.drain_jobs)

    def shutdown(self, deadline_s: float) -> Collection[JobId]:
        """Shut the tier down. Blocks until the deadline at most; returns as `drain_jobs` does."""
        return self._within(deadline_s, "shutdown", self._manager.shutdown)

    def _within(
        self, deadline_s: float, method: str, call: Callable[[], Collection[JobId] | None]
    ) -> Collection[JobId]:
        """Make a blocking call on a thread of its own, so that a tier cannot hold the engine."""
        if self._blocking_call is not None:
            # The tier expects one call at a time.
            self._blocking_call.join(deadline_s)
            if self._is_blocked():
                return tuple(self.jobs)
        outcomes: queue.SimpleQueue[tuple[JobId, ...] | BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcomes.put(tuple(call() or ()))
            except BaseException as error:  # noqa: BLE001 - handed over; see the class docstring
                outcomes.put(error)

        thread = threading.Thread(target=run, name=f"kv-{method}-{self.name}", daemon=True)
        # Before the wait: an interrupt may end it, and leaves the thread inside the tier.
        self._blocking_call = thread
        try:
            thread.start()
        except RuntimeError:
            # Functions that run at the interpreter's exit can start none (from Python 3.12 on), and
            # there is no engine left to hold.
            run()
        else:
            try:
                outcome = outcomes.get(timeout=deadline_s)
            except queue.Empty:
                self.health.detach(f"{method} did not return within {deadline_s:g} s")
                return tuple(self.jobs)
            outcomes.put(outcome)
            thread.join()
        self._blocking_call = None
        outcome = outcomes.get()
        if isinstance(outcome, BaseException):
            self._contained(method, outcome)
            return tuple(self.jobs)
        return outcome

    def _is_blocked(self) -> bool:
        """Say whether another thread is still inside the tier, which expects one at a time."""
        if self._blocking_call is not None and not self._blocking_call.is_alive():
            self._blocking_call = None
        return self._blocking_call is not None

    def _call(self, method: str, call: Callable[[], T], default: T) -> T:
        if self._is_blocked():
            return default
        try:
            return call()
        except _PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001 - see the class docstring
            self._contained(method, error)
            return default

    def _contained(self, method: str, error: BaseException) -> None:
        """Count an exception and log the first of every thousand."""
        self.exceptions += 1
        count = self._exceptions_by_method.get(method, 0) + 1
        self._exceptions_by_method[method] = count
        if isinstance(error, TierClosedError):
            self.health.detach(f"closed: {error}")
        else:
            activity = _ACTIVITIES.get(method, Activity.CALL)
            self.health.failed(activity, f"{type(error).__name__} in {method}")
        if count % _LOG_EVERY == 1:
            _LOGGER.error(
                "tier %r raised in %s; contained, the engine goes on",
                self.name,
                method,
                exc_info=error,
            )


def _read_result(job: TierJob, result: JobResult) -> None:
    """Copy what a tier says of a job, as far as it makes sense.

    Raises:
        Exception: Whatever comes of things that are not what they should be.
    """
    error: object = result.error
    if isinstance(error, JobError) and isinstance(error.kind, JobErrorKind):
        job.error = error
    job.busy_s = max(0.0, float(result.transfer_time_s))
    keys = frozenset(job.metadata.keys)
    # A tier may claim only what it was asked for.
    job.succeeded = keys if result.success else keys.intersection(result.successful_keys)
