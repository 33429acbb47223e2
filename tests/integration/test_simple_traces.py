"""Recorded traces in the simple modes: GPU and CPU memory, every loaded byte verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from kv_core.workload import read_trace
from kv_core.workload.replay import ReplayConfig, replay_trace

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.workload.replay import ReplayReport

pytestmark = pytest.mark.traces

BLOCK_BYTES: Final = 1024
CPU_BLOCKS: Final = 6000


def replay(mode: str, traces: Path) -> ReplayReport:
    """Replay the beginning of the conversation trace, with a GPU that has to give up blocks."""
    trace = read_trace(traces / "mooncake" / "conversation_trace.jsonl", limit=300)
    config = ReplayConfig(
        mode=mode,
        gpu_blocks=1024,
        block_bytes=BLOCK_BYTES,
        cpu_bytes=CPU_BLOCKS * BLOCK_BYTES,
        max_output_tokens=256,
    )
    return replay_trace(trace, config)


def test_both_modes_bring_back_the_right_bytes(traces: Path) -> None:
    """Lazy stores less, and finds blocks in CPU memory that the GPU has evicted."""
    eager, lazy = replay("simple-eager", traces), replay("simple-lazy", traces)
    for report in (eager, lazy):
        assert report.problems() == []
        assert report.requests_finished == 300
        assert report.bytes_wrong == 0
        assert report.blocks_verified == report.hits["cpu"] + report.blocks_reloaded > 0
        assert report.hits["cpu"] > 0
    assert lazy.bytes_moved["gpu_to_cpu"] < eager.bytes_moved["gpu_to_cpu"]
