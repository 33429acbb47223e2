"""Blocks found below come up: one job per tier and request, at the end of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_core.contract import ReqContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey


def test_a_found_block_gets_a_slot_at_once_and_its_job_at_the_end_of_the_step(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """The lookup reserves; nothing moves within the step, and the engine must go on."""
    engine.tier.has(*keys[:2])
    assert engine.ask("a", *keys[:2]) == ["pending", "pending"]
    assert engine.stats["blocks_writing"] == 2
    assert engine.tier.jobs == {}
    assert engine.manager.has_pending_work()
    engine.end_step()
    (job,) = engine.tier.loads
    assert job.keys == (keys[0], keys[1])
    assert job.block_ids.tolist() == [0, 1]
    assert job.is_promotion
    assert job.req_context == ReqContext("a")
    assert job.submit_time == engine.clock.now


def test_there_is_one_job_for_each_tier_and_request(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """In the order of the first question; loads come before the tiers' end of step."""
    engine = start(num_blocks=16, num_tiers=2)
    engine.tiers[0].has(keys[0], keys[1], keys[3])
    engine.tiers[1].has(keys[2], keys[4])
    assert engine.ask("a", *keys[:3]) == ["pending"] * 3
    assert engine.ask("b", *keys[:5]) == ["pending"] * 5
    engine.log.clear()
    engine.end_step()
    assert [(job.keys, job.req_context.req_id) for job in engine.tiers[0].loads] == [
        ((keys[0], keys[1]), "a"),
        ((keys[3],), "b"),
    ]
    assert [(job.keys, job.req_context.req_id) for job in engine.tiers[1].loads] == [
        ((keys[2],), "a"),
        ((keys[4],), "b"),
    ]
    assert engine.log == [
        "tier0.submit_load",
        "tier1.submit_load",
        "tier0.submit_load",
        "tier1.submit_load",
        "tier0.on_schedule_end",
        "tier1.on_schedule_end",
    ]


