"""Storage that fails, stalls, lies and fills up while the engine serves from it.

Every request ends with the right tokens, the metrics say what happened, and afterwards the cache
works as before.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from kv_conformance.faults.fuse import FaultyFolder
from kv_conformance.harness import Fault

from ._faults import ENGINE, TIER, store_all, until_healthy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.integration.vllm.conftest import Cache, Engine, Prompts, Reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts"),
    pytest.mark.timeout(900),
    pytest.mark.caches("engine-fs", "tier-fs"),
]

LENGTHS = (300, 250, 200)
FULL_HIT = [(length - 1) // 32 * 32 for length in LENGTHS]
BLOCKS = sum(length // 32 for length in LENGTHS)


@pytest.fixture(scope="module")
def storage(cache: Cache) -> Iterator[FaultyFolder]:
    """Return the folder of the tier, which misbehaves on demand."""
    with FaultyFolder(cache.folder / "backing", cache.folder / "mounted") as folder:
        yield folder


@pytest.fixture(scope="module")
def engine(cache: Cache, storage: FaultyFolder, start: Callable[..., Engine]) -> Iterator[Engine]:
    """Return an engine above that folder."""
    connector = cache.connector(blocks=100, store=storage.mountpoint, tier_settings=TIER, **ENGINE)
    with start(connector=connector) as engine:
        yield engine
        storage.heal()


@pytest.fixture(autouse=True)
def healthy(cache: Cache, storage: FaultyFolder, engine: Engine, prompts: Prompts) -> None:
    """Begin each test with storage that works, and an engine that uses it."""
    storage.heal()
    until_healthy(cache, engine, prompts)


def test_stores_fail(
    cache: Cache, storage: FaultyFolder, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """Every operation of the storage is an error while the engine stores: counted, no more."""
    asked = prompts("stores fail", *LENGTHS)
    before = cache.moved(engine)
    storage.inject(Fault.ERROR)
    found = engine.generate(asked)
    engine.settle()
    assert found.tokens == reference(asked).tokens
    moved = cache.moved(engine) - before
    assert moved.stored == BLOCKS
    assert moved.failed_stores > 0
    assert moved.cascaded == 0


def test_loads_fail(
    cache: Cache, storage: FaultyFolder, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """Every operation is an error while the engine loads: it computes, and finds it all later."""
    asked = prompts("loads fail", *LENGTHS)
    expected = reference(asked).tokens
    store_all(engine, asked)
    before = cache.moved(engine)
    storage.inject(Fault.ERROR)
    found = engine.generate(asked)
    assert (found.tokens, found.cached) == (expected, [0] * len(LENGTHS))
    moved = cache.moved(engine) - before
    assert moved.promoted == 0
    assert moved.errors > 0


def test_loads_stall(
    cache: Cache, storage: FaultyFolder, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """No operation returns while the engine loads: requests end all the same, before it does."""
    asked = prompts("loads stall", *LENGTHS)
    expected = reference(asked).tokens
    store_all(engine, asked)
    before = cache.moved(engine)
    storage.inject(Fault.STALL)
    found = engine.generate(asked)
    assert (found.tokens, found.cached) == (expected, [0] * len(LENGTHS))
    assert found.seconds < 60
    moved = cache.moved(engine) - before
    assert moved.promoted == 0
    assert moved.errors > 0


def test_stores_stall(
    cache: Cache, storage: FaultyFolder, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """No operation returns while the engine stores: requests do not wait for it."""
    asked = prompts("stores stall", *LENGTHS)
    expected = reference(asked).tokens
    before = cache.moved(engine)
    storage.inject(Fault.STALL)
    assert engine.generate(asked).tokens == expected
    assert (cache.moved(engine) - before).cascaded == 0
    # From the CPU tier, while the tier below still hangs.
    engine.reset()
    found = engine.generate(asked)
    assert (found.tokens, found.cached) == (expected, FULL_HIT)
    cache.wait_until(engine, lambda moved: moved.stalled > before.stalled)


def test_bytes_are_flipped(
    cache: Cache, storage: FaultyFolder, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """One wrong byte in every block (vllm#54363): nothing wrong is served, and it is repaired."""
    asked = prompts("flipped", *LENGTHS)
    expected = reference(asked).tokens
    known = set(files(storage.backing))
    store_all(engine, asked)
    damaged = [path for path in files(storage.backing) if path not in known]
    assert len(damaged) == BLOCKS
    for path in damaged:
        flip_one_byte(path)
    before = cache.moved(engine)
    found = engine.generate(asked)
    assert (found.tokens, found.cached) == (expected, [0] * len(LENGTHS))
    moved = cache.moved(engine) - before
    # Found when they are loaded, or even before.
    assert moved.failed_loads + moved.errors > 0
    assert moved.promoted == 0

    store_all(engine, asked)
    found = engine.generate(asked)
    assert (found.tokens, found.cached) == (expected, FULL_HIT)


def test_storage_fills_up(
    cache: Cache, storage: FaultyFolder, engine: Engine, prompts: Prompts, reference: Reference
) -> None:
    """There is no space left from some moment on, in the middle of the stores."""
    arrived = prompts("before it was full", *LENGTHS)
    asked = prompts("full", *LENGTHS * 3)
    expected = reference(asked).tokens
    store_all(engine, arrived)
    before = cache.moved(engine)
    known = len(files(storage.backing))
    engine.begin_generate(asked)
    cache.wait_for(lambda: len(files(storage.backing)) > known)
    storage.inject(Fault.FULL)
    assert engine.end_generate().tokens == expected
    engine.settle()
    moved = cache.moved(engine) - before
    assert moved.failed_stores > 0
    assert moved.declined > 0
    # A job counts when all its blocks have arrived, and it may be that each has lost one.
    assert moved.cascaded < BLOCKS * 3
    assert 0 < len(files(storage.backing)) - known < BLOCKS * 3
    # A full disk is no broken disk: what is on it is served.
    assert engine.reset(connector=True)
    found = engine.generate(arrived)
    assert (found.tokens, found.cached) == (reference(arrived).tokens, FULL_HIT)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with room for some thirty blocks."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_small_disk(
    cache: Cache,
    small_disk: Path,
    start: Callable[..., Engine],
    prompts: Prompts,
    reference: Reference,
) -> None:
    """A disk smaller than the working set: stores are declined, and what is there is served."""
    asked = prompts("small disk", *[200] * 12)
    expected = reference(asked).tokens
    with start(connector=cache.connector(blocks=100, store=small_disk)) as engine:
        assert engine.generate(asked).tokens == expected
        engine.settle()
        moved = cache.moved(engine)
        assert moved.declined > 0
        assert 0 < moved.cascaded < 72
        assert engine.reset(connector=True)
        found = engine.generate(asked)
        assert found.tokens == expected
        assert 0 < sum(found.cached) < 72 * 32


def files(folder: Path) -> list[Path]:
    """Return the files of blocks in a folder."""
    return [path for path in folder.rglob("*.bin") if path.stat().st_size > 1 << 16]


def flip_one_byte(path: Path) -> None:
    """Change one byte in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(12345)
        byte = file.read(1)
        file.seek(12345)
        file.write(bytes([byte[0] ^ 0x40]))
