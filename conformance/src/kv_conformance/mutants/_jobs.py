"""Mutants of the clauses about one job: JOB-1 to JOB-6."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderTier, folder_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import (
        JobMetadata,
        JobResult,
        LookupAnswer,
        OffloadKey,
        ReqContext,
        TierContext,
    )

    Task = Callable[[], None]


# -- JOB-1: exactly once ---------------------------------------------------------------------------


class _TwiceInParts(FolderTier):
    """Reports what has failed at once, and the job when all of it has ended."""

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        return [result for result in results if not result.success] + results


@mutant(
    "JOB-1",
    breaks="Reports a job with failures a second time.",
    source="vllm#50321: outcomes of single keys, bolted on to a report per job",
)
def reports_failed_jobs_twice(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_TwiceInParts))


class _RepeatsAfterDrain(FolderTier):
    """A drain collects results itself, and does not take them out of the list."""

    @override
    def open(self) -> None:
        super().open()
        self._collected: list[JobResult] = []
        self._repeat = False

    @override
    def drain_jobs(self) -> Any:
        unfinished = super().drain_jobs()
        self._collected += super().get_finished_jobs()
        self._repeat = True
        return unfinished

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = [*self._collected, *super().get_finished_jobs()]
        if not self._repeat:
            self._collected = []
        self._repeat = False
        return results


@mutant(
    "JOB-1",
    breaks="Reports the results that a drain has collected by two polls.",
    source="dynamo#5012: two owners of one completion",
)
def repeats_results_after_a_drain(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_RepeatsAfterDrain))


class _NothingToDo(FolderTier):
    """Has a fast path for stores of blocks that are there, which forgets to report."""

    @override
    def open(self) -> None:
        super().open()
        self._known: set[OffloadKey] = set()
        self._stores: dict[int, JobMetadata] = {}

    @override
    def submit_store(self, job: JobMetadata) -> None:
        if not job.keys or not self._known.issuperset(job.keys):
            self._stores[job.job_id] = job
            super().submit_store(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        for result in results:
            job = self._stores.pop(result.job_id, None)
            if job is not None and result.success:
                self._known.update(job.keys)
        return results


@mutant(
    "JOB-1",
    breaks="Never reports a store whose blocks are all present already.",
    source="vllm#49947: a way out of a function that does not pass the report",
)
def forgets_stores_of_present_blocks(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_NothingToDo))


# -- JOB-2: reported as failed, not raised ---------------------------------------------------------


class _RaisesForAbsent(FolderTier):
    """Takes a load of what it knows to be absent for a mistake of the caller."""

    @override
    def open(self) -> None:
        super().open()
        self._absent: set[OffloadKey] = set()

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        answers = super().lookup_many(keys, req_context)
        self._absent.update(k for k, found in zip(keys, answers, strict=True) if found is False)
        return answers

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._absent.difference_update(job.keys)
        super().submit_store(job)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        if absent := self._absent.intersection(job.keys):
            raise KeyError(f"{len(absent)} block(s) are not there")
        super().submit_load(job)


@mutant(
    "JOB-2",
    breaks="Raises from the submit of a load of blocks that it knows to be absent.",
    source="llm-d-kv-cache#514, vllm#39732: a load that fails takes the worker down",
)
def raises_for_absent_blocks(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_RaisesForAbsent))


class _RaisesWhenDown(FolderTier):
    """Remembers that the last store failed, and says so where it must not."""

    @override
    def open(self) -> None:
        super().open()
        self._is_down = False

    @override
    def submit_store(self, job: JobMetadata) -> None:
        if self._is_down:
            self._is_down = False
            raise ConnectionError("the storage has not answered")
        super().submit_store(job)

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        try:
            return super().write_block(key, data)
        except OSError:
            self._is_down = True
            raise


@mutant(
    "JOB-2",
    breaks="Raises from the submit of a store after one has failed.",
    source="llm-d-kv-cache#514: errors of the backend come out of the wrong call",
)
def raises_while_the_storage_is_down(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_RaisesWhenDown))


class _SomeIsAll(FolderTier):
    """Calls a load a success as soon as one block of it was found."""

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [
            replace(result, success=True) if result.successful_keys else result
            for result in super().get_finished_jobs()
        ]


@mutant(
    "JOB-2",
    breaks="Reports a job as a success when a part of it was.",
    source="dynamo#15079: the metrics show a full hit, the transfer had failed",
    also=frozenset({"DATA-1", "DATA-10"}),
)
def takes_a_part_for_the_whole(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_SomeIsAll))


# -- JOB-3: everything that is finished, without waiting -------------------------------------------


class _OneAtATime(FolderTier):
    """Hands one result out per call."""

    @override
    def open(self) -> None:
        super().open()
        self._waiting: list[JobResult] = []

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._waiting += super().get_finished_jobs()
        return [self._waiting.pop(0)] if self._waiting else []

    @override
    def has_pending_work(self) -> bool:
        return bool(self._waiting) or super().has_pending_work()


@mutant(
    "JOB-3",
    breaks="Returns one result per poll.",
    source="vllm#46713: at a few hundred jobs, results lag behind by as many steps",
)
def one_result_per_poll(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OneAtATime))


class _WaitsForOne(FolderTier):
    """Waits a little for a result when jobs are in flight."""

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        if not results and self._ledger.wait_until_idle(0.03):
            results = list(super().get_finished_jobs())
        return results


@mutant(
    "JOB-3",
    breaks="A poll waits up to 30 ms for a result.",
    source="vllm#45595: a step that waits for transfers",
    also=frozenset({"BLOCK-1"}),
)
def a_poll_that_waits(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_WaitsForOne))


# -- JOB-4: empty jobs -----------------------------------------------------------------------------


class _NoKeysNoJob(FolderTier):
    """Reports a job when its last block has ended, and an empty one has none."""

    @override
    def submit_load(self, job: JobMetadata) -> None:
        if job.keys:
            super().submit_load(job)


@mutant(
    "JOB-4",
    breaks="Never reports an empty load.",
    source="vllm#49947: jobs that are counted down block by block",
)
def forgets_empty_loads(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_NoKeysNoJob))


class _EmptyWithOthers(FolderTier):
    """Looks for finished jobs only when a transfer has ended."""

    @override
    def open(self) -> None:
        super().open()
        self._empty: set[int] = set()
        self._held: list[JobResult] = []

    @override
    def submit_store(self, job: JobMetadata) -> None:
        if not job.keys:
            self._empty.add(job.job_id)
        super().submit_store(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        self._held += [result for result in results if result.job_id in self._empty]
        others = [result for result in results if result.job_id not in self._empty]
        if not others:
            return []
        held, self._held = self._held, []
        return held + others


@mutant(
    "JOB-4",
    breaks="Reports an empty store together with the next job that is not empty.",
    source="a completion that is noticed by the end of a transfer",
)
def empty_stores_wait_for_others(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_EmptyWithOthers))


# -- JOB-5: the deadline ---------------------------------------------------------------------------


class _QueueWithoutDeadline(FolderTier):
    """Counts the deadline of a job from its first transfer."""

    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._ledger._job_deadline_s = 3600.0


@mutant(
    "JOB-5",
    breaks="A job in the queue has no deadline.",
    source="vllm#49829: a stalled write, and whatever waits behind it, stays for ever",
)
def queued_jobs_have_no_deadline(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_QueueWithoutDeadline))


class _NeverWithdraws(FolderTier):
    """Counts a queued job as stalled and leaves it where it is."""

    @override
    def _open(self) -> Any:
        executor: Any
        executor, prober = super()._open()
        executor.withdraw = lambda _: False
        return executor, prober


@mutant(
    "JOB-5",
    breaks="Counts queued jobs as stalled instead of failing them.",
    source="vllm#56828: 36 to 43 seconds until the loss of a peer is seen",
)
def queued_jobs_count_as_running(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_NeverWithdraws))


class _CountsNoStall(FolderTier):
    """Does not say how many jobs it could not end."""

    @override
    def get_stats(self) -> Mapping[str, float]:
        return {**super().get_stats(), "stalled_jobs": 0.0}


@mutant(
    "JOB-5",
    breaks="Does not count the jobs that outlast their deadline.",
    source="LMCache#5119: a storage that has failed reports itself healthy",
)
def stalled_jobs_are_not_counted(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CountsNoStall))


# -- JOB-6: the end of the request -----------------------------------------------------------------


class _ResultsOfTheLiving(FolderTier):
    """Keeps what it knows of a job with its request."""

    @override
    def open(self) -> None:
        super().open()
        self._of_request: dict[str, set[int]] = {}
        self._dropped: set[int] = set()

    def _note(self, job: JobMetadata) -> None:
        self._of_request.setdefault(job.req_context.req_id, set()).add(job.job_id)

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._note(job)
        super().submit_store(job)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._note(job)
        super().submit_load(job)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._dropped |= self._of_request.pop(req_context.req_id, set())
        super().on_request_finished(req_context)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [r for r in super().get_finished_jobs() if r.job_id not in self._dropped]


@mutant(
    "JOB-6",
    breaks="Drops results of requests that have ended.",
    source="dynamo#3730: a request that finishes first leaves its blocks pinned",
)
def drops_results_of_ended_requests(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ResultsOfTheLiving))


class _CancelsWithTheRequest(_ResultsOfTheLiving):
    """Cancels the queued loads of a request at its end, and reports them to nobody."""

    @override
    def submit_store(self, job: JobMetadata) -> None:
        FolderTier.submit_store(self, job)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        # Of a job that is being reported there is nothing left to cancel.
        done = {job.metadata.job_id for job in tuple(self._ledger._finished)}
        self._dropped |= self._of_request.pop(req_context.req_id, set()) - done
        FolderTier.on_request_finished(self, req_context)


@mutant(
    "JOB-6",
    breaks="Cancels the loads of a request at its end without a report.",
    source="vllm#48102: requests that are aborted while their blocks are on the way",
)
def cancels_loads_with_the_request(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CancelsWithTheRequest))
