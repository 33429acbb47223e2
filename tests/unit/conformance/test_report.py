"""The report: for machines, for people, for CI servers, for the terminal and as a badge."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree as ET

import pytest

import kv_conformance
from kv_conformance.clauses import CLAUSES, ClauseKind, clause_of
from kv_conformance.harness import HarnessError
from kv_conformance.run._deviations import Deviation
from kv_conformance.run._explain import explain
from kv_conformance.run._integrity import suite_digest
from kv_conformance.run._junit import write_junit
from kv_conformance.run._report import make_report, make_room, write_report
from kv_conformance.run._summary import show
from kv_conformance.run._verdict import ClauseOutcome, ClauseResult, TierVerdict, Verdict
from kv_core.contract import CONTRACT_VERSION, Capability

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE: Final = Path(__file__).parents[3] / "docs" / "conformance-report.md"

Shape = dict[str, Any]

CLAUSE: Final[Shape] = {"id": str, "outcome": str, "seconds": float, "messages": [str]}
TIER: Final[Shape] = {
    "type": str,
    "origin": str,
    "verdict": str,
    "capabilities": [str],
    "undeclared": [str],
    "faults": [str],
    "faults_left_out": [str],
    "problems": [str],
    "clauses": [CLAUSE],
}
ENVIRONMENT: Final[Shape] = {
    "python": str,
    "implementation": str,
    "system": str,
    "machine": str,
    "kv-core": str,
    "pytest": str,
    "pytest_plugins": [str],
    "optimized": bool,
}
REPORT: Final[Shape] = {
    "schema": int,
    "contract": str,
    "suite": str,
    "suite_sha256": str,
    "time_scale": float,
    "environment": ENVIRONMENT,
    "problems": [str],
    "tiers": [TIER],
}
OPTIONAL: Final = {"provisional", "deviation"}


def check(value: object, shape: object, where: str = "report") -> None:
    """Compare a value with a shape: field names exactly, types, lists item by item."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), where
        assert value.keys() - OPTIONAL == shape.keys(), where
        for name, part in shape.items():
            check(value[name], part, f"{where}.{name}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for item in value:
            check(item, shape[0], f"{where}[]")
    else:
        assert isinstance(shape, type)
        allowed = (int, float) if shape is float else (shape,)
        assert type(value) in allowed, f"{where}: {value!r}"


def make_verdict(verdict: Verdict, **outcomes: ClauseOutcome) -> TierVerdict:
    """Return a verdict in which the named clauses (``LOOK_3``) have other outcomes than passed."""
    changed = {name.replace("_", "-"): outcome for name, outcome in outcomes.items()}
    deviation = Deviation(
        clause="DATA-1", reason="later", issue="acme#7", expiry=dt.date(2999, 12, 31)
    )
    results = tuple(
        ClauseResult(
            clause,
            changed.get(clause.id, ClauseOutcome.PASSED),
            seconds=0.25,
            messages=("a | b\nc <d>\0",) if clause.id in changed else (),
            deviation=deviation if changed.get(clause.id) is ClauseOutcome.DEVIATION else None,
        )
        for clause in CLAUSES
    )
    return TierVerdict(
        "acme",
        "kv-tier-acme 1.0",
        ("bounded", "shared"),
        verdict,
        results,
        faults=("error", "stall"),
    )


GOOD: Final = make_verdict(Verdict.CONFORMANT)
BAD: Final = make_verdict(
    Verdict.NON_CONFORMANT,
    LOOK_3=ClauseOutcome.FAILED,
    JOB_1=ClauseOutcome.ERROR,
    JOB_2=ClauseOutcome.NOT_RUN,
    DATA_1=ClauseOutcome.DEVIATION,
    PERS_1=ClauseOutcome.UNDECLARED,
)


def written(folder: Path, *verdicts: TierVerdict) -> Mapping[str, Any]:
    """Write the files and return the report as it is read."""
    write_report(folder, verdicts, time_scale=2.0, problems=["a problem"], plugins=["other 1.0"])
    report: dict[str, Any] = json.loads((folder / "conformance-report.json").read_text())
    return report


def test_the_layout(tmp_path: Path) -> None:
    """The fields and their types are exactly those of the schema."""
    check(written(tmp_path, GOOD, BAD), REPORT)


def test_every_field_is_documented() -> None:
    """The page on the report names each field."""
    named = set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    fields = {*REPORT, *TIER, *CLAUSE, *OPTIONAL, *(f"environment.{name}" for name in ENVIRONMENT)}
    assert named >= fields
    assert {outcome.value for outcome in ClauseOutcome} <= named
    assert {verdict.value for verdict in Verdict} <= named


def test_what_was_run(tmp_path: Path) -> None:
    """The report says which contract, which suite, and what else was loaded."""
    report = written(tmp_path, GOOD)
    assert report["schema"] == 1
    assert report["contract"] == str(CONTRACT_VERSION)
    assert report["suite"] == kv_conformance.__version__
    assert report["suite_sha256"] == suite_digest()
    assert report["time_scale"] == 2.0
    assert report["problems"] == ["a problem"]
    assert report["environment"]["pytest"] == pytest.__version__
    assert report["environment"]["pytest_plugins"] == ["other 1.0"]


def test_capabilities_declared_and_not(tmp_path: Path) -> None:
    """Every capability of the contract is on one of two lists."""
    (tier,) = written(tmp_path, GOOD)["tiers"]
    assert tier["capabilities"] == ["bounded", "shared"]
    assert {*tier["capabilities"], *tier["undeclared"]} == {item.value for item in Capability}
    assert not {*tier["capabilities"]} & {*tier["undeclared"]}


def test_faults_made_and_left_out(tmp_path: Path) -> None:
    """What a storage was not put through is told, to machines and to people."""
    (tier,) = written(tmp_path, GOOD)["tiers"]
    assert (tier["faults"], tier["faults_left_out"]) == (["error", "stall"], ["full", "short"])
    text = (tmp_path / "conformance-report.md").read_text(encoding="utf-8")
    assert "the harness makes: error, stall; left out: full, short." in text


def test_each_clause_once(tmp_path: Path) -> None:
    """All clauses are there, in the order of the specification, also those not owed."""
    (tier,) = written(tmp_path, BAD)["tiers"]
    assert [clause["id"] for clause in tier["clauses"]] == [clause.id for clause in CLAUSES]
    outcomes = {clause["id"]: clause["outcome"] for clause in tier["clauses"]}
    assert outcomes["LOOK-3"] == "failed"
    assert outcomes["JOB-2"] == "not run"
    assert outcomes["PERS-1"] == "undeclared"


def test_a_deviation_is_told(tmp_path: Path) -> None:
    """A known deviation stands in the report with its reason, issue and expiry."""
    (tier,) = written(tmp_path, BAD)["tiers"]
    (entry,) = (clause for clause in tier["clauses"] if clause["id"] == "DATA-1")
    assert entry["deviation"] == {"reason": "later", "issue": "acme#7", "expiry": "2999-12-31"}


def test_nothing_was_tested() -> None:
    """A report of a run that found no tier has the same layout."""
    check(make_report([], time_scale=1, problems=["no server"]), REPORT)


def test_the_digest_follows_the_files() -> None:
    """The digest is that of the names and bytes of all Python files, in order."""
    root = Path(kv_conformance.__file__).parent
    expected = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        expected.update(file.relative_to(root).as_posix().encode() + b"\0")
        expected.update(hashlib.sha256(file.read_bytes()).digest())
    assert suite_digest() == expected.hexdigest()


@pytest.mark.parametrize("verdict", list(Verdict))
def test_badges(tmp_path: Path, verdict: Verdict) -> None:
    """Only a conformant tier has a green badge."""
    written(tmp_path, make_verdict(verdict))
    badge = json.loads((tmp_path / "conformance-badge-acme.json").read_text())
    assert badge["schemaVersion"] == 1
    assert badge["message"] == verdict.value
    assert ("green" in badge["color"]) == (verdict is Verdict.CONFORMANT)


def test_markdown(tmp_path: Path) -> None:
    """The table for people has a row for each clause, and no message breaks it."""
    written(tmp_path, BAD)
    text = (tmp_path / "conformance-report.md").read_text()
    assert "## `acme`: non-conformant" in text
    assert "a problem" in text
    assert "other 1.0" in text
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    assert len(rows) == len(CLAUSES)
    look = clause_of("LOOK-3")
    (row,) = (row for row in rows if row.startswith("| [LOOK-3]"))
    assert row.startswith(f"| [LOOK-3]({look.link}) | failed | 0.25 | a \\| b c <d>")


def test_an_old_report_is_removed(tmp_path: Path) -> None:
    """What an earlier run found is not left for this one's, and nothing else is touched."""
    written(tmp_path, GOOD)
    (tmp_path / "notes.md").touch()
    make_room(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]


def test_a_report_that_could_not_be_written(tmp_path: Path) -> None:
    """It is said before the run, and not after it, with what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(HarnessError, match=r"no report can be written to '.*file'.*report DIR"):
        make_room(tmp_path / "file")


def junit(tmp_path: Path, *verdicts: TierVerdict, problems: tuple[str, ...] = ()) -> ET.Element:
    """Write the JUnit file and read it."""
    path = tmp_path / "reports" / "junit.xml"
    write_junit(path, verdicts, problems)
    return ET.parse(path).getroot()  # noqa: S314 - our own file


def test_junit_names_the_clause(tmp_path: Path) -> None:
    """Each test case carries its clause as a property."""
    root = junit(tmp_path, BAD)
    cases = root.findall("./testsuite/testcase")
    assert [case.get("name") for case in cases] == [clause.id for clause in CLAUSES]
    for case, clause in zip(cases, CLAUSES, strict=True):
        properties = {item.get("name"): item.get("value") for item in case.iter("property")}
        assert properties["clause"] == clause.id
        assert properties["link"] == clause.link


def test_junit_outcomes(tmp_path: Path) -> None:
    """A failure, an error, and what did not run are three things."""
    root = junit(tmp_path, BAD)
    kinds = {
        case.get("name"): [child.tag for child in case if child.tag != "properties"]
        for case in root.iter("testcase")
    }
    assert kinds["LOOK-3"] == ["failure"]
    assert kinds["JOB-1"] == ["error"]
    assert kinds["JOB-2"] == kinds["PERS-1"] == kinds["DATA-1"] == ["skipped"]
    assert kinds["LOOK-1"] == []
    (suite,) = root.findall("testsuite")
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("1", "1", "3")


def test_junit_with_strange_messages(tmp_path: Path) -> None:
    """A message with bytes that XML cannot hold does not make an unreadable file."""
    (failure,) = junit(tmp_path, BAD).iter("failure")
    assert failure.text == "a | b\nc <d>?"


def test_junit_of_a_run_that_found_nothing(tmp_path: Path) -> None:
    """A run without a tier is an error there, too, and not an empty success."""
    root = junit(tmp_path, problems=("no server",))
    (error,) = root.iter("error")
    assert error.get("message") == "no server"


def test_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure is shown with its sentence, what was found, and a link."""
    show([BAD], ["a problem"], [Path("report.json")])
    text = capsys.readouterr().out
    look = clause_of("LOOK-3")
    assert f"LOOK-3 failed: {look.sentence}" in text
    assert "found: a | b" in text
    assert look.link in text
    assert "known deviation: later (acme#7)" in text
    assert "not run: JOB-2" in text
    assert "acme (kv-tier-acme 1.0): non-conformant" in text
    assert "error: a problem" in text
    assert "report.json" in text


def test_the_summary_names_few_clauses_that_did_not_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever runs one clause of all has no use for a list of the others."""
    verdict = replace(BAD, results=tuple(ClauseResult(c, ClauseOutcome.NOT_RUN) for c in CLAUSES))
    show([verdict], [], [])
    text = capsys.readouterr().out
    assert f"not run: {len(CLAUSES)} clauses, see the report" in text
    assert "LOOK-3" not in text


def test_the_summary_of_a_blocked_clause(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was found of it, so it is said where to look."""
    blocked = ClauseResult(clause_of("LOOK-3"), ClauseOutcome.BLOCKED)
    show([replace(BAD, results=(blocked,))], [], [])
    text = capsys.readouterr().out
    assert "LOOK-3 blocked" in text
    assert "repair that first" in text


def test_the_summary_of_a_conformant_tier(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing distracts from a good verdict."""
    show([GOOD], [], [])
    text = capsys.readouterr().out
    assert "acme (kv-tier-acme 1.0): conformant" in text
    assert "found" not in text


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.id)
def test_explanations(clause: Any) -> None:
    """A clause is explained by its sentence, its reason, and who breaks it."""
    text = explain(clause)
    words = " ".join(text.split())
    assert text.startswith(clause.id)
    assert " ".join(clause.sentence.split()) in words
    assert " ".join(clause.reason.split()) in words
    assert text.endswith(clause.link)


def test_an_explanation_names_mutants() -> None:
    """What breaks a clause is the best explanation of it."""
    assert "always_there: Answers True for every key." in explain(clause_of("LOOK-1"))


def test_an_explanation_of_an_allowance_names_extremes() -> None:
    """Who relies on an allowance is named."""
    allowed = next(
        clause
        for clause in CLAUSES
        if clause.kind is ClauseKind.ALLOWANCE and clause.id == "DRAIN-3"
    )
    assert "relied on by" in explain(allowed)
