"""Our tiers below vLLM's own tiering, where a configuration could be taken for another."""

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
    pytest.mark.caches("tier-fs", matrix=["engine-fs", "engine-s3", "tier-s3"]),
]

LENGTHS = (400, 250)
FULL_HIT = [384, 224]


def test_two_models_share_no_block(
    cache: Cache, start: Callable[..., Engine], prompts: Prompts, reference: Reference
) -> None:
    """Two models of one shape over one store: each finds its own blocks and none of the other's.

    Published tiers of two projects name blocks without the weights, and serve the wrong ones.
    """
    asked = prompts("two models", *LENGTHS)
    connector = cache.connector(blocks=100)
    expected = {model: reference(asked, model=model).tokens for model in ("tiny", "twin")}
    assert expected["tiny"] != expected["twin"]
    for model in ("tiny", "twin"):
        with start(model=model, connector=connector) as engine:
            found = engine.generate(asked)
            assert (found.tokens, found.cached) == (expected[model], [0, 0])
            engine.settle()
            assert engine.reset(connector=True)
            found = engine.generate(asked)
            assert (found.tokens, found.cached) == (expected[model], FULL_HIT)
            assert cache.moved(engine).promoted > 0


def test_the_plugin_reaches_every_process(
    cache: Cache, start: Callable[..., Engine], prompts: Prompts, reference: Reference
) -> None:
    """With the engine core in a process of its own, and the metrics published by another.

    From an interpreter that has imported nothing, to be seen in one test at least.
    """
    asked = prompts("processes", *LENGTHS)
    with start(fresh=True, connector=cache.connector(blocks=100), processes=True) as engine:
        expected = reference(asked).tokens
        assert engine.generate(asked).tokens == expected
        engine.settle()
        assert engine.reset(connector=True)
        found = engine.generate(asked)
        assert (found.tokens, found.cached) == (expected, FULL_HIT)
        assert cache.moved(engine).promoted > 0
