"""Shared pieces of the end-to-end tests: the command as a process, in a place of its own."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the place to be checked
_DEADLINE_S: Final = 90


@pytest.fixture
def traces() -> Path:
    """Return the folder of the recorded traces."""
    folder = os.environ.get("KV_CORE_TRACES")
    if not folder:
        pytest.skip("KV_CORE_TRACES does not name the folder of recorded traces")
    return Path(folder)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Return the folder in which started commands keep their temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path: Path, scratch: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts ``kv-core`` in the test's folder, as leader of a group.

    Groups that still run are killed at the end.
    """
    processes: list[subprocess.Popen[str]] = []

    # A shell starts its background jobs with SIGINT ignored, and so would be all that we start.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kv_core", *arguments],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(scratch)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    signal.signal(signal.SIGINT, interrupt)


@pytest.fixture
def command(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``kv-core`` to its end: exit status, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        process = start(*arguments)
        out, err = process.communicate(timeout=_DEADLINE_S)
        return process.returncode, out, err

    return run


@pytest.fixture
def wait_until() -> Callable[[subprocess.Popen[str], Callable[[], bool]], None]:
    """Return a function that waits until a running process has got somewhere."""

    def wait(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the process did not get there"
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
                pytest.fail(f"ended with {process.returncode} too early: {process.communicate()}")

    return wait


@pytest.fixture
def shared_memory_is_clean() -> Iterator[None]:
    """Fail a test after which there is a new region in /dev/shm that no process owns."""
    before = set(_SHARED_MEMORY.iterdir())
    yield
    new = set(_SHARED_MEMORY.iterdir()) - before
    assert [path for path in new if path.name.startswith("kv_core") and _is_orphan(path)] == []


def _is_orphan(path: Path) -> bool:
    """Say whether no process holds the lock that the owner of a region has."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True
