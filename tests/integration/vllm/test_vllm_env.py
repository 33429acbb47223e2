"""Runs the tests that import vLLM, in the environment that has it.

Each file of ``tests/vllm_env`` in a process of its own: vLLM keeps what is registered with it for
the life of a process, and so would one test's tiers be found by the next.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from tests.integration.vllm._processes import Zygote

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT: Final = Path(__file__).parents[3]
# Before the tests, as vLLM and all that it needs are: a plugin of theirs for pytest among it.
IMPORTED: Final = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
FILES: Final = sorted((ROOT / "tests" / "vllm_env").rglob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_file(file: Path, zygote: Zygote, tmp_path: Path) -> None:
    """All tests of a file pass."""
    log = tmp_path / "log"
    process = zygote(
        ["pytest", "-q", "-p", "no:cacheprovider", "-W", IMPORTED, str(file)],
        cwd=ROOT,
        environment={**os.environ, **zygote.environment, "VLLM_LOGGING_LEVEL": "WARNING"},
        log=log,
    )
    try:
        status = process.wait(280)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    assert status == 0, log.read_text()