def test_loads_are_split_at_the_tiers_limit(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Parts are independent: one can succeed while another is still on its way."""
    engine = start(num_blocks=16, max_job_keys=2)
    engine.tier.has(*keys[:5])
    engine.ask("a", *keys[:5])
    engine.end_step()
    assert [job.keys for job in engine.tier.loads] == [
        (keys[0], keys[1]),
        (keys[2], keys[3]),
        (keys[4],),
    ]
    engine.tier.finish(engine.tier.loads[1])
    assert engine.ask("a", *keys[:5]) == ["pending", "pending", "hit", "hit", "pending"]


def test_a_promoted_block_is_a_hit_with_the_tiers_bytes(
    engine: Engine,
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """The answer turns at the first lookup after the result; then the load finds the bytes."""
    engine.promote("a", keys[0])
    assert engine.ask("a", keys[0]) == ["hit"]
    assert engine.load("a", keys[0]) == [expected(keys[0])]
    assert not engine.manager.has_pending_work()


def test_a_promotion_is_asked_for_once_whoever_waits(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Other requests find the reservation; the tier is not asked again."""
    engine.tier.has(keys[0])
    assert engine.ask("a", keys[0]) == ["pending"]
    assert engine.ask("b", keys[0]) == ["pending"]
    engine.end_step()
    assert engine.ask("b", keys[0]) == ["pending"]
    engine.end_step()
    assert len(engine.tier.loads) == 1
    assert engine.tier.lookups == [(keys[0], "a")]


def test_a_promoted_block_is_not_cascaded(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Promotions go up only; other tiers are not given a copy."""
    engine = start(num_tiers=2)
    engine.promote("a", keys[0])
    engine.end_step()
    assert engine.tiers[0].stores == engine.tiers[1].stores == []


def test_the_level_of_a_hit_is_the_tier_for_the_request_that_promoted_it(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """A CPU hit for everybody else, and for itself once it is loaded."""
    engine.promote("a", keys[0])
    engine.ask("a", keys[0])
    assert engine.manager.hit_level(keys[0], ReqContext("a")) == "tier0"
    assert engine.manager.hit_level(keys[0], ReqContext("b")) == "cpu"
    engine.manager.prepare_load(keys[:1], ReqContext("a"))
    assert engine.manager.hit_level(keys[0], ReqContext("a")) == "tier0"
    engine.manager.complete_load(keys[:1], ReqContext("a"))
    assert engine.manager.hit_level(keys[0], ReqContext("a")) == "cpu"


def test_the_level_is_the_tiers_only_once_delivered(engine: Engine, keys: list[OffloadKey]) -> None:
    """dynamo#15079: a promotion on its way, or failed, counts as no hit of the tier."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    assert engine.manager.hit_level(keys[0], ReqContext("a")) == "cpu"
    engine.tier.finish(engine.tier.loads[0], good=())
    engine.end_step()
    assert engine.manager.hit_level(keys[0], ReqContext("a")) == "cpu"


def test_a_promotion_evicts_what_nobody_needs(engine: Engine, keys: list[OffloadKey]) -> None:
    """The coldest unpinned block goes, never one that this step answered as a hit."""
    engine.store("x", *keys[:8])
    engine.tier.finish_all()
    engine.end_step()
    assert engine.ask("y", keys[7]) == ["hit"]
    engine.tier.answers.clear()
    engine.tier.has(keys[10])
    assert engine.ask("a", keys[10]) == ["pending"]
    assert engine.ask("y", keys[7], keys[6]) == ["hit", "miss"]


# -- which tier ---------------------------------------------------------------------------------


def test_the_first_tier_that_has_the_block_is_used(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Order is the order of the configuration; those behind are not asked."""
    engine = start(num_tiers=3)
    engine.tiers[1].has(keys[0])
    engine.tiers[2].has(keys[0])
    assert engine.ask("a", keys[0]) == ["pending"]
    engine.end_step()
    assert [len(tier.lookups) for tier in engine.tiers] == [1, 1, 0]
    assert [len(tier.loads) for tier in engine.tiers] == [0, 1, 0]


def test_a_yes_further_down_beats_an_unknown_above(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Nobody waits for a tier that may not have what another one has."""
    engine = start(num_tiers=2)
    engine.tiers[0].answers[keys[0]] = None
    engine.tiers[1].has(keys[0])
    assert engine.ask("a", keys[0]) == ["pending"]
    engine.end_step()
    assert len(engine.tiers[1].loads) == 1


def test_an_unknown_and_no_yes_is_retry(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Whichever tier does not know; nothing is reserved, and all are asked again."""
    engine = start(num_tiers=2)
    engine.tiers[0].answers[keys[0]] = None
    engine.tiers[1].answers[keys[1]] = None
    assert engine.ask("a", *keys[:3]) == ["retry", "retry", "miss"]
    assert engine.stats["blocks_writing"] == 0
    engine.end_step()
    engine.tiers[0].answers[keys[0]] = False
    engine.tiers[1].has(keys[1])
    assert engine.ask("a", *keys[:3]) == ["miss", "pending", "miss"]


def test_a_hit_in_the_primary_asks_no_tier(engine: Engine, keys: list[OffloadKey]) -> None:
    """Neither does a block that is being written."""
    engine.store("a", keys[0])
    engine.offer("a", keys[1])
    assert engine.ask("b", *keys[:2]) == ["hit", "pending"]
    assert engine.tier.lookups == []


def test_results_are_polled_once_per_step(engine: Engine, keys: list[OffloadKey]) -> None:
    """Lookups and the end of the step share one poll; a step without lookups has one, too."""
    engine.store("a", keys[0])
    engine.log.clear()
    engine.ask("b", *keys[1:4])
    engine.end_step()
    assert engine.log.count("tier0.get_finished_jobs") == 1
    engine.end_step()
    assert engine.log.count("tier0.get_finished_jobs") == 2
