"""Mutants of DATA-7 to DATA-11: objects, their names, and what faults leave of them."""

from __future__ import annotations

import errno
import functools
import os
from typing import TYPE_CHECKING, ClassVar

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
from kv_core.contract import Capability, JobError, JobErrorKind, JobResult, OffloadKey
from kv_core.errors import BlockMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import JobMetadata, TierContext, TierSpec

_UNCHECKED = frozenset(Capability) - {Capability.WITHDRAWS_IO, Capability.INTEGRITY}


# -- DATA-7 ----------------------------------------------------------------------------------------


class _ByName(dict[OffloadKey, bytes]):
    """Objects by the name that is made of their key."""

    def __init__(self, name: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._name = name

    @override
    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and super().__contains__(self._name(key))

    @override
    def __getitem__(self, key: OffloadKey) -> bytes:
        return super().__getitem__(self._of(key))

    @override
    def __setitem__(self, key: OffloadKey, data: bytes) -> None:
        super().__setitem__(self._of(key), data)

    @override
    def __delitem__(self, key: OffloadKey) -> None:
        super().__delitem__(self._of(key))

    def _of(self, key: OffloadKey) -> OffloadKey:
        return OffloadKey(self._name(key))

    @override
    def get(self, key: OffloadKey, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
        return super().get(self._of(key), default)

    @override
    def pop(self, key: OffloadKey, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
        return super().pop(self._of(key), default)


class _Named(DictTier):
    @override
    def __init__(self, context: TierContext, name: Callable[[bytes], bytes]) -> None:
        super().__init__(context)
        self.store.objects = _ByName(name)


def _named(name: Callable[[bytes], bytes]) -> TierSpec:
    return dict_spec(functools.partial(_Named, name=name))


@mutant(
    "DATA-7",
    breaks="Names objects on a storage that knows no upper case.",
    source="file systems that fold case, and names that are not hexadecimal",
)
def folds_case(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, _named(bytes.lower))


@mutant(
    "DATA-7",
    breaks="Names objects by the hash alone.",
    source="tiers from the time when there was one group",
)
def drops_the_group(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, _named(lambda key: key[:-4]))


@mutant(
    "DATA-7",
    breaks="Keeps sixteen bits of the group index.",
    source="a field that is wide enough for every model known so far",
)
def keeps_half_of_the_group(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, _named(lambda key: key[:-4] + key[-2:]))


@mutant(
    "DATA-7",
    breaks="Hands the hash to a library for which a string ends at NUL.",
    source="bindings that pass bytes as a char pointer",
)
def ends_names_at_nul(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, _named(lambda key: key[:-4].split(b"\0")[0] + b"/" + key[-4:]))


@mutant(
    "DATA-7",
    breaks="Replaces separators in names by a character that may occur itself.",
    source="names made safe for a file system, one way only",
)
def replaces_separators(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, _named(lambda key: key.replace(b"/", b"_").replace(b"\\", b"_")))


@mutant(
    "DATA-7",
    breaks="Writes hash and group one after the other, with nothing between.",
    source="names that are put together from parts of any length",
)
def glues_hash_and_group(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(
        workdir, _named(lambda key: f"{key[:-4].hex()}{int.from_bytes(key[-4:], 'big')}".encode())
    )


# -- DATA-8 ----------------------------------------------------------------------------------------


class _LeavesHalf(DictTier):
    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        try:
            return super()._store_block(key, block_id)
        except BlockingIOError:
            raise
        except OSError:
            half = bytes(self._primary.block(block_id)[: self._primary.block_bytes // 2])
            self.store.objects.setdefault(key, half.ljust(self._primary.block_bytes, b"\0"))
            raise


@mutant(
    "DATA-8",
    breaks="Leaves the object behind that a failed store has allocated and half filled.",
    source="LMCache#4991: after failed stores, hits on their keys gave gibberish",
)
def leaves_a_half_written_object(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_LeavesHalf))


class _SpoilsTheOld(DictTier):
    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        try:
            return super()._store_block(key, block_id)
        except BlockingIOError:
            raise
        except OSError:
            if key in self.store.objects:
                self.store.objects[key] = bytes(self._primary.block_bytes)
            raise


@mutant(
    "DATA-8",
    breaks="Empties an object before it is written anew, and the storage fails in between.",
    source="open for writing: the old bytes are gone before the new ones are there",
)
def spoils_what_it_replaces(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_SpoilsTheOld))


# -- DATA-9 ----------------------------------------------------------------------------------------


class _OneWriterAKey(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        self._busy: set[OffloadKey] = set()
        super().__init__(context)

    @override
    def submit_store(self, job: JobMetadata) -> None:
        if self._busy.intersection(job.keys):
            error = JobError(JobErrorKind.FAILED, "the key is being written")
            self._finished.append(JobResult(job.job_id, success=False, error=error))
            return
        self._busy.update(job.keys)
        super().submit_store(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._busy.clear()
        return super().get_finished_jobs()


@mutant(
    "DATA-9",
    breaks="Fails a store while another one of the same key is under way.",
    source="LMCache#2517: of two instances that stored one key, one failed",
)
def refuses_a_second_writer(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_OneWriterAKey))


class _InPlaceStore(FolderStore):
    """Writes an object under its own name, and believes what it reads."""

    def begin(self, key: bytes, data: memoryview) -> None:
        """Put half of an object where readers look."""
        super().put(key, memoryview(bytes(data[: len(data) // 2]).ljust(len(data), b"\0")))

    @override
    def get(self, key: bytes, buffer: memoryview) -> None:
        try:
            with self.path(key).open("rb", buffering=0) as file:
                file.readinto(buffer)
        except FileNotFoundError as error:
            raise BlockMissingError("there is no such object") from error


class _WritesInPlace(FolderTier):
    store_type = _InPlaceStore

    @override
    def is_valid(self, key: OffloadKey, data: memoryview) -> bool:
        return False

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        if isinstance(self._store, _InPlaceStore):
            # What a storage that stalls in the middle of a write leaves for others to see.
            self._store.begin(key, data)
        try:
            return super().write_block(key, data)
        except OSError:
            if self._store is not None:
                self._store.remove(key)
            raise


@mutant(
    "DATA-9",
    breaks="Writes an object under its own name, where readers see it grow.",
    source="Mooncake#3066: checksums that did not fit, and no error",
    also=frozenset(
        {"CAP-1", "CAP-3", "DATA-1", "DATA-6", "DATA-10", "EVT-1", "EVT-2", "USE-1", "ZC-1"}
    ),
)
def writes_in_place(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_WritesInPlace, capabilities=_UNCHECKED))


class _TruncatingStore(FolderStore):
    @override
    def put(self, key: bytes, data: memoryview) -> None:
        if self.exists(key):
            self.path(key).write_bytes(b"")
        super().put(key, data)


class _Truncates(FolderTier):
    store_type = _TruncatingStore

    @override
    def is_valid(self, key: OffloadKey, data: memoryview) -> bool:
        return False


@mutant(
    "DATA-9",
    breaks="Cuts an object off before it writes it again, under the eyes of another instance.",
    source="LMCache#2517: of two instances that stored one key, one failed",
)
def truncates_before_it_writes(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_Truncates, capabilities=_UNCHECKED))


# -- DATA-10 ---------------------------------------------------------------------------------------


class _TakesTooLong(DictTier):
    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        data = self.store.get(key)
        if data is None or len(data) <= self._primary.block_bytes:
            return super()._load_block(key, block_id)
        with self._primary.block(block_id) as block:
            block[:] = data[: len(block)]
        return None


@mutant(
    "DATA-10",
    breaks="Reads as many bytes as it needs from an object that has more.",
    source="vllm#54363: objects are read without a look at what they are",
)
def accepts_overlong_objects(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_TakesTooLong))


class _TakesTooShort(DictTier):
    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        data = self.store.get(key)
        if data is None or len(data) >= self._primary.block_bytes:
            return super()._load_block(key, block_id)
        with self._primary.block(block_id) as block:
            block[: len(data)] = data
        return None


@mutant(
    "DATA-10",
    breaks="Fills a slot with what is there of an object that was cut off.",
    source="Mooncake#3066: fewer bytes than asked for, and no error",
)
def accepts_truncated_objects(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_TakesTooShort))


class _KeepsBadObjects(FolderTier):
    @override
    def retire(self, key: OffloadKey) -> None:
        pass


@mutant(
    "DATA-10",
    breaks="Leaves a bad object where it is, and finds it again.",
    source="vllm#49176: the same doomed load in every step",
    also=frozenset({"CAP-4", "EVT-1", "INT-1", "LOOK-4", "USE-1"}),
)
def keeps_bad_objects(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_KeepsBadObjects))


class _NeverRepairs(DictTier):
    @override
    def _retire(self, key: OffloadKey) -> bool:
        return False

    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        if self.store.exists(key):
            return None
        return super()._store_block(key, block_id)


@mutant(
    "DATA-10",
    breaks="Takes a damaged object for present when its key is stored again.",
    source="LMCache#2420: what happens behind the back of an index",
)
def never_repairs(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_NeverRepairs))


# -- DATA-11 ---------------------------------------------------------------------------------------


class _OneRead(FolderStore):
    @override
    def get(self, key: bytes, buffer: memoryview) -> None:
        try:
            descriptor = os.open(self.path(key), os.O_RDONLY)
        except FileNotFoundError as error:
            raise BlockMissingError("there is no such object") from error
        try:
            whole = os.fstat(descriptor).st_size >= len(buffer)
            count = os.readv(descriptor, [buffer[: self.allowed(len(buffer))]])
            if not whole or not count:
                raise BlockMissingError("the object ends early")
        finally:
            os.close(descriptor)


class _ReadsOnce(FolderTier):
    store_type = _OneRead

    @override
    def is_valid(self, key: OffloadKey, data: memoryview) -> bool:
        return False


@mutant(
    "DATA-11",
    breaks="Does not look at how many bytes a read has moved.",
    source="Mooncake#3066: fewer bytes than asked for, and no error",
)
def ignores_short_reads(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ReadsOnce, capabilities=_UNCHECKED))


class _FullForEver(DictTier):
    _is_full = False

    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        if self._is_full:
            return JobError(JobErrorKind.DECLINED, "the storage is full")
        try:
            return super()._store_block(key, block_id)
        except OSError as error:
            self._is_full = error.errno == errno.ENOSPC
            raise


@mutant(
    "DATA-11",
    breaks="Believes for ever that the storage is full.",
    source="LMCache#4546: all puts were dropped although the disk was empty",
)
def is_full_for_ever(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_FullForEver))


class _LosesTransfers(FolderTier):
    """Allows so many transfers at a time, and gives none back that an error ended."""

    transfers: ClassVar[int] = 12

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        with self._lock:
            if self._lost >= self.transfers:
                raise OSError(errno.EBUSY, "too many transfers at a time")
        try:
            return super().write_block(key, data)
        except OSError:
            with self._lock:
                self._lost += 1
            raise

    _lost = 0


@mutant(
    "DATA-11",
    breaks="Does not give the place of a transfer back that ended with an error.",
    source="LMCache#2942: a staging buffer that was full for ever",
)
def loses_transfers(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LosesTransfers))


class _EndsWithoutDescriptors(FolderTier):
    _is_broken = False

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        if self._is_broken:
            raise OSError(errno.EBADF, "the tier is out of use")
        try:
            super().read_block(key, buffer)
        except OSError as error:
            self._is_broken = error.errno == errno.EMFILE
            raise


@mutant(
    "DATA-11",
    breaks="Goes out of use when there are no descriptors, for good.",
    source="sglang#38428: one exception ended a thread that everything went through",
)
def ends_without_descriptors(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_EndsWithoutDescriptors))
