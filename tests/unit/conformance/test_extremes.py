"""Each legal extreme works at all: of whole runs of them, every commit draws a few only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_conformance.extremes import EXTREMES, Extreme
from kv_conformance.rig import Budget, Rigs, SubjectType
from kv_conformance.run._subjects import load_harness

if TYPE_CHECKING:
    from pathlib import Path

    from kv_conformance.rig import Violation


@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
def test_an_extreme_stores_and_loads(extreme: Extreme, tmp_path: Path) -> None:
    """Whatever it builds on fits together."""
    violations: list[Violation] = []
    harness = load_harness(extreme.reference, tmp_path)
    subject = SubjectType("acme", "acme 1.0", harness.spec, harness, extreme.reference, tmp_path)
    harness.start()
    try:
        rigs = Rigs(subject, "test", Budget(), violations.append)
        rig = rigs.open()
        keys = rigs.keys(4)
        rig.stored(keys)
        rig.expect_loads(keys)
        rigs.close()
    finally:
        harness.stop()
    assert violations == []
