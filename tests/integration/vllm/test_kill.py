"""An engine that is killed in the middle of its stores, and the one that comes after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.vllm.conftest import Cache, Engine, Prompts, Reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.caches("engine-fs", matrix=["tier-fs"]),
]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the place to be checked


def ours() -> set[str]:
    """Return the names in shared memory that are ours."""
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith("kv_core")}


def test_killed_in_the_middle_of_stores(
    cache: Cache, start: Callable[..., Engine], prompts: Prompts, reference: Reference
) -> None:
    """Nothing is left in shared memory, and what is in storage is whole: the tokens are right."""
    asked = prompts("killed", *[300] * 40)
    expected = reference(asked).tokens
    before = ours()
    engine = start(fresh=True, connector=cache.connector(blocks=400), processes=True)
    # A name in shared memory would outlive the process; so it is gone as soon as all have it open.
    assert ours() == before
    engine.begin_generate(asked)
    cache.wait_for(lambda: len(list(cache.store.rglob("*.bin"))) > 60)
    engine.kill()
    assert ours() == before

    engine = start(connector=cache.connector(blocks=400))
    found = engine.generate(asked)
    assert found.tokens == expected
    moved = cache.moved(engine)
    assert moved.promoted > 0
    assert sum(found.cached) > 0
    assert moved.failed_loads == 0
    engine.settle()
    # Storage takes what was missing.
    assert engine.reset(connector=True)
    found = engine.generate(asked)
    assert (found.tokens, found.cached) == (expected, [288] * 40)
    engine.stop()
