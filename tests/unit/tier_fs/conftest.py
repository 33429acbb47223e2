"""Shared pieces of the tests of the file system tier."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_core.contract import OffloadKey

# What a child process of a test starts with: `drive()`, `keys`, and a gate in both directions.
_CHILD_PRELUDE = """
import os, sys
from pathlib import Path
from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_fs import kv_core_register_tier

keys = [example_key(number) for number in range(8)]

def drive(root_dir, **settings):
    spec = kv_core_register_tier()
    settings = {"root_dir": root_dir, "layout": "files", **settings}
    config = parse_tier_config("fs", spec.config_model, settings)
    return TierDriver(spec.factory, config, block_bytes=4096, tier_name="fs")

def gate(word):
    print(word, flush=True)
    sys.stdin.readline()

"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread or a descriptor of the tier behind (LIFE-2)."""
    threads = set(threading.enumerate())
    descriptors = _open_files()
    yield
    assert [thread.name for thread in threading.enumerate() if thread not in threads] == []
    assert _open_files() - descriptors == set()


def _open_files() -> set[str]:
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            name = str(link.readlink())
        except FileNotFoundError:
            continue
        if name.startswith("/") and not name.startswith("/dev/"):
            names.add(name)
    return names


@pytest.fixture
def keys() -> list[OffloadKey]:
    """Return eight distinct keys."""
    return [example_key(number) for number in range(8)]


@pytest.fixture
def child() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Return a function that starts a Python program; programs are killed at the end."""
    children: list[subprocess.Popen[str]] = []

    def run(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD_PRELUDE + program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(process)
        return process

    yield run
    for process in children:
        process.kill()
        process.communicate()


@pytest.fixture
def files_below() -> Callable[[Path], list[str]]:
    """Return a function that lists all files below a folder, relative to it, sorted."""

    def run(folder: Path) -> list[str]:
        return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())

    return run
