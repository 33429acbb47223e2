"""Tiers that do the least they may, or as slowly as they may."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field
from typing_extensions import override

from kv_conformance.extremes._extreme import extreme
from kv_conformance.reference import (
    DictHarness,
    FolderConfig,
    FolderHarness,
    FolderTier,
    folder_spec,
)
from kv_core.contract import (
    Capability,
    JobError,
    JobErrorKind,
    JobResult,
    SecondaryTierManager,
)
from kv_core.errors import BlockDeclinedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from kv_conformance.harness import Harness, Opening
    from kv_core.contract import JobMetadata, OffloadKey, TierLimits

_BLOCK_S: Final = 0.005
_ALL_BUT_WITHDRAWAL: Final = frozenset(Capability) - {Capability.WITHDRAWS_IO}


@extreme(
    does="Has no thread and ends every job before its submit returns, unless the store stalls.",
    relies_on=frozenset({"DRAIN-3"}),
)
def at_once(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir)


# -- retention ------------------------------------------------------------------------------------


class _RetentionConfig(FolderConfig):
    retention_blocks: int = Field(default=1, ge=1)


class _SmallestRetention(FolderTier):
    """Keeps the last blocks stored and drops everything else, used or not."""

    config: _RetentionConfig
    touch = SecondaryTierManager.touch

    @override
    def open(self) -> None:
        super().open()
        self._order_lock = threading.Lock()
        self._order: OrderedDict[OffloadKey, None] = OrderedDict()

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        moved = super().write_block(key, data)
        with self._order_lock:
            self._order[key] = None
            self._order.move_to_end(key)
            surplus = []
            while len(self._order) > self.config.retention_blocks:
                surplus.append(self._order.popitem(last=False)[0])
        for old in surplus:
            self.retire(old)
        return moved


class _RetentionHarness(FolderHarness):
    @override
    def settings(self, opening: Opening) -> Mapping[str, Any]:
        return {**super().settings(opening), "retention_blocks": opening.retention_blocks}


def _retention_limits(config: _RetentionConfig) -> TierLimits:
    return config.limits(min_retained_blocks=config.retention_blocks, min_free_bytes=1)


@extreme(does="Keeps exactly as many blocks as it must, the last that were stored.")
def smallest_retention(workdir: Path) -> Harness:
    """Make the harness."""
    return _RetentionHarness(
        workdir,
        folder_spec(
            _SmallestRetention,
            name="smallest-retention",
            config_model=_RetentionConfig,
            limits=_retention_limits,
            # First in, first out is no BOUNDED, and each instance counts its own stores only.
            capabilities=_ALL_BUT_WITHDRAWAL
            - {Capability.BOUNDED, Capability.TOUCH, Capability.SHARED},
        ),
    )


# -- stores that fail -------------------------------------------------------------------------


class _DeclinesFreely(FolderTier):
    """Takes one store in three."""

    @override
    def open(self) -> None:
        super().open()
        self._numbers = itertools.count(1)

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        if next(self._numbers) % 3:
            raise BlockDeclinedError("too much to do")
        return super().write_block(key, data)


@extreme(does="Declines two stores of three, like a server that throttles.")
def declines_freely(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DeclinesFreely, name="declines-freely"))


# -- limits ---------------------------------------------------------------------------------------


class _OneKeyAJob(FolderTier):
    """Has no idea of batches."""

    @override
    def open(self) -> None:
        super().open()
        self._refused: list[JobResult] = []

    @override
    def submit_store(self, job: JobMetadata) -> None:
        if self._takes(job):
            super().submit_store(job)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        if self._takes(job):
            super().submit_load(job)

    def _takes(self, job: JobMetadata) -> bool:
        if len(job.keys) <= 1:
            return True
        self._refused.append(
            JobResult(
                job.job_id,
                success=False,
                error=JobError(JobErrorKind.FAILED, "more than one key, against what is declared"),
            )
        )
        return False

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        refused, self._refused = self._refused, []
        return [*refused, *super().get_finished_jobs()]


def _one_key(config: FolderConfig) -> TierLimits:
    return config.limits(min_retained_blocks=config.capacity_blocks, max_job_keys=1)


@extreme(does="Takes one key a job, and says so.")
def one_key_a_job(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OneKeyAJob, name="one-key-a-job", limits=_one_key))


def _small_blocks(config: FolderConfig) -> TierLimits:
    return config.limits(min_retained_blocks=config.capacity_blocks, max_block_bytes=4096)


@extreme(does="Takes no block above 4096 bytes, and says so.")
def small_blocks(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(name="small-blocks", limits=_small_blocks))


class _Slow(FolderTier):
    """Takes its time for every block."""

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        time.sleep(_BLOCK_S)
        super().read_block(key, buffer)

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        time.sleep(_BLOCK_S)
        return super().write_block(key, data)


@extreme(does="Takes five milliseconds for every block.")
def slow(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_Slow, name="slow"))
