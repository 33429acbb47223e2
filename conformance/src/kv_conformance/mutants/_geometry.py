"""Mutants of GEO-1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
from kv_core.contract import JobError, JobErrorKind, get_offload_group_idx

if TYPE_CHECKING:
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import OffloadKey

_PAGE_BYTES: Final = 4096
_CALL_BYTES: Final = 2 << 20


class _WholePages(FolderTier):
    @override
    def open(self) -> None:
        if self.context.block_bytes % _PAGE_BYTES:
            raise ValueError(f"block_bytes must be a multiple of {_PAGE_BYTES}")
        super().open()


@mutant(
    "GEO-1",
    breaks="Refuses blocks that are no multiple of a page.",
    source="vllm#55424: does not boot for a block of 3,098,112 bytes",
)
def wants_whole_pages(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_WholePages))


class _OneCall(DictTier):
    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        data = self.store.get(key)
        if data is None or len(data) != self._primary.block_bytes:
            return super()._load_block(key, block_id)
        with self._primary.block(block_id) as block:
            block[:_CALL_BYTES] = data[:_CALL_BYTES]
        return None


@mutant(
    "GEO-1",
    breaks="Moves a block by one call, which moves no more than 2 MiB.",
    source="system calls and protocols that have a largest transfer",
)
def moves_two_mebibytes(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_OneCall))


class _OneGroup(DictTier):
    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        if get_offload_group_idx(key):
            return JobError(JobErrorKind.FAILED, "there is one group only")
        return super()._store_block(key, block_id)


@mutant(
    "GEO-1",
    breaks="Stores the blocks of the first group only.",
    source="vllm#50454: mistakes that show with several groups only",
    also=frozenset({"DATA-7"}),
)
def knows_one_group(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_OneGroup))
