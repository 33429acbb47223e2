"""Our own engine keeps G-1 to G-7: whole replays over a tier that checks the engine."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import kv_core
from kv_conformance.checker import Breach, EngineChecker, checking_spec
from kv_core.plugins import ENTRY_POINT_GROUP, TierRegistry
from kv_core.workload import read_trace, synthetic_trace
from kv_core.workload.replay import ReplayConfig, ReplayEngine

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.contract import TierSpec
    from kv_core.workload import Trace

FAULTS: dict[str, dict[str, Any]] = {
    "example": {"max_blocks": 500},
    "asynchronous": {"max_blocks": 500, "simulate_async": True},
    "hostile": {
        "max_blocks": 100_000,
        "seed": 7,
        "fail_rate": 0.05,
        "partial_rate": 0.1,
        "late_rate": 0.1,
        "forget_rate": 0.05,
        "lie_rate": 0.02,
        "raise_rate": 0.01,
    },
}


def _registry(
    monkeypatch: pytest.MonkeyPatch, breaches: list[Breach], checkers: list[EngineChecker]
) -> TierRegistry:
    """Install the example and the hostile tier with a checker in front."""
    plain = TierRegistry(
        [
            EntryPoint("example", "kv_tier_example", ENTRY_POINT_GROUP),
            EntryPoint("hostile", "kv_tier_example.hostile", ENTRY_POINT_GROUP),
        ]
    )
    entries = []
    for name in ("example", "hostile"):
        module = ModuleType(f"kv_checked_{name}")
        spec = checking_spec(plain.spec(name), breaches, checkers)

        def register(spec: TierSpec = spec) -> TierSpec:
            return spec

        register.__name__ = "kv_core_register_tier"
        module.__dict__["kv_core_register_tier"] = kv_core.hookimpl(register)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        entries.append(EntryPoint(name, module.__name__, ENTRY_POINT_GROUP))
    return TierRegistry(entries)


def _replay(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, kind: str, **fields: Any
) -> tuple[list[Breach], list[EngineChecker], ReplayEngine]:
    """Replay a trace over two checked tiers, with memory for a fraction of it."""
    breaches: list[Breach] = []
    checkers: list[EngineChecker] = []
    tier = {"type": "hostile" if kind == "hostile" else "example", **FAULTS[kind]}
    config = ReplayConfig(
        **{
            "gpu_blocks": 600,
            "cpu_bytes": 2**20,
            "secondary_tiers": [tier, {**tier, "name": "second"}],
            "engine_options": {
                "promotion_deadline_s": 0.5,
                "store_deadline_s": 1.0,
                "request_lookup_deadline_s": 1.0,
                "degraded_backoff_s": 0.02,
                "quarantine_grace_s": 0.5,
            },
            **fields,
        }
    )
    engine = ReplayEngine(trace, config, registry=_registry(monkeypatch, breaches, checkers))

    def begin_step() -> None:
        for checker in checkers:
            checker.begin_step()

    try:
        report = engine.run(between_steps=begin_step)
    finally:
        engine.shutdown()
    assert report.problems() == []
    return breaches, checkers, engine


@pytest.mark.parametrize("kind", list(FAULTS))
def test_the_engine_keeps_its_guarantees(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """No breach in a replay in which blocks are stored, evicted and promoted all the time."""
    trace = synthetic_trace("mixed", seed=3, num_requests=60, block_tokens=16)
    breaches, checkers, _ = _replay(monkeypatch, trace, kind)
    assert breaches == []
    assert len(checkers) == 2
    assert all(checker.jobs > 20 for checker in checkers)
    assert [checker.unreported for checker in checkers] == [frozenset(), frozenset()]


@pytest.mark.traces
def test_the_engine_keeps_its_guarantees_on_a_recorded_trace(
    monkeypatch: pytest.MonkeyPatch, traces: Path
) -> None:
    """No breach on requests as they came."""
    trace = read_trace(traces / "mooncake" / "conversation_trace.jsonl", limit=300)
    fields = {"gpu_blocks": 4096, "cpu_bytes": 2**23, "block_bytes": 4096}
    breaches, checkers, _ = _replay(monkeypatch, trace, "asynchronous", **fields)
    assert breaches == []
    assert all(checker.jobs > 100 for checker in checkers)
