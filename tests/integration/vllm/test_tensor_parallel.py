"""Two workers in processes of their own share one region with the scheduler in a third."""

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
    pytest.mark.caches("engine-fs", matrix=["tier-fs", "engine-s3"]),
]

OPTIONS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
LENGTHS = (400, 300, 200, 100)
FULL_HIT = [(length - 1) // 32 * 32 for length in LENGTHS]
BLOCKS = sum(length // 32 for length in LENGTHS)


@pytest.fixture(scope="module")
def engine(cache: Cache, start: Callable[..., Engine]) -> Iterator[Engine]:
    """Return an engine of two ranks, each of which has one of the two heads of every block."""
    connector = cache.connector(blocks=100, sabotaged=True)
    environment = {"KV_CORE_TEST_SABOTAGE": str(cache.sabotage)}
    with start(
        connector=connector, options=OPTIONS, environment=environment, processes=True
    ) as engine:
        assert engine.info["world_size"] == 2
        yield engine


def test_blocks_have_the_bytes_of_both_ranks(
    cache: Cache, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """What both ranks stored comes back to both, from the CPU tier and from the tier below."""
    asked = prompts("two ranks", *LENGTHS)
    expected = reference(asked).tokens
    assert engine.generate(asked).tokens == expected
    engine.settle()
    # Metrics count the bytes of both ranks, so this is half if one of them is left out.
    moved = cache.moved(engine)
    assert (moved.stored, moved.cascaded) == (BLOCKS, BLOCKS)

    assert engine.reset()
    found = engine.generate(asked)
    assert (found.tokens, found.cached) == (expected, FULL_HIT)
    assert cache.moved(engine).promoted == 0

    assert engine.reset(connector=True)
    found = engine.generate(asked)
    assert (found.tokens, found.cached) == (expected, FULL_HIT)
    assert cache.moved(engine).promoted == BLOCKS


def test_the_bytes_of_one_rank_matter(
    cache: Cache, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """A load that goes wrong on the second rank alone changes the tokens."""
    asked = prompts("two ranks", *LENGTHS)
    assert engine.reset()
    cache.sabotage.write_text("zero 1")
    try:
        found = engine.generate(asked)
    finally:
        cache.sabotage.write_text("none")
    assert found.cached == FULL_HIT
    expected = reference(asked).tokens
    assert all(one != other for one, other in zip(found.tokens, expected, strict=True))
