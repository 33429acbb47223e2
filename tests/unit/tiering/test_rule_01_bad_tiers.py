"""Rule 1: a failed or slow tier costs a recompute, never a request or the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import JobErrorKind, ReqContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, RealEngine

    from kv_core.contract import OffloadKey


def _fail_loads(engine: Engine, *keys: OffloadKey) -> None:
    for key in keys:
        engine.tier.has(key)
        engine.ask(f"r{key.hex()}", key)
        engine.end_step()
        engine.tier.finish(engine.tier.loads[-1], good=())
        engine.end_step()


def test_a_tier_whose_loads_fail_is_left_alone(engine: Engine, keys: list[OffloadKey]) -> None:
    """After three in a row it is not asked any more; requests see a miss at once."""
    _fail_loads(engine, *keys[:3])
    assert engine.health() == "degraded"
    asked = len(engine.tier.lookups)
    assert engine.ask("b", keys[5]) == ["miss"]
    assert len(engine.tier.lookups) == asked


def test_good_stores_do_not_hide_bad_loads(engine: Engine, keys: list[OffloadKey]) -> None:
    """A tier that only takes and never gives is degraded all the same."""
    for index in range(3):
        _fail_loads(engine, keys[index])
        engine.store("x", keys[10 + index])
        engine.tier.finish_all()
        engine.end_step()
    assert engine.health() == "degraded"


def test_a_tier_whose_lookups_raise_is_left_alone(engine: Engine, keys: list[OffloadKey]) -> None:
    """Three exceptions, then no call; an answer in between ends the row."""
    engine.tier.raising.add("lookup")
    engine.ask("a", keys[0], keys[1])
    engine.tier.raising.clear()
    engine.ask("a", keys[2])
    engine.tier.raising.add("lookup")
    assert engine.ask("a", *keys[3:10]) == ["miss"] * 7
    assert len(engine.tier.lookups) == 6
    assert engine.tier_stat("contained_exceptions") == 5
    assert engine.health() == "degraded"


def test_a_degraded_tier_is_probed_with_one_block(engine: Engine, keys: list[OffloadKey]) -> None:
    """The other reservations go back at once; success brings the tier back."""
    _fail_loads(engine, *keys[:3])
    engine.clock.advance(1.0)
    engine.tier.has(*keys[5:8])
    assert engine.ask("a", *keys[5:8]) == ["pending"] * 3
    engine.end_step()
    assert engine.tier.loads[-1].keys == (keys[5],)
    assert engine.stats["share_blocks_used"] == engine.stats["blocks_writing"] == 1
    assert engine.ask("a", *keys[5:8]) == ["pending", "miss", "miss"]
    engine.end_step()
    engine.tier.finish_all()
    assert engine.ask("b", keys[5]) == ["hit"]
    assert engine.health() == "healthy"
    assert engine.ask("a", *keys[5:8]) == ["hit", "pending", "pending"]


def test_a_probe_that_fails_doubles_the_wait(engine: Engine, keys: list[OffloadKey]) -> None:
    """One, two, four seconds."""
    _fail_loads(engine, *keys[:3])
    for index, seconds in enumerate((1.0, 2.0, 4.0)):
        engine.clock.advance(seconds - 0.1)
        assert engine.ask("b", keys[5]) == ["miss"]
        engine.clock.advance(0.1)
        _fail_loads(engine, keys[10 + index])
    assert len(engine.tier.loads) == 6


def test_stores_to_a_degraded_tier_are_skipped_and_remembered(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """On probation one block goes as a probe; what it missed follows when it is used again."""
    engine.tier.raising.add("submit_store")
    for key in keys[:3]:
        engine.store("x", key)
    assert engine.health() == "degraded"
    engine.tier.raising.clear()
    engine.store("x", *keys[3:5])
    assert engine.tier.stores == []
    assert engine.tier_stat("engine_blocks_skipped") == 2
    engine.clock.advance(4.0)
    engine.load("a", *keys[:5])
    assert [job.keys for job in engine.tier.stores] == [(keys[0],)]
    engine.tier.finish_all()
    engine.end_step()
    assert engine.health() == "healthy"
    engine.load("a", *keys[:5])
    assert sorted(engine.tier.stores[-1].keys) == sorted(keys[1:5])


def test_a_tier_that_refuses_jobs_does_not_lose_its_probation(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A batch that is refused half-way leaves no probe behind that nobody waits for."""
    engine = start(max_job_keys=1)
    engine.tier.raising.add("submit_store")
    engine.store("x", *keys[:6])
    assert engine.tier_stat("contained_exceptions") == 3
    engine.tier.raising.clear()
    engine.clock.advance(4.0)
    engine.store("x", keys[6])
    assert len(engine.tier.stores) == 1


def test_a_declining_tier_is_not_degraded(engine: Engine, keys: list[OffloadKey]) -> None:
    """Full is no failure."""
    for index in range(5):
        engine.clock.advance(10.0)
        engine.store("x", keys[index])
        engine.tier.finish(engine.tier.stores[-1], good=(), kind=JobErrorKind.DECLINED)
        engine.end_step()
    assert engine.health() == "healthy"
    assert engine.tier_stat("engine_blocks_declined") == 5


def test_other_tiers_go_on(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """What a degraded tier has, another one may have, too."""
    engine = start(num_tiers=2)
    _fail_loads(engine, *keys[:3])
    engine.tiers[1].has(keys[5])
    engine.tiers[0].has(keys[5])
    assert engine.ask("b", keys[5]) == ["pending"]
    engine.end_step()
    assert len(engine.tiers[1].loads) == 1
    assert (engine.health(0), engine.health(1)) == ("degraded", "healthy")


def test_every_change_of_health_is_in_the_metrics(engine: Engine, keys: list[OffloadKey]) -> None:
    """LMCache#5119: a failing tier does not report healthy."""
    assert (engine.tier_stat("health"), engine.tier_stat("health_changes")) == (0, 0)
    _fail_loads(engine, *keys[:3])
    assert (engine.tier_stat("health"), engine.tier_stat("health_changes")) == (1, 1)
    assert "a load failed" in engine.manager.tier_health()["tier0"][1]


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_real_tier_with_a_broken_disk(
    start_real: Callable[..., RealEngine], keys: list[OffloadKey], kind: str
) -> None:
    """EIO on every read or write: degraded after three, back after the first good probe."""
    engine = start_real()
    engine.has(*keys[:8])
    engine.gated.broken = {kind}
    for index in range(3):
        if kind == "read":
            assert engine.ask(f"r{index}", keys[index]) == ["pending"]
        else:
            engine.store(f"r{index}", keys[10 + index])
        engine.until(lambda: engine.manager.num_jobs_in_flight == 0)
    assert engine.health() == "degraded"
    assert engine.ask("late", keys[6]) == ["miss"]
    engine.gated.broken = set()
    engine.clock.advance(2.0)
    if kind == "read":
        assert engine.ask("late", keys[6]) == ["pending"]
    else:
        engine.store("late", keys[15])
    engine.until(lambda: engine.health() == "healthy")
    engine.manager.complete_store([], ReqContext("late"))
