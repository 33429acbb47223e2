"""Whole replays over a tier that fails on purpose: every request finishes, no byte is wrong."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.plugins import ENTRY_POINT_GROUP, TierRegistry
from kv_core.workload import read_trace, synthetic_trace
from kv_core.workload.replay import ReplayConfig, replay_trace

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayReport

# Each fault alone, often enough to happen, and all of them together. The counter tells that it did.
FAULTS: dict[str, tuple[dict[str, float], tuple[str, ...]]] = {
    "raise": ({"raise_rate": 0.02}, ("faults_raised",)),
    "fail": ({"fail_rate": 0.2}, ("results_failed",)),
    "partial": ({"partial_rate": 0.3}, ("results_partial",)),
    "late": ({"late_rate": 0.3, "late_polls": 20}, ("results_late",)),
    "lose": ({"lose_rate": 0.05}, ("results_lost",)),
    "duplicate": ({"duplicate_rate": 0.5, "unknown_rate": 0.2}, ("results_duplicated",)),
    "lie": ({"lie_rate": 0.1}, ("lookups_lied",)),
    "forget": ({"forget_rate": 0.1}, ("lookups_forgotten",)),
    "everything": (
        {
            "raise_rate": 0.01,
            "fail_rate": 0.05,
            "partial_rate": 0.05,
            "late_rate": 0.05,
            "lose_rate": 0.02,
            "duplicate_rate": 0.1,
            "unknown_rate": 0.1,
            "lie_rate": 0.05,
            "forget_rate": 0.05,
        },
        ("faults_raised", "results_failed", "lookups_lied"),
    ),
}

# Short, so that a lost job does not hold the test up.
DEADLINES = {
    "promotion_deadline_s": 0.2,
    "store_deadline_s": 0.3,
    "request_lookup_deadline_s": 0.5,
    "degraded_backoff_s": 0.02,
    "degraded_backoff_max_s": 0.1,
    "quarantine_grace_s": 0.1,
}


def _registry() -> TierRegistry:
    return TierRegistry(
        [
            EntryPoint("example", "kv_tier_example", ENTRY_POINT_GROUP),
            EntryPoint("hostile", "kv_tier_example.hostile", ENTRY_POINT_GROUP),
        ]
    )


def _replay(trace: Trace, faults: dict[str, float], **fields: Any) -> ReplayReport:
    hostile = {"type": "hostile", "max_blocks": 100_000, "seed": 11, **faults}
    config = ReplayConfig(
        **{
            "gpu_blocks": 128,
            "cpu_bytes": 2**20,
            "secondary_tiers": [hostile],
            "engine_options": DEADLINES,
            **fields,
        }
    )
    return replay_trace(trace, config, registry=_registry())


def _check(report: ReplayReport, counters: tuple[str, ...]) -> None:
    assert report.bytes_wrong == 0
    assert report.requests_finished == report.requests
    accounted = sum(report.hits.values()) + report.misses
    assert accounted == report.blocks_requested
    for counter in counters:
        assert report.stats.get(f"tier.hostile.{counter}", 0) > 0, counter
    stats = report.stats
    assert stats["tier.hostile.engine_queries"] == sum(
        stats[f"tier.hostile.engine_{outcome}"] for outcome in ("hits", "misses", "errors")
    )
    # Slots that the tier may still touch stay within the share, and nothing else is left over.
    assert stats["share_blocks_reserved"] == stats["share_blocks_leased"] == 0
    assert stats["share_blocks_quarantined"] <= stats["share_blocks_limit"]


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_costs_hits_only(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each fault happens, and the JSON tells so (vllm#49176, vllm#49829, sglang#38428)."""
    caplog.set_level("CRITICAL")
    faults, counters = FAULTS[name]
    trace = synthetic_trace("mixed", seed=3, num_requests=250)
    _check(_replay(trace, faults), counters)


def test_a_tier_without_faults_serves_more(caplog: pytest.LogCaptureFixture) -> None:
    """The measure of what faults cost: the same replay without them."""
    caplog.set_level("CRITICAL")
    trace = synthetic_trace("mixed", seed=3, num_requests=250)
    honest, hostile = (
        _replay(trace, FAULTS[name][0] if name else {}) for name in ("", "everything")
    )
    assert honest.problems() == []
    assert honest.hits["hostile"] > hostile.hits["hostile"] > 0


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "limit", "gpu_blocks"),
    [
        ("mooncake/conversation_trace.jsonl", 300, 512),
        ("ragpulse/0_trace.jsonl", 500, 512),
        ("claude-code", 40, 4096),
    ],
)
def test_recorded_traces_survive_everything_at_once(
    name: str, limit: int, gpu_blocks: int, traces: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Real traffic over the worst tier: all requests finish with right bytes."""
    caplog.set_level("CRITICAL")
    trace = read_trace(traces / name, limit=limit)
    faults, _ = FAULTS["everything"]
    _check(_replay(trace, faults, gpu_blocks=gpu_blocks, cpu_bytes=8 * 2**20), ("faults_raised",))
