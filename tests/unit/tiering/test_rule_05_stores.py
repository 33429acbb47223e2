"""Rule 5: what was not stored is offered, or given to its tiers, again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import (
    JobErrorKind,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from kv_core.tiering import TierMode, TierOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, RealEngine

    from kv_core.contract import OffloadKey

WHOLE = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)


def _stored(engine: Engine, index: int = 0) -> list[tuple[OffloadKey, ...]]:
    return [job.keys for job in engine.tiers[index].stores]


# -- declined and lost --------------------------------------------------------------------------


def test_a_declined_batch_leaves_no_trace(engine: Engine, keys: list[OffloadKey]) -> None:
    """vllm#26329: nothing was reserved, and the same offer is taken once there is room."""
    engine.store("x", *keys[:8])
    assert engine.offer("a", *keys[10:12]) is None
    assert engine.stats["blocks_writing"] == 0
    engine.tier.finish_all()
    assert engine.offer("a", *keys[10:12]) is not None


def test_a_block_that_was_known_and_failed_is_named(engine: Engine, keys: list[OffloadKey]) -> None:
    """Whoever was told so offers it again; it is named once."""
    engine.offer("a", *keys[:2])
    assert engine.offer("b", *keys[:3]) is not None
    engine.manager.complete_store(keys[:2], ReqContext("a"), success=False)
    assert set(engine.manager.take_lost_keys()) == set(keys[:2])
    assert set(engine.manager.take_lost_keys()) == set()


