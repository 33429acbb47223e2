"""Loads beside a backlog of stores, and stores that have to evict."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from _fs_bench._throughput import settle

from kv_core.contract import JobErrorKind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _fs_bench._contenders import FsContender
    from _fs_bench._memory import Batch, Memory, Plan

    from kv_core.contract import JobId

__all__ = ["Mixed", "Steady", "measure_mixed", "measure_steady"]

_JOB_BLOCKS: Final = 32
_POLL_S: Final = 0.0001


@dataclass(frozen=True, slots=True)
class Mixed:
    """How long a load of 32 blocks takes, in milliseconds.

    Attributes:
        block_bytes: Bytes of a block.
        backlog_bytes: Stores that were submitted before the loads.
        samples: Loads that were measured, alone and beside.
        alone_p50_ms: Median, without stores.
        alone_p99_ms: 99th percentile, without stores.
        beside_p50_ms: Median, beside the backlog.
        beside_p99_ms: 99th percentile, beside the backlog.
    """

    block_bytes: int
    backlog_bytes: int
    samples: tuple[int, int]
    alone_p50_ms: float
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float

    @property
    def ratio(self) -> float:
        """How many times longer the 99th percentile is beside stores."""
        return self.beside_p99_ms / self.alone_p99_ms


@dataclass(frozen=True, slots=True)
class Steady:
    """Speed of stores, in bytes per second.

    Attributes:
        block_bytes: Bytes of a block.
        capacity_bytes: The bound.
        unbounded: Without a bound.
        at_capacity: With the bound, once it is reached.
        declined: Share of the blocks that were declined, which are not in the speed.
    """

    block_bytes: int
    capacity_bytes: int
    unbounded: float
    at_capacity: float
    declined: float

    @property
    def ratio(self) -> float:
        """What is left of the speed."""
        return self.at_capacity / self.unbounded


def measure_mixed(
    folder: Path,
    memory: Memory,
    contender: FsContender,
    random: np.random.Generator,
    *,
    block_bytes: int,
    backlog_bytes: int,
    rounds: int,
) -> Mixed:
    """Load 32 blocks again and again, first alone, then beside stores, in every round."""
    alone: list[float] = []
    beside: list[float] = []
    blocks = memory.half_bytes // block_bytes
    for _ in range(rounds):
        contender.open(folder / "tier", block_bytes)
        try:
            plan = memory.plan(blocks, block_bytes, random)
            contender.store(plan.stores(_JOB_BLOCKS))
            settle(folder)
            loads = _endless(plan.loads(_JOB_BLOCKS), random)
            count = max(100, 300 // rounds)
            alone.extend(_time_load(contender, next(loads), set()) for _ in range(count))
            backlog: set[JobId] = set()
            for _ in range(backlog_bytes // memory.half_bytes):
                stored = memory.plan(blocks, block_bytes, random)
                for batch in stored.stores(_JOB_BLOCKS):
                    job = contender.job(batch, load=False)
                    backlog.add(job.job_id)
                    contender.submit(job)
            while backlog:
                seconds = _time_load(contender, next(loads), backlog)
                # The last one may have run alone for the most part.
                if backlog:
                    beside.append(seconds)
        finally:
            contender.close()
        settle(folder)
    a50, a99, b50, b99 = (
        float(np.percentile(samples, at)) * 1e3 for samples in (alone, beside) for at in (50, 99)
    )
    return Mixed(block_bytes, backlog_bytes, (len(alone), len(beside)), a50, a99, b50, b99)


def measure_steady(
    folder: Path,
    memory: Memory,
    contender: FsContender,
    random: np.random.Generator,
    *,
    block_bytes: int,
    capacity_bytes: int,
    repeats: int,
) -> Steady:
    """Store twice the capacity, with room for all of it and with none left, taking turns."""
    blocks = memory.half_bytes // block_bytes
    times = 2 * capacity_bytes // memory.half_bytes
    unbounded, bounded, declined = [], [], []

    def plans(count: int) -> Iterator[Plan]:
        for _ in range(count):
            yield memory.plan(blocks, block_bytes, random)

    for _ in range(repeats):
        for limit in (None, capacity_bytes):
            contender.open(folder / "tier", block_bytes, capacity_bytes=limit)
            try:
                for plan in plans(0 if limit is None else 2 * capacity_bytes // memory.half_bytes):
                    _store(contender, plan)
                stored, seconds = 0, 0.0
                for plan in plans(times):
                    good, spent = _store(contender, plan)
                    stored, seconds = stored + good, seconds + spent
            finally:
                contender.close()
            settle(folder)
            speed = stored * block_bytes / seconds
            if limit is None:
                unbounded.append(speed)
            else:
                bounded.append(speed)
                declined.append(1 - stored / (times * blocks))
    return Steady(
        block_bytes,
        capacity_bytes,
        statistics.median(unbounded),
        statistics.median(bounded),
        statistics.mean(declined),
    )


def _endless(batches: list[Batch], random: np.random.Generator) -> Iterator[Batch]:
    while True:
        for at in random.permutation(len(batches)).tolist():
            yield batches[at]


def _time_load(contender: FsContender, batch: Batch, others: set[JobId]) -> float:
    """Return the seconds of one load; take the jobs out of ``others`` that end meanwhile."""
    job = contender.job(batch, load=True)
    start = time.perf_counter()
    contender.submit(job)
    end = None
    while end is None:
        results = list(contender.tier.get_finished_jobs())
        now = time.perf_counter()
        for result in results:
            if not result.success:
                raise RuntimeError(f"{contender.name}: a job failed: {result.error}")
            if result.job_id == job.job_id:
                end = now
            others.discard(result.job_id)
        if not results:
            time.sleep(_POLL_S)
    return end - start


def _store(contender: FsContender, plan: Plan) -> tuple[int, float]:
    """Store a plan; return how many blocks were stored, and the seconds."""
    jobs = [contender.job(batch, load=False) for batch in plan.stores(_JOB_BLOCKS)]
    sizes = {job.job_id: len(job.keys) for job in jobs}
    stored = 0
    start = time.perf_counter()
    for job in jobs:
        contender.submit(job)
    while sizes:
        results = list(contender.tier.get_finished_jobs())
        for result in results:
            size = sizes.pop(result.job_id)
            error = result.error
            if error is not None and error.kind is not JobErrorKind.DECLINED:
                raise RuntimeError(f"{contender.name}: a store failed: {error}")
            stored += size if result.success else len(result.successful_keys)
        if not results:
            time.sleep(_POLL_S)
    return stored, time.perf_counter() - start
