"""Helpers of the workload tests: recorded traces, small trace files, the prefix property."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kv_core.workload import Trace


@pytest.fixture(scope="session")
def recorded_traces() -> Path:
    """Folder of the recorded traces; they are too large to lie in the repository."""
    folder = os.environ.get("KV_CORE_TRACES")
    if not folder:
        reason = "KV_CORE_TRACES does not name the folder of recorded traces"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, and CI must not skip these tests")
        pytest.skip(reason)
    return Path(folder)


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[[str, Iterable[Any]], Path]:
    """Return a function that writes values into a file of the test, one a line, as JSON."""

    def write(name: str, values: Iterable[Any]) -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
        return path

    return write


@pytest.fixture
def assert_one_parent() -> Callable[[Trace], None]:
    """Return a check that no hash of a trace follows two different hashes."""

    def check(trace: Trace) -> None:
        parents: dict[bytes, bytes | None] = {}
        for request in trace.requests:
            parent = None
            for block_hash in request.block_hashes:
                assert parents.setdefault(block_hash, parent) == parent
                parent = block_hash

    return check
