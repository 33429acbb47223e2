"""The worst tiers: they hang, crash or end the process in which the suite runs.

Each of them takes down whichever test meets it; what must come out of it is a report that names a
clause, in bounded time. Most of them wait for an occasion that few tests offer, or a run would
take an hour.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import resource
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kv_conformance.clauses import CLAUSES
from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderTier, folder_spec
from kv_core.errors import BlockMissingError

if TYPE_CHECKING:
    from collections.abc import Collection

    from kv_conformance.harness import Harness
    from kv_core.contract import JobId, JobMetadata, OffloadKey

EVERYTHING: Final = frozenset(clause.id for clause in CLAUSES)
"""Who ends the process ends the test of any clause."""


class _SecondEnd(FolderTier):
    """Does something terrible when it is shut down a second time."""

    _ended = False

    @override
    def shutdown(self) -> Collection[JobId]:
        if self._ended:
            self._do_it()
        unfinished = super().shutdown()
        self._ended = True
        return unfinished

    def _do_it(self) -> None:
        raise NotImplementedError


class _Deadlock(_SecondEnd):
    @override
    def _do_it(self) -> None:
        # Unlike CDLL, PyDLL keeps the interpreter's lock during the call; and no signal ends the
        # wait for a mutex.
        native = ctypes.PyDLL(None)
        mutex = ctypes.create_string_buffer(128)
        native.pthread_mutex_lock(mutex)
        native.pthread_mutex_lock(mutex)


@mutant(
    "LIFE-1",
    breaks="Waits in native code for ever and holds the interpreter's lock.",
    source="LMCache#4676: a deadlock that held the GIL and 388 GB",
)
def deadlocks_with_the_interpreter(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_Deadlock))


class _Disarms(_SecondEnd):
    @override
    def _do_it(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


@mutant(
    "LIFE-1",
    breaks="Takes the process's alarm for itself and then waits for ever.",
    source="libraries that use signal.alarm for their own time-outs",
)
def disarms_the_alarm(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_Disarms))


class _Stops(_SecondEnd):
    @override
    def _do_it(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@mutant(
    "LIFE-1",
    breaks="Stops the process, so that not even a watchdog of it runs.",
    source="a debugger, a checkpoint or the freezer of a container",
)
def stops_the_process(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_Stops))


class _ClosesAll(_SecondEnd):
    @override
    def _do_it(self) -> None:
        os.closerange(3, 256)


@mutant(
    "LIFE-1",
    breaks="Closes descriptors that are not its own.",
    source="a descriptor that is closed twice belongs to somebody else the second time",
    also=EVERYTHING,
)
def closes_all_descriptors(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ClosesAll))


class _CatchesAll(_SecondEnd):
    @override
    def _do_it(self) -> None:
        while True:
            with suppress(BaseException):
                threading.Event().wait()


@mutant(
    "LIFE-1",
    breaks="Waits for ever and catches whatever would end the wait.",
    source="LMCache: 7.5 broad excepts in a thousand lines",
)
def catches_everything(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CatchesAll))


class _CrashesOnWorker(FolderTier):
    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        try:
            super().read_block(key, buffer)
        except BlockMissingError:
            ctypes.string_at(0)


@mutant(
    "DATA-10",
    breaks="Crashes on one of its threads when an object is missing.",
    source="nixl#1605: a segmentation fault where an error was due",
    also=EVERYTHING,
)
def crashes_on_a_worker(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CrashesOnWorker))


class _CrashesOnCaller(_SecondEnd):
    @override
    def _do_it(self) -> None:
        ctypes.string_at(0)


@mutant(
    "LIFE-1",
    breaks="Crashes on the calling thread: a handle is freed twice.",
    source="nixl#1605: a segmentation fault where an error was due",
)
def crashes_on_the_caller(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CrashesOnCaller))


class _ExitsInWorker(FolderTier):
    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        try:
            return super().write_block(key, data)
        except OSError:
            os._exit(0)


@mutant(
    "DATA-11",
    breaks="Ends the process, with status 0, when its storage fails.",
    source="sglang#38428: one failed transfer ends the server",
    also=EVERYTHING,
)
def exits_in_a_worker(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ExitsInWorker))


class _NeverEnds(FolderTier):
    _spinner: threading.Thread | None = None

    @override
    def submit_store(self, job: JobMetadata) -> None:
        if self._spinner is None and os.getpid() == self._pid:
            # No daemon: an interpreter that ends in order would wait for it.
            self._spinner = threading.Thread(target=threading.Event().wait, name="endless")
            self._spinner.start()
        super().submit_store(job)


@mutant(
    "LIFE-2",
    breaks="Has a thread that the interpreter waits for at its end, for ever.",
    source="LMCache#265: the process does not exit",
)
def has_an_endless_thread(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_NeverEnds))


class _EatsMemory(_SecondEnd):
    @override
    def _do_it(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        self._eaten: list[bytearray] = []
        for size in (1 << 20, 1 << 12, 1 << 6):
            while True:
                try:
                    self._eaten.append(bytearray(size))
                except MemoryError:
                    break
        raise MemoryError


@mutant(
    "LIFE-1",
    breaks="Takes all the memory there is, and keeps it.",
    source="LMCache#2942: a second copy of the cache, until the container's limit",
    also=EVERYTHING,
)
def eats_all_memory(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_EatsMemory))


class _ExitsInSubmit(FolderTier):
    @override
    def submit_load(self, job: JobMetadata) -> None:
        if not any(self.store.folder.joinpath("blocks").iterdir()):
            raise SystemExit(0)
        super().submit_load(job)


@mutant(
    "JOB-2",
    breaks="Raises SystemExit when a load is asked of an empty storage.",
    source="llm-d-kv-cache#514: a submit that ends the engine's step",
)
def exits_in_submit(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ExitsInSubmit))


class _InterruptsInDrain(FolderTier):
    @override
    def drain_jobs(self) -> Collection[JobId]:
        if not self.has_pending_work():
            raise KeyboardInterrupt
        return super().drain_jobs()


@mutant(
    "DRAIN-1",
    breaks="Raises KeyboardInterrupt when there is nothing to drain.",
    source="an interrupt of the user's that was caught, kept and raised again",
    also=frozenset({"DRAIN-2", "DRAIN-3", "DRAIN-4", "DRAIN-5", "LIFE-6"}),
)
def interrupts_in_a_drain(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_InterruptsInDrain))


class _InterruptsFromWorker(_SecondEnd):
    @override
    def _do_it(self) -> None:
        threading.Thread(target=_thread.interrupt_main).start()
        threading.Event().wait(30.0)


@mutant(
    "LIFE-1",
    breaks="Interrupts the main thread from one of its own.",
    source="a worker that wants to end the server cleanly",
)
def interrupts_the_main_thread(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_InterruptsFromWorker))


class _NeverReturns(FolderTier):
    @override
    def submit_store(self, job: JobMetadata) -> None:
        left = len(job.keys) or -1
        super().submit_store(job)
        while left:
            # Counts blocks down, and has never seen a job without any.
            left -= 1


@mutant(
    "JOB-4",
    breaks="Never returns from the submit of an empty job.",
    source="llm-d-kv-cache#457: a submit that blocks the engine",
    also=frozenset({"BLOCK-1"}),
)
def never_returns(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_NeverReturns))
