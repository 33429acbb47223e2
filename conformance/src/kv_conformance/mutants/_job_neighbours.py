"""Mutants of the clauses about jobs among others: JOB-7 and JOB-8."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderTier, folder_spec
from kv_core.contract import JobErrorKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import (
        JobError,
        JobResult,
        OffloadKey,
    )
    from kv_core.tierkit import ThreadedTier

    Task = Callable[[], None]


# -- JOB-7: exceptions -----------------------------------------------------------------------------


class _MortalPool:
    """Threads that end with the first error of a transfer."""

    def __init__(self, tier: ThreadedTier) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._taken: set[Any] = set()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(tier.config.io_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, chunks: Iterable[Any], *, loads: bool) -> None:  # noqa: ARG002
        for chunk in chunks:
            self._tasks.put(chunk)

    def withdraw(self, chunk: Any) -> bool:
        with self._lock:
            if chunk in self._taken:
                return False
            self._taken.add(chunk)
            return True

    def interrupt(self, chunk: Any) -> None:
        pass

    def _work(self) -> None:
        while (chunk := self._tasks.get()) is not None:
            with self._lock:
                if chunk in self._taken:
                    continue
                self._taken.add(chunk)
            chunk()
            if chunk.failures and any(f.kind.value == "failed" for f in chunk.failures.values()):
                return

    def stop(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()


class _DyingThreads(FolderTier):
    """Its own pool, in which an error ends the thread."""

    @override
    def _open(self) -> Any:
        _, prober = super()._open()
        self._mortal = _MortalPool(self)
        return self._mortal, prober

    @override
    def _stop(self, timeout_s: float) -> bool:
        if not self._ledger.wait_until_idle(timeout_s):
            return False
        self._mortal.stop()
        return super()._stop(timeout_s)


@mutant(
    "JOB-7",
    breaks="A thread ends with the first error of the storage.",
    source="sglang#38428: any exception kills the backup thread",
    also=frozenset({"CAP-4", "DATA-8", "DATA-11", "JOB-2", "JOB-8", "LIFE-4", "REQ-2"}),
)
def threads_die_of_errors(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DyingThreads))


class _GivesUp(FolderTier):
    """After many errors in a row, does not try any more. Ever."""

    @override
    def open(self) -> None:
        super().open()
        self._errors = 0

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        if self._errors >= 20:
            raise ConnectionError("the storage is out of order")
        try:
            super().read_block(key, buffer)
        except OSError:
            self._errors += 1
            raise
        self._errors = 0


@mutant(
    "JOB-7",
    breaks="After 20 errors in a row no load is tried any more.",
    source="LMCache#4546: after a while everything is dropped, silently",
)
def gives_up_after_errors(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_GivesUp))


class _DyingProbes(FolderTier):
    """An error ends the thread that asks the storage."""

    @override
    def open(self) -> None:
        super().open()
        self._is_dead = threading.Event()

    @override
    def exists_many(self, keys: Sequence[OffloadKey]) -> Sequence[bool | BaseException]:
        if self._is_dead.is_set():
            return [TimeoutError("nobody is there to ask")] * len(keys)
        answers = super().exists_many(keys)
        if any(isinstance(answer, OSError) for answer in answers):
            self._is_dead.set()
        return answers


@mutant(
    "JOB-7",
    breaks="After an error of the storage no lookup is answered any more.",
    source="sglang#38428, for the thread that asks",
    also=frozenset({"LOOK-6"}),
)
def lookups_die_of_an_error(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DyingProbes))


class _LeavesItsError(FolderTier):
    """Keeps the error of a connection where the next load that uses it finds it."""

    @override
    def open(self) -> None:
        super().open()
        self._error: JobError | None = None

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._with_error(result) for result in super().get_finished_jobs()]

    def _with_error(self, result: JobResult) -> JobResult:
        if result.error is not None:
            if result.error.kind is JobErrorKind.MISSING:
                self._error = result.error
            return result
        error, self._error = self._error, None
        return result if error is None else replace(result, success=False, error=error)


@mutant(
    "JOB-7",
    breaks="The job after a load of an object that is gone fails with its error.",
    source="vllm#50321: one missing key threw away what had nothing to do with it",
)
def a_bad_object_fails_the_next_job(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LeavesItsError))


# -- JOB-8: loads overtake stores ------------------------------------------------------------------


class _PlainQueue:
    """One queue for both directions; ``pick`` says which end, and whether stores go first."""

    def __init__(self, *, stores_first: bool) -> None:
        self._tasks: OrderedDict[Task, bool] = OrderedDict()
        self._stores_first = stores_first

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, tasks: Iterable[Task], *, loads: bool) -> None:
        self._tasks.update(dict.fromkeys(tasks, loads))

    def take(self, *, stores_first: bool) -> tuple[Task, bool] | None:  # noqa: ARG002
        if not self._tasks:
            return None
        task = next(iter(self._tasks))
        if self._stores_first:
            task = next((t for t, is_load in self._tasks.items() if not is_load), task)
        return task, not self._tasks.pop(task)

    def store_done(self) -> None:
        pass

    def withdraw(self, task: Task) -> bool:
        return self._tasks.pop(task, None) is not None


class _FirstComeFirstServed(FolderTier):
    """One queue, in the order of submission."""

    stores_first = False

    @override
    def open(self) -> None:
        super().open()
        self._pool._queue = cast("Any", _PlainQueue(stores_first=self.stores_first))
        self._is_busy = threading.Lock()

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        # A slow device.
        with self._is_busy:
            threading.Event().wait(0.001)
        return super().write_block(key, data)


@mutant(
    "JOB-8",
    breaks="Serves loads and stores in the order of their submission.",
    source="vllm#49225: loads behind a backlog of stores",
)
def first_come_first_served(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_FirstComeFirstServed))


class _StoresFirst(_FirstComeFirstServed):
    """Serves a load when no store is queued."""

    stores_first = True


@mutant(
    "JOB-8",
    breaks="Serves a load only when no store is queued.",
    source="a write-behind cache that flushes before it reads",
)
def stores_come_first(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_StoresFirst))
