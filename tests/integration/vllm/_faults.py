"""What tests of storage that fails under an engine have in common."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from ._caches import Cache
    from ._engine import Engine
    from ._prompts import Prompts

__all__ = ["ENGINE", "TIER", "store", "store_all", "until_healthy"]

_NUMBERS: Final = itertools.count()
_ATTEMPTS: Final = 10

# Faults are to be seen to pass.
TIER: Final = {"job_deadline_s": 5, "lookup_deadline_s": 2, "error_backoff_s": 0.1}
"""Settings of a tier."""
ENGINE: Final[dict[str, Any]] = {
    "promotion_deadline_s": 5,
    "request_lookup_deadline_s": 8,
    "store_deadline_s": 8,
    "degraded_backoff_s": 0.1,
    "degraded_backoff_max_s": 0.2,
    "quarantine_grace_s": 0.2,
    "shutdown_flush_s": 5,
}
"""Settings of the connector."""


def store(engine: Engine, asked: list[list[int]]) -> list[int]:
    """Answer prompts, and forget all that is above the tier; return what had been cached."""
    found = engine.generate(asked)
    engine.settle()
    assert engine.reset(connector=True)
    return found.cached


def store_all(engine: Engine, asked: list[list[int]]) -> None:
    """Put prompts into the tier, and out of everything above it.

    A machine with too much to do may miss the short deadlines, so it is done until it is done.
    """
    full = [len(prompt) // 32 * 32 for prompt in asked]
    for _ in range(_ATTEMPTS):
        if (cached := store(engine, asked)) == full:
            return
    pytest.fail(f"the prompts do not get into the tier: {cached}")


def until_healthy(cache: Cache, engine: Engine, prompts: Prompts) -> None:
    """Wait until the engine uses its tier again, whose storage works."""
    engine.settle()
    probe = prompts(f"probe {next(_NUMBERS)}", 40)
    # A tier that failed to load proves itself with a load, so there has to be something to load.
    cache.wait_until(
        engine,
        lambda _: sum(engine.metrics("tier_health").values()) == 0,
        between=lambda: store(engine, probe),
    )
