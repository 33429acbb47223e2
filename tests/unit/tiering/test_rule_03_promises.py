"""Rule 3: what a lookup promised stays loadable: within the step, and across steps by leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_core.contract import ReqContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, RealEngine

    from kv_core.contract import OffloadKey


def _fill(engine: Engine, *keys: OffloadKey) -> None:
    """Store blocks, with their cascades done, and forget that the tier has them."""
    engine.store("x", *keys)
    engine.tier.finish_all()
    engine.end_step()
    engine.tier.answers.clear()


def test_a_hit_is_not_evicted_within_its_step(engine: Engine, keys: list[OffloadKey]) -> None:
    """vllm#39702, vllm#42289: neither by a store nor by a promotion, at 100 % pressure."""
    _fill(engine, *keys[:8])
    assert engine.ask("a", *keys[:8]) == ["hit"] * 8
    engine.tier.has(keys[20])
    assert engine.ask("b", keys[20]) == ["miss"]
    assert engine.offer("c", keys[21]) is None
    assert len(engine.load("a", *keys[:8])) == 8


def test_after_the_step_a_hit_of_a_request_that_does_not_wait_may_go(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """It was answered in full; whether it runs is not the engine's to know."""
    _fill(engine, *keys[:8])
    engine.ask("a", keys[0])
    engine.end_step()
    assert engine.stats["share_blocks_leased"] == 0
    assert engine.offer("c", *keys[20:28]) is not None


def test_hits_of_a_waiting_request_are_leased(engine: Engine, keys: list[OffloadKey]) -> None:
    """vllm#54914: while its other blocks come up, the first ones stay."""
    _fill(engine, *keys[:4])
    engine.tier.has(keys[4])
    assert engine.ask("a", *keys[2:5]) == ["hit", "hit", "pending"]
    engine.end_step()
    assert engine.stats["share_blocks_leased"] == 2
    assert engine.offer("c", *keys[20:25]) is not None
    engine.tier.finish_all()
    assert engine.ask("a", *keys[2:5]) == ["hit"] * 3


def test_leases_reservations_and_quarantine_stay_within_the_share(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Four of eight slots, whatever they are used for."""
    _fill(engine, *keys[:6])
    engine.tier.has(keys[10])
    engine.ask("a", keys[10])
    engine.end_step()
    engine.clock.advance(10.0)
    engine.end_step()
    engine.tier.has(keys[11])
    assert engine.ask("b", *keys[:6], keys[11]) == ["hit"] * 6 + ["pending"]
    engine.end_step()
    stats = engine.stats
    assert stats["share_blocks_quarantined"] == stats["share_blocks_reserved"] == 1
    assert stats["share_blocks_leased"] == 2
    assert stats["share_blocks_used"] == stats["share_blocks_limit"] == 4


def test_an_older_request_takes_the_lease_of_a_younger_one(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """The younger one's block may be evicted then; it is told the truth at its next question."""
    engine.begin("old")
    engine.promote("young", *keys[:4])
    engine.end_step()
    engine.tier.answers.clear()
    engine.tier.has(keys[9])
    assert engine.offer("x", *keys[20:24]) is not None
    assert engine.ask("old", keys[9]) == ["pending"]
    assert engine.stats["leases_revoked"] == 1
    assert engine.ask("young", *keys[:4]) == ["hit", "hit", "hit", "miss"]


def test_a_lease_ends_at_its_deadline_and_is_not_renewed(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A request that is never scheduled does not hold memory for ever."""
    engine = start(lease_deadline_s=60.0, request_lookup_deadline_s=1000.0)
    engine.promote("a", *keys[:2])
    engine.end_step()
    assert engine.stats["share_blocks_leased"] == 2
    engine.clock.advance(60.0)
    engine.ask("a", *keys[:2])
    engine.end_step()
    assert engine.stats["share_blocks_leased"] == 2
    engine.clock.advance(0.1)
    for _ in range(3):
        assert engine.ask("a", *keys[:2]) == ["hit", "hit"]
        engine.end_step()
        assert engine.stats["share_blocks_leased"] == engine.stats["blocks_pinned"] == 0


def test_a_resumed_request_is_recognized_by_its_stores(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """A scheduler names requests that run for the first time, not those it resumes."""
    engine.promote("a", *keys[:2])
    engine.end_step()
    assert engine.stats["requests_waiting"] == 1
    engine.offer("a", keys[5])
    assert engine.stats["requests_waiting"] == engine.stats["share_blocks_leased"] == 0


def test_a_prefix_that_many_requests_share_is_leased_once(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Ten requests over the same two blocks leave room for one of their own."""
    _fill(engine, *keys[:2])
    engine.tier.answers.update(dict.fromkeys(keys[10:20]))
    for index in range(10):
        assert engine.ask(f"r{index}", *keys[:2], keys[10 + index]) == ["hit", "hit", "retry"]
    engine.end_step()
    assert engine.stats["share_blocks_leased"] == 2
    assert engine.stats["blocks_pinned"] == 2
    engine.tier.has(keys[30])
    assert engine.ask("late", keys[30]) == ["pending"]
    for index in range(10):
        engine.finish(f"r{index}")
    assert engine.stats["blocks_pinned"] == 0


def test_real_promotions_stay_until_they_are_loaded(
    start_real: Callable[..., RealEngine],
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """Between the promotion and the load, stores and promotions press from all sides."""
    engine = start_real()
    engine.has(*keys[:3], keys[9])
    assert engine.ask("a", *keys[:3]) == ["pending"] * 3
    engine.until(lambda: engine.stats["share_blocks_leased"] == 3)
    for index in range(10, 30):
        if engine.offer("x", keys[index]) is not None:
            engine.manager.complete_store([keys[index]], ReqContext("x"))
        engine.ask("b", keys[9])
        engine.end_step()
    assert engine.ask("a", *keys[:3]) == ["hit"] * 3
    assert engine.load("a", *keys[:3]) == [expected(key) for key in keys[:3]]
    engine.until(lambda: engine.manager.num_jobs_in_flight == 0)
    assert engine.stats["share_blocks_leased"] <= 1
