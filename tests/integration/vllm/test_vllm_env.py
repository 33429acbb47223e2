"""Runs the tests that import vLLM, in the environment that has it.

Each file of ``tests/vllm_env`` in a process of its own: vLLM keeps what is registered with it for
the life of a process, and so would one test's tiers be found by the next.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT: Final = Path(__file__).parents[3]
FILES: Final = sorted((ROOT / "tests" / "vllm_env").rglob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_file(file: Path, vllm_python: Path) -> None:
    """All tests of a file pass."""
    done = subprocess.run(
        [vllm_python, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        cwd=ROOT,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
