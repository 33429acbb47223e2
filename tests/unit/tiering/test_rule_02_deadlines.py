"""Rule 2: every wait has a deadline; what is late is quarantined, and may be adopted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import JobId, JobResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, RealEngine

    from kv_core.contract import JobMetadata, OffloadKey


def _stall(engine: Engine, *keys: OffloadKey, req_id: str = "a") -> JobMetadata:
    """Begin a load and let its deadline pass."""
    engine.tier.has(*keys)
    assert engine.ask(req_id, *keys) == ["pending"] * len(keys)
    engine.end_step()
    job = engine.tier.loads[-1]
    engine.clock.advance(10.0)
    engine.end_step()
    return job


def test_before_its_deadline_a_load_is_waited_for(engine: Engine, keys: list[OffloadKey]) -> None:
    """Ten seconds by default, to the end."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    engine.clock.advance(9.99)
    engine.end_step()
    assert engine.ask("a", keys[0]) == ["pending"]
    assert engine.stats["share_blocks_quarantined"] == 0


def test_past_its_deadline_every_waiter_sees_a_miss(engine: Engine, keys: list[OffloadKey]) -> None:
    """vllm#49829: who asked for it, and who only found it; within the promotion deadline."""
    engine.tier.has(keys[0])
    assert engine.ask("a", keys[0]) == engine.ask("b", keys[0]) == ["pending"]
    engine.end_step()
    engine.tier.answers.clear()
    engine.clock.advance(10.0)
    engine.end_step()
    assert engine.ask("a", keys[0]) == engine.ask("b", keys[0]) == ["miss"]


