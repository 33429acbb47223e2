"""The ledger of jobs: each is split, run in pieces, and reported exactly once.

**Who owns what.** The calling thread owns ``_jobs`` and the counters. A chunk belongs to the
executor's queue, then to the thread that runs it; whoever ends it, by running or by withdrawing
it, hands it to :meth:`JobLedger.finish` once. ``_idle``'s lock guards what that changes
(``open_chunks`` and the totals of a job, ``_finished``, ``_unfinished``) and is never held during
I/O.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from kv_core.contract import JobError, JobErrorKind, JobResult
from kv_core.tierkit._errors import SERIOUSNESS, BlockFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kv_core.contract import Clock, JobId, JobMetadata
    from kv_core.tierkit._lookup import HitClaim

__all__ = ["Chunk", "Executor", "Job", "JobLedger"]

_NEVER: Final = float("inf")


@final
class Chunk:
    """A run of consecutive blocks of a job, moved one after the other, and what became of them.

    Owned by whoever runs it until it is handed to :meth:`JobLedger.finish`. Callable: runs
    itself.

    Attributes:
        job: The job.
        start: Index of the first block.
        stop: Index after the last block.
        reached: Index of the first block without an outcome.
        failures: Failed blocks, by index; ``None`` for none.
        moved_bytes: Bytes moved.
        started: When the first transfer began; infinite when none did.
        ended: When the last transfer ended.
    """

    __slots__ = (
        "_run",
        "ended",
        "failures",
        "job",
        "moved_bytes",
        "reached",
        "start",
        "started",
        "stop",
    )

    def __init__(self, job: Job, start: int, stop: int, run: Callable[[Chunk], object]) -> None:
        self.job = job
        self.start = start
        self.stop = stop
        self.reached = start
        self.failures: dict[int, BlockFailure] | None = None
        self.moved_bytes = 0
        self.started = _NEVER
        self.ended = -_NEVER
        self._run = run

    def __call__(self) -> None:
        self._run(self)

    def begin_block(self, now: float) -> bool:
        """Say whether the next block may be begun; if not, the rest has failed."""
        job = self.job
        if now >= job.deadline:
            job.overdue = True
        if job.overdue or job.withdrawn:
            self.fail_rest("the job ended before the transfer of the block began")
            return False
        if self.started == _NEVER:
            self.started = now
        return True

    def record(self, outcome: BlockFailure | int) -> None:
        """Note the outcome of the next block: a failure, or the bytes moved."""
        if isinstance(outcome, BlockFailure):
            self._fail(range(self.reached, self.reached + 1), outcome)
        else:
            self.moved_bytes += outcome
        self.reached += 1

    def fail_rest(self, message: str) -> None:
        """Note that the blocks without an outcome will not be moved."""
        failure = BlockFailure(JobErrorKind.STALLED, message, 0)
        self._fail(range(self.reached, self.stop), failure)
        self.reached = self.stop

    def record_all(self, moved_bytes: int, failures: Mapping[int, BlockFailure]) -> None:
        """Note the outcomes of all blocks at once: the failures by index in the job."""
        if failures:
            self.failures = {**(self.failures or {}), **failures}
        self.moved_bytes += moved_bytes
        self.reached = self.stop

    def _fail(self, indices: range, failure: BlockFailure) -> None:
        if self.failures is None:
            self.failures = {}
        self.failures.update(dict.fromkeys(indices, failure))


@final
class Job:
    """One submitted job.

    Attributes:
        metadata: What the engine submitted.
        block_ids: Its block ids, as a list.
        deadline: On the clock; after it no further block is begun.
        chunks: The pieces.
        tickets: Per block, the ticket drawn before its transfer.
        tracked: Whether the lookups were told of the store.
        claim: A load that the lookups were told of: the hits it is to make good.
        withdrawn: Set when no further block may be begun.
        overdue: Set when the deadline passed before the end.
        stalled: Set when the job has been counted as stalled.
        plan: What the tier has noted of the job when it was submitted.
        planned: Whether it has.
        open_chunks: Chunks that have not been reported.
        failures: Failed blocks, by index.
        moved_bytes: Bytes moved.
        started: When the first transfer began, on the clock.
        ended: When the last transfer ended, on the clock.
    """

    __slots__ = (
        "block_ids",
        "chunks",
        "claim",
        "deadline",
        "ended",
        "failures",
        "metadata",
        "moved_bytes",
        "open_chunks",
        "overdue",
        "plan",
        "planned",
        "stalled",
        "started",
        "tickets",
        "tracked",
        "withdrawn",
    )

    def __init__(self, metadata: JobMetadata, deadline: float) -> None:
        self.metadata = metadata
        self.block_ids: list[int] = metadata.block_ids.tolist()
        self.deadline = deadline
        self.chunks: list[Chunk] = []
        self.tickets = [0] * len(metadata.keys)
        self.tracked = False
        self.claim: HitClaim | None = None
        self.withdrawn = False
        self.overdue = False
        self.stalled = False
        self.plan: Any = None
        self.planned = False
        self.open_chunks = 0
        self.failures: dict[int, BlockFailure] = {}
        self.moved_bytes = 0
        self.started = _NEVER
        self.ended = -_NEVER

    def result(self) -> JobResult:
        """Return the outcome. Only after the last chunk was reported."""
        metadata = self.metadata
        seconds = max(0.0, self.ended - self.started) if self.started < _NEVER else 0.0
        if not self.failures:
            return JobResult(
                metadata.job_id, True, transfer_time_s=seconds, transfer_bytes=self.moved_bytes
            )
        good = tuple(key for i, key in enumerate(metadata.keys) if i not in self.failures)
        worst = max(self.failures.values(), key=lambda failure: SERIOUSNESS.index(failure.kind))
        return JobResult(
            metadata.job_id,
            False,
            successful_keys=good,
            error=JobError(
                worst.kind,
                f"{len(self.failures)} of {len(metadata.keys)} block(s): {worst.message}",
            ),
            transfer_time_s=seconds,
            transfer_bytes=self.moved_bytes,
        )


class Executor(Protocol):
    """Whoever runs chunks."""

    def submit(self, chunks: Iterable[Chunk], *, loads: bool) -> None:
        """Queue chunks. Returns at once."""

    def withdraw(self, chunk: Chunk) -> bool:
        """Take a chunk back; ``True``: it will never run."""

    def interrupt(self, chunk: Chunk) -> None:
        """Break off a running chunk, if the tier can withdraw I/O. Returns at once."""


@final
class JobLedger:
    """Splits jobs, enforces their deadlines, and hands out each outcome once.

    Args:
        executor: Runs the chunks.
        run: Runs one chunk; what it returns is for the executor.
        clock: Monotonic seconds.
        job_deadline_s: Deadline of every job.
        split: Returns the number of chunks for a job that is not empty.
    """

    def __init__(
        self,
        executor: Executor,
        run: Callable[[Chunk], object],
        *,
        clock: Clock,
        job_deadline_s: float,
        split: Callable[[Job], int],
    ) -> None:
        self._executor = executor
        self._run = run
        self._clock = clock
        self._job_deadline_s = job_deadline_s
        self._split = split
        self._jobs: dict[JobId, Job] = {}
        self._next_deadline = _NEVER
        self._stalled_jobs = 0
        self._idle = threading.Condition(threading.Lock())
        self._unfinished = 0
        self._finished: deque[Job] = deque()

    @property
    def stalled_jobs(self) -> int:
        """Jobs that were not done at their deadline."""
        return self._stalled_jobs

    def has_jobs(self) -> bool:
        """Say whether jobs are in flight or have not been collected."""
        return bool(self._jobs)

    # -- the calling thread ---------------------------------------------------------------------

    def admit(self, metadata: JobMetadata) -> Job:
        """Enter a job. :meth:`launch` begins it."""
        job = Job(metadata, self._clock() + self._job_deadline_s)
        self._jobs[metadata.job_id] = job
        self._next_deadline = min(self._next_deadline, job.deadline)
        return job

    def launch(self, job: Job) -> None:
        """Split a job and begin it; an empty job is finished already (JOB-4)."""
        count = len(job.metadata.keys)
        if not count:
            self._finished.append(job)
            return
        pieces = max(1, min(count, self._split(job)))
        step, extra = divmod(count, pieces)
        start = 0
        for piece in range(pieces):
            stop = start + step + (piece < extra)
            job.chunks.append(Chunk(job, start, stop, self._run))
            start = stop
        job.open_chunks = pieces
        with self._idle:
            self._unfinished += 1
        self._executor.submit(job.chunks, loads=job.metadata.is_promotion)

    def refuse(self, job: Job, message: str) -> None:
        """End a job that was not launched."""
        failure = BlockFailure(JobErrorKind.FAILED, message, 0)
        job.failures = dict.fromkeys(range(len(job.metadata.keys)), failure)
        self._finished.append(job)

    def collect(self) -> list[Job]:
        """Enforce deadlines, then return every job that has finished since the last call."""
        if self._jobs and self._clock() >= self._next_deadline:
            self._expire()
        jobs = []
        while self._finished:
            job = self._finished.popleft()
            del self._jobs[job.metadata.job_id]
            if job.overdue:
                self._count_stalled(job)
            jobs.append(job)
        return jobs

    def _expire(self) -> None:
        now = self._clock()
        self._next_deadline = _NEVER
        for job in self._jobs.values():
            if not job.open_chunks or job.stalled:
                continue
            if now < job.deadline:
                self._next_deadline = min(self._next_deadline, job.deadline)
                continue
            job.overdue = True
            self._count_stalled(job)
            self._cut(job, "the job deadline passed before the transfer began")

    def _count_stalled(self, job: Job) -> None:
        if not job.stalled:
            job.stalled = True
            self._stalled_jobs += 1

    def cancel(self, reason: str) -> None:
        """Withdraw everything that has not begun, and break off what can be."""
        for job in list(self._jobs.values()):
            if job.open_chunks:
                self._cut(job, reason)

    def _cut(self, job: Job, reason: str) -> None:
        job.withdrawn = True
        for chunk in job.chunks:
            if self._executor.withdraw(chunk):
                chunk.fail_rest(reason)
                self.finish(chunk)
            else:
                self._executor.interrupt(chunk)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no chunk is queued or running.

        In real seconds, unlike the deadlines: a wait cannot follow a clock that a test turns.

        Returns:
            Whether that came true within ``timeout_s``.
        """
        end = time.monotonic() + timeout_s
        with self._idle:
            while self._unfinished:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def unfinished_ids(self) -> tuple[JobId, ...]:
        """Return the ids of jobs that still touch their slots."""
        with self._idle:
            return tuple(job_id for job_id, job in self._jobs.items() if job.open_chunks)

    # -- any thread -----------------------------------------------------------------------------

    def finish(self, chunk: Chunk) -> None:
        """Take a chunk back, once; the last one finishes the job. Thread-safe."""
        if chunk.reached < chunk.stop:
            # Whatever broke the chunk off: what has no outcome must not pass for moved.
            chunk.fail_rest("the transfer was broken off")
        job = chunk.job
        with self._idle:
            if chunk.failures:
                job.failures.update(chunk.failures)
            job.moved_bytes += chunk.moved_bytes
            job.started = min(job.started, chunk.started)
            job.ended = max(job.ended, chunk.ended)
            job.open_chunks -= 1
            if job.open_chunks:
                return
            self._finished.append(job)
            self._unfinished -= 1
            if not self._unfinished:
                self._idle.notify_all()
