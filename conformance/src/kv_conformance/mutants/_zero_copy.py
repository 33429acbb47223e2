"""Mutants of the ZC clauses."""

from __future__ import annotations

import errno
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np
from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import (
    DictHarness,
    DictTier,
    FolderConfig,
    FolderHarness,
    FolderTier,
    dict_spec,
    folder_spec,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import JobError, JobMetadata, OffloadKey, TierContext, TierLimits

_SMALL_BLOCK_BYTES: Final = 128 << 10


# -- ZC-1 ------------------------------------------------------------------------------------------


class _Mirror(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._mirror = bytearray(self.context.primary.view)

    @override
    def close(self) -> None:
        super().close()
        self._mirror.clear()


@mutant(
    "ZC-1",
    breaks="Makes a copy of the region when it opens, to move blocks by way of it.",
    source="connectors whose client library wants memory of its own",
)
def mirrors_the_region(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_Mirror))


class _Bounces(DictTier):
    @override
    def submit_load(self, job: JobMetadata) -> None:
        # For all blocks of the job, whatever its size.
        buffer = bytearray(len(job.keys) * self._primary.block_bytes)
        super().submit_load(job)
        buffer.clear()


@mutant(
    "ZC-1",
    breaks="Allocates a buffer for a whole load and declares nothing.",
    source="LMCache#2942: a staging buffer beside the cache",
)
def bounces_whole_jobs(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_Bounces))


def _small_blocks(config: FolderConfig) -> TierLimits:
    return config.limits(
        min_retained_blocks=config.capacity_blocks, max_block_bytes=_SMALL_BLOCK_BYTES
    )


class _BouncesSmallBlocks(FolderTier):
    @override
    def submit_load(self, job: JobMetadata) -> None:
        buffer = bytearray(len(job.keys) * self.context.primary.block_bytes)
        super().submit_load(job)
        buffer.clear()


@mutant(
    "ZC-1",
    breaks="Allocates a buffer for a whole load, and takes only blocks that are small beside it.",
    source="a limit on blocks must not hide what a job of many of them takes",
)
def bounces_small_blocks(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_BouncesSmallBlocks, limits=_small_blocks))


class _CopiesBlocks(FolderTier):
    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        return super().write_block(key, memoryview(bytes(data)))


@mutant(
    "ZC-1",
    breaks="Turns every block into a bytes object for its client library.",
    source="client libraries that take bytes, and nothing else",
)
def copies_every_block(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CopiesBlocks))


# -- ZC-2 ------------------------------------------------------------------------------------------


class _Snapshots(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._copies: dict[tuple[OffloadKey, int], bytes] = {}

    @override
    def submit_store(self, job: JobMetadata) -> None:
        for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
            self._copies[key, block_id] = bytes(self.context.primary.block(block_id))
        super().submit_store(job)

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        place = next((place for place in list(self._copies) if place[0] == key), None)
        copy = self._copies.pop(place, None) if place else None
        return super().write_block(key, data if copy is None else memoryview(copy))


@mutant(
    "ZC-2",
    breaks="Copies the blocks of a store when it is submitted.",
    source="fear of the race in vllm#45704, paid for with memory and time of the scheduler",
    also=frozenset({"ZC-1"}),
)
def takes_a_snapshot(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_Snapshots))


@mutant(
    "ZC-2",
    breaks="Copies the blocks of a store when it is submitted, and takes only small ones.",
    source="a limit on blocks must not hide what a job of many of them takes",
    also=frozenset({"ZC-1"}),
)
def takes_a_snapshot_of_small_blocks(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_Snapshots, limits=_small_blocks))


class _RemembersSlots(DictTier):
    """Reads a slot again only when it has forgotten it, or has written it itself."""

    @override
    def __init__(self, context: TierContext) -> None:
        self._seen: OrderedDict[int, bytes] = OrderedDict()
        super().__init__(context)

    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        if block_id not in self._seen:
            self._seen[block_id] = bytes(self._primary.block(block_id))
        data = self._seen[block_id]
        while len(self._seen) > 4:
            self._seen.popitem(last=False)
        self.store.put(key, memoryview(data))
        return None

    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        self._seen.pop(block_id, None)
        return super()._load_block(key, block_id)


@mutant(
    "ZC-2",
    breaks="Takes the bytes of a slot from a cache that nobody tells of new bytes.",
    source="vllm#45704: what was stored was what the slot had held before",
)
def stores_stale_bytes(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_RemembersSlots))


# -- ZC-3 ------------------------------------------------------------------------------------------


class _KeepsViews(FolderTier):
    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        self._last = buffer[:16]
        super().read_block(key, buffer)


@mutant(
    "ZC-3",
    breaks="Keeps a view of the last block it has loaded.",
    source="attributes for debugging, and callbacks that are never cleared",
)
def keeps_a_view(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_KeepsViews))


class _KeepsFailed(DictTier):
    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        try:
            return super()._store_block(key, block_id)
        except OSError as error:
            if error.errno == errno.EIO:
                self._failed = np.frombuffer(self._primary.block(block_id), dtype=np.uint8)
            raise


@mutant(
    "ZC-3",
    breaks="Keeps an array over the block whose store failed last.",
    source="errors that carry what they were about",
)
def keeps_failed_blocks(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_KeepsFailed))


# -- ZC-4 ------------------------------------------------------------------------------------------


class _IgnoresStride(DictTier):
    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        start = block_id * self._primary.block_bytes
        with self._primary.view.cast("B") as flat:
            self.store.put(key, flat[start : start + self._primary.block_bytes])
        return None


@mutant(
    "ZC-4",
    breaks="Finds a block at its number times the size of a block.",
    source="vllm#55424 and Mooncake#4024: rows that are longer than what is in them",
)
def ignores_the_row_stride(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_IgnoresStride))


class _WritesRows(DictTier):
    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        error = super()._load_block(key, block_id)
        start = block_id * self._primary.row_stride
        with self._primary.view.cast("B") as flat:
            padding = self._primary.row_stride - self._primary.block_bytes
            end = start + self._primary.row_stride
            flat[end - padding : end] = bytes(padding)
        return error


@mutant(
    "ZC-4",
    breaks="Writes whole rows, padding included.",
    source="direct I/O, whose lengths are rounded up",
)
def writes_whole_rows(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_WritesRows))