def test_the_same_tier_is_not_tried_again_for_the_same_request(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """The tier still says yes; the request goes without, another one may try."""
    _stall(engine, keys[0])
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.ask("b", keys[0]) == ["pending"]


def test_a_stalled_slot_is_quarantined(engine: Engine, keys: list[OffloadKey]) -> None:
    """Out of the map, out of use, and counted against the share of promotions."""
    _stall(engine, keys[0])
    stats = engine.stats
    assert stats["share_blocks_quarantined"] == stats["share_blocks_used"] == 1
    assert stats["blocks_orphaned"] == 1
    assert stats["blocks_writing"] == 0
    assert stats["promotions_abandoned"] == 1
    assert engine.tier_stat("engine_jobs_stalled") == 1


def test_a_new_store_takes_another_slot(engine: Engine, keys: list[OffloadKey]) -> None:
    """DATA-5: the tier may still write to the old one."""
    job = _stall(engine, keys[0])
    assert engine.store("b", keys[0]) != job.block_ids.tolist()
    assert engine.ask("c", keys[0]) == ["hit"]


def test_a_late_success_is_adopted(
    engine: Engine,
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """The bytes are there and the key is absent: a hit for whoever comes."""
    job = _stall(engine, keys[0])
    engine.tier.finish(job)
    assert engine.ask("b", keys[0]) == ["hit"]
    assert engine.load("b", keys[0]) == [expected(keys[0])]
    assert engine.stats["promotions_adopted"] == 1
    assert engine.stats["promotions"] == 0
    assert engine.stats["share_blocks_used"] == engine.stats["blocks_orphaned"] == 0


def test_a_late_success_of_a_key_that_is_back_is_not_adopted(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """The slot is freed, the newer block stays."""
    job = _stall(engine, keys[0])
    (slot,) = engine.store("b", keys[0])
    engine.tier.finish(job)
    engine.end_step()
    assert engine.stats["promotions_adopted"] == 0
    assert engine.primary.block_id_of(keys[0]) == slot
    assert engine.stats["blocks_free"] == 7


def test_a_late_success_of_a_key_that_is_being_written_is_not_adopted(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Completions are matched by slot and generation, never by key alone."""
    job = _stall(engine, keys[0])
    engine.offer("b", keys[0])
    engine.tier.finish(job)
    assert engine.ask("c", keys[0]) == ["pending"]
    assert engine.stats["blocks_writing"] == 1
    assert engine.stats["blocks_free"] == 7


@pytest.mark.parametrize("how", ["cache", "epoch"])
def test_a_late_success_from_before_a_reset_is_not_adopted(
    engine: Engine, keys: list[OffloadKey], how: str
) -> None:
    """vllm#9744: the block is of other weights, or was to be forgotten."""
    job = _stall(engine, keys[0])
    tier = engine.tier
    tier.stuck = (job.job_id,)
    if how == "cache":
        engine.manager.reset_cache()
    else:
        engine.manager.reset(1)
    engine.manager.on_reset_flushed()
    assert engine.stats["share_blocks_quarantined"] == 1
    tier.finish(job)
    engine.end_step()
    engine.tier.answers.clear()
    assert engine.ask("b", keys[0]) == ["miss"]
    assert engine.stats["promotions_adopted"] == 0
    assert engine.stats["blocks_free"] == 8


def test_a_late_failure_frees_the_slot(engine: Engine, keys: list[OffloadKey]) -> None:
    """Nothing becomes readable."""
    job = _stall(engine, keys[0])
    engine.tier.finish(job, good=())
    engine.end_step()
    assert engine.stats["blocks_free"] == 8
    assert engine.stats["share_blocks_used"] == engine.stats["promotions_adopted"] == 0


def test_a_late_partial_success_is_adopted_in_part(engine: Engine, keys: list[OffloadKey]) -> None:
    """Rule 6 holds for late results, too."""
    job = _stall(engine, *keys[:3])
    engine.tier.finish(job, good=keys[1:2])
    engine.tier.answers.clear()
    assert engine.ask("b", *keys[:3]) == ["miss", "hit", "miss"]
    assert engine.stats["blocks_free"] == 7


def test_late_duplicates_and_unknown_results_are_ignored(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """The slot may be somebody else's by the second time."""
    job = _stall(engine, keys[0])
    result = engine.tier.finish(job)
    engine.end_step()
    engine.store("x", *keys[10:18])
    engine.tier.results += [result, JobResult(JobId(4711), success=True)]
    engine.end_step()
    assert engine.tier_stat("ignored_results") == 2
    assert engine.stats["share_blocks_used"] == 0
    assert engine.stats["blocks_pinned"] == 8


def test_stalls_in_a_row_degrade_the_tier(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Quarantine is bounded: after the third, no further slot is given to it."""
    engine = start(num_blocks=16)
    for index in range(3):
        _stall(engine, keys[index], req_id=f"r{index}")
    assert engine.health() == "degraded"
    assert engine.stats["share_blocks_quarantined"] == 3
    assert engine.ask("b", keys[5]) == ["miss"]


def test_a_tier_that_loses_jobs_now_and_then_cannot_take_the_share(
    start: Callable[..., Engine], keys: list[OffloadKey], caplog: pytest.LogCaptureFixture
) -> None:
    """It never fails three times in a row; with a third of the share overdue it gets no more."""
    engine = start(num_blocks=24, num_tiers=2)
    losing, healthy = engine.tiers
    for index in range(4):
        losing.has(keys[20 + index])
        engine.ask("good", keys[20 + index])
        engine.end_step()
        losing.finish(losing.loads[-1])
        assert engine.ask("good", keys[20 + index]) == ["hit"]
        engine.load("good", keys[20 + index])
        engine.finish("good")
        _stall(engine, keys[index], req_id=f"r{index}")
    assert engine.health() == "healthy"
    assert engine.stats["share_blocks_quarantined"] == 4
    assert engine.tier_stat("overdue_blocks") == 4
    losing.has(keys[10])
    assert engine.ask("b", keys[10]) == ["miss"]
    healthy.has(keys[11])
    assert engine.ask("b", keys[11]) == ["pending"]
    (message,) = [text for text in caplog.messages if "gets no more work" in text]
    assert message.startswith("tier 'tier0' holds 4 block(s) of jobs")


def test_a_tier_that_reports_overdue_jobs_gets_work_again(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Late is better than never: the slots are back, and so is the tier."""
    engine = start(num_blocks=4)
    job = _stall(engine, keys[0], req_id="a")
    engine.tier.has(keys[1])
    assert engine.ask("b", keys[1]) == ["miss"]
    engine.end_step()
    engine.tier.finish(job)
    engine.end_step()
    assert engine.tier_stat("overdue_blocks") == 0
    assert engine.ask("c", keys[1]) == ["pending"]


def test_overdue_stores_count_as_well(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """Stores that are never reported pin their slots; a tier may pin only so many."""
    engine = start(num_blocks=8, store_deadline_s=5.0)
    engine.store("a", keys[0], keys[1])
    (lost,) = engine.tier.stores
    engine.clock.advance(5.1)
    engine.end_step()
    assert engine.tier_stat("overdue_blocks") == 2
    engine.store("b", keys[2])
    assert engine.tier.stores == [lost]
    assert engine.tier_stat("engine_blocks_skipped") == 1
    engine.tier.finish(lost)
    engine.end_step()
    # What it missed is stored when it is of use again.
    engine.store("c", keys[2], keys[3])
    assert [job.keys for job in engine.tier.stores[1:]] == [(keys[2],), (keys[3],)]


def test_a_tier_that_is_always_late_is_degraded(engine: Engine, keys: list[OffloadKey]) -> None:
    """A success past the deadline does not make up for the stall."""
    for index in range(3):
        job = _stall(engine, keys[index], req_id=f"r{index}")
        engine.tier.finish(job)
        engine.end_step()
    assert engine.health() == "degraded"


def test_a_store_past_its_deadline_keeps_its_pins_and_counts_as_stalled(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """DATA-2: the tier may still read; three in a row degrade it, and late results end it."""
    engine = start(store_deadline_s=5.0)
    for key in keys[:3]:
        engine.store("x", key)
    engine.clock.advance(5.0)
    engine.end_step()
    assert engine.tier_stat("engine_jobs_stalled") == 3
    assert engine.health() == "degraded"
    assert engine.stats["blocks_pinned"] == 3
    engine.tier.finish_all()
    engine.end_step()
    assert engine.stats["blocks_pinned"] == 0
    assert engine.health() == "degraded"


def test_a_tier_that_does_not_know_by_its_own_deadline_does_not_have_it(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """LOOK-2: absent, an error of the tier, and not asked again for that request."""
    engine = start(lookup_deadline_s=2.0, num_tiers=2)
    engine.tier.answers[keys[0]] = None
    assert engine.ask("a", keys[0]) == ["retry"]
    engine.clock.advance(2.0)
    assert engine.ask("a", keys[0]) == ["retry"]
    engine.clock.advance(0.1)
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.tier_stat("engine_errors") == 1
    asked = len(engine.tier.lookups)
    assert engine.ask("a", keys[0]) == ["miss"]
    assert len(engine.tier.lookups) == asked


def test_a_lost_job_keeps_an_idle_engine_stepping_for_its_grace_only(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Ten seconds of deadline and five of grace; then a lost job is no work any more."""
    _stall(engine, keys[0])
    engine.finish("a")
    engine.clock.advance(4.9)
    assert engine.manager.has_pending_work()
    engine.clock.advance(0.2)
    assert not engine.manager.has_pending_work()
    assert engine.manager.num_jobs_in_flight == 1


def test_a_tier_that_always_has_work_does_not_keep_an_idle_engine_stepping(
    engine: Engine,
) -> None:
    """Its own word counts for the grace time after the last request and job."""
    engine.tier.pending = True
    engine.begin("a")
    engine.clock.advance(100.0)
    assert engine.manager.has_pending_work()
    engine.finish("a")
    assert engine.manager.has_pending_work()
    engine.clock.advance(5.1)
    assert not engine.manager.has_pending_work()


def test_a_real_stalled_read_is_quarantined_and_adopted(
    start_real: Callable[..., RealEngine],
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """The disk hangs: waiters go on after the deadline; when it is back, the block is used."""
    engine = start_real()
    engine.has(keys[0])
    engine.shut("read")
    assert engine.ask("a", keys[0]) == engine.ask("b", keys[0]) == ["pending"]
    engine.end_step()
    engine.entered("read")
    engine.clock.advance(10.0)
    engine.end_step()
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.stats["blocks_orphaned"] == engine.stats["share_blocks_quarantined"] == 1
    engine.finish("a")
    engine.finish("b")
    engine.open_gates()
    engine.until(lambda: engine.stats["promotions_adopted"] == 1)
    assert engine.stats["share_blocks_used"] == 0
    assert engine.ask("c", keys[0]) == ["hit"]
    assert engine.load("c", keys[0]) == [expected(keys[0])]


def test_a_real_stalled_read_is_freed_when_it_fails_late(
    start_real: Callable[..., RealEngine], keys: list[OffloadKey]
) -> None:
    """The slot is back in use, and nothing was adopted."""
    engine = start_real()
    engine.has(keys[0])
    engine.shut("read")
    engine.ask("a", keys[0])
    engine.end_step()
    engine.entered("read")
    engine.clock.advance(10.0)
    engine.end_step()
    assert engine.stats["blocks_free"] == 7
    engine.gated.broken = {"read"}
    engine.open_gates()
    engine.until(lambda: engine.stats["blocks_free"] == 8)
    assert engine.stats["promotions_adopted"] == engine.stats["share_blocks_used"] == 0


def test_a_real_stalled_read_survives_a_reset(
    start_real: Callable[..., RealEngine], keys: list[OffloadKey]
) -> None:
    """Its drain ends without it; the slot stays out of use, and its late block is not adopted."""
    engine = start_real()
    engine.has(keys[0])
    engine.shut("read")
    engine.ask("a", keys[0])
    engine.end_step()
    engine.entered("read")
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    assert engine.stats["blocks_free"] == 7
    engine.open_gates()
    engine.until(lambda: engine.stats["blocks_free"] == 8)
    assert engine.stats["promotions_adopted"] == 0
    assert engine.stats["promotions_discarded"] == 1
