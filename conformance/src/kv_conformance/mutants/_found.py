"""Mutants whose fault shows only in a situation that few tests make.

Large jobs, many requests, memory beyond 2 GiB, a key that comes back: each of these tiers once
passed the whole suite.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

import numpy as np
from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import (
    DictHarness,
    DictTier,
    FolderHarness,
    FolderStore,
    FolderTier,
    dict_spec,
    folder_spec,
)
from kv_core.contract import ABSENT, JobResult, OffloadKey, TierUsage, get_offload_block_hash
from kv_core.errors import BlockDamagedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import (
        JobError,
        JobId,
        JobMetadata,
        LookupAnswer,
        ReqContext,
        RequestOffloadingContext,
    )
    from kv_core.tierkit._errors import BlockFailure
    from kv_core.tierkit._jobs import Chunk, Job

# -- many at once ----------------------------------------------------------------------------------

_MOST_BUFFERS: Final = 64


class _MovesSixtyFour(FolderTier):
    @override
    def _load_block(self, job: Job, index: int) -> BlockFailure | int:
        # The client took what it takes in one call, and said how much that was.
        if index >= _MOST_BUFFERS:
            return self.context.block_bytes
        return super()._load_block(job, index)


@mutant(
    "DATA-1",
    breaks="Loads 64 blocks of a job, the most that its client takes at once, and reports all.",
    source="nixl#2070: batches above the limits of a pool; IOV_MAX, which readv stops at",
)
def moves_sixty_four_blocks(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_MovesSixtyFour))


_MOST_QUESTIONS: Final = 100


class _AsksForAHundred(DictTier):
    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        answers = super().lookup_many(keys[:_MOST_QUESTIONS], req_context)
        return answers + [ABSENT] * (len(keys) - len(answers))


@mutant(
    "LOOK-3",
    breaks="Asks for the first 100 keys of a batch, and takes the others for absent.",
    source="services that take 100 keys in a batch and leave the rest unprocessed",
)
def asks_for_a_hundred_keys(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_AsksForAHundred))


_MOST_HOLDERS: Final = 8


class _EightHolders(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._held: Counter[OffloadKey] = Counter()
        self._holding: dict[JobId, tuple[OffloadKey, ...]] = {}

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self.check_process()
        self._held.update(job.keys)
        self._holding[job.job_id] = job.keys
        super().submit_load(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        for result in results:
            self._held.subtract(self._holding.pop(result.job_id, ()))
        return results

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        if self._held[key] > _MOST_HOLDERS:
            raise OSError(errno.EBUSY, "no lease is left for the object")
        super().read_block(key, buffer)


@mutant(
    "DATA-1",
    breaks="Fails loads of a block that eight others are loading: it has eight leases of it.",
    source="Mooncake#4239: loads of one popular prefix, and leases that run out",
)
def eight_leases_of_a_block(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_EightHolders))


_QUEUE_BLOCKS: Final = 1000


class _BoundedQueue(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._places = threading.Semaphore(_QUEUE_BLOCKS)

    def _take_places(self, job: JobMetadata) -> None:
        self.check_process()
        for _ in job.keys:
            self._places.acquire()

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._take_places(job)
        super().submit_store(job)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._take_places(job)
        super().submit_load(job)

    @override
    def _finish_chunk(self, chunk: Chunk) -> None:
        self._places.release(chunk.stop - chunk.start)
        super()._finish_chunk(chunk)


@mutant(
    "BLOCK-1",
    breaks="Has a queue for 1000 blocks, and a submit waits for a place in it.",
    source="llm-d-kv-cache#457: the engine is stuck at high concurrency",
)
def waits_for_a_place_in_the_queue(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_BoundedQueue))


_MOST_REQUESTS: Final = 256


class _FewRequests(DictTier):
    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        answer = super().on_new_request(req_context)
        requests = self._lookups._requests
        if len(requests) > _MOST_REQUESTS:
            del requests[next(iter(requests))]
        return answer


@mutant(
    "MET-1",
    breaks="Knows 256 requests, forgets the oldest of more, and counts its lookups again.",
    source="a cache with a bound in the place of a table, because requests leaked",
)
def knows_256_requests(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_FewRequests))


_MOST_EVENTS: Final = 100


class _Bounded(deque["tuple[Sequence[OffloadKey], bool]"]):
    @override
    def append(self, item: tuple[Sequence[OffloadKey], bool], /) -> None:
        if len(self) < _MOST_EVENTS:
            super().append(item)


class _FewEvents(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._events = _Bounded()


@mutant(
    "EVT-1",
    breaks="Has room for 100 events between two polls and drops what comes after.",
    source="LMCache#3532: events that are lost in a burst",
)
def has_room_for_a_hundred_events(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_FewEvents))


# -- unusual bytes ---------------------------------------------------------------------------------


class _StoresNoZeros(FolderTier):
    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        if not any(data):
            # A slot that nobody has written, as it seems.
            return 0
        return super().write_block(key, data)


@mutant(
    "DATA-1",
    breaks="Takes a block of zeros for one that was never written, and stores nothing.",
    source="layers that a model leaves empty; storage that saves the space of zeros",
)
def stores_no_zeros(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_StoresNoZeros))


# -- large memory ----------------------------------------------------------------------------------


class _NarrowOffsets(DictTier):
    """Computes places in numpy, in the type of the block ids it was given."""

    def _slot(self, block_id: int) -> memoryview:
        starts = np.array([block_id], dtype=np.int32) * np.int32(self._primary.row_stride)
        with self._primary.view.cast("B") as flat:
            return flat[starts[0] :][: self._primary.block_bytes]

    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        with self._slot(block_id) as block:
            self.store.put(key, block)
        return None

    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        error = super()._load_block(key, block_id)
        if error is None:
            with self._slot(block_id) as block:
                block[:] = self.store.objects[key]
        return error


@mutant(
    "ZC-4",
    breaks="Multiplies block ids of 32 bits by the length of a row, in 32 bits.",
    source="vllm#51080: what works with every small region, and fails with a large one",
)
def offsets_of_32_bits(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_NarrowOffsets))


# -- what comes back -------------------------------------------------------------------------------


class _IdsStartAnew(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._owners: dict[JobId, str] = {}
        self._dropped: set[JobId] = set()

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._owners[job.job_id] = job.req_context.req_id
        super().submit_store(job)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._owners[job.job_id] = job.req_context.req_id
        super().submit_load(job)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        owners = self._owners
        self._dropped |= {job for job in owners if owners[job] == req_context.req_id}
        return super().on_new_request(req_context)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        for result in results:
            self._owners.pop(result.job_id, None)
        return [result for result in results if result.job_id not in self._dropped]


@mutant(
    "JOB-6",
    breaks="Begins with an empty record when an id comes back, and loses the jobs of the old one.",
    source="vllm#48102: jobs that nobody knows any more",
)
def loses_jobs_when_an_id_comes_back(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_IdsStartAnew))


class _OldAge(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._ages: dict[OffloadKey, int] = {}

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        moved = super().write_block(key, data)
        if moved is None:
            self.store.mark_used(key, self._ages.setdefault(key, time.time_ns()))
        return moved


@mutant(
    "CAP-2",
    breaks="Remembers how old a block was when it was evicted: stored again, it goes first.",
    source="a queue of candidates that keeps the entry of a block that is gone",
)
def old_age_comes_back(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OldAge))


# -- neighbours ------------------------------------------------------------------------------------


class _OneIndexOfStores(FolderTier):
    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        name = self.store.path(key).name
        for found in self.config.root_dir.glob(f"*/blocks/{name}"):
            if found.parent.parent != self.store.folder:
                return 0
        return super().write_block(key, data)


@mutant(
    "NS-1",
    breaks="Takes a block for stored when another namespace has its key.",
    source="vllm#49261: lookups and loads that know the namespace, and stores that do not",
)
def stored_in_another_namespace(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OneIndexOfStores))


class _RemovesAllGroups(FolderTier):
    def _siblings(self, key: OffloadKey) -> list[OffloadKey]:
        found = [OffloadKey(other) for other, _ in self.store.list_objects()]
        digest = get_offload_block_hash(key)
        return [other for other in found if get_offload_block_hash(other) == digest]

    @override
    def retire(self, key: OffloadKey) -> None:
        for sibling in {key, *self._siblings(key)}:
            super().retire(sibling)


@mutant(
    "DATA-7",
    breaks="Removes the blocks of all groups when the one of one group is bad.",
    source="vllm#43884: what was right for one group recurred with several",
)
def retires_every_group(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_RemovesAllGroups))


class _ServedByOthers(DictTier):
    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._check_process()
        if job.req_context.kv_transfer_params.get("do_remote_prefill"):
            # Somebody else brings the blocks of such a request.
            self._finished.append(JobResult(job.job_id, success=True))
            return
        super().submit_load(job)


@mutant(
    "DATA-1",
    breaks="Leaves the loads of a request to the peer that its parameters name.",
    source="kv_transfer_params that are meant for another connector",
)
def leaves_loads_to_a_peer(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_ServedByOthers))


# -- leaks -----------------------------------------------------------------------------------------


class _KeepsDamagedOpen(FolderStore):
    @override
    def get(self, key: bytes, buffer: memoryview) -> None:
        try:
            super().get(key, buffer)
        except BlockDamagedError:
            os.open(self.path(key), os.O_RDONLY)
            raise


class _KeepsDamagedTier(FolderTier):
    store_type = _KeepsDamagedOpen


@mutant(
    "LIFE-2",
    breaks="Raises for a damaged object before it closes the file.",
    source="LMCache#1495: what is freed on the way that is tested, and on no other",
)
def leaves_damaged_files_open(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_KeepsDamagedTier))


class _LeavesTemporaries(FolderTier):
    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        # The folder of the writer itself; what is in it is removed at the end, or after it.
        temporary = self.store._temporary / f"begun-{time.time_ns()}"
        temporary.touch()
        moved = super().write_block(key, data)
        temporary.unlink()
        return moved


@mutant(
    "DATA-11",
    breaks="Leaves the temporary file of a store that fails where it is, until it is shut down.",
    source="vllm#54779: a disk that fills up, and fails the faster the fuller it is",
)
def leaves_temporary_files(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LeavesTemporaries))


class _KeepsJobs(DictTier):
    @override
    def _begin(self, metadata: JobMetadata) -> None:
        self._all_jobs = (metadata, getattr(self, "_all_jobs", None))
        super()._begin(metadata)


@mutant(
    "REQ-2",
    breaks="Keeps a record of every job.",
    source="LMCache#1495: memory that is not flat after ten thousand jobs",
)
def keeps_records_of_jobs(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_KeepsJobs))


class _MiscountsFailures(FolderTier):
    """Takes a block off its account when its store fails, added or not."""

    @override
    def open(self) -> None:
        super().open()
        self._present: set[OffloadKey] = set()
        self._taken_off = 0

    @override
    def note_removed(self, key: OffloadKey) -> None:
        self._present.discard(key)
        super().note_removed(key)

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        try:
            moved = super().write_block(key, data)
        except OSError:
            self._taken_off += key in self._present
            raise
        self._present.add(key)
        return moved

    @override
    def usage(self) -> TierUsage:
        usage = super().usage()
        blocks = max(0, usage.blocks - self._taken_off)
        return TierUsage(
            blocks=blocks,
            bytes=blocks * self.context.block_bytes,
            capacity_blocks=usage.capacity_blocks,
        )


@mutant(
    "USE-1",
    breaks="Takes a block off its account when a second store of it fails.",
    source="LMCache#4564: an account that drifts with every failure",
)
def takes_failures_off(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_MiscountsFailures))
