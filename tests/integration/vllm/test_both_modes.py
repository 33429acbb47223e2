"""Both modes over one folder, one after the other.

Whether they find each other's blocks is their own affair. What is found must be right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.vllm.conftest import Cache, Engine, Prompts, Reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.caches("engine-fs", "tier-fs"),
]

LENGTHS = (400, 300, 200)
OTHER = {"engine": "tier", "tier": "engine"}


def test_the_tokens_are_right_after_a_change_of_the_mode(
    cache: Cache, start: Callable[..., Engine], prompts: Prompts, reference: Reference
) -> None:
    """An operator who changes the mode and keeps the folder gets the same answers."""
    asked = prompts("both modes", *LENGTHS)
    expected = reference(asked).tokens
    for each in (cache, replace(cache, mode=OTHER[cache.mode])):
        with start(connector=each.connector(blocks=100)) as engine:
            found = engine.generate(asked)
            engine.settle()
            moved = each.moved(engine)
            print(each.mode, found.cached, moved)
        assert found.tokens == expected
        # Both have stored something there, or a tier that is never used would pass as well.
        assert moved.cascaded > 0 or moved.promoted > 0
