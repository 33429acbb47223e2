"""Replays that are interrupted or killed: nothing is left behind, and no byte is wrong later."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    Command = Callable[..., tuple[int, str, str]]
    Start = Callable[..., subprocess.Popen[str]]
    WaitUntil = Callable[[subprocess.Popen[str], Callable[[], bool]], None]


@pytest.fixture
def shm_dir(tmp_path: Path) -> Path:
    """Return a folder for the shared region."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Return the root folder of the tier."""
    return tmp_path / "storage"


@pytest.fixture
def arguments(shm_dir: Path, storage: Path) -> list[str]:
    """Return a replay that runs much longer than a test waits."""
    small = ["--gpu-blocks=400", "--cpu-bytes=4MiB", "--quiet", f"--shm-dir={shm_dir}"]
    tier = f"--tier=fs:root_dir={storage},layout=files"
    return ["replay", "synthetic:chat", "--limit=4000", tier, *small]


def count_blocks(storage: Path) -> int:
    """Return how many blocks are stored."""
    return sum(1 for _ in storage.rglob("*.bin"))


def unfinished(storage: Path) -> list[Path]:
    """Return what only a running writer may have: temporary files, folders and locks."""
    return [*storage.rglob("*.tmp"), *storage.glob("*/writers/*")]


def test_an_interrupt_is_not_an_error(
    start: Start,
    wait_until: WaitUntil,
    arguments: list[str],
    storage: Path,
    shm_dir: Path,
    scratch: Path,
) -> None:
    """Ctrl-C in the middle of stores: status 130, no word, only whole blocks stay."""
    process = start(*arguments)
    wait_until(process, lambda: count_blocks(storage) > 100)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130
    assert unfinished(storage) == []
    assert list(shm_dir.iterdir()) == list(scratch.iterdir()) == []


def test_an_interrupt_ends_both_processes_of_a_restart(
    start: Start,
    wait_until: WaitUntil,
    arguments: list[str],
    storage: Path,
    shm_dir: Path,
    scratch: Path,
) -> None:
    """Ctrl-C during the second run: both processes clean up, and no report is written."""
    report = storage.parent / "report.json"
    process = start(*arguments, "--limit=400", "--restart", f"--json={report}")

    # The first run has ended when there is a folder for the report of the second.
    wait_until(process, lambda: any(scratch.iterdir()))
    # So the second has to store all again, and its first block shows that its requests run.
    (blocks,) = storage.glob("*_r0")
    blocks.rename(storage.parent / "blocks of the first run")
    wait_until(process, lambda: count_blocks(storage) > 0)
    # As a terminal does it: to every process of the group.
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130
    assert unfinished(storage) == []
    assert list(shm_dir.iterdir()) == list(scratch.iterdir()) == []
    assert not report.exists()


@pytest.mark.parametrize("blocks", [1, 60, 400])
def test_a_killed_replay_leaves_right_bytes(
    blocks: int,
    start: Start,
    command: Command,
    wait_until: WaitUntil,
    arguments: list[str],
    storage: Path,
    shm_dir: Path,
) -> None:
    """After kill -9 in the middle of stores the next replay finds whole blocks and tidies up."""
    process = start(*arguments)
    wait_until(process, lambda: count_blocks(storage) >= blocks)
    process.kill()
    process.communicate()
    assert list(shm_dir.iterdir()) == []

    report = storage.parent / "report.json"
    status, out, err = command(*arguments, "--limit=60", f"--json={report}")
    assert (status, out, err) == (0, "", "")
    second = json.loads(report.read_text())
    assert second["requests_finished"] == 60
    assert second["bytes_wrong"] == 0
    assert second["loads_failed"] == 0
    # A single block is of use only if it happens to be the first of a prompt.
    assert second["hits"]["fs"] > 0 or blocks == 1
    assert unfinished(storage) == []
    assert list(shm_dir.iterdir()) == []
