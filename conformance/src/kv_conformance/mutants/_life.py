"""Mutants of the LIFE clauses."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderTier, folder_spec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import (
        JobId,
        JobMetadata,
        JobResult,
        LookupAnswer,
        OffloadKey,
        PrimaryView,
        ReqContext,
        ScheduleEndContext,
        TierContext,
    )


# -- LIFE-1: a second shutdown ------------------------------------------------------------------


class _ClosesTwice(FolderTier):
    """Closes a descriptor of its own, whether it has done so already or not."""

    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._lease = os.open(os.devnull, os.O_RDONLY)

    @override
    def shutdown(self) -> Collection[JobId]:
        os.close(self._lease)
        return super().shutdown()


@mutant(
    "LIFE-1",
    breaks="Raises when it is shut down a second time.",
    source="LMCache#265: an order of ends that its author did not think of",
)
def closes_twice(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ClosesTwice))


class _DrainEndsIt(FolderTier):
    """A drain takes the pool down, and the shutdown wants to do that itself."""

    _drained = False

    @override
    def drain_jobs(self) -> Collection[JobId]:
        self._drained = True
        return super().drain_jobs()

    @override
    def shutdown(self) -> Collection[JobId]:
        if self._drained:
            self._drained = False
            raise RuntimeError("the tier is drained already")
        return super().shutdown()


@mutant(
    "LIFE-1",
    breaks="Raises when it is shut down after a drain.",
    source="engines drain before they end: a state machine without that edge is plausible",
)
def refuses_to_end_after_a_drain(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DrainEndsIt))


# -- LIFE-2: what is left -------------------------------------------------------------------------


class _LeavesSomething(FolderTier):
    """Has something more from its first store on, and forgets it at its end."""

    _extra: object = None

    @override
    def submit_store(self, job: JobMetadata) -> None:
        if self._extra is None and os.getpid() == self._pid:
            self._extra = self._acquire()
        super().submit_store(job)

    def _acquire(self) -> object:
        raise NotImplementedError


class _LeavesThread(_LeavesSomething):
    @override
    def _acquire(self) -> object:
        reporter = threading.Thread(target=threading.Event().wait, name="reporter", daemon=True)
        reporter.start()
        return reporter


@mutant(
    "LIFE-2",
    breaks="Leaves a thread that reports statistics.",
    source="LMCache#1495: every restart of the connector keeps a little more",
)
def leaves_a_thread(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LeavesThread))


class _LeavesSocket(_LeavesSomething):
    @override
    def _acquire(self) -> object:
        return socket.socketpair()


@mutant(
    "LIFE-2",
    breaks="Leaves its connections open.",
    source="LMCache#1495: an S3 connector whose client was never closed",
)
def leaves_sockets(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LeavesSocket))


class _LeavesProcess(_LeavesSomething):
    @override
    def _acquire(self) -> object:
        # It ends with the process that holds the other end of its input.
        return subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)


@mutant(
    "LIFE-2",
    breaks="Leaves a helper process.",
    source="LMCache#4676: helpers and servers that outlive each other",
)
def leaves_a_process(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LeavesProcess))


class _LeavesFailedDescriptors(FolderTier):
    """Opens what it needs for a store, and closes it only when the store succeeds."""

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        moved = super().write_block(key, data)
        os.close(descriptor)
        return moved


@mutant(
    "LIFE-2",
    breaks="Leaves a descriptor open for every store that fails.",
    source="LMCache#4546: only the path without errors gives back what it took",
)
def leaves_descriptors_of_failed_stores(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LeavesFailedDescriptors))


# -- LIFE-3: jobs in flight -----------------------------------------------------------------------


class _DeniesWhatGoesOn(FolderTier):
    @override
    def shutdown(self) -> Collection[JobId]:
        super().shutdown()
        return ()


@mutant(
    "LIFE-3",
    breaks="Says that nothing goes on when transfers could not be stopped.",
    source="dynamo#5012: transfers that outlived what they were writing to",
    # What goes on holds the memory.
    also=frozenset({"ZC-3"}),
)
def denies_what_goes_on(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DeniesWhatGoesOn))


class _WaitsForEver(FolderTier):
    @override
    def shutdown(self) -> Collection[JobId]:
        self.check_process()
        while not self._ledger.wait_until_idle(1.0):
            pass
        return super().shutdown()


@mutant(
    "LIFE-3",
    breaks="Waits for its jobs at the end, however long they take.",
    source="LMCache#265: a process that does not exit, because a join has no limit",
)
def waits_for_ever_at_the_end(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_WaitsForEver))


class _WritesLate(FolderTier):
    """Carries loads out that it has cancelled."""

    @override
    def shutdown(self) -> Collection[JobId]:
        self.check_process()
        waiting = [job for job in self._ledger._jobs.values() if job.metadata.is_promotion]
        unfinished = super().shutdown()
        for job in waiting:
            loader = threading.Thread(target=self._write, args=(self._target, job.metadata))
            loader.start()
        return unfinished

    def _write(self, primary: PrimaryView, job: JobMetadata) -> None:
        # Not before the caller has been told that it will not happen.
        threading.Event().wait(0.02)
        for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
            if self.store.exists(key):
                primary.block(block_id)[:16] = b"better late than"


@mutant(
    "LIFE-3",
    breaks="Carries loads out after it has said that they are cancelled.",
    source="dynamo#5012: a load that came in after the end",
    also=frozenset({"ZC-3"}),
)
def loads_after_its_end(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_WritesLate))


# -- LIFE-4: constructors that fail ------------------------------------------------------------


class _ForgetsThread(FolderTier):
    """Starts a thread first and opens the storage then."""

    _is_open = False

    @override
    def open(self) -> None:
        self._end = threading.Event()
        self._reporter = threading.Thread(target=self._end.wait, name="reporter", daemon=True)
        self._reporter.start()
        self._store = None
        self._sweeper = None
        super().open()
        self._is_open = True

    @override
    def close(self) -> None:
        if self._is_open:
            self._end.set()
            self._reporter.join()
        super().close()


@mutant(
    "LIFE-4",
    breaks="Keeps a thread when the storage cannot be opened.",
    source="nixl#1605: a constructor that fails half way",
)
def forgets_a_thread_of_a_failed_opening(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ForgetsThread))


class _ForgetsFirstThreads(FolderTier):
    """Starts several threads, and does not think of the third that cannot be started."""

    @override
    def open(self) -> None:
        super().open()
        self._end = threading.Event()
        helpers = [threading.Thread(target=self._end.wait, daemon=True) for _ in range(3)]
        for helper in helpers:
            helper.start()
        self._helpers = helpers

    @override
    def close(self) -> None:
        for helper in getattr(self, "_helpers", ()):
            self._end.set()
            helper.join()
        super().close()


@mutant(
    "LIFE-4",
    breaks="Keeps the first threads when a later one cannot be started.",
    source="a container's limit of processes is met in the middle of a pool",
)
def forgets_the_first_threads(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ForgetsFirstThreads))


class _ForgetsDescriptor(FolderTier):
    @override
    def open(self) -> None:
        pair = [os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)]
        super().open()
        self._pair = pair

    @override
    def close(self) -> None:
        super().close()
        for descriptor in getattr(self, "_pair", ()):
            os.close(descriptor)


@mutant(
    "LIFE-4",
    breaks="Keeps a descriptor when the next one cannot be opened.",
    source="LMCache#1495: what is opened in pairs is closed in pairs",
)
def forgets_the_first_descriptor(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ForgetsDescriptor))


class _KeepsMemoryRegistered(FolderTier):
    """Registers the memory with a library, which the end of a failed opening does not undo."""

    _registered: ClassVar[dict[int, memoryview]] = {}

    @override
    def open(self) -> None:
        self._registered[id(self)] = self.context.primary.block(0)
        super().open()

    @override
    def shutdown(self) -> Collection[JobId]:
        unfinished = super().shutdown()
        self._registered.pop(id(self), None)
        return unfinished


@mutant(
    "LIFE-4",
    breaks="Keeps the memory registered when the storage cannot be opened.",
    source="aibrix#1093 and nixl#1605: registration comes first, errors later",
)
def keeps_memory_registered(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_KeepsMemoryRegistered))


# -- LIFE-5: several instances --------------------------------------------------------------------


class _OneListOfResults(FolderTier):
    """The list of finished jobs is an attribute of the class."""

    _finished: ClassVar[deque[JobResult]] = deque()

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._finished.extend(super().get_finished_jobs())
        # One instance takes what is there; what another one has just put there is its own.
        return [self._finished.popleft() for _ in range(len(self._finished))]

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        super().on_schedule_end(context)
        self._finished.extend(super().get_finished_jobs())


@mutant(
    "LIFE-5",
    breaks="Reports the jobs of all instances in a process to whoever asks first.",
    source="LMCache#2517: state of a module that two instances share",
)
def one_list_of_results(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OneListOfResults))


class _OneIndex(FolderTier):
    """Remembers what is stored by key, in an index that all instances share."""

    _index: ClassVar[set[OffloadKey]] = set()

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        jobs = dict(self._ledger._jobs)
        results = list(super().get_finished_jobs())
        for result in results:
            job = jobs[result.job_id].metadata
            if result.success and not job.is_promotion:
                self._index.update(job.keys)
            elif job.is_promotion:
                good = job.keys if result.success else result.successful_keys
                self._index.difference_update(set(job.keys) - set(good))
        return results

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        answers = super().lookup_many(keys, req_context)
        return [
            True if answer is False and key in self._index and key not in self._deleted else answer
            for key, answer in zip(keys, answers, strict=True)
        ]


@mutant(
    "LIFE-5",
    breaks="Finds what another instance has stored in another place.",
    source="LMCache#2517: an index that is one for the process",
    also=frozenset({"NS-1", "LOOK-6", "MET-1", "CAP-2", "LOOK-3", "LOOK-4", "DEL-1"}),
)
def one_index(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OneIndex))


class _OnePool(FolderTier):
    """Reads through a pool that all instances share and each one ends."""

    _pool_of_all: ClassVar[ThreadPoolExecutor | None] = None

    @override
    def open(self) -> None:
        super().open()
        if _OnePool._pool_of_all is None:
            _OnePool._pool_of_all = ThreadPoolExecutor(2)

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        pool = _OnePool._pool_of_all
        if pool is None:
            raise RuntimeError("cannot schedule new futures after shutdown")
        pool.submit(super().read_block, key, buffer).result()

    @override
    def close(self) -> None:
        pool, _OnePool._pool_of_all = _OnePool._pool_of_all, None
        if pool is not None:
            pool.shutdown()
        super().close()


@mutant(
    "LIFE-5",
    breaks="Takes a pool down at its end that other instances use.",
    source="LMCache#2517: the first of two instances that ends, ends both",
    # Two instances are opened wherever blocks are looked for from another one.
    also=frozenset({"SHARE-1", "SHARE-2", "NS-1", "NS-2", "PERS-1", "PERS-3", "CAP-3"}),
)
def one_pool(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OnePool))


# -- LIFE-6: forks --------------------------------------------------------------------------------


class _DeafInFork(FolderTier):
    """Takes what it is given in a fork, and does nothing with it."""

    @property
    def _is_fork(self) -> bool:
        return os.getpid() != self._pid

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return None if self._is_fork else super().lookup(key, req_context)

    @override
    def submit_store(self, job: JobMetadata) -> None:
        if not self._is_fork:
            super().submit_store(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return () if self._is_fork else super().get_finished_jobs()

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if not self._is_fork:
            super().on_schedule_end(context)


@mutant(
    "LIFE-6",
    breaks="Takes jobs in a fork, where no thread carries them out, and never answers.",
    source="engines fork workers after the tiers were made: the job waits for ever",
)
def deaf_in_a_fork(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DeafInFork))


class _ClearsAwayInFork(FolderTier):
    """Refuses to work in a fork, but its end clears away what belongs to its parent."""

    @override
    def shutdown(self) -> Collection[JobId]:
        if os.getpid() != self._pid and self._store is not None:
            self._store.close()
        return super().shutdown()


@mutant(
    "LIFE-6",
    breaks="Removes the temporary files of its parent when a fork ends it.",
    source="clean-up at exit runs in every fork of a process",
)
def clears_away_in_a_fork(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ClearsAwayInFork))


class _HoldsLock(FolderTier):
    """Takes a lock for a load that one of its threads gives back."""

    @override
    def open(self) -> None:
        self._loading = threading.Lock()
        super().open()

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._loading.acquire(blocking=False)
        super().submit_load(job)

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        super().read_block(key, buffer)
        with suppress(RuntimeError):
            self._loading.release()

    @override
    def get_stats(self) -> Mapping[str, float]:
        if os.getpid() != self._pid:
            self._loading.acquire()
        return super().get_stats()


@mutant(
    "LIFE-6",
    breaks="Waits in a fork for a lock whose holder is not there.",
    source="LMCache#265: a process that hangs in lock.acquire",
)
def waits_for_a_lock_in_a_fork(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_HoldsLock))
