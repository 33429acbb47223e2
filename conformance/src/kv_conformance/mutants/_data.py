"""Mutants of DATA-1 to DATA-6: slots, and what is said of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

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
from kv_core.contract import JobError, JobErrorKind, JobResult

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kv_conformance.harness import Harness, Subject
    from kv_conformance.reference import DictStore
    from kv_core.contract import (
        JobId,
        JobMetadata,
        LookupAnswer,
        OffloadKey,
        ReqContext,
        TierContext,
    )


# -- DATA-1 ----------------------------------------------------------------------------------------


class _SortedSlots(DictTier):
    @override
    def submit_load(self, job: JobMetadata) -> None:
        super().submit_load(dataclasses.replace(job, block_ids=np.sort(job.block_ids)))


@mutant(
    "DATA-1",
    breaks="Sorts the slots of a load for the sake of the disk, and not the keys with them.",
    source="LMCache#4385: sessions answered with the content of others",
    also=frozenset({"DATA-2", "DATA-6", "DATA-7", "DATA-8", "DATA-11", "ZC-4", "GEO-1"}),
)
def sorts_slots_without_keys(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_SortedSlots))


class _RingOfBuffers(DictTier):
    """Loads through eight buffers, and takes the ninth block for the first one's."""

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._ring: dict[int, bytes] = {}
        self._place = 0
        super().submit_load(job)

    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        error = super()._load_block(key, block_id)
        if error is None:
            place, self._place = self._place % 8, self._place + 1
            with self._primary.block(block_id) as block:
                block[:] = self._ring.setdefault(place, bytes(block))
        return error


@mutant(
    "DATA-1",
    breaks="Fills a buffer of its ring once a job: after eight blocks the first comes again.",
    source="LMCache#2942: buffers were handed on that nobody had filled",
    also=frozenset({"DATA-7", "DATA-11", "ZC-1", "GEO-1"}),
)
def reuses_buffers_too_early(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_RingOfBuffers))


# -- DATA-2 ----------------------------------------------------------------------------------------


class _WritesBehind(DictTier):
    """Reports a store at once, and reads its slots when it is called the next time but one."""

    @override
    def __init__(self, context: TierContext) -> None:
        self._unread: list[tuple[OffloadKey, int]] = []
        self._reported: list[tuple[OffloadKey, int]] = []
        super().__init__(context)

    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        self.store.exists(key)  # A storage that fails or stalls is seen all the same.
        self._unread.append((key, block_id))
        return None

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self.flush()
        finished = super().get_finished_jobs()
        self._reported, self._unread = self._unread, []
        return finished

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        self.flush()
        return super().lookup(key, req_context)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self.flush()
        super().submit_load(job)

    def flush(self) -> None:
        """Read the slots of what was reported before."""
        for key, block_id in self._reported:
            self.store.objects[key] = bytes(self._primary.block(block_id))
        self._reported.clear()


class _WritesBehindHarness(DictHarness):
    @override
    def _store(self, subject: Subject) -> DictStore:
        if isinstance(subject.tier, _WritesBehind):
            subject.tier.flush()
        return super()._store(subject)


@mutant(
    "DATA-2",
    breaks="Reports a store when it is queued, and reads the slots afterwards.",
    source="vllm#45704: garbled output when a store raced with the next owner of its slot",
    also=frozenset({"DATA-1", "ZC-1", "GEO-1"}),
)
def reports_before_it_reads(workdir: Path) -> Harness:
    """Make the harness."""
    return _WritesBehindHarness(workdir, dict_spec(_WritesBehind))


class _RetriesFailedStores(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        self._again: dict[OffloadKey, int] = {}
        super().__init__(context)

    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        try:
            return super()._store_block(key, block_id)
        except BlockingIOError:
            raise
        except OSError:
            self._again[key] = block_id
            raise

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        if self.store.fault is None:
            for key, block_id in self._again.items():
                super()._store_block(key, block_id)
            self._again.clear()
        return super().get_finished_jobs()


@mutant(
    "DATA-2",
    breaks="Tries a store that it has reported as failed once more, from the same slot.",
    source="LMCache#4991: after failed stores, hits on their keys gave gibberish",
)
def retries_after_the_report(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_RetriesFailedStores))


# -- DATA-3 ----------------------------------------------------------------------------------------


class _SpillsChecksum(DictTier):
    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        error = super()._load_block(key, block_id)
        end = block_id * self._primary.row_stride + self._primary.block_bytes
        with self._primary.view.cast("B") as flat:
            if error is None and end + 4 <= len(flat):
                flat[end : end + 4] = b"\0\0\0\0"
        return error


@mutant(
    "DATA-3",
    breaks="Reads the checksum behind the block into the slot, and so into the next one.",
    source="native engines that are given an address and the length of the object",
    also=frozenset({"DATA-1", "DATA-5", "LIFE-3", "ZC-4", "GEO-1"}),
)
def spills_into_the_next_slot(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_SpillsChecksum))


class _ReadsAllThereIs(DictTier):
    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        data = self.store.get(key) or b""
        start = block_id * self._primary.row_stride
        with self._primary.view.cast("B") as flat:
            if self._primary.block_bytes < len(data) <= len(flat) - start:
                flat[start : start + len(data)] = data
        return super()._load_block(key, block_id)


