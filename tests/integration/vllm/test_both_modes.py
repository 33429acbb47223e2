"""Both modes over one folder, one after the other: they find each other's blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.vllm.conftest import Cache, Engine, Prompts, Reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.caches(
        "engine-fs", "tier-fs", matrix=["engine-fsspec", "engine-s3", "tier-obstore"]
    ),
]

LENGTHS: Final = (400, 300, 200)
OTHER: Final = {"engine": "tier", "tier": "engine"}
# Of the tiny model, as in the conftest.
BLOCK_BYTES: Final = 64 << 10
# Engine blocks in an offloaded one: their order in a row must be the same as well.
FACTOR: Final = {"engine": 2, "tier": 1}


def test_the_tokens_are_right_after_a_change_of_the_mode(
    cache: Cache, start: Callable[..., Engine], prompts: Prompts, reference: Reference
) -> None:
    """An operator who changes the mode and keeps the folder gets the same answers."""
    asked = prompts("both modes", *LENGTHS)
    factor = FACTOR[cache.mode]
    settings: dict[str, Any] = {
        "blocks": 50,
        "block_bytes": factor * BLOCK_BYTES,
        "blocks_per_chunk": factor,
    }
    with start(connector=cache.connector(**settings)) as engine:
        assert engine.generate(asked).tokens == reference(asked).tokens
        engine.settle()
    other = replace(cache, mode=OTHER[cache.mode])
    with start(connector=other.connector(**settings)) as engine:
        found = engine.generate(asked)
        assert found.tokens == reference(asked).tokens
        promoted = other.moved(engine).promoted / factor
    tokens = 32 * factor
    assert found.cached == [(length - 1) // tokens * tokens for length in LENGTHS]
    assert promoted == sum((length - 1) // tokens for length in LENGTHS)
