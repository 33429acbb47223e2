"""The dict tier: on the bare contract, without the kit and without a thread.

Everything runs on the engine's thread, which it never makes wait: what the client refuses for the
moment is tried again at the next poll. A job that the client can serve at once is finished when
its submit returns.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pydantic import Field
from typing_extensions import override

from kv_conformance.reference._dict_lookup import DictLookup
from kv_conformance.reference._dict_store import DictStore
from kv_core.contract import (
    JobError,
    JobErrorKind,
    JobResult,
    RequestOffloadingContext,
    SecondaryTierManager,
    TierConfig,
    TierLimits,
)
from kv_core.errors import TierClosedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from kv_core.contract import (
        JobId,
        JobMetadata,
        LookupAnswer,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
        TierContext,
    )

__all__ = ["DictConfig", "DictTier"]

_SEVERITY: Final = (
    JobErrorKind.FAILED,
    JobErrorKind.STALLED,
    JobErrorKind.DAMAGED,
    JobErrorKind.MISSING,
    JobErrorKind.DECLINED,
)


class DictConfig(TierConfig):
    """Settings of the dict tier."""

    job_deadline_s: float = Field(default=30.0, gt=0, le=3600)
    """A job is reported within this many seconds."""
    lookup_deadline_s: float = Field(default=5.0, gt=0, le=600)
    """A lookup resolves within this many seconds."""
    error_backoff_s: float = Field(default=1.0, ge=0, le=600)
    """How long the tier may answer "absent" after an error."""

    def limits(self) -> TierLimits:
        """Return the limits of the tier."""
        return TierLimits(
            job_deadline_s=self.job_deadline_s,
            lookup_deadline_s=self.lookup_deadline_s,
            error_backoff_s=self.error_backoff_s,
            min_retained_blocks=1_000_000,
            # Memory that the tier cannot see the end of.
            min_free_bytes=1,
        )


@dataclass(slots=True)
class _Job:
    metadata: JobMetadata
    begun: float
    done: list[OffloadKey] = field(default_factory=list)
    errors: list[JobError] = field(default_factory=list)

    @property
    def reached(self) -> int:
        """How many keys have come to an end."""
        return len(self.done) + len(self.errors)

    @property
    def rest(self) -> tuple[OffloadKey, ...]:
        return self.metadata.keys[self.reached :]


class DictTier(SecondaryTierManager):
    """Blocks in a dictionary."""

    @override
    def __init__(self, context: TierContext) -> None:
        if not isinstance(context.config, DictConfig):
            raise TypeError(f"expected a DictConfig, found {type(context.config).__name__}")
        self.store = DictStore()
        self._config = context.config
        self._primary = context.primary
        self._clock = context.clock
        self._pid = os.getpid()
        self._jobs: dict[JobId, _Job] = {}
        self._finished: list[JobResult] = []
        self._storing: Counter[OffloadKey] = Counter()
        self._failures = {"store_failures": 0, "load_failures": 0}
        self._closed = False
        self._lookups = DictLookup(
            self.store.exists,
            self._storing,
            context.clock,
            deadline_s=context.config.lookup_deadline_s,
            backoff_s=context.config.error_backoff_s,
        )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TierClosedError(
                f"the tier was opened by process {self._pid}, and its fork {os.getpid()} would "
                "report its jobs a second time: open it in the process that uses it"
            )

    # -- lookup ---------------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        self._check_process()
        return self._lookups.ask(key, req_context.req_id)

    # -- jobs -----------------------------------------------------------------------------------

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._check_process()
        self._storing.update(job.keys)
        self._begin(job)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._check_process()
        self._begin(job)

    def _begin(self, metadata: JobMetadata) -> None:
        job = self._jobs[metadata.job_id] = _Job(metadata, self._clock())
        if self._closed:
            self._break_off(job, JobErrorKind.FAILED, "the tier is shut down")
        else:
            self._advance(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._check_process()
        self._advance_all()
        finished, self._finished = self._finished, []
        return finished

    def _advance_all(self) -> None:
        # Loads first: nobody waits for a store.
        for job in sorted(self._jobs.values(), key=lambda job: not job.metadata.is_promotion):
            self._advance(job)

    def _advance(self, job: _Job) -> None:
        """Move blocks until the client refuses, or the job ends."""
        metadata = job.metadata
        move = self._load_block if metadata.is_promotion else self._store_block
        for key, block_id in zip(job.rest, metadata.block_ids[job.reached :], strict=True):
            try:
                error = move(key, int(block_id))
            except BlockingIOError:
                if self._clock() - job.begun >= self._config.job_deadline_s:
                    self._break_off(job, JobErrorKind.STALLED, "the store did not answer in time")
                return
            except OSError as problem:
                full = problem.errno == errno.ENOSPC
                error = JobError(
                    JobErrorKind.DECLINED if full else JobErrorKind.FAILED, str(problem)
                )
            if error is None:
                job.done.append(key)
            else:
                self._fail(job, key, error)
        self._end(job)

    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        with self._primary.block(block_id) as block:
            self.store.put(key, block)
        return None

    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        data = self.store.get(key)
        if data is None:
            return JobError(JobErrorKind.MISSING, "there is no such object")
        with self._primary.block(block_id) as block:
            if len(data) != len(block):
                return JobError(
                    JobErrorKind.DAMAGED, f"the object has {len(data)} bytes, not {len(block)}"
                )
            block[:] = data
        return None

    def _fail(self, job: _Job, key: OffloadKey, error: JobError) -> None:
        job.errors.append(error)
        if not job.metadata.is_promotion:
            self._failures["store_failures"] += 1
            return
        self._failures["load_failures"] += 1
        transient = error.kind not in {JobErrorKind.MISSING, JobErrorKind.DAMAGED}
        self._lookups.load_failed(
            key,
            job.metadata.req_context.req_id,
            transient=transient,
            retired=not transient and self._retire(key),
        )

    def _retire(self, key: OffloadKey) -> bool:
        try:
            self.store.remove(key)
        except OSError:
            return False
        return True

    def _break_off(self, job: _Job, kind: JobErrorKind, message: str) -> None:
        """Fail what is left of a job. Nothing of it is under way: the client never waits."""
        for key in job.rest:
            self._fail(job, key, JobError(kind, message))
        self._end(job)

    def _end(self, job: _Job) -> None:
        metadata = job.metadata
        del self._jobs[metadata.job_id]
        if not metadata.is_promotion:
            self._storing -= Counter(metadata.keys)
            for key in job.done:
                self._lookups.stored(key)
        self._finished.append(
            JobResult(
                metadata.job_id,
                success=not job.errors,
                successful_keys=tuple(job.done) if job.errors else (),
                error=min(job.errors, key=lambda error: _SEVERITY.index(error.kind), default=None),
                transfer_time_s=self._clock() - job.begun,
                transfer_bytes=len(job.done) * self._primary.block_bytes,
            )
        )

    @override
    def drain_jobs(self) -> Collection[JobId]:
        self._check_process()
        self._advance_all()
        self._cancel_all("cancelled by a drain")
        return ()

    def _cancel_all(self, message: str) -> None:
        for job in list(self._jobs.values()):
            self._break_off(job, JobErrorKind.STALLED, message)

    # -- requests and steps ---------------------------------------------------------------------

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._check_process()
        self._lookups.begin(req_context.req_id)
        return RequestOffloadingContext()

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._check_process()
        self._lookups.end(req_context.req_id)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._check_process()
        self._advance_all()
        self._lookups.end_step()

    @override
    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._finished)

    # -- observation and end --------------------------------------------------------------------

    @override
    def get_stats(self) -> Mapping[str, float]:
        failures = {name: float(count) for name, count in self._failures.items()}
        return {**self._lookups.stats(), **failures, "stalled_jobs": 0.0}

    @override
    def shutdown(self) -> Collection[JobId]:
        self._check_process()
        self._closed = True
        self._cancel_all("cancelled by the shutdown of the tier")
        self.store.objects.clear()
        return ()
