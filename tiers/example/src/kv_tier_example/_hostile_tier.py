"""The faults themselves. All state here belongs to the engine's thread."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from typing_extensions import override

from kv_core.contract import (
    ABSENT,
    PRESENT,
    UNKNOWN,
    JobError,
    JobErrorKind,
    JobId,
    JobResult,
    RequestOffloadingContext,
    SecondaryTierManager,
)
from kv_tier_example._tier import ExampleTier

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from kv_core.contract import (
        JobMetadata,
        LookupAnswer,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
        TierContext,
    )
    from kv_tier_example.hostile import HostileConfig

__all__ = ["HostileTier", "ScriptedFaultError"]

_NO_SUCH_JOB = JobId(2**62)


class ScriptedFaultError(RuntimeError):
    """What the tier raises when its script says so."""


@dataclass(slots=True)
class _Late:
    result: JobResult
    polls_left: int


@final
class HostileTier(SecondaryTierManager):
    """Passes calls on to an :class:`ExampleTier`, except when it does not.

    Attributes:
        inner: The tier behind the wall.
    """

    @override
    def __init__(self, context: TierContext) -> None:
        self._config: HostileConfig = context.config  # type: ignore[assignment]  # our own model
        self._random = random.Random(self._config.seed)  # noqa: S311 - repeatable, not secret
        self.inner = ExampleTier(context)
        self._jobs: dict[JobId, JobMetadata] = {}
        self._late: list[_Late] = []
        self._counts: dict[str, float] = {}

    def _happens(self, rate: float, fault: str) -> bool:
        if not rate or self._random.random() >= rate:
            return False
        self._counts[fault] = self._counts.get(fault, 0) + 1
        return True

    def _maybe_raise(self, method: str) -> None:
        if self._happens(self._config.raise_rate, "faults_raised"):
            raise ScriptedFaultError(f"{method} raises, as the script says")

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        self._maybe_raise("lookup")
        if self._happens(self._config.forget_rate, "lookups_forgotten"):
            return UNKNOWN
        answer = self.inner.lookup(key, req_context)
        if answer is ABSENT and self._happens(self._config.lie_rate, "lookups_lied"):
            return PRESENT
        return answer

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._maybe_raise("submit_store")
        self._jobs[job.job_id] = job
        self.inner.submit_store(job)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._maybe_raise("submit_load")
        self._jobs[job.job_id] = job
        self.inner.submit_load(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._maybe_raise("get_finished_jobs")
        due = self._due_results()
        for result in self.inner.get_finished_jobs():
            job = self._jobs.pop(result.job_id)
            if self._happens(self._config.lose_rate, "results_lost"):
                continue
            told = self._distort(job, result)
            if self._happens(self._config.late_rate, "results_late"):
                self._late.append(_Late(told, self._config.late_polls))
                continue
            due.append(told)
            if self._happens(self._config.duplicate_rate, "results_duplicated"):
                due.append(told)
        if self._happens(self._config.unknown_rate, "results_unknown"):
            due.append(JobResult(_NO_SUCH_JOB, success=True))
        return due

    def _due_results(self) -> list[JobResult]:
        for late in self._late:
            late.polls_left -= 1
        due = [late.result for late in self._late if late.polls_left <= 0]
        self._late = [late for late in self._late if late.polls_left > 0]
        return due

    def _distort(self, job: JobMetadata, result: JobResult) -> JobResult:
        if not result.success:
            return result
        if self._happens(self._config.fail_rate, "results_failed"):
            keys: tuple[OffloadKey, ...] = ()
        elif self._happens(self._config.partial_rate, "results_partial"):
            keys = job.keys[::2]
        else:
            return result
        error = JobError(JobErrorKind.FAILED, "the script says so")
        return replace(result, success=False, successful_keys=keys, error=error)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._maybe_raise("on_new_request")
        return self.inner.on_new_request(req_context)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self.inner.on_request_finished(req_context)
        self._maybe_raise("on_request_finished")

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.inner.on_schedule_end(context)
        self._maybe_raise("on_schedule_end")

    @override
    def has_pending_work(self) -> bool:
        return bool(self._late) or self.inner.has_pending_work()

    @override
    def get_stats(self) -> Mapping[str, float]:
        return {**self.inner.get_stats(), **self._counts}

    @override
    def drain_jobs(self) -> Collection[JobId]:
        return self.inner.drain_jobs()

    @override
    def shutdown(self) -> Collection[JobId]:
        return self.inner.shutdown()
