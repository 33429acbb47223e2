"""A fence around one tier: nothing it raises gets past here.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TypeVar, final

from kv_core.contract import ABSENT, JobId, JobMetadata, JobResult, RequestOffloadingContext

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kv_core.contract import (
        LookupAnswer,
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from kv_core.plugins import OpenTier

__all__ = ["GuardedTier"]

_LOGGER: Final = logging.getLogger(__name__)
_LOG_EVERY: Final = 1000

T = TypeVar("T")


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
        jobs: Jobs handed over and not yet reported: id to metadata and slot generations
            (generations only for loads).
    """

    __slots__ = (
        "_exceptions_by_method",
        "_manager",
        "exceptions",
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
        self.jobs: dict[JobId, tuple[JobMetadata, tuple[int, ...]]] = {}
        self._manager = tier.manager
        self._exceptions_by_method: dict[str, int] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        """Ask the tier; an exception is "absent"."""
        try:
            return self._manager.lookup(key, req_context)
        except Exception:  # noqa: BLE001 - a tier may raise anything; see the class docstring
            self._contained("lookup")
            return ABSENT

    def submit(self, job: JobMetadata, generations: tuple[int, ...] = ()) -> bool:
        """Hand a job over.

        Returns:
            ``False`` when the tier raised: it has not taken the job and does not touch its
            slots.
        """
        self.jobs[job.job_id] = (job, generations)
        try:
            if job.is_promotion:
                self._manager.submit_load(job)
            else:
                self._manager.submit_store(job)
        except Exception:  # noqa: BLE001 - a tier may raise anything; see the class docstring
            del self.jobs[job.job_id]
            self._contained("submit_load" if job.is_promotion else "submit_store")
            return False
        return True

    def finished(self) -> list[tuple[JobMetadata, tuple[int, ...], JobResult]]:
        """Return newly finished jobs; repeated and unknown results are logged and dropped."""
        nothing: list[JobResult] = []
        results: list[JobResult] = self._call(
            "get_finished_jobs", lambda: list(self._manager.get_finished_jobs()), nothing
        )
        known = []
        for result in results:
            entry = self.jobs.pop(result.job_id, None)
            if entry is None:
                self._count("unknown_results")
                _LOGGER.warning(
                    "tier %r reported job %s, which is not in flight; ignored",
                    self.name,
                    result.job_id,
                )
                continue
            known.append((*entry, result))
        return known

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Announce a request; an exception is the default policy."""
        return self._call(
            "on_new_request",
            lambda: self._manager.on_new_request(req_context),
            RequestOffloadingContext(),
        )

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
        empty: Mapping[str, float] = {}
        stats = dict(self._call("get_stats", self._manager.get_stats, empty))
        stats["contained_exceptions"] = self.exceptions
        stats["jobs_in_flight"] = len(self.jobs)
        return stats

    def drain_jobs(self) -> Collection[JobId]:
        """Drain the tier. May block. After an exception, every job may still be running."""
        return self._call("drain_jobs", self._manager.drain_jobs, tuple(self.jobs))

    def shutdown(self) -> Collection[JobId]:
        """Shut the tier down. May block. After an exception, every job may still be running."""
        return self._call("shutdown", self._manager.shutdown, tuple(self.jobs))

    def _call(self, method: str, call: Callable[[], T], default: T) -> T:
        try:
            return call()
        except Exception:  # noqa: BLE001 - a tier may raise anything; see the class docstring
            self._contained(method)
            return default

    def _contained(self, method: str) -> None:
        if self._count(method) % _LOG_EVERY == 1:
            _LOGGER.error("tier %r raised in %s; contained, the engine goes on", self.name, method)

    def _count(self, method: str) -> int:
        self.exceptions += 1
        count = self._exceptions_by_method.get(method, 0) + 1
        self._exceptions_by_method[method] = count
        return count
