"""Rule 4: promotions do not starve stores, and some request always completes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, RealEngine

    from kv_core.contract import OffloadKey


def test_what_the_oldest_alone_cannot_have_is_a_miss(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """vllm#50014: it runs with a shorter prefix, at the first block that does not fit."""
    engine.tier.has(*keys[:6])
    assert engine.ask("a", *keys[:6]) == ["pending"] * 4 + ["miss"] * 2


def test_what_no_waiting_helps_is_a_miss_for_younger_ones_too(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """A request that fills the share by itself does not wait for its turn with more."""
    engine.tier.answers[keys[20]] = None
    assert engine.ask("old", keys[20]) == ["retry"]
    engine.tier.has(*keys[:5])
    assert engine.ask("young", *keys[:5]) == ["pending"] * 4 + ["miss"]


def test_younger_requests_are_told_to_ask_again(engine: Engine, keys: list[OffloadKey]) -> None:
    """vllm#49902: they wait for the older ones instead of taking the primary apart."""
    engine.tier.has(*keys[:6])
    engine.ask("old", *keys[:4])
    assert engine.ask("young", keys[4]) == ["retry"]
    engine.end_step()
    engine.tier.finish_all()
    assert engine.ask("old", *keys[:4]) == ["hit"] * 4
    engine.load("old", *keys[:4])
    engine.end_step("old")
    assert engine.ask("young", keys[4]) == ["pending"]


def test_quarantined_slots_are_not_waited_for(engine: Engine, keys: list[OffloadKey]) -> None:
    """A tier may never report: the share that is left is the share."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    engine.clock.advance(10.0)
    engine.end_step()
    engine.finish("a")
    engine.tier.has(*keys[10:14])
    assert engine.ask("b", *keys[10:14]) == ["pending", "pending", "pending", "miss"]


def test_stores_have_what_is_left(engine: Engine, keys: list[OffloadKey]) -> None:
    """vllm#49952: promotions and leases at their limit leave four of eight slots to stores."""
    engine.promote("a", *keys[:4])
    engine.end_step()
    for index in range(8, 24, 4):
        engine.store("x", *keys[index : index + 4])
        engine.tier.finish_all()
        engine.end_step()
    assert engine.ask("a", *keys[:4]) == ["hit"] * 4


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
def test_a_primary_smaller_than_the_queue_makes_progress(
    start: Callable[..., Engine], keys: list[OffloadKey], num_blocks: int
) -> None:
    """sglang#33862: five requests of six blocks each; every one completes, in bounded steps."""
    engine = start(num_blocks=num_blocks)
    engine.tier.has(*keys[:30])
    wanted = {f"r{index}": keys[6 * index : 6 * index + 6] for index in range(5)}
    for req_id in wanted:
        engine.begin(req_id)
    loaded = {}
    for _ in range(60):
        scheduled = []
        for req_id, blocks in wanted.items():
            if req_id in loaded:
                continue
            hits = []
            answers = []
            for key in blocks:
                (answer,) = engine.ask(req_id, key)
                answers.append(answer)
                if answer == "miss":
                    break
                hits.append(key)
            if not {"pending", "retry"}.intersection(answers):
                loaded[req_id] = len(engine.load(req_id, *hits)) if hits else 0
                scheduled.append(req_id)
        engine.end_step(*scheduled)
        engine.tier.finish_all()
    assert loaded.keys() == wanted.keys()
    limit = max(1, num_blocks // 2)
    assert loaded["r0"] == limit
    assert engine.stats["share_blocks_used"] == engine.stats["requests_waiting"] == 0


def test_thousands_of_waiting_requests_cost_each_other_nothing(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A lookup without room looks at the youngest holder of leases, not at all who wait."""
    engine = start(num_blocks=8)
    engine.tier.has(*keys)
    engine.ask("old", *keys[:4])
    for index in range(2000):
        assert engine.ask(f"r{index}", keys[5]) == ["retry"]
    share = engine.manager._share
    assert len(share._holders) == len(share._ages) == 0
    assert engine.stats["requests_waiting"] == 2001


def test_a_real_tier_and_a_queue_larger_than_the_primary(
    start_real: Callable[..., RealEngine],
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """Four requests of four blocks over two slots of share: all end, with the right bytes."""
    engine = start_real(num_blocks=4)
    engine.has(*keys[:16])
    left = {f"r{index}": keys[4 * index : 4 * index + 4] for index in range(4)}

    def step() -> bool:
        for req_id, blocks in tuple(left.items()):
            answers = engine.ask(req_id, *blocks)
            if {"pending", "retry"}.intersection(answers):
                continue
            hits = blocks[: answers.index("miss")]
            assert len(hits) == 2
            assert engine.load(req_id, *hits) == [expected(key) for key in hits]
            del left[req_id]
        return not left

    engine.until(step)
    assert engine.stats["share_blocks_used"] == 0
