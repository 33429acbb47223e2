"""Collects what happens during a replay. One thread: the replay's."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, final

from kv_core.workload.replay._report import LatencySummary, ReplayReport, Stopwatch

if TYPE_CHECKING:
    from kv_core.engine import TransferResult
    from kv_core.tiering import JobReport

__all__ = ["Measurements"]


@final
class Measurements:
    """Bytes and latencies by hop, peaks, and where time goes.

    Attributes:
        stopwatch: Adds up the time of named parts.
        jobs_finished: Jobs of tiers that ended, well or badly.
    """

    def __init__(self, block_bytes: int) -> None:
        """Start empty.

        Args:
            block_bytes: Bytes of one block between the primary and a tier.
        """
        self.stopwatch = Stopwatch()
        self.jobs_finished = 0
        self._block_bytes = block_bytes
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._peaks: dict[str, int] = {}

    def transfer_finished(self, result: TransferResult) -> None:
        """Note a transfer between the GPU and the primary tier."""
        hop = "_to_".join(result.transfer_type).lower()
        self._bytes[hop] += result.transfer_size
        self._seconds[hop].append(result.transfer_time)

    def job_finished(self, report: JobReport) -> None:
        """Note a job between the primary tier and a secondary tier."""
        self.jobs_finished += 1
        hop = f"{report.tier}_to_cpu" if report.is_promotion else f"cpu_to_{report.tier}"
        self._bytes[hop] += report.blocks_succeeded * self._block_bytes
        self._seconds[hop].append(report.seconds)

    def note_peak(self, name: str, value: int) -> None:
        """Remember the largest value of a quantity."""
        if value > self._peaks.get(name, -1):
            self._peaks[name] = value

    def complete(self, report: ReplayReport) -> None:
        """Write everything into the report."""
        report.bytes_moved = dict(self._bytes)
        report.latency_seconds = {
            hop: LatencySummary.of(seconds) for hop, seconds in self._seconds.items()
        }
        report.peaks = dict(self._peaks)
        report.time_seconds = dict(self.stopwatch.seconds)
        accounted = sum(report.time_seconds.values())
        report.time_seconds["other"] = max(0.0, report.wall_seconds - accounted)