def test_a_block_that_nobody_was_told_of_is_not_named(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """The request that failed to store it knows."""
    engine.offer("a", keys[0])
    engine.manager.complete_store(keys[:1], ReqContext("a"), success=False)
    assert set(engine.manager.take_lost_keys()) == set()


@pytest.mark.parametrize("how", ["failed", "stalled"])
def test_a_promotion_that_was_known_and_failed_is_named(
    engine: Engine, keys: list[OffloadKey], how: str
) -> None:
    """A promotion is a write as well."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.offer("b", keys[0])
    engine.end_step()
    if how == "failed":
        engine.tier.finish(engine.tier.loads[0], good=())
    else:
        engine.clock.advance(10.0)
    engine.end_step()
    assert set(engine.manager.take_lost_keys()) == {keys[0]}


def test_a_block_that_arrived_after_all_is_not_named(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Known is known; a later eviction is another matter."""
    engine.offer("a", keys[0])
    engine.offer("b", keys[0])
    engine.manager.complete_store(keys[:1], ReqContext("a"))
    assert set(engine.manager.take_lost_keys()) == set()


def test_a_completion_that_comes_twice_cascades_once(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Repetitions are harmless."""
    engine.store("a", *keys[:2])
    engine.manager.complete_store(keys[:2], ReqContext("a"))
    assert _stored(engine) == [(keys[0], keys[1])]


# -- what never reached a tier ------------------------------------------------------------------


def test_bytes_in_flight_are_bounded(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """Three blocks of 32 bytes; the rest is counted, remembered, and goes later."""
    engine = start(max_inflight_store_bytes=100)
    engine.store("x", *keys[:5])
    assert _stored(engine) == [tuple(keys[:3])]
    assert engine.tier_stat("inflight_store_bytes") == 96
    assert engine.tier_stat("engine_blocks_throttled") == 2
    assert engine.stats["blocks_missed_by_tiers"] == 2
    engine.tier.finish_all()
    engine.end_step()
    assert engine.tier_stat("inflight_store_bytes") == 0
    engine.offer("a", *keys[:5])
    assert _stored(engine)[1:] == [tuple(keys[3:5])]
    assert engine.stats["blocks_missed_by_tiers"] == 0


def test_one_block_always_fits_an_idle_tier(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A limit smaller than a block slows a tier down; it does not turn it off."""
    engine = start(max_inflight_store_bytes=1)
    engine.store("x", *keys[:3])
    assert _stored(engine) == [(keys[0],)]


def test_stores_are_dropped_under_pressure_and_remembered(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """After three failures nothing passes; after the half-life has done its work, it does."""
    for key in keys[:3]:
        engine.store("x", key)
        engine.tier.finish(engine.tier.stores[-1], good=(), kind=JobErrorKind.DECLINED)
    engine.end_step()
    engine.store("x", keys[3])
    assert len(engine.tier.stores) == 3
    assert engine.tier_stat("engine_blocks_dropped") == 1
    assert engine.tier_stat("store_drop_rate") == 1.0
    engine.clock.advance(4.0)
    engine.load("a", *keys[:4])
    assert sorted(_stored(engine)[-1]) == sorted(keys[:4])


@pytest.mark.parametrize("how", ["offered", "loaded"])
def test_what_failed_goes_again_when_it_is_used(
    start: Callable[..., Engine], keys: list[OffloadKey], how: str
) -> None:
    """Only the block that failed, and only to the tier that missed it."""
    engine = start(num_tiers=2)
    engine.store("x", *keys[:3])
    engine.tiers[0].finish(engine.tiers[0].stores[0], good=[keys[0], keys[2]])
    engine.tiers[1].finish_all()
    engine.end_step()
    assert engine.stats["blocks_missed_by_tiers"] == 1
    if how == "offered":
        engine.offer("a", *keys[:3])
    else:
        engine.load("a", *keys[:3])
    assert _stored(engine, 0)[1:] == [(keys[1],)]
    assert _stored(engine, 1)[1:] == []


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_what_is_missed_is_forgotten_with_the_block(
    engine: Engine, keys: list[OffloadKey], how: str
) -> None:
    """The memory is as small as the primary tier."""
    engine.store("x", keys[0])
    engine.tier.finish(engine.tier.stores[0], good=())
    engine.end_step()
    assert engine.stats["blocks_missed_by_tiers"] == 1
    if how == "evicted":
        engine.offer("x", *keys[10:18])
    else:
        engine.manager.reset_cache()
    assert engine.stats["blocks_missed_by_tiers"] == 0


def test_a_read_only_tier_is_never_stored_to(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """It is asked and loaded from; nothing is missed by it."""
    engine = start(options={"tier0": TierOptions(TierMode.READ_ONLY)})
    engine.tier.policy = WHOLE
    assert engine.begin("a") == "block_level"
    engine.store("a", *keys[:2])
    engine.load("b", *keys[:2])
    engine.promote("c", keys[5])
    assert engine.ask("c", keys[5]) == ["hit"]
    assert _stored(engine) == []
    assert engine.stats["blocks_missed_by_tiers"] == 0


def test_a_promoted_block_fills_the_tiers_above_that_ask_for_it(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Above its source, and only with ``fill_on_promotion``."""
    engine = start(
        num_tiers=4,
        options={name: TierOptions(fill_on_promotion=True) for name in ("tier1", "tier2", "tier3")},
    )
    engine.tiers[2].has(*keys[:2])
    engine.ask("a", *keys[:2])
    engine.end_step()
    engine.tiers[2].finish(engine.tiers[2].loads[0], good=[keys[0]])
    engine.end_step()
    assert [_stored(engine, index) for index in range(4)] == [[], [(keys[0],)], [], []]


# -- whole requests -----------------------------------------------------------------------------


def test_a_whole_request_gets_blocks_that_the_primary_had(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """For the tier that asks for it; the other one has them already."""
    engine = start(num_tiers=2)
    engine.tiers[1].policy = WHOLE
    engine.store("x", *keys[:2])
    assert engine.begin("a") == "request_level"
    engine.offer("a", *keys[:3])
    engine.manager.complete_store(keys[2:3], ReqContext("a"))
    assert _stored(engine, 0) == [(keys[0], keys[1]), (keys[2],)]
    assert _stored(engine, 1) == [(keys[0], keys[1]), (keys[0], keys[1]), (keys[2],)]
    assert engine.tiers[1].stores[1].req_context == ReqContext("a")


def test_a_write_pending_block_is_given_once_it_is_there(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """And the end of the request is held until then; an engine with parked blocks has work."""
    engine.offer("x", keys[0])
    engine.tier.policy = WHOLE
    engine.begin("a")
    engine.offer("a", keys[0])
    engine.finish("a")
    assert "tier0.on_request_finished" not in engine.log
    assert engine.manager.has_pending_work()
    engine.log.clear()
    engine.manager.complete_store(keys[:1], ReqContext("x"))
    assert engine.log == [
        "tier0.submit_store",
        "tier0.submit_store",
        "tier0.on_request_finished",
    ]
    assert [job.req_context.req_id for job in engine.tier.stores] == ["x", "a"]


def test_its_own_last_blocks_come_before_its_end(engine: Engine, keys: list[OffloadKey]) -> None:
    """The copy from the GPU may end after the request; each block is given once."""
    engine.tier.policy = WHOLE
    engine.begin("a")
    engine.offer("a", *keys[:2])
    engine.finish("a")
    engine.log.clear()
    engine.manager.complete_store(keys[:2], ReqContext("a"))
    assert engine.log == ["tier0.submit_store", "tier0.on_request_finished"]


@pytest.mark.parametrize("how", ["failed", "reset", "namesake"])
def test_a_held_end_comes_whatever_happens(
    engine: Engine, keys: list[OffloadKey], how: str
) -> None:
    """The block is lost, the cache is emptied, or the name is used again: once, and before that."""
    engine.tier.policy = WHOLE
    engine.begin("a")
    engine.offer("a", keys[0])
    engine.finish("a")
    engine.log.clear()
    if how == "failed":
        engine.manager.complete_store(keys[:1], ReqContext("a"), success=False)
    elif how == "reset":
        engine.manager.reset_cache()
    else:
        engine.begin("a")
        engine.manager.complete_store(keys[:1], ReqContext("a"))
        assert engine.log.index("tier0.on_request_finished") < engine.log.index(
            "tier0.on_new_request"
        )
    assert engine.log.count("tier0.on_request_finished") == 1
    assert not engine.manager._parking


def test_what_a_whole_request_tier_missed_is_not_given_twice(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Once, as a block of the request that offers it."""
    engine.store("x", keys[0])
    engine.tier.finish(engine.tier.stores[0], good=())
    engine.end_step()
    engine.tier.policy = WHOLE
    engine.begin("a")
    engine.offer("a", keys[0])
    assert len(engine.tier.stores) == 2
    assert engine.stats["blocks_missed_by_tiers"] == 0


# -- a real tier --------------------------------------------------------------------------------


def test_a_real_tier_gets_what_it_missed(
    start_real: Callable[..., RealEngine],
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """LMCache#4991: writes fail with EIO; the next use of the block stores it, bit-exact."""
    engine = start_real()
    engine.gated.broken = {"write"}
    engine.store("x", *keys[:2])
    engine.until(lambda: engine.stats["blocks_missed_by_tiers"] == 2)
    assert engine.gated.objects == {}
    engine.gated.broken = set()
    engine.load("a", *keys[:2])
    engine.until(lambda: engine.manager.num_jobs_in_flight == 0)
    assert engine.gated.objects == {key: expected(key) for key in keys[:2]}
    assert engine.stats["blocks_missed_by_tiers"] == 0


def test_a_real_stalled_tier_is_throttled(
    start_real: Callable[..., RealEngine], keys: list[OffloadKey]
) -> None:
    """llm-d-kv-cache#457: the disk hangs; what is on its way is bounded, and stores go on."""
    engine = start_real(max_inflight_store_bytes=64)
    engine.shut("write")
    engine.store("x", *keys[:2])
    engine.entered("write")
    for index in range(2, 20):
        engine.store("x", keys[index])
        engine.end_step()
    assert engine.stats["blocks_pinned"] == 2
    assert engine.tier_stat("engine_blocks_throttled") == 18
    engine.open_gates()
    engine.until(lambda: engine.stats["blocks_pinned"] == 0)
    assert len(engine.gated.objects) == 2
