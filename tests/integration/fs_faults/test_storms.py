"""Slices of the storms: ``make fs-faults`` runs them whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

STORMS: Final = Path(__file__).with_name("storms.py")


def storm(*arguments: str) -> dict[str, Any]:
    """Run a storm and return what it says of itself."""
    done = subprocess.run(
        [sys.executable, str(STORMS), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layout", "rounds"), [("segments", 20), ("files", 8)])
def test_killed_writers_leave_nothing_wrong(layout: str, rounds: int) -> None:
    """Whole or gone, counted and reclaimed, wherever they die (PERS-2, PERS-3, CAP-3)."""
    summary = storm("kills", "--layout", layout, "--rounds", str(rounds), "--seed", "1")
    assert summary["kills"] == rounds
    # Both kinds of death, in several places.
    assert 0 < summary["from_outside"] < rounds
    assert len(summary["places"]) > 3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["segments", "files"])
def test_a_crowd_in_two_namespaces_keeps_to_itself(layout: str) -> None:
    """Four processes at once: bytes right, bounds kept at every look (CAP-1, SHARE-2)."""
    summary = storm("crowd", "--layout", layout, "--seconds", "4", "--seed", "2")
    assert summary["looks"] > 10
    if layout == "segments":
        assert 2 << 20 < summary["most_bytes"] <= (6 << 20) + 4 * 4096
