"""An object store that is killed, or frozen, while the engine stores to it and loads from it.

Every request ends with the right tokens, the metrics say what happened, and when the server is back
so is the cache, without anything being done about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_tier_s3._harness import SeaweedServer

from ._faults import ENGINE, TIER, store_all, until_healthy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integration.vllm.conftest import Cache, Engine, Prompts, Reference

    from kv_tier_s3._harness import S3Server

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.s3,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.caches(
        "engine-s3", matrix=["tier-s3", "engine-obstore", "tier-obstore", "engine-obj", "tier-obj"]
    ),
]

LENGTHS = (300, 250, 200)
FULL_HIT = [(length - 1) // 32 * 32 for length in LENGTHS]
BLOCKS = sum(length // 32 for length in LENGTHS)
BUCKET: Final = "kv-vllm-faults"
# What waits for a server, besides the deadlines.
CLIENT: Final[dict[str, dict[str, Any]]] = {
    "s3": {"max_attempts": 1, "connect_timeout_s": 1, "read_timeout_s": 3},
    "obj": {"max_attempts": 1, "request_timeout_s": 3},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return an object store that no other test uses."""
    with SeaweedServer(tmp_path_factory.mktemp("server")) as server:
        server.make_bucket(BUCKET)
        yield server
        # It cannot end while it is frozen.
        server.thaw()


@pytest.fixture(scope="module")
def engine(cache: Cache, server: S3Server, start: Callable[..., Engine]) -> Iterator[Engine]:
    """Return an engine above that store."""
    place = server.access.settings(BUCKET) | {"prefix": cache.folder.name}
    connector = cache.connector(
        blocks=100, tier_settings=place | CLIENT[cache.tier] | TIER, **ENGINE
    )
    with start(connector=connector) as engine:
        yield engine


@pytest.fixture(autouse=True)
def healthy(cache: Cache, server: S3Server, engine: Engine, prompts: Prompts) -> None:
    """Begin each test with an engine that uses its store."""
    until_healthy(cache, engine, prompts)


def come_back(cache: Cache, engine: Engine, asked: list[list[int]], prompts: Prompts) -> None:
    """Wait until the engine uses its store again; see that it finds there what it stores."""
    until_healthy(cache, engine, prompts)
    store_all(engine, asked)
    before = cache.moved(engine)
    assert engine.generate(asked).cached == FULL_HIT
    assert (cache.moved(engine) - before).promoted == BLOCKS


def test_killed_while_the_engine_stores(
    cache: Cache, server: S3Server, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """Connections break and are refused: stores fail and are counted, and no request minds."""
    asked = prompts("server killed at stores", *LENGTHS)
    expected = reference(asked).tokens
    before = cache.moved(engine)
    server.kill()
    try:
        assert engine.generate(asked).tokens == expected
        engine.settle()
        moved = cache.moved(engine) - before
        assert moved.stored == BLOCKS
        assert moved.failed_stores > 0
        assert moved.cascaded == 0
        # From the CPU tier, while there is nothing below it.
        engine.reset()
        found = engine.generate(asked)
        assert (found.tokens, found.cached) == (expected, FULL_HIT)
    finally:
        server.restart()
    come_back(cache, engine, asked, prompts)


def test_killed_while_the_engine_loads(
    cache: Cache, server: S3Server, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """What cannot be asked for is computed, and is no miss: it is found when the server is back."""
    asked = prompts("server killed at loads", *LENGTHS)
    expected = reference(asked).tokens
    store_all(engine, asked)
    before = cache.moved(engine)
    server.kill()
    try:
        found = engine.generate(asked)
        assert (found.tokens, found.cached) == (expected, [0] * len(LENGTHS))
        moved = cache.moved(engine) - before
        assert moved.promoted == 0
        assert moved.errors > 0
    finally:
        server.restart()
    until_healthy(cache, engine, prompts)
    assert engine.reset(connector=True)
    before = cache.moved(engine)
    found = engine.generate(asked)
    assert (found.tokens, found.cached) == (expected, FULL_HIT)
    assert (cache.moved(engine) - before).promoted == BLOCKS


def test_frozen_while_the_engine_stores(
    cache: Cache, server: S3Server, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """Nothing is answered: requests do not wait for their stores, and hit in the CPU tier."""
    asked = prompts("server frozen at stores", *LENGTHS)
    expected = reference(asked).tokens
    before = cache.moved(engine)
    server.freeze()
    try:
        found = engine.generate(asked)
        assert found.tokens == expected
        assert (cache.moved(engine) - before).cascaded == 0
        engine.reset()
        found = engine.generate(asked)
        assert (found.tokens, found.cached) == (expected, FULL_HIT)
    finally:
        server.thaw()
    come_back(cache, engine, asked, prompts)


def test_frozen_while_the_engine_loads(
    cache: Cache, server: S3Server, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """Nothing is answered: requests compute what they cannot load, within their deadlines."""
    asked = prompts("server frozen at loads", *LENGTHS)
    expected = reference(asked).tokens
    store_all(engine, asked)
    before = cache.moved(engine)
    server.freeze()
    try:
        found = engine.generate(asked)
        assert (found.tokens, found.cached) == (expected, [0] * len(LENGTHS))
        assert found.seconds < 60
        assert (cache.moved(engine) - before).promoted == 0
    finally:
        server.thaw()
    come_back(cache, engine, asked, prompts)
