"""vLLM's own tiers under the suite, compared with what is published about them.

A difference is news either way: vLLM has changed, or our suite, adapter or page is wrong.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.integration.vllm._processes import Zygote

EVERYTHING: Final = os.environ.get("KV_CORE_VLLM_MATRIX") == "1"

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

FOLDER: Final = Path(__file__).parents[3] / "docs" / "conformance"
PAGE: Final = FOLDER / "vllm-0.32.md"
ROW: Final = re.compile(
    r"^\| ([A-Z]+-[0-9A-Z]+) \| ([a-z ]+) \| ([a-z ]+) \| ([a-z ]+) \|", re.MULTILINE
)
# Before the suite, as vLLM and all that it needs are: a plugin of theirs for pytest among it.
IMPORTED: Final = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
# In the words of the page.
NOT_JUDGED: Final = {"error": "not judged"}
# Their tests start processes, each of which imports vLLM: seconds, and many on a busy machine. The
# last is also broken when such a process takes long to end.
IN_PROCESSES: Final = ("NS-2", "PERS-2", "PERS-3", "SHARE-1", "SHARE-2", "DATA-9", "LIFE-2")

# What is judged unless everything is asked for, which takes minutes: both outcomes, and no clause
# whose tests wait for deadlines that the tier has not got.
SLICE: Final = (
    *("LOOK-6", "LOOK-7", "LOOK-9", "JOB-1", "JOB-4", "JOB-9", "ZC-1", "LIFE-1", "LIFE-5"),
    *("REQ-2", "CONF-1", "CONF-3", "NS-1", "UNDECLARED-EVENTS", "UNDECLARED-DELETE"),
)

# Of obj, whose other clauses end in a crash here or there: the page says why.
OBJ_SLICE: Final = (
    *("LOOK-7", "JOB-1", "JOB-9", "DATA-5", "DATA-10", "LIFE-1", "LIFE-5", "REQ-2"),
    *("CONF-1", "CONF-3", "NS-1", "UNDECLARED-DELETE"),
)
# What waits for minutes, or starts a new interpreter.
SLOW_BY_HAND: Final = {"obj-without-telemetry", "obj-a-server-that-hangs"}

# The random model test, one of DATA-1, blames one or the other for the same thing; and a process
# that is killed leaves a temporary file only if it was writing one at that moment.
BY_CHANCE: Final = ("LOOK-3", "PERS-3")


def published(tier: str) -> dict[str, str]:
    """Return the outcome of each clause that the page's table names."""
    place = {"fs": 2, "example": 3, "obj": 4}[tier]
    return {row.group(1): row.group(place).strip() for row in ROW.finditer(PAGE.read_text())}


def outcomes(
    zygote: Zygote, folder: Path, tier: str, *, scale: float, clauses: Sequence[str] = ()
) -> Iterator[tuple[str, str]]:
    """Run the suite in a folder of its own, and yield what became of each clause."""
    folder.mkdir()
    options = {
        "--conformance-harness": [f"kv_core.vllm.conformance:{tier}"],
        "--conformance-workdir": [str(folder)],
        "--conformance-time-scale": [str(scale)],
        "--conformance-clause": clauses,
    }
    words = [word for name, values in options.items() for value in values for word in (name, value)]
    log = folder / "log"
    process = zygote(
        ["pytest", "-q", "--conformance", *IMPORTED, *words],
        cwd=folder,
        environment=zygote.environment,
        log=log,
    )
    try:
        process.wait(1500)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    report = folder / "conformance-report.json"
    assert report.exists(), log.read_text()[-8000:]
    [result] = json.loads(report.read_text())["tiers"]
    for clause in result["clauses"]:
        if clause["outcome"] in ("declared", "not run"):
            continue
        yield clause["id"], NOT_JUDGED.get(clause["outcome"], clause["outcome"])


def test_the_file_system_tier_does_what_is_published(zygote: Zygote, tmp_path: Path) -> None:
    """Each clause has the outcome that the table of the page says."""
    expected = {
        clause: outcome for clause, outcome in published("fs").items() if outcome != "declared"
    }
    if EVERYTHING:
        found = dict(outcomes(zygote, tmp_path / "usual", "fs", scale=1))
        slow = dict(outcomes(zygote, tmp_path / "slow", "fs", scale=10, clauses=IN_PROCESSES))
        found |= {clause: slow[clause] for clause in IN_PROCESSES}
        for clause in BY_CHANCE:
            assert found[clause] in ("passed", "failed")
            found[clause] = expected[clause]
    else:
        judged = dict(outcomes(zygote, tmp_path / "slice", "fs", scale=1, clauses=SLICE))
        # A test of one clause may see another broken.
        found = {clause: judged[clause] for clause in SLICE}
        expected = {clause: expected[clause] for clause in SLICE}
    assert found == expected


def test_the_example_tier_does_what_is_published(zygote: Zygote, tmp_path: Path) -> None:
    """Each clause has the outcome that the table of the page says."""
    found = dict(outcomes(zygote, tmp_path / "usual", "example", scale=1))
    assert found == {
        clause: outcome for clause, outcome in published("example").items() if outcome != "declared"
    }


def test_the_object_store_tier_does_what_is_published(zygote: Zygote, tmp_path: Path) -> None:
    """Each clause that no crash decides has the outcome that the table of the page says."""
    judged = dict(outcomes(zygote, tmp_path / "slice", "obj", scale=1, clauses=OBJ_SLICE))
    expected = published("obj")
    assert {clause: judged[clause] for clause in OBJ_SLICE} == {
        clause: expected[clause] for clause in OBJ_SLICE
    }


def seen_by_hand(python: Path, folder: Path, script: str, names: Sequence[str] = ()) -> list[str]:
    """Return what one of the scripts prints."""
    done = subprocess.run(
        [python, FOLDER / script, *names],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if " NIXL " not in line]


def quoted() -> dict[str, list[str]]:
    """Return the findings that the page quotes, with the lines of each, its name the first."""
    found: dict[str, list[str]] = {}
    name = ""
    for block in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for line in block.splitlines():
            if not line.startswith(" "):
                name = line
                assert name not in found
            found.setdefault(name, []).append(line)
    return found


def test_what_is_quoted_is_what_is_seen_by_hand(vllm_python: Path, tmp_path: Path) -> None:
    """The script prints every block of output of the page, word for word, and nothing more."""
    expected = [
        line for name, lines in quoted().items() if not name.startswith("obj-") for line in lines
    ]
    found = seen_by_hand(vllm_python, tmp_path, "vllm_tiers_by_hand.py")
    assert sorted(found) == sorted(expected)


def test_what_is_quoted_of_obj_is_what_is_seen_by_hand(vllm_python: Path, tmp_path: Path) -> None:
    """The same for the script about obj."""
    expected = {name: lines for name, lines in quoted().items() if name.startswith("obj-")}
    names = [name for name in expected if EVERYTHING or name not in SLOW_BY_HAND]
    found = seen_by_hand(vllm_python, tmp_path, "vllm_obj_by_hand.py", names)
    assert found == [line for name in names for line in expected[name]]
