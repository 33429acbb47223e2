"""What a replay measured."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LatencySummary", "ReplayReport", "Stopwatch", "WorkerSummary"]


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Percentiles of how long the jobs of one hop took, in seconds."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LatencySummary:
        """Summarize measurements; all zero when there are none."""
        if not seconds:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(np.asarray(seconds), (50, 90, 99)).tolist()
        return cls(len(seconds), p50, p90, p99, max(seconds))


@dataclass(slots=True)
class WorkerSummary:
    """What one worker verified.

    Attributes:
        device: Where its GPU pool was.
        blocks_verified: Its pages of blocks that loads delivered, compared.
        bytes_wrong: Bytes of them that differed.
    """

    device: str
    blocks_verified: int = 0
    bytes_wrong: int = 0


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """The outcome of one replay; :meth:`to_json` is what ``kv-core replay --json`` writes.

    Attributes:
        trace: Name of the trace.
        requests: Requests of the trace.
        requests_finished: Requests that finished; all of them unless something is wrong.
        blocks_requested: Prompt blocks of all requests; equals the hits of all levels plus the
            misses.
        hits: Prompt blocks, at each request's first admission, by the level they came from:
            ``gpu`` (reused), ``cpu``, and each tier by name (loaded).
        misses: Prompt blocks that had to be computed.
        blocks_verified: Blocks that loads delivered and the checker compared.
        bytes_wrong: Bytes that differed, on all workers.
        bytes_wrong_by_level: The same by the level that delivered them.
        workers: What each worker verified, in rank order.
        bytes_moved: Bytes by hop, ``gpu_to_cpu``, ``cpu_to_gpu``, ``cpu_to_TIER``,
            ``TIER_to_cpu``; those of all workers together.
        latency_seconds: Latency of the jobs of each hop.
        peaks: Largest number of requests running, waiting, loading, and of jobs in flight.
        stores_declined: Offers of blocks that found no room.
        loads_failed: Loads to the GPU that failed.
        preemptions: Times that a request lost its blocks to another.
        blocks_reloaded: Blocks loaded again after a preemption; not among the hits.
        steps: Steps of the engine.
        stalled: Whether the replay gave up because nothing moved for ``stall_deadline_s``.
        jobs_unfinished: Transfers and jobs of tiers that had not ended then.
        tokens_saved: Prompt tokens that did not have to be computed.
        wall_seconds: From the first step to the end of the last transfer.
        time_seconds: Where the wall time went.
        stats: Measurements of the offloading engine at the end.
    """

    trace: str
    requests: int
    requests_finished: int = 0
    blocks_requested: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    blocks_verified: int = 0
    bytes_wrong: int = 0
    bytes_wrong_by_level: dict[str, int] = field(default_factory=dict)
    workers: list[WorkerSummary] = field(default_factory=list)
    bytes_moved: dict[str, int] = field(default_factory=dict)
    latency_seconds: dict[str, LatencySummary] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    stores_declined: int = 0
    loads_failed: int = 0
    preemptions: int = 0
    blocks_reloaded: int = 0
    steps: int = 0
    stalled: bool = False
    jobs_unfinished: int = 0
    tokens_saved: int = 0
    wall_seconds: float = 0.0
    time_seconds: dict[str, float] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether all requests and jobs ended, every byte was right and the books balance."""
        return not self.problems()

    def problems(self) -> list[str]:
        """Say in words what is wrong; empty when nothing is."""
        problems = []
        if self.bytes_wrong:
            levels = ", ".join(
                f"{wrong} from {level}" for level, wrong in self.bytes_wrong_by_level.items()
            )
            workers = "".join(
                f"; {worker.bytes_wrong} on worker {rank}"
                for rank, worker in enumerate(self.workers)
                if worker.bytes_wrong and len(self.workers) > 1
            )
            problems.append(
                f"{self.bytes_wrong} byte(s) of loaded blocks are wrong ({levels}{workers})"
            )
        if self.requests_finished != self.requests:
            unfinished = self.requests - self.requests_finished
            problems.append(f"{unfinished} of {self.requests} requests did not finish")
        if self.stalled:
            problems.append(
                "the replay gave up because nothing moved any more; "
                f"{self.jobs_unfinished} transfer(s) and tier job(s) had not ended"
            )
        accounted = sum(self.hits.values()) + self.misses
        if accounted != self.blocks_requested:
            problems.append(
                f"hits and misses add up to {accounted}, but {self.blocks_requested} blocks "
                "were requested"
            )
        return problems

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


@final
class Stopwatch:
    """Adds up where time goes. One thread."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Charge the block's time to a name."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started
