"""Without tiers it is a CPU manager; with tiers it announces, counts and ends in order."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import TYPE_CHECKING

import pytest

from kv_core.contract import (
    OffloadingEvent,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from kv_core.errors import EngineStateError, RegionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey


def test_without_tiers_it_is_a_cpu_manager(
    start: Callable[..., Engine],
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """Store, hit, load and miss work; no job exists and no work is pending."""
    engine = start(num_tiers=0)
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.offer("a", keys[0]) == [0]
    assert engine.ask("a", keys[0]) == ["pending"]
    engine.manager.complete_store(keys[:1], ReqContext("a"))
    assert engine.ask("b", keys[0]) == ["hit"]
    assert engine.load("b", keys[0]) == [expected(keys[0])]
    assert not engine.manager.has_pending_work()
    assert engine.manager.num_jobs_in_flight == 0


def test_a_load_of_what_is_not_there_is_refused(engine: Engine, keys: list[OffloadKey]) -> None:
    """The primary tier's check comes through."""
    with pytest.raises(EngineStateError, match=keys[0].hex()):
        engine.manager.prepare_load(keys[:1], ReqContext("a"))


def test_requests_and_steps_are_announced_to_every_tier(start: Callable[..., Engine]) -> None:
    """Each tier hears of new and finished requests, uses, and the end of each step, once."""
    engine = start(num_tiers=2)
    context = ScheduleEndContext(frozenset({"a"}), frozenset({"b"}))
    engine.manager.on_new_request(ReqContext("a"))
    engine.manager.touch([], ReqContext("a"))
    engine.manager.on_request_finished(ReqContext("a"))
    engine.manager.on_schedule_end(context)
    assert engine.log == [
        f"tier{index}.{method}"
        for method in ("on_new_request", "touch", "on_request_finished", "on_schedule_end")
        for index in (0, 1)
    ]
    assert engine.tiers[1].ends == [context]


def test_one_tier_that_wants_whole_requests_is_enough(start: Callable[..., Engine]) -> None:
    """The engine's answer binds the scheduler: REQUEST_LEVEL if any tier asks for it."""
    engine = start(num_tiers=2)
    assert engine.begin("a") == OffloadPolicy.BLOCK_LEVEL.value
    engine.tiers[1].policy = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
    assert engine.begin("b") == OffloadPolicy.REQUEST_LEVEL.value


def test_the_end_of_an_unknown_request_is_fine(engine: Engine) -> None:
    """Neither the manager nor a tier minds."""
    engine.finish("nobody")
    assert engine.log == ["tier0.on_request_finished"]


def test_statistics_name_the_tier_they_come_from(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The primary's, the manager's own, and ``tier.NAME.X`` of each tier, live."""
    engine = start(num_tiers=2)
    engine.tiers[1].stats = {"lookup_queries": 7.0}
    engine.store("a", *keys[:3])
    stats = engine.stats
    assert stats["blocks_total"] == 8
    assert stats["blocks_pinned"] == 3
    assert stats["tier.tier0.jobs_in_flight"] == stats["tier.tier1.jobs_in_flight"] == 1
    assert stats["tier.tier1.lookup_queries"] == 7
    assert stats["tier.tier0.contained_exceptions"] == 0
    assert stats["requests_waiting"] == stats["share_blocks_used"] == 0


def test_events_are_those_of_the_primary_then_of_each_tier(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Events come once, with their own medium; a promoted block is an event of the primary."""
    engine = start(num_tiers=1, enable_events=True)
    engine.store("a", keys[0])
    engine.tier.events = [OffloadingEvent((keys[5],), "tier0", removed=False)]
    assert engine.manager.take_events() == [
        OffloadingEvent((keys[0],), "CPU", removed=False),
        OffloadingEvent((keys[5],), "tier0", removed=False),
    ]
    engine.promote("b", keys[1])
    assert engine.manager.take_events() == []
    assert engine.ask("b", keys[1]) == ["hit"]
    assert engine.manager.take_events() == [OffloadingEvent((keys[1],), "CPU", removed=False)]


def test_a_failed_promotion_emits_nothing(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Neither stored nor removed: the block never was there."""
    engine = start(enable_events=True)
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    engine.tier.finish(engine.tier.loads[0], good=())
    engine.end_step()
    assert engine.manager.take_events() == []


# -- the end ------------------------------------------------------------------------------------


def test_tiers_end_before_the_primary(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """All drain, so that what is confirmed reaches them; all close; then the view goes."""
    engine = start(num_tiers=2)
    engine.store("a", keys[0])
    engine.log.clear()
    engine.manager.shutdown()
    assert engine.log == [
        "tier0.drain_jobs",
        "tier1.drain_jobs",
        "tier0.get_finished_jobs",
        "tier1.get_finished_jobs",
        "tier0.shutdown",
        "tier0.get_finished_jobs",
        "tier1.shutdown",
        "tier1.get_finished_jobs",
        "primary.shutdown",
    ]
    assert keys[0] in engine.tiers[1].blocks
    with pytest.raises(ValueError, match="released"):
        engine.primary.get_kv_memoryview().tobytes()


def test_shutdown_is_idempotent(engine: Engine) -> None:
    """A second call reaches no tier."""
    engine.manager.shutdown()
    engine.log.clear()
    engine.manager.shutdown()
    assert engine.log == []


def test_a_stuck_job_keeps_the_primary_mapped(engine: Engine, keys: list[OffloadKey]) -> None:
    """Pages that a tier cannot let go of are never taken from under it."""
    engine.store("a", keys[0])
    engine.tier.stuck = (engine.tier.stores[0].job_id,)
    engine.manager.shutdown()
    assert "primary.shutdown" not in engine.log
    assert len(engine.primary.get_kv_memoryview().tobytes()) == 8 * 64


def test_a_view_that_is_still_in_use_can_be_released_later(engine: Engine) -> None:
    """A leaked export is an error that names its cause, and a later call makes up for it."""
    leaked = PickleBuffer(engine.primary.get_kv_memoryview())
    with pytest.raises(RegionError, match="export"):
        engine.manager.shutdown()
    leaked.release()
    engine.manager.shutdown()
    assert engine.log.count("tier0.shutdown") == 1
    assert engine.log[-1] == "primary.shutdown"
