"""Shared pieces of the command line tests: running `replay` here, and proving a clean refusal."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest

from kv_core.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.plugins import TierRegistry


@pytest.fixture
def shm_dir(tmp_path: Path) -> Path:
    """Return a folder of the test's own for the shared region."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def run_replay(
    capfd: pytest.CaptureFixture[str], shm_dir: Path
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``kv-core replay`` here: exit status, stdout, stderr.

    What processes of a restart print is included.
    """

    def run(*arguments: str, registry: TierRegistry | None = None) -> tuple[int, str, str]:
        status = main(["replay", "--shm-dir", str(shm_dir), *arguments], registry=registry)
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def refusal(run_replay: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a replay which must be refused, and returns the message.

    Refused means: status 2, one line on stderr, nothing on stdout, and no file, folder or thread
    that was not there before.
    """

    def run(*arguments: str) -> str:
        files, threads = sorted(tmp_path.rglob("*")), threading.enumerate()
        status, out, err = run_replay(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == files
        assert threading.enumerate() == threads
        return err

    return run


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Return a trace of three requests: two blocks, the same two, and one more after them."""
    path = tmp_path / "trace.jsonl"
    prompts = ([1, 2], [1, 2], [1, 2, 3])
    lines = (
        {
            "timestamp": number * 1000,
            "input_length": 512 * len(ids),
            "output_length": 8,
            "hash_ids": ids,
        }
        for number, ids in enumerate(prompts)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path
