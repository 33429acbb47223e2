"""Mutants of JOB-9: wrong reasons."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderTier, folder_spec
from kv_core.contract import JobErrorKind
from kv_core.errors import BlockDeclinedError, BlockMissingError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import JobResult, OffloadKey


class _LostIsAnOutage(FolderTier):
    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [
            replace(result, error=replace(result.error, kind=JobErrorKind.FAILED))
            if result.error is not None and result.error.kind is JobErrorKind.MISSING
            else result
            for result in super().get_finished_jobs()
        ]


@mutant(
    "JOB-9",
    breaks="Reports an object that is gone as a failure of the backend.",
    source="LMCache#2420: a file that somebody else removed brought the engine down",
)
def lost_is_an_outage(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LostIsAnOutage))


class _FullIsAnOutage(FolderTier):
    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        try:
            return super().write_block(key, data)
        except OSError as error:
            raise RuntimeError(f"the write failed: {error}") from error


@mutant(
    "JOB-9",
    breaks="Wraps the error of a full disk, so that it looks like a broken one.",
    source="LMCache#4364: the log hid the errno",
)
def full_is_an_outage(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_FullIsAnOutage))


class _OutageIsDeclined(FolderTier):
    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        try:
            return super().write_block(key, data)
        except OSError as error:
            raise BlockDeclinedError(f"not now: {errno.errorcode[error.errno or 0]}") from error


@mutant(
    "JOB-9",
    breaks="Declines what a broken backend cannot store: the engine never learns of the outage.",
    source="LMCache#5119: a failing store that reports itself as healthy",
)
def outage_is_declined(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OutageIsDeclined))


class _OutageIsMissing(FolderTier):
    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        try:
            super().read_block(key, buffer)
        except OSError as error:
            raise BlockMissingError(f"{key.hex()} cannot be read") from error


@mutant(
    "JOB-9",
    breaks="Takes every error of a read for an object that is not there.",
    source="vllm#49176: a failure that was remembered as something else",
    also=frozenset({"LOOK-4"}),
)
def outage_is_missing(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OutageIsMissing))


class _SaysNothing(FolderTier):
    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [replace(result, error=None) for result in super().get_finished_jobs()]


@mutant(
    "JOB-9",
    breaks="Reports failures without an error.",
    source="LMCache#4364: all stores failed, and nothing said why",
)
def says_nothing(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_SaysNothing))
