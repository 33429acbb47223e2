"""Settings of the engine mode that decide what is stored, what goes, and what is told of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.vllm.conftest import Cache, Engine, Prompts, Reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.caches("engine-fs"),
]

BLOCK = 32
LENGTHS = (200, 100)
PROMPT_BLOCKS = sum(length // BLOCK for length in LENGTHS)
# Long enough to fill two blocks behind each prompt.
ANSWER = 2 * BLOCK


def test_what_is_stored_and_told(
    cache: Cache, start: Callable[..., Engine], prompts: Prompts, reference: Reference
) -> None:
    """Nothing of a prompt that comes once, no answers; and each block is an event per medium."""
    asked = prompts("settings", *LENGTHS)
    expected = reference(asked, max_tokens=ANSWER).tokens
    connector = cache.connector(
        blocks=100, store_threshold=2, offload_prompt_only=True, eviction_policy="arc"
    )
    with start(connector=connector, events=True) as engine:

        def ask() -> list[int]:
            """Answer the prompts, forget the engine's own cache, and tell what was found."""
            found = engine.generate(asked, max_tokens=ANSWER)
            assert found.tokens == expected
            engine.settle()
            assert engine.reset()
            return found.cached

        assert ask() == [0, 0]
        assert cache.moved(engine).stored == 0
        assert not [event for event in engine.events() if event["medium"] == "CPU"]

        assert ask() == [0, 0]
        moved = cache.moved(engine)
        assert (moved.stored, moved.cascaded) == (PROMPT_BLOCKS, PROMPT_BLOCKS)
        told: Counter[tuple[str, str]] = Counter()
        for event in engine.events():
            told[event["kind"], event["medium"]] += event["blocks"]
        assert told["BlockStored", "CPU"] == PROMPT_BLOCKS

        assert ask() == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
        assert cache.moved(engine).stored == PROMPT_BLOCKS


@pytest.mark.parametrize(("policy", "promoted"), [("lru", 2), ("arc", 0)])
def test_the_policy_decides_what_goes(
    cache: Cache,
    start: Callable[..., Engine],
    prompts: Prompts,
    reference: Reference,
    policy: str,
    promoted: int,
) -> None:
    """A prompt that came again outlives many that came once with ``arc``, and not with ``lru``."""
    (again,) = prompts(f"again with {policy}", 2 * BLOCK + 1)
    once = prompts(f"once with {policy}", *[2 * BLOCK + 1] * 12)
    expected = reference([again]).tokens
    connector = cache.connector(blocks=12, eviction_policy=policy)
    with start(connector=connector) as engine:
        for _ in range(2):
            assert engine.generate([again]).tokens == expected
            engine.settle()
            assert engine.reset()
        for prompt in once:
            engine.generate([prompt])
            engine.settle()
        assert engine.reset()
        before = cache.moved(engine)
        found = engine.generate([again])
        assert (found.tokens, found.cached) == (expected, [2 * BLOCK])
        assert (cache.moved(engine) - before).promoted == promoted
