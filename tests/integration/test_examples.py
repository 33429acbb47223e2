"""The examples are documentation that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str) -> subprocess.CompletedProcess[str]:
    """Run an example as its docstring says."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_succeeds_quietly(name: str) -> None:
    """Each example ends with status 0 and writes nothing to stderr."""
    result = run(name)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_tiny_tier_serves_the_second_run() -> None:
    """The tier of the tutorial keeps its blocks from one engine to the next."""
    lines = run("tiny_tier.py").stdout.splitlines()
    first, second = (
        re.fullmatch(r"(.*) run: (\{.*\}), computed (\d+), ok", line) for line in lines
    )
    assert first is not None
    assert second is not None
    assert (first[1], second[1]) == ("first", "second")
    assert "'tiny': " in second[2]
    # Of 100 prompts 97 end within a block, which is computed in any case.
    assert 97 <= int(second[3]) < int(first[3]) / 4


def test_the_embedded_engine_gets_its_bytes_back() -> None:
    """Three blocks of 16 tokens go through CPU memory into the tier and come back from there."""
    lines = run("embed_engine.py").stdout.splitlines()
    assert lines == [
        "first request: 0 tokens can be loaded",
        "second request: 48 tokens can be loaded",
        "they come from: ['example', 'example', 'example']",
        "the bytes are the same: True",
    ]
