"""A harness that does not do what it says makes the run an error: nothing was tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from pathlib import Path

HARNESSES: Final = """
from dataclasses import replace

from kv_conformance.reference import DictHarness
from kv_core.contract import Capability


class NoFaults(DictHarness):
    def inject(self, subject, fault):
        pass


class LosesNothing(DictHarness):
    def lose(self, subject, key):
        if key not in self.list_keys(subject):
            raise KeyError(key.hex())


class ListsNothing(DictHarness):
    def list_keys(self, subject):
        return []


class MissesNothing(DictHarness):
    def lose(self, subject, key):
        try:
            super().lose(subject, key)
        except KeyError:
            pass


class DeclaresLess(DictHarness):
    def __init__(self, workdir):
        super().__init__(workdir)
        whole = self.spec
        less = replace(whole, capabilities=whole.capabilities - {Capability.WITHDRAWS_IO})
        self.spec = replace(less, refine=lambda config: whole)
"""

LIES: Final = {
    "NoFaults": (("JOB-5", "DATA-11"), "inject(Fault.STALL) has no effect"),
    "LosesNothing": (("DATA-10",), "lose() did not remove the object"),
    "ListsNothing": (("DATA-10",), "it must list the objects"),
    "MissesNothing": (("DATA-10",), "must raise KeyError, and did not"),
    "DeclaresLess": (("DATA-1",), "the harness must carry what TierSpec.refine returns"),
}


@pytest.mark.parametrize("name", list(LIES))
def test_the_run_is_an_error(tmp_path: Path, name: str) -> None:
    """The clause that was not tested is named, and the message says what the harness lacks."""
    clauses, message = LIES[name]
    (tmp_path / "lying.py").write_text(HARNESSES)
    command = [sys.executable, "-m", "pytest", "--conformance", "-q", "-p", "no:cacheprovider"]
    command += ["--conformance-harness", f"lying:{name}"]
    for clause in clauses:
        command += ["--conformance-clause", clause]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    report = json.loads((tmp_path / "conformance-report.json").read_text())
    [tier] = report["tiers"]
    entry = next(entry for entry in tier["clauses"] if entry["id"] == clauses[0])
    # Where other tests of the clause fail because of it, the verdict is as bad.
    assert (tier["verdict"], done.returncode) in [("error", 3), ("non-conformant", 1)], done.stdout
    assert any(message in found for found in entry["messages"])
