"""Tiers that move bytes in unusual ways."""

from __future__ import annotations

import mmap
import zlib
from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from kv_conformance.extremes._extreme import extreme
from kv_conformance.reference import (
    DictHarness,
    DictTier,
    FolderConfig,
    FolderHarness,
    FolderStore,
    FolderTier,
    dict_spec,
    folder_spec,
)
from kv_core.errors import BlockDamagedError, BlockMissingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from kv_conformance.harness import Harness, Opening
    from kv_core.contract import JobError, JobResult, OffloadKey, TierContext, TierLimits


class _MappingStore(FolderStore):
    @override
    def get(self, key: bytes, buffer: memoryview) -> None:
        try:
            with (
                self.path(key).open("rb") as file,
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping,
                memoryview(mapping) as whole,
            ):
                trailer = bytes(whole[len(buffer) :])
                if len(trailer) != 4 + len(key) + 6 or trailer[4:-6] != key:
                    raise BlockDamagedError("the object has another length or key")
                with whole[: len(buffer)] as payload:
                    if zlib.crc32(payload).to_bytes(4, "big") != trailer[:4]:
                        raise BlockDamagedError("the object has other bytes than were put")
                    buffer[:] = payload
        except FileNotFoundError as error:
            raise BlockMissingError(f"no object for {key.hex()}") from error
        except ValueError as error:
            raise BlockDamagedError("the object is empty") from error


class _MapsFiles(FolderTier):
    store_type = _MappingStore


@extreme(does="Maps the files that it loads from, all at once.", relies_on=frozenset({"ZC-1"}))
def maps_files(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_MapsFiles))


# -- memory of its own ---------------------------------------------------------------------------


class _StagingConfig(FolderConfig):
    staged_block_bytes: int = Field(default=1, ge=1)


class _StagingHarness(FolderHarness):
    @override
    def settings(self, opening: Opening) -> Mapping[str, Any]:
        return {**super().settings(opening), "staged_block_bytes": opening.block_bytes}


class _Stages(FolderTier):
    """Copies each block to a buffer, for stores and for loads."""

    config: _StagingConfig

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        staged = bytearray(len(buffer))
        super().read_block(key, memoryview(staged))
        buffer[:] = staged

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        return super().write_block(key, memoryview(bytes(data)))


def _staging_limits(config: _StagingConfig) -> TierLimits:
    return config.limits(
        min_retained_blocks=config.capacity_blocks,
        staging_bytes=config.io_threads * config.staged_block_bytes,
    )


@extreme(
    does="Moves every block by way of a buffer, and declares the buffers.",
    relies_on=frozenset({"ZC-1"}),
)
def stages_blocks(workdir: Path) -> Harness:
    """Make the harness."""
    spec = folder_spec(_Stages, config_model=_StagingConfig, limits=_staging_limits)
    return _StagingHarness(workdir, spec)


class _Pool(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        # Touched, as memory that is registered with a device is.
        self._pool = bytearray(b"\1") * (64 << 20)


@extreme(
    does="Allocates 64 MiB of its own when it opens, whatever the size of the region.",
    relies_on=frozenset({"ZC-1"}),
)
def has_a_pool(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_Pool))


# -- one at a time -------------------------------------------------------------------------------


class _OneBlockAPoll(DictTier):
    """Moves exactly one block in a poll, and tells of a job when its last one has been moved."""

    _may_move = False

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._may_move = True
        try:
            return super().get_finished_jobs()
        finally:
            self._may_move = False

    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        self._take_turn()
        return super()._load_block(key, block_id)

    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        self._take_turn()
        return super()._store_block(key, block_id)

    def _take_turn(self) -> None:
        if not self._may_move:
            raise BlockingIOError("not before the next poll")
        self._may_move = False


@extreme(
    does="Moves one block in each poll, and nothing in between.",
    relies_on=frozenset({"DRAIN-3", "DATA-6"}),
)
def one_block_a_poll(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_OneBlockAPoll))
