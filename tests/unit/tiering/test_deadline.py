"""No tier keeps a request waiting for longer than the deadline of its lookups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_core.contract import ReqContext, ScheduleEndContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey


def test_a_tier_that_never_knows_releases_every_request(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """vllm#49829: all waiting requests are told "miss" once their time is over."""
    engine.tier.answers = dict.fromkeys(keys)
    for req_id in "abc":
        assert engine.ask(req_id, *keys[:3]) == ["retry"] * 3
    engine.clock.advance(30)
    assert engine.ask("a", keys[0]) == ["retry"]
    engine.clock.advance(0.1)
    for req_id in "abc":
        assert engine.ask(req_id, *keys[:3]) == ["miss"] * 3
    assert engine.stats["lookup_deadlines_passed"] == 3


def test_a_load_that_never_ends_releases_every_request(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """vllm#49829: who promoted the block and who only found it pending, alike."""
    engine.tier.has(keys[0])
    assert engine.ask("a", keys[0]) == engine.ask("b", keys[0]) == ["pending"]
    engine.end_step()
    engine.clock.advance(31)
    assert engine.ask("a", keys[0]) == engine.ask("b", keys[0]) == ["miss"]


def test_a_store_that_never_ends_releases_every_request(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """vllm#49829: also without any tier."""
    engine = start(num_tiers=0, request_lookup_deadline_s=5)
    engine.offer("a", keys[0])
    assert engine.ask("b", keys[0]) == ["pending"]
    engine.clock.advance(5.1)
    assert engine.ask("b", keys[0]) == ["miss"]


def test_the_clock_runs_from_the_first_unknown_answer(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Time before it does not count; a request that never waited never runs out of time."""
    engine.manager.on_new_request(ReqContext("a"))
    engine.clock.advance(100)
    assert engine.ask("a", keys[0]) == ["miss"]
    engine.clock.advance(100)
    engine.tier.answers[keys[0]] = None
    assert engine.ask("a", keys[0]) == ["retry"]
    engine.clock.advance(29)
    assert engine.ask("a", keys[0]) == ["retry"]


def test_past_the_deadline_a_yes_is_still_a_yes(engine: Engine, keys: list[OffloadKey]) -> None:
    """What is ready is a hit; nothing new is begun, and the tier is not even asked."""
    engine.promote("a", keys[0])
    engine.clock.advance(31)
    engine.tier.has(keys[1])
    assert engine.ask("a", *keys[:2]) == ["hit", "miss"]
    assert engine.tier.lookups == [(keys[0], "a")]
    assert engine.ask("b", keys[1]) == ["pending"]


def test_a_request_that_runs_and_asks_again_gets_a_new_deadline(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """A preempted request waits anew."""
    engine.tier.answers[keys[0]] = None
    engine.ask("a", keys[0])
    engine.clock.advance(31)
    assert engine.ask("a", keys[0]) == ["miss"]
    engine.end_step("a")
    assert engine.ask("a", keys[0]) == ["retry"]
    assert engine.stats["lookup_deadlines_passed"] == 1


def test_a_request_that_is_preempted_has_waited_to_the_end(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """It was resumed without a block, which no scheduler says, and asks again minutes later."""
    engine.tier.answers[keys[0]] = None
    engine.ask("a", keys[0])
    engine.tier.answers[keys[0]] = False
    assert engine.ask("a", keys[0]) == ["miss"]
    engine.clock.advance(300)
    engine.manager.on_schedule_end(ScheduleEndContext(preempted_req_ids=frozenset({"a"})))
    engine.tier.answers[keys[1]] = None
    assert engine.ask("a", keys[1]) == ["retry"]
    assert engine.stats["lookup_deadlines_passed"] == 0


def test_each_request_has_its_own_deadline(engine: Engine, keys: list[OffloadKey]) -> None:
    """A later one waits on."""
    engine.tier.answers[keys[0]] = None
    engine.ask("a", keys[0])
    engine.clock.advance(20)
    engine.ask("b", keys[0])
    engine.clock.advance(20)
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.ask("b", keys[0]) == ["retry"]