@mutant(
    "DATA-3",
    breaks="Reads an object that is too long to its end before it refuses it.",
    source="Mooncake#3066: lengths of the storage that nobody compared",
)
def reads_over_the_end(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_ReadsAllThereIs))


# -- DATA-4 ----------------------------------------------------------------------------------------


class _MarksSlots(DictTier):
    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        error = super()._store_block(key, block_id)
        self._primary.block(block_id)[:8] = b"\0" * 8
        return error


@mutant(
    "DATA-4",
    breaks="Marks a slot as stored in its first bytes.",
    source="headers that are kept in front of the payload, where there is no room for one",
    also=frozenset({"DATA-3"}),
)
def marks_stored_slots(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_MarksSlots))


class _EncryptsInPlace(DictTier):
    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        try:
            return super()._store_block(key, block_id)
        except BlockingIOError:
            raise
        except OSError:
            block = np.frombuffer(self._primary.block(block_id), dtype=np.uint8)
            np.bitwise_xor(block, 0x5C, out=block)
            raise


@mutant(
    "DATA-4",
    breaks="Encodes a block in its slot, and does not decode it when the storage fails.",
    source="compression and encryption in place, to save a buffer",
    also=frozenset({"DATA-3"}),
)
def leaves_slots_encoded(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_EncryptsInPlace))


# -- DATA-5 ----------------------------------------------------------------------------------------


class _ReportsAtTheDeadline(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._loads: dict[JobId, float] = {}
        self._given_up: set[JobId] = set()

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._loads[job.job_id] = self.context.clock() + self.config.job_deadline_s
        super().submit_load(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = [
            result for result in super().get_finished_jobs() if result.job_id not in self._given_up
        ]
        for result in results:
            self._loads.pop(result.job_id, None)
        late = [job for job, end in self._loads.items() if self.context.clock() >= end]
        for job_id in late:
            del self._loads[job_id]
            self._given_up.add(job_id)
            error = JobError(JobErrorKind.STALLED, "the deadline has passed")
            results.append(JobResult(job_id, success=False, error=error))
        return results


@mutant(
    "DATA-5",
    breaks="Reports a load at its deadline while a thread may still be reading into the slot.",
    source="vllm#47282: a load was not ordered after what else used its slot",
)
def writes_after_the_deadline(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ReportsAtTheDeadline))


class _MakesGood(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        self._owed: dict[OffloadKey, int] = {}
        super().__init__(context)

    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        error = super()._load_block(key, block_id)
        if error is not None and error.kind is JobErrorKind.MISSING:
            self._owed[key] = block_id
        return error

    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        error = super()._store_block(key, block_id)
        if error is None and key in self._owed:
            super()._load_block(key, self._owed.pop(key))
        return error


@mutant(
    "DATA-5",
    breaks="Makes a failed load good when its key arrives later.",
    source="sglang#28468: host memory was written after it had been given to others",
)
def fulfils_failed_loads_later(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_MakesGood))


# -- DATA-6 ----------------------------------------------------------------------------------------


class _Counts(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        self._keys: dict[JobId, tuple[OffloadKey, ...]] = {}
        super().__init__(context)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._keys[job.job_id] = job.keys
        super().submit_load(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        for result in super().get_finished_jobs():
            keys = self._keys.pop(result.job_id, result.successful_keys)
            yield dataclasses.replace(result, successful_keys=keys[: len(result.successful_keys)])


@mutant(
    "DATA-6",
    breaks="Counts the blocks that were loaded and names that many from the front.",
    source="vllm#50321: which blocks of a batch were loaded was not told",
    also=frozenset({"DATA-10"}),
)
def counts_instead_of_naming(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_Counts))


class _OneIsEnough(DictTier):
    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        for result in super().get_finished_jobs():
            if result.successful_keys:
                yield dataclasses.replace(result, success=True, error=None)
            else:
                yield result


@mutant(
    "DATA-6",
    breaks="Takes a job for a success when any of its blocks was moved.",
    source="dynamo#15079: a failed transfer was counted as a full hit",
    also=frozenset({"DATA-1", "DATA-8", "DATA-10", "JOB-2"}),
)
def one_block_is_enough(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_OneIsEnough))


class _SwallowsErrors(DictTier):
    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        try:
            return super()._store_block(key, block_id)
        except BlockingIOError:
            raise
        except OSError:
            return None


@mutant(
    "DATA-6",
    breaks="Logs an error of a store and reports the store as successful.",
    source="LMCache#4364: every write failed, and the tier reported good health",
)
def swallows_errors_of_stores(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_SwallowsErrors))


class _OneWrite(FolderStore):
    @override
    def write_all(self, descriptor: int, data: memoryview) -> None:
        # Whatever else the file gets follows at once.
        super().write_all(descriptor, data[: self.allowed(len(data))])


class _WritesOnce(FolderTier):
    store_type = _OneWrite


@mutant(
    "DATA-6",
    breaks="Does not look at how many bytes a write has moved.",
    source="Mooncake#3066: fewer bytes than asked for, and no error",
)
def ignores_short_writes(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_WritesOnce))
