"""The same tokens with the cache off, cold, warm and restarted, and what was loaded for it."""

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
        "engine-fs",
        "tier-fs",
        "engine-example",
        "tier-example",
        "engine-segments",
        "engine-s3",
        "tier-obstore",
        matrix=[
            "tier-segments",
            "engine-fsspec",
            "tier-fsspec",
            "engine-memory",
            "tier-memory",
            "tier-s3",
            "engine-obstore",
            "engine-obj",
            "tier-obj",
            "vllm-fs",
        ],
    ),
]

# Around the borders of blocks of 32 tokens, and some of many blocks.
LENGTHS = (400, 300, 250, 200, 97, 96, 65, 64, 33, 31)
# All full blocks are loaded, also when nothing is left to compute: vLLM then computes the last
# token once more, which it counts as cached all the same.
FULL_HIT = [length // 32 * 32 for length in LENGTHS]
BLOCKS = sum(FULL_HIT) // 32


@pytest.fixture(scope="module")
def engines(cache: Cache, start: Callable[..., Engine]) -> Iterator[list[Engine]]:
    """Return a list of one running engine; a test that restarts it replaces it there."""
    running = [start(connector=cache.connector(blocks=200))]
    yield running
    running[0].stop()


def test_a_cold_cache_changes_no_token(
    cache: Cache, engines: list[Engine], prompts: Prompts, reference: Reference
) -> None:
    """Nothing is found, everything is stored, and every store reaches the tier."""
    [engine] = engines
    asked = prompts("cold", *LENGTHS)
    before = cache.moved(engine)
    found = engine.generate(asked)
    engine.settle()
    assert found.tokens == reference(asked).tokens
    assert found.cached == [0] * len(LENGTHS)
    moved = cache.moved(engine) - before
    assert (moved.stored, moved.cascaded) == (BLOCKS, BLOCKS)
    assert (moved.loaded, moved.promoted, moved.tier_hits) == (0, 0, 0)


def test_full_hits_in_the_cpu_tier(
    cache: Cache, engines: list[Engine], prompts: Prompts, reference: Reference
) -> None:
    """All full blocks come from the CPU tier, and no other tier has to provide any."""
    [engine] = engines
    asked = prompts("warm", *LENGTHS)
    engine.generate(asked)
    engine.settle()
    assert engine.reset()
    before = cache.moved(engine)
    found = engine.generate(asked)
    assert found.tokens == reference(asked).tokens
    assert found.cached == FULL_HIT
    moved = cache.moved(engine) - before
    assert (moved.loaded, moved.stored, moved.promoted) == (BLOCKS, 0, 0)


def test_full_hits_in_the_tier(
    cache: Cache, engines: list[Engine], prompts: Prompts, reference: Reference
) -> None:
    """With the CPU tier empty all full blocks come from the tier, each of them once."""
    [engine] = engines
    asked = prompts("from the tier", *LENGTHS)
    engine.generate(asked)
    engine.settle()
    assert engine.reset(connector=True)
    before = cache.moved(engine)
    found = engine.generate(asked)
    assert found.tokens == reference(asked).tokens
    assert found.cached == FULL_HIT
    moved = cache.moved(engine) - before
    assert (moved.loaded, moved.stored) == (BLOCKS, 0)
    assert (moved.promoted, moved.tier_hits) == (BLOCKS, BLOCKS)


def test_full_hits_after_a_restart(
    cache: Cache,
    engines: list[Engine],
    prompts: Prompts,
    reference: Reference,
    start: Callable[..., Engine],
) -> None:
    """Another process finds in storage what the first one stored."""
    if not cache.is_lasting:
        # It is memory: there is nothing to be found. That it starts again is not in question.
        return
    asked = prompts("restarted", *LENGTHS)
    engines[0].generate(asked)
    engines[0].stop()
    engines[0] = start(connector=cache.connector(blocks=200))
    [engine] = engines
    found = engine.generate(asked)
    assert found.tokens == reference(asked).tokens
    assert found.cached == FULL_HIT
    moved = cache.moved(engine)
    assert (moved.loaded, moved.stored) == (BLOCKS, 0)
    assert (moved.promoted, moved.tier_hits) == (BLOCKS, BLOCKS)
