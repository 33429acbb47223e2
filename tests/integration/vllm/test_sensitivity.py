"""The tests of this folder can fail: loads that go wrong change the tokens.

Without this, "the same tokens with and without the cache" would prove nothing: with some models
they are the same whatever the cache holds.
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
    pytest.mark.caches("engine-fs", "tier-fs", matrix=["engine-s3", "tier-s3", "vllm-fs"]),
]

LENGTHS = (400, 300, 250, 200)


@pytest.fixture(scope="module")
def engine(cache: Cache, start: Callable[..., Engine], prompts: Prompts) -> Iterator[Engine]:
    """Return an engine that has stored the prompts, and whose worker can be sabotaged."""
    connector = cache.connector(blocks=100, sabotaged=True)
    environment = {"KV_CORE_TEST_SABOTAGE": str(cache.sabotage)}
    with start(connector=connector, environment=environment) as engine:
        engine.generate(prompts("sensitivity", *LENGTHS))
        engine.settle()
        yield engine


def wrong_answers(
    how: str, cache: Cache, engine: Engine, prompts: Prompts, reference: Reference
) -> int:
    """Load all prompts from the cache in some way; return how many of them get other tokens."""
    asked = prompts("sensitivity", *LENGTHS)
    cache.sabotage.write_text(how)
    assert engine.reset()
    before = cache.moved(engine)
    found = engine.generate(asked)
    engine.settle()
    assert found.cached == [(length - 1) // 32 * 32 for length in LENGTHS]
    # A load of the real worker counts its blocks; one that was skipped does not.
    blocks = sum(length // 32 for length in LENGTHS) if how != "skip" else 0
    assert (cache.moved(engine) - before).loaded == blocks
    expected = reference(asked).tokens
    return sum(one != other for one, other in zip(found.tokens, expected, strict=True))


def test_honest_loads_leave_the_tokens_alone(
    cache: Cache, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """The same engine, the same prompts, the same path, and no sabotage: no token differs."""
    assert wrong_answers("none", cache, engine, prompts, reference) == 0


@pytest.mark.parametrize("how", ["skip", "zero", "swap"])
def test_wrong_loads_change_the_tokens(
    how: str, cache: Cache, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """Loads that are skipped, lose one block or exchange one with another prompt: all differ."""
    assert wrong_answers(how, cache, engine, prompts, reference) == len(LENGTHS)


def test_the_right_tokens_are_right_by_a_margin(prompts: Prompts, reference: Reference) -> None:
    """The order of additions, which differs from batch to batch, cannot change a token.

    Their difference is in the order of 1e-5 in these models.
    """
    assert reference(prompts("sensitivity", *LENGTHS)).margin > 1e-3
