"""Promotions take a share of the primary tier, and leases keep what was promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import ReqContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey


def _used(engine: Engine) -> float:
    return engine.stats["share_blocks_used"]


def test_reservations_stay_within_the_share(engine: Engine, keys: list[OffloadKey]) -> None:
    """vllm#49902: of eight slots four are for promotions; the rest is left to stores."""
    engine.tier.has(*keys[:8])
    assert engine.ask("a", *keys[:8])[:5] == ["pending"] * 4 + ["miss"]
    assert _used(engine) == 4
    assert engine.offer("b", *keys[10:14]) is not None
    assert engine.offer("b", keys[14]) is None


def test_the_oldest_waiting_request_is_told_miss_and_younger_ones_to_ask_again(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """vllm#49902: the oldest runs with a shorter prefix, so some request always completes."""
    engine.tier.has(*keys[:10])
    for req_id in ("old", "young"):
        engine.manager.on_new_request(ReqContext(req_id))
    assert engine.ask("young", keys[8]) == ["pending"]
    # What the younger one has under way comes free: the oldest waits for that, not for itself.
    assert engine.ask("old", *keys[:5]) == ["pending"] * 3 + ["retry"] * 2
    assert engine.ask("young", keys[9]) == ["retry"]
    engine.end_step()
    engine.tier.finish_all()
    # The younger one's lease goes to the oldest, which then fills the share all alone.
    assert engine.ask("old", *keys[:5]) == ["hit"] * 3 + ["pending", "miss"]
    assert engine.stats["leases_revoked"] == 1
    assert engine.ask("young", keys[9]) == ["retry"]
    engine.end_step()
    engine.tier.finish_all()
    assert engine.ask("old", *keys[:5]) == ["hit"] * 4 + ["miss"]
    engine.load("old", *keys[:4])
    engine.end_step("old")
    assert engine.ask("young", keys[8], keys[9]) == ["hit", "pending"]


def test_a_request_in_a_tiny_primary_makes_progress(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """sglang#33862: even one slot is enough for one block at a time."""
    engine = start(num_blocks=1)
    engine.promote("a", keys[0])
    assert engine.ask("a", *keys[:2]) == ["hit", "miss"]
    engine.load("a", keys[0])
    assert _used(engine) == 0


def test_a_primary_that_is_pinned_all_over_has_no_room_either(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Within the share, but without a slot: the only waiting request is not kept waiting."""
    engine.store("x", *keys[:8])
    engine.tier.has(keys[9])
    assert engine.ask("a", keys[9]) == ["miss"]
    assert _used(engine) == 0


def test_a_lease_keeps_a_promoted_block_until_its_request_loads_it(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """vllm#49952: neither other promotions nor stores evict it unread."""
    engine.promote("a", *keys[:4])
    assert engine.ask("a", *keys[:4]) == ["hit"] * 4
    engine.end_step()
    assert _used(engine) == 4
    assert engine.offer("b", *keys[10:14]) is not None
    assert engine.offer("b", keys[14]) is None
    engine.tier.has(keys[20])
    assert engine.ask("c", keys[20]) == ["retry"]
    assert engine.ask("a", *keys[:4]) == ["hit"] * 4


@pytest.mark.parametrize("how", ["prepare_load", "release", "finish", "scheduled", "reset"])
def test_a_lease_ends(engine: Engine, keys: list[OffloadKey], how: str) -> None:
    """vllm#35931: at its load, release, scheduling without a load, the request's end, a reset."""
    engine.promote("a", keys[0])
    engine.end_step()
    assert _used(engine) == 1
    assert engine.stats["blocks_pinned"] == 1
    context = ReqContext("a")
    if how == "prepare_load":
        engine.load("a", keys[0])
    elif how == "release":
        engine.manager.release(context)
    elif how == "finish":
        engine.manager.on_request_finished(context)
    elif how == "scheduled":
        engine.end_step("a")
    else:
        engine.manager.reset_cache()
    assert _used(engine) == 0
    assert engine.stats["blocks_pinned"] == 0
    assert engine.stats["requests_waiting"] == 0


def test_the_load_itself_pins_before_the_lease_ends(engine: Engine, keys: list[OffloadKey]) -> None:
    """There is no moment without a pin between the lease and the end of the copy."""
    engine.promote("a", keys[0])
    assert engine.ask("a", keys[0]) == ["hit"]
    engine.manager.prepare_load(keys[:1], ReqContext("a"))
    engine.end_step("a")
    assert engine.stats["blocks_pinned"] == 1
    assert engine.offer("b", *keys[10:17]) is not None
    assert engine.offer("b", keys[17]) is None


def test_a_request_that_stopped_waiting_gets_no_lease(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """A late result is cached like any block, and its part of the share is free."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    engine.manager.release(ReqContext("a"))
    assert _used(engine) == 1
    engine.tier.finish_all()
    engine.end_step()
    assert _used(engine) == 0
    assert engine.stats["blocks_evictable"] == 1


def test_a_request_that_ended_gets_no_lease(engine: Engine, keys: list[OffloadKey]) -> None:
    """Its promotion may still come in; then it is anybody's."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    engine.finish("a")
    engine.tier.finish_all()
    assert engine.ask("b", keys[0]) == ["hit"]
    assert _used(engine) == 0
    assert engine.manager.hit_level(keys[0], ReqContext("b")) == "cpu"


def test_a_failed_promotion_gives_its_part_of_the_share_back(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """vllm#50014: the slot, too."""
    engine.tier.has(*keys[:4])
    engine.ask("a", *keys[:4])
    engine.end_step()
    engine.tier.finish(engine.tier.loads[0], good=())
    engine.end_step()
    assert _used(engine) == 0
    assert engine.stats["blocks_free"] == 8


def test_the_whole_share_is_usable_again_afterwards(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Nothing of the account is lost over many rounds of mixed outcomes."""
    engine = start(degrade_after_failures=100)
    for index in range(0, 28, 4):
        part = keys[index : index + 4]
        engine.tier.has(*part)
        req_id = f"r{index}"
        assert engine.ask(req_id, *part) == ["pending"] * 4
        engine.end_step()
        engine.tier.finish(engine.tier.loads[-1], good=part[: index % 3])
        engine.end_step()
        engine.finish(req_id)
        assert _used(engine) == 0
