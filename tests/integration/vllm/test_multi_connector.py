"""Ours as one of two connectors, which may win a request or lose it to the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.integration.vllm.conftest import Cache, Engine, Prompts, Reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.caches("engine-fs", matrix=["tier-fs"]),
]

LENGTHS = (300, 250, 200)
FULL_HIT = [(length - 1) // 32 * 32 for length in LENGTHS]


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    """Return the connector that asks others in turn and stores to all."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def other(folder: Path) -> dict[str, Any]:
    """Return vLLM's connector that writes whole prompts to files."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@pytest.mark.parametrize("ours_is_first", [True, False], ids=["first", "second"])
def test_one_of_two_connectors(
    ours_is_first: bool,
    cache: Cache,
    start: Callable[..., Engine],
    prompts: Prompts,
    reference: Reference,
    tmp_path: Path,
) -> None:
    """The tokens are right whoever loads; ours gives up what it promised when the other does."""
    asked = prompts(f"ours is first: {ours_is_first}", *LENGTHS)
    expected = reference(asked).tokens
    ours = cache.connector(blocks=40)
    pair = [ours, other(tmp_path / "other")]
    with start(connector=multi(*(pair if ours_is_first else pair[::-1]))) as engine:
        assert engine.generate(asked).tokens == expected
        engine.settle()
        assert engine.reset()
        found = engine.generate(asked)
        assert found.tokens == expected
        assert min(found.cached) > 0
        moved = cache.moved(engine)
        assert (moved.loaded > 0) is ours_is_first

        # What ours promised and did not have to deliver does not stay reserved. No more at a time
        # than there is room for: how fast storage takes them is not in question.
        more = prompts(f"more, ours is first: {ours_is_first}", *[300] * 12)
        expected = reference(more).tokens
        for first in range(0, len(more), 4):
            assert engine.generate(more[first : first + 4]).tokens == expected[first : first + 4]
            engine.settle()
        assert (cache.moved(engine) - moved).stored == 12 * 9
