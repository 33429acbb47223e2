"""Two engines at the same time over one store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.vllm.conftest import Cache, Engine, Prompts, Reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.caches(
        "engine-fs", matrix=["tier-fs", "engine-fsspec", "engine-s3", "tier-obstore"]
    ),
]


def test_two_engines_share_a_store(
    cache: Cache, start: Callable[..., Engine], prompts: Prompts, reference: Reference
) -> None:
    """They store the same blocks at once, each finds what the other stored, and all is right."""
    both = prompts("both", *[300] * 12)
    of_each = [prompts("of the first", *[250] * 6), prompts("of the second", *[250] * 6)]
    expected = reference(both).tokens
    with (
        start(connector=cache.connector(blocks=400)) as first,
        start(connector=cache.connector(blocks=400)) as second,
    ):
        # The same prompts at the same time, from both ends.
        first.begin_generate(both)
        second.begin_generate(both[::-1])
        assert first.end_generate().tokens == expected
        assert second.end_generate().tokens == expected[::-1]
        for engine, asked in zip((first, second), of_each, strict=True):
            engine.begin_generate(asked)
        for engine, asked in zip((first, second), of_each, strict=True):
            assert engine.end_generate().tokens == reference(asked).tokens
            engine.settle()

        for engine, asked in zip((first, second), of_each[::-1], strict=True):
            before = cache.moved(engine)
            found = engine.generate(asked)
            assert (found.tokens, found.cached) == (reference(asked).tokens, [224] * 6)
            moved = cache.moved(engine) - before
            assert (moved.promoted, moved.stored) == (42, 0)
        for engine in (first, second):
            assert engine.reset(connector=True)
            found = engine.generate(both)
            assert (found.tokens, found.cached) == (expected, [288] * 12)
