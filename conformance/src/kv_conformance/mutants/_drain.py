"""Mutants of the DRAIN clauses."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import (
    DictHarness,
    DictTier,
    FolderHarness,
    FolderTier,
    dict_spec,
    folder_spec,
)
from kv_core.contract import JobError, JobErrorKind, JobResult

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import JobId, JobMetadata, OffloadKey

# -- DRAIN-1: everything is at an end --------------------------------------------------------------


class _DrainsNothing(FolderTier):
    """Has no drain, on a device that takes its time."""

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        threading.Event().wait(0.01)
        return super().write_block(key, data)

    @override
    def drain_jobs(self) -> Collection[JobId]:
        return ()


@mutant(
    "DRAIN-1",
    breaks="A drain does nothing.",
    source="vllm#48102: a reset with jobs in flight",
    also=frozenset({"DRAIN-4"}),
)
def drains_nothing(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DrainsNothing))


class _DrainsStores(FolderTier):
    """A drain is a flush: it waits for what was written."""

    @override
    def open(self) -> None:
        super().open()
        self._stores: set[JobId] = set()
        self._loads: dict[JobId, int] = {}
        self._held: list[JobResult] = []
        self._polls = 0

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._loads[job.job_id] = 0
        super().submit_load(job)

    @override
    def drain_jobs(self) -> Collection[JobId]:
        unfinished = super().drain_jobs()
        # The loads come from a queue that the drain does not look into, a few polls later.
        self._polls = 5
        return unfinished

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = [*self._held, *super().get_finished_jobs()]
        self._held = []
        if self._polls:
            self._polls -= 1
            self._held = [result for result in results if result.job_id in self._loads]
        return [result for result in results if result not in self._held]

    @override
    def has_pending_work(self) -> bool:
        return bool(self._held) or super().has_pending_work()


@mutant(
    "DRAIN-1",
    breaks="A drain waits for stores only.",
    source="a flush of dirty pages that is taken for a drain",
    also=frozenset({"DRAIN-4"}),
)
def drains_stores_only(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DrainsStores))


class _ReportsWhatIsStuck(FolderTier):
    """A drain that runs out of time reports everything as failed, threads or not."""

    @override
    def open(self) -> None:
        super().open()
        self._given_up: set[JobId] = set()
        self._extra: list[JobResult] = []

    @override
    def drain_jobs(self) -> Collection[JobId]:
        unfinished = super().drain_jobs()
        self._given_up.update(unfinished)
        error = JobError(JobErrorKind.STALLED, "cancelled by a drain")
        self._extra += [JobResult(job_id, success=False, error=error) for job_id in unfinished]
        return ()

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = [r for r in super().get_finished_jobs() if r.job_id not in self._given_up]
        extra, self._extra = self._extra, []
        return extra + results


@mutant(
    "DRAIN-1",
    breaks="A drain reports jobs as failed whose I/O is still under way.",
    source="vllm#48102, sglang#28468: memory that is given away under a running transfer",
    also=frozenset({"DATA-5"}),
)
def drains_by_giving_up(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ReportsWhatIsStuck))


# -- DRAIN-2: nothing to drain ---------------------------------------------------------------------


class _WaitsForQuiet(FolderTier):
    """A drain lets the storage come to rest, whether there was anything or not."""

    @override
    def drain_jobs(self) -> Collection[JobId]:
        unfinished = super().drain_jobs()
        time.sleep(self.config.job_deadline_s * 0.3)
        return unfinished


@mutant(
    "DRAIN-2",
    breaks="A drain waits for a share of the deadline, whatever is in flight.",
    source="vllm#45595: idle offloads that hold up whoever comes next",
)
def idle_drains_wait(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_WaitsForQuiet))


class _LosesCount(FolderTier):
    """Counts jobs up when they come and down when they succeed."""

    @override
    def open(self) -> None:
        super().open()
        self._in_flight = 0

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._in_flight += 1
        super().submit_load(job)

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._in_flight += 1
        super().submit_store(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        self._in_flight -= sum(result.success for result in results)
        return results

    @override
    def drain_jobs(self) -> Collection[JobId]:
        unfinished = super().drain_jobs()
        done = sum(job.result().success for job in tuple(self._ledger._finished))
        if self._in_flight > done:
            # In the belief that something is still on its way.
            time.sleep(self.config.job_deadline_s * 0.3)
        return unfinished


@mutant(
    "DRAIN-2",
    breaks="After a job that failed, every drain waits for it.",
    source="LMCache#4546: accounting that only grows",
)
def drains_wait_for_failed_jobs(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LosesCount))


# -- DRAIN-4: the deadline -------------------------------------------------------------------------


class _DrainsWithoutEnd(FolderTier):
    """Waits until everything has ended."""

    @override
    def drain_jobs(self) -> Collection[JobId]:
        while not self._ledger.wait_until_idle(1.0):
            pass
        return ()


@mutant(
    "DRAIN-4",
    breaks="A drain waits for stalled I/O for ever.",
    source="vllm#48102, LMCache#265: a thread that is joined inside a dead mount",
    also=frozenset({"DRAIN-1", "DRAIN-3", "DRAIN-5"}),
)
def drains_without_end(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DrainsWithoutEnd))


class _NamesNobody(FolderTier):
    """Ends in time, and says that all is well."""

    @override
    def drain_jobs(self) -> Collection[JobId]:
        super().drain_jobs()
        return ()


@mutant(
    "DRAIN-4",
    breaks="A drain does not name the jobs that it could not stop.",
    source="vllm#48102: slots that are reset under a transfer",
)
def drains_name_nobody(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_NamesNobody))


class _NamesEverybody(FolderTier):
    """Names what was in flight before it cancelled the queue."""

    @override
    def drain_jobs(self) -> Collection[JobId]:
        if self._ledger.wait_until_idle(self.config.job_deadline_s * 0.8):
            return ()
        unfinished = self._ledger.unfinished_ids()
        super().drain_jobs()
        return unfinished


@mutant(
    "DRAIN-4",
    breaks="A drain names cancelled jobs as impossible to stop.",
    source="vllm#49947: memory that stays pinned for nothing",
)
def drains_name_everybody(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_NamesEverybody))


class _CancelsAndForgets(DictTier):
    """A drain throws the queue away."""

    @override
    def drain_jobs(self) -> Collection[JobId]:
        self._advance_all()
        for job in self._jobs.values():
            self._storing.subtract(job.metadata.keys)
        self._storing = +self._storing
        self._jobs.clear()
        return ()


@mutant(
    "DRAIN-4",
    breaks="A drain cancels jobs and never reports them.",
    source="vllm#48102: after a reset requests wait for jobs that nobody knows",
    also=frozenset({"DRAIN-3"}),
)
def drains_forget_what_they_cancel(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_CancelsAndForgets))


# -- DRAIN-5: life goes on -------------------------------------------------------------------------


class _DrainIsTheEnd(FolderTier):
    """A drain is the first half of the shutdown."""

    @override
    def open(self) -> None:
        super().open()
        self._is_over = False

    @override
    def drain_jobs(self) -> Collection[JobId]:
        self._is_over = True
        return super().drain_jobs()

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        if self._is_over:
            raise ConnectionError("the tier takes no more jobs")
        return super().write_block(key, data)


@mutant(
    "DRAIN-5",
    breaks="No store is taken after a drain.",
    source="a drain that was written for the shutdown and is called by a reset",
)
def a_drain_is_the_end(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DrainIsTheEnd))


class _StaysCancelled(FolderTier):
    """Sets a flag that cancels, and takes it back only where nothing was cancelled."""

    @override
    def open(self) -> None:
        super().open()
        self._cancel = threading.Event()

    @override
    def drain_jobs(self) -> Collection[JobId]:
        if self._ledger.wait_until_idle(self.config.job_deadline_s * 0.5):
            return ()
        self._cancel.set()
        return super().drain_jobs()

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        if self._cancel.is_set():
            raise InterruptedError("cancelled")
        super().read_block(key, buffer)


@mutant(
    "DRAIN-5",
    breaks="After a drain that had to cancel, every load is cancelled.",
    source="a flag that is set in one place and cleared in none",
)
def stays_cancelled(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_StaysCancelled))
