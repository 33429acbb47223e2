"""A reset empties the primary tier, whatever is in flight; tiers keep their data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_core.contract import ReqContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey


def test_a_reset_drains_the_tiers_and_forgets_every_block(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Cascades that were under way have reached the tier; all slots are free."""
    engine.store("a", *keys[:3])
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    assert set(engine.tier.blocks) == set(keys[:3])
    assert engine.stats["blocks_free"] == 8
    assert not engine.manager.has_pending_work()


def test_until_the_flush_a_missing_key_is_a_miss_and_nothing_is_promoted(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Workers may still be writing what is old: no slot is filled from below."""
    engine.tier.has(keys[0])
    engine.manager.reset_cache()
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.tier.lookups == []
    engine.manager.on_reset_flushed()
    assert engine.ask("a", keys[0]) == ["pending"]


def test_a_promotion_that_waits_for_the_end_of_the_step_is_given_up(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Its slot and share are free, no job follows, and it did not fail: it is asked for again."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.manager.reset_cache()
    assert engine.stats["share_blocks_used"] == 0
    assert engine.stats["blocks_free"] == 8
    engine.manager.on_reset_flushed()
    engine.end_step()
    assert engine.tier.loads == []
    assert engine.ask("a", keys[0]) == ["pending"]


def test_waiting_requests_become_schedulable(engine: Engine, keys: list[OffloadKey]) -> None:
    """vllm#48102: after a reset with jobs in flight nobody waits for what is gone."""
    engine.tier.has(keys[0])
    engine.offer("x", keys[1])
    assert engine.ask("a", *keys[:2]) == ["pending", "pending"]
    engine.end_step()
    engine.manager.reset_cache()
    assert engine.ask("a", *keys[:2]) == ["miss", "miss"]
    assert engine.stats["requests_waiting"] == 0
    assert engine.manager.num_jobs_in_flight == 0


def test_a_stuck_load_holds_its_slot_over_the_reset(engine: Engine, keys: list[OffloadKey]) -> None:
    """DATA-5: the slot is out of use until the tier reports; the late block is not adopted."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    (job,) = engine.tier.loads
    engine.tier.stuck = (job.job_id,)
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    assert engine.stats["blocks_orphaned"] == 1
    assert engine.manager.has_pending_work()
    assert engine.offer("b", *keys[10:17]) is not None
    assert engine.offer("b", keys[17]) is None
    engine.tier.finish(job)
    engine.end_step()
    assert engine.stats["blocks_orphaned"] == 0
    assert engine.stats["share_blocks_used"] == 0
    assert not engine.manager.has_pending_work()
    # It came too late, but it did not fail: the same request may have it promoted again.
    assert engine.ask("a", keys[0]) == ["pending"]


def test_a_stuck_cascade_holds_its_slot_over_the_reset(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """DATA-2: what a tier still reads is not overwritten."""
    engine.store("a", keys[0])
    engine.tier.stuck = (engine.tier.stores[0].job_id,)
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    assert engine.stats["blocks_free"] == 7
    engine.tier.finish_all()
    engine.end_step()
    assert engine.stats["blocks_free"] == 8


def test_leases_do_not_outlive_a_reset(engine: Engine, keys: list[OffloadKey]) -> None:
    """Neither do the names of the levels that blocks came from."""
    engine.promote("a", keys[0])
    engine.ask("a", keys[0])
    engine.manager.reset_cache()
    assert engine.stats["share_blocks_used"] == 0
    assert engine.stats["blocks_free"] == 8
    assert engine.manager.hit_level(keys[0], ReqContext("a")) == "cpu"


def test_stores_go_on_during_a_reset(
    engine: Engine,
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """New blocks are stored, cascaded and found between the reset and its flush."""
    engine.manager.reset_cache()
    engine.store("a", keys[0])
    assert len(engine.tier.stores) == 1
    assert engine.ask("b", keys[0]) == ["hit"]
    assert engine.load("b", keys[0]) == [expected(keys[0])]
