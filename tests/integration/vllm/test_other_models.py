"""Models whose layers do not all see everything: sliding windows, alone and among others."""

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
    pytest.mark.caches("engine-fs", matrix=["tier-fs", "engine-s3"]),
]

LENGTHS = (400, 333, 250, 100)


@pytest.mark.parametrize("model", ["sliding", "hybrid"])
def test_windows(
    model: str, cache: Cache, start: Callable[..., Engine], prompts: Prompts, reference: Reference
) -> None:
    """The tokens are right from the CPU tier, from the tier below, and after a restart."""
    asked = prompts(model, *LENGTHS)
    expected = reference(asked, model=model).tokens
    connector = cache.connector(blocks=200)
    with start(model=model, connector=connector) as engine:
        assert engine.generate(asked).tokens == expected
        engine.settle()
        assert engine.reset()
        found = engine.generate(asked)
        assert found.tokens == expected
        assert found.cached == [384, 320, 224, 96]
        assert cache.moved(engine).loaded > 0

        assert engine.reset(connector=True)
        found = engine.generate(asked)
        assert found.tokens == expected
        assert found.cached == [384, 320, 224, 96]
        moved = cache.moved(engine)
        assert moved.promoted > 0
        assert moved.tier_hits > 0

    with start(model=model, connector=connector) as engine:
        found = engine.generate(asked)
        assert found.tokens == expected
        assert found.cached == [384, 320, 224, 96]
        assert cache.moved(engine).promoted > 0
