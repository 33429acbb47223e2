"""Rule 7, its resets: one empties the primary, the other makes everything stored unreachable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import OffloadPolicy, RequestOffloadingContext
from kv_core.errors import TierOpenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, RealEngine

    from kv_core.contract import OffloadKey


def _reset(engine: Engine, epoch: int = 1) -> None:
    engine.manager.reset(epoch)
    engine.manager.on_reset_flushed()


def test_a_reset_of_the_cache_keeps_what_tiers_have(engine: Engine, keys: list[OffloadKey]) -> None:
    """The same tier, asked again."""
    engine.store("x", keys[0])
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    assert "tier0.open" not in engine.log
    assert engine.ask("a", keys[0]) == ["pending"]


def test_a_new_epoch_opens_every_tier_under_another_namespace(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """vllm#9744: drained, closed, opened; nothing that was stored before is found again."""
    engine = start(num_tiers=2)
    engine.store("x", keys[0])
    engine.log.clear()
    _reset(engine, epoch=7)
    assert [call for call in engine.log if call.startswith("tier0")] == [
        "tier0.drain_jobs",
        "tier0.get_finished_jobs",
        "tier0.shutdown",
        "tier0.get_finished_jobs",
        "tier0.open",
        "tier0.on_new_request",
    ]
    assert [tier.epoch for tier in engine.tiers] == [7, 7]
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.stats["blocks_free"] == 8


def test_a_load_in_flight_over_an_epoch_brings_nothing(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Old weights: its late success is discarded, its slot freed by the tier that is gone."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    former = engine.tier
    former.stuck = tuple(former.open_jobs)
    _reset(engine)
    assert engine.stats["blocks_orphaned"] == 1
    assert engine.manager.num_jobs_in_flight == 1
    former.finish_all()
    engine.end_step()
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.stats["blocks_free"] == 8
    assert engine.manager.num_jobs_in_flight == 0
    polls = engine.log.count("tier0.get_finished_jobs")
    engine.end_step()
    assert engine.log.count("tier0.get_finished_jobs") == polls


def test_the_late_failure_of_a_former_tier_is_not_held_against_the_new_one(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """The request may be served from the new namespace."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    former = engine.tier
    former.stuck = tuple(former.open_jobs)
    _reset(engine)
    former.finish(former.loads[0], good=())
    engine.end_step()
    engine.tier.has(keys[0])
    assert engine.ask("a", keys[0]) == ["pending"]


def test_live_requests_are_announced_to_the_new_tier(engine: Engine) -> None:
    """And its wishes are those that count."""
    engine.begin("a")
    engine.reopened_policy = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
    engine.log.clear()
    _reset(engine)
    assert engine.log.count("tier0.on_new_request") == 1
    state = engine.manager._requests.find("a")
    assert state is not None
    assert state.request_level_tiers == frozenset({0})


def test_counters_go_on_over_an_epoch(engine: Engine, keys: list[OffloadKey]) -> None:
    """Rule 10: what was counted stays counted."""
    engine.ask("a", keys[0])
    engine.store("x", *keys[1:3])
    _reset(engine)
    engine.ask("b", keys[0])
    assert engine.tier_stat("engine_misses") == 2
    assert engine.tier_stat("engine_blocks_stored") == 2


def test_a_degraded_tier_starts_healthy_under_a_new_epoch(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """It is another connection."""
    engine.tier.raising.add("lookup")
    engine.ask("a", *keys[:3])
    assert engine.health() == "degraded"
    _reset(engine)
    assert engine.health() == "healthy"
    assert engine.tier_stat("health_changes") == 2


@pytest.mark.parametrize("error", [TierOpenError("no such host"), ValueError("boom")])
def test_a_tier_that_cannot_be_opened_again_is_detached(
    engine: Engine, keys: list[OffloadKey], error: Exception
) -> None:
    """Under the namespace of the old weights it must not be asked; the engine goes on."""
    engine.tier.has(keys[0])
    engine.reopen_error = error
    _reset(engine)
    assert engine.health() == "detached"
    assert str(error) in engine.manager.tier_health()["tier0"][1]
    assert engine.ask("a", keys[0]) == ["miss"]
    engine.store("x", keys[1])
    assert engine.tier.stores == []
    engine.reopen_error = None
    _reset(engine, epoch=2)
    assert engine.health() == "healthy"


def test_without_a_way_to_open_tiers_they_are_detached(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Safe rather than useful."""
    engine = start(can_reopen=False)
    engine.tier.has(keys[0])
    _reset(engine)
    assert engine.health() == "detached"
    assert engine.ask("a", keys[0]) == ["miss"]


def test_a_real_tier_over_an_epoch_with_a_stalled_read(
    start_real: Callable[..., RealEngine], keys: list[OffloadKey]
) -> None:
    """Drain and shutdown end without the read; its slot is back once the disk is."""
    engine = start_real(quarantine_grace_s=0.1)
    engine.has(keys[0])
    engine.shut("read")
    engine.ask("a", keys[0])
    engine.end_step()
    engine.entered("read")
    former = engine.gated
    _reset(engine)
    assert engine.gated is not former
    assert engine.stats["blocks_orphaned"] == 1
    assert engine.ask("a", keys[0]) == ["miss"]
    for gate in former.gates.values():
        gate.set()
    engine.until(lambda: engine.stats["blocks_free"] == 8)
    assert engine.manager.num_jobs_in_flight == 0
    former.shutdown()
