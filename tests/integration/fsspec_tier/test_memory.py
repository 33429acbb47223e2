"""Memory does not grow with the blocks that pass. ``make fsspec-soak`` does ten times as much."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_memory_is_flat() -> None:
    """After a thousand puts and gets as before, in a process of its own."""
    soak = Path(__file__).with_name("soak.py")
    done = subprocess.run(
        [sys.executable, str(soak), "--blocks", "1000"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, json.dumps([done.stdout, done.stderr])
    assert done.stdout.endswith("verdict: memory is flat\n")
