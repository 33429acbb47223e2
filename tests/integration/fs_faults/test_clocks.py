"""Clocks that jump, and files from the future or the past: only the order of eviction changes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Work = Callable[..., Any]

BLOCK: Final = 16384
CAPACITY: Final = 64 * BLOCK
YEARS_S: Final = 10 * 365 * 86400
SETTINGS: Final = {"layout": "segments", "block_bytes": BLOCK, "capacity_bytes": CAPACITY}


def set_times(root: Path, offset_s: float) -> None:
    """Pretend that everything was written so long ago, or will be."""
    now = time.time() + offset_s
    for path in sorted(root.rglob("*")):
        os.utime(path, (now, now), follow_symlinks=False)


@pytest.mark.parametrize("offset_s", [-YEARS_S, YEARS_S, -time.time()])
@pytest.mark.parametrize("moment", ["open", "closed"])
def test_strange_times_cost_nothing_but_order(
    root: Path, start_worker: Any, offset_s: float, moment: str
) -> None:
    """The bound holds, what is stored is found, and no byte is wrong."""
    settings = {"root_dir": str(root), **SETTINGS}
    worker = start_worker(settings)
    for first in range(0, 48, 12):
        assert worker("store", blocks=list(range(first, first + 12)))["error"] is None
    if moment == "closed":
        worker.end()
    set_times(root, offset_s)
    if moment == "closed":
        worker = start_worker(settings)
    before = set(worker.check(range(48)))
    assert before == set(range(48))
    for first in range(100, 220, 12):
        assert worker("store", blocks=list(range(first, first + 12)))["error"] is None
        there = set(worker.check(range(first, first + 12)))
        assert there == set(range(first, first + 12))
    usage = worker("usage")
    assert usage["bytes"] <= CAPACITY
    assert usage["blocks"] * BLOCK > CAPACITY // 2


@pytest.mark.parametrize("offset_s", [-YEARS_S, YEARS_S])
def test_a_live_namespace_outlives_every_jump(
    root: Path, start_worker: Any, offset_s: float
) -> None:
    """Old namespaces age out, and one in use is none, whatever its files say of their age."""
    old = start_worker(
        {
            "root_dir": str(root),
            **SETTINGS,
            "namespace_ttl_s": 3600.0,
            "namespace": {"revision": "old"},
        }
    )
    assert old("store", blocks=list(range(12)))["error"] is None
    set_times(root, offset_s)
    new = start_worker({"root_dir": str(root), **SETTINGS, "namespace_ttl_s": 3600.0})
    for first in range(100, 148, 12):
        assert new("store", blocks=list(range(first, first + 12)))["error"] is None
    assert old.check(range(12)) == list(range(12))


def test_a_namespace_that_nobody_uses_ages_out(root: Path, start_worker: Any) -> None:
    """Only when it is old, and nobody has it open; a new one of another model takes its place."""
    settings = {"root_dir": str(root), **SETTINGS, "namespace_ttl_s": 3600.0}
    old = start_worker({**settings, "namespace": {"revision": "old"}})
    assert old("store", blocks=list(range(12)))["error"] is None
    old.end()
    folders = {path.name for path in root.iterdir() if path.is_dir()}
    young = start_worker({**settings, "namespace": {"revision": "young"}})
    young.end()
    assert {path.name for path in root.iterdir() if path.is_dir()} > folders
    set_times(root, -2 * 3600.0)
    new = start_worker(settings)
    assert new("store", blocks=list(range(12)))["error"] is None
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1
    assert new.check(range(12)) == list(range(12))
