"""A fence around one tier: nothing it raises gets past here.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TypeVar, final

from kv_core.contract import ABSENT, JobResult, RequestOffloadingContext

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kv_core.contract import (
        JobError,
        JobId,
        JobMetadata,
        LookupAnswer,
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from kv_core.plugins import OpenTier

__all__ = ["GuardedTier", "TierJob"]

_LOGGER: Final = logging.getLogger(__name__)
_LOG_EVERY: Final = 1000

T = TypeVar("T")


@final
class TierJob:
    """A job on its way through a tier, and its outcome once the tier has reported it.

    Attributes:
        metadata: As the tier got it.
        block_ids: The slots. A list of the engine's own: the array in the metadata is the
            tier's to sort, and slots are given back by what the engine reserved.
        generations: Generation of each slot; only for loads.
        succeeded: Keys that were stored or loaded; none before the report.
        error: Why keys failed, or ``None``.
    """

    __slots__ = ("block_ids", "error", "generations", "metadata", "succeeded")

    def __init__(self, metadata: JobMetadata, generations: tuple[int, ...] = ()) -> None:
        self.metadata = metadata
        self.block_ids: list[int] = metadata.block_ids.tolist()
        self.generations = generations
        self.succeeded: frozenset[OffloadKey] = frozenset()
        self.error: JobError | None = None


@final
class GuardedTier:
    """One open tier, as the tiering manager calls it.

    An exception in a tier costs a recompute, never the engine: each call answers with the
    harmless outcome instead ("absent", "not accepted", "nothing finished"), the exception is
    counted, and the first of every thousand per method is logged with its traceback.

    Attributes:
        name: Name of the tier.
        index: Position in the lookup order.
        max_job_keys: Most keys in one job, or ``None``.
        exceptions: Number of exceptions contained so far.
        ignored_results: Number of results that were late, repeated, unknown or no results.
        jobs: Jobs handed over and not yet reported.
    """

    __slots__ = (
        "_exceptions_by_method",
        "_manager",
        "exceptions",
        "ignored_results",
        "index",
        "jobs",
        "max_job_keys",
        "name",
    )

    def __init__(self, tier: OpenTier, index: int) -> None:
        self.name = tier.name
        self.index = index
        self.max_job_keys = tier.limits.max_job_keys
        self.exceptions = 0
        self.ignored_results = 0
        self.jobs: dict[JobId, TierJob] = {}
        self._manager = tier.manager
        self._exceptions_by_method: dict[str, int] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        """Ask the tier; an exception is "absent"."""
        try:
            answer = self._manager.lookup(key, req_context)
            return None if answer is None else bool(answer)
        except Exception:  # noqa: BLE001 - a tier may raise anything; see the class docstring
            self._contained("lookup")
            return ABSENT

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
        except Exception:  # noqa: BLE001 - a tier may raise anything; see the class docstring
            del self.jobs[metadata.job_id]
            self._contained("submit_load" if metadata.is_promotion else "submit_store")
            return False
        return True

    def finished(self) -> list[TierJob]:
        """Return newly reported jobs; what is no result of a job in flight is ignored."""
        finished: list[TierJob] = []
        try:
            # One by one: when the tier raises half-way, what it has reported by then counts.
            for result in self._manager.get_finished_jobs():
                job = self._take_report(result)
                if job is not None:
                    finished.append(job)
        except Exception:  # noqa: BLE001 - a tier may raise anything; see the class docstring
            self._contained("get_finished_jobs")
        return finished

    def _take_report(self, result: object) -> TierJob | None:
        job = None
        if isinstance(result, JobResult) and isinstance(result.job_id, int):
            job = self.jobs.pop(result.job_id, None)
        if job is None or not isinstance(result, JobResult):
            self.ignored_results += 1
            if self.ignored_results % _LOG_EVERY == 1:
                _LOGGER.warning(
                    "tier %r reported %r, which is the result of no job in flight; ignored",
                    self.name,
                    result,
                )
            return None
        job.error = result.error
        job.succeeded = frozenset(job.metadata.keys)
        if not result.success:
            try:
                # A tier may claim only what it was asked for.
                job.succeeded = job.succeeded.intersection(result.successful_keys)
            except TypeError:
                job.succeeded = frozenset()
                self._contained("get_finished_jobs")
        return job

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
        """Pass on a use of blocks."""
        self._call("touch", lambda: self._manager.touch(keys, req_context), None)

    def has_pending_work(self) -> bool:
        """Say whether the tier needs further steps; an exception is "no"."""
        if self.jobs:
            return True
        return self._call("has_pending_work", self._manager.has_pending_work, default=False)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the tier's events."""
        return self._call("take_events", lambda: list(self._manager.take_events()), [])

    def get_stats(self) -> dict[str, float]:
        """Return the tier's measurements and the number of contained exceptions."""
        empty: dict[str, float] = {}
        stats = self._call("get_stats", lambda: dict(self._manager.get_stats()), empty)
        stats["contained_exceptions"] = self.exceptions
        stats["ignored_results"] = self.ignored_results
        stats["jobs_in_flight"] = len(self.jobs)
        return stats

    def drain_jobs(self) -> Collection[JobId]:
        """Drain the tier. May block. After an exception, every job may still be running."""
        return self._call(
            "drain_jobs", lambda: tuple(self._manager.drain_jobs() or ()), tuple(self.jobs)
        )

    def shutdown(self) -> Collection[JobId]:
        """Shut the tier down. May block. After an exception, every job may still be running."""
        return self._call(
            "shutdown", lambda: tuple(self._manager.shutdown() or ()), tuple(self.jobs)
        )

    def _call(self, method: str, call: Callable[[], T], default: T) -> T:
        try:
            return call()
        except Exception:  # noqa: BLE001 - a tier may raise anything; see the class docstring
            self._contained(method)
            return default

    def _contained(self, method: str) -> None:
        """Count the exception being handled and log the first of every thousand."""
        self.exceptions += 1
        count = self._exceptions_by_method.get(method, 0) + 1
        self._exceptions_by_method[method] = count
        if count % _LOG_EVERY == 1:
            _LOGGER.error(
                "tier %r raised in %s; contained, the engine goes on",
                self.name,
                method,
                exc_info=True,  # noqa: LOG014 - called by exception handlers only
            )
