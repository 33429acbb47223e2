"""Caches far too small: evictions, promotions, preemptions, resets and aborts under load.

The engine has room for three or four prompts, the CPU tier for two. All that does not fit has to
travel, and the tokens stay the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integration.vllm.conftest import Cache, Engine, Prompts, Reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.caches(
        "engine-fs-async",
        "tier-fs",
        matrix=[
            "engine-fs",
            "tier-fs-async",
            "engine-example",
            "tier-example",
            "engine-fsspec",
            "tier-memory",
            "engine-s3",
            "tier-s3",
            "engine-obstore-async",
            "engine-obj",
            "tier-obj",
            "vllm-fs",
        ],
    ),
]

GPU_BLOCKS = 40
CPU_BLOCKS = 24
CONVERSATIONS = 12
TURNS = 5
OPTIONS = {"num_gpu_blocks_override": GPU_BLOCKS, "max_model_len": 512}


@pytest.fixture(scope="module")
def engine(cache: Cache, start: Callable[..., Engine]) -> Iterator[Engine]:
    """Return an engine with too little of everything, whose loads can be held."""
    connector = cache.connector(blocks=CPU_BLOCKS, sabotaged=True)
    environment = {"KV_CORE_TEST_SABOTAGE": str(cache.sabotage)}
    options = OPTIONS | dict(cache.options)
    with start(connector=connector, options=options, environment=environment) as engine:
        assert engine.info["async_scheduling"] is bool(cache.options)
        yield engine


def conversations(prompts: Prompts, reference: Reference) -> list[list[list[int]]]:
    """Return the prompts of each turn: what was said before, the answer, and something new."""
    stems = [prompts(f"stem {number}", 128)[0] for number in range(4)]
    asked = [
        prompts(f"conversation {number}", 150, stem=stems[number % 4])[0]
        for number in range(CONVERSATIONS)
    ]
    turns = [asked]
    for turn in range(1, TURNS):
        answers = reference(asked).tokens
        asked = [
            prompts(
                f"turn {turn} of {number}",
                len(asked[number]) + 60,
                stem=[*asked[number], *answers[number]],
            )[0]
            for number in range(CONVERSATIONS)
        ]
        turns.append(asked)
    return turns


def test_conversations_that_grow(
    cache: Cache, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """Sixty prompts with shared stems and growing histories: all right, with all tiers at work."""
    before = cache.moved(engine)
    cached = 0
    for asked in conversations(prompts, reference):
        found = engine.generate(asked)
        assert found.tokens == reference(asked).tokens
        cached += sum(found.cached)
        # Blocks that find no room while storage is slow are not stored, which is as it should be
        # (one run on a busy disk stored 44 in all): so each turn begins with room.
        engine.settle()
    moved = cache.moved(engine) - before
    # Every slot of the CPU tier has been used several times over, so blocks were evicted.
    assert moved.stored + moved.promoted > 3 * CPU_BLOCKS, engine.metrics("kv_")
    assert moved.promoted > 0
    assert moved.tier_hits > 0
    assert moved.loaded > 0
    assert cached > 0


def test_preempted_requests(
    cache: Cache, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """Requests that lose their blocks in the middle of their answers, again and again.

    Three of them at a time have room for their prompts, and not for their answers.
    """
    asked = prompts("preempted", *[300] * 12)
    expected = reference(asked, max_tokens=128).tokens
    engine.generate(asked[:6])
    engine.settle()
    engine.reset()
    before = cache.moved(engine)
    found = engine.generate(asked, max_tokens=128)
    assert found.tokens == expected
    moved = cache.moved(engine) - before
    assert moved.preemptions > 0
    assert moved.loaded > 0


def test_a_reset_in_the_middle(
    cache: Cache, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """All caches forget everything while requests run, stores and promotions are on their way."""
    asked = prompts("reset", *[280] * 8)
    expected = reference(asked).tokens
    engine.generate(asked[:4])
    engine.settle()
    engine.reset(connector=True)
    names = engine.do("submit", prompts=asked)
    for _ in range(3):
        engine.do("step", count=3)
        while engine.do("loading"):
            engine.do("step")
        # With steps in flight vLLM cannot take back what it computes, and resets the connector.
        in_flight = bool(engine.info["async_scheduling"])
        assert engine.reset(running=not in_flight, connector=True) or in_flight
    answers = engine.do("finish")
    assert [answers[name]["tokens"] for name in names] == expected
    engine.settle()
    engine.reset()
    again = engine.generate(asked)
    assert again.tokens == expected
    assert sum(again.cached) > 0


def test_aborted_in_the_middle_of_a_load(
    cache: Cache, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """Requests end while their blocks are being written; others, and they themselves, go on."""
    asked = prompts("aborted", 200, 210)
    expected = reference(asked).tokens
    engine.generate(asked)
    engine.settle()
    engine.reset()
    cache.sabotage.write_text("hold")
    try:
        names = engine.do("submit", prompts=asked)
        for _ in range(200):
            engine.do("step")
            if sorted(engine.do("loading")) == sorted(names):
                break
        assert sorted(engine.do("loading")) == sorted(names)
        engine.do("abort", requests=names[:1])
        engine.do("step", count=3)
    finally:
        cache.sabotage.write_text("none")
    answers = engine.do("finish")
    assert answers[names[1]]["tokens"] == expected[1]
    engine.settle()
    engine.reset()
    again = engine.generate(asked)
    assert again.tokens == expected
    assert again.cached == [192, 192]


def test_aborted_while_blocks_come_from_the_tier(
    cache: Cache, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """Requests end after their blocks have been asked for and before they are there."""
    asked = prompts("aborted early", *[250] * 6)
    expected = reference(asked).tokens
    engine.generate(asked)
    engine.settle()
    engine.reset(connector=True)
    before = cache.moved(engine)
    names = engine.do("submit", prompts=asked)
    engine.do("step", count=2)
    engine.do("abort", requests=names[::2])
    answers = engine.do("finish")
    assert [answers[name]["tokens"] for name in names[1::2]] == expected[1::2]
    engine.settle()
    assert (cache.moved(engine) - before).promoted > 0
    engine.reset()
    assert engine.generate(asked).tokens == expected
