"""The table of compatibility shows what reports say, and nothing more favourable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from kv_conformance.clauses import CLAUSES
from kv_conformance.compatibility import CompatibilityError, main, page

DOCS: Final = Path(__file__).parents[3] / "docs"


def report(**changes: Any) -> dict[str, Any]:
    """Return the report of a tier that keeps everything, with fields of the tier changed."""
    tier = {
        "type": "acme",
        "origin": "kv-tier-acme 1.2.0",
        "verdict": "conformant",
        "capabilities": ["persistent"],
        "undeclared": ["delete", "shared"],
        "problems": [],
        "clauses": [clause(item.id, "passed") for item in CLAUSES],
    }
    return {
        "schema": 1,
        "contract": "1.0",
        "suite": "0.1.0",
        "suite_sha256": "0123456789abcdef",
        "time_scale": 1.0,
        "environment": {
            "python": "3.12.1",
            "system": "Linux 6.1",
            "machine": "x86_64",
            "kv-core": "0.1.0",
            "pytest": "8.0",
        },
        "problems": [],
        "tiers": [{**tier, **changes}],
    }


def clause(clause_id: str, outcome: str) -> dict[str, Any]:
    """Return the entry of one clause."""
    return {"id": clause_id, "outcome": outcome, "seconds": 0.1, "messages": []}


def clauses_with(outcomes: dict[str, str]) -> list[dict[str, Any]]:
    """Return all entries, with the outcomes of some given."""
    return [clause(item.id, outcomes.get(item.id, "passed")) for item in CLAUSES]


def page_of(folder: Path, *reports: dict[str, Any]) -> str:
    """Return the page of some reports."""
    for number, item in enumerate(reports):
        (folder / f"report-{number}.json").write_text(json.dumps(item))
    return page(folder)


def row_of(text: str, tier: str = "acme") -> list[str]:
    """Return the cells of a tier's line."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| `{tier}` |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_page_in_the_docs_is_up_to_date() -> None:
    """Whoever adds a report makes the page anew."""
    expected = page(DOCS / "compatibility")
    assert (DOCS / "compatibility.md").read_text(encoding="utf-8") == expected


def test_a_line_shows_what_is_declared_and_what_is_not(tmp_path: Path) -> None:
    """Both sides of the declaration, the versions, and a link to the report."""
    assert row_of(page_of(tmp_path, report())) == [
        "`acme`",
        "kv-tier-acme 1.2.0",
        "[conformant](compatibility/report-0.json)",
        "persistent",
        "delete, shared",
        f"{len(CLAUSES)} of {len(CLAUSES)}",
        "-",
        "1.0",
        "0.1.0 (`0123456789ab`)",
        "Python 3.12.1, kv-core 0.1.0, Linux x86_64",
    ]


def test_what_did_not_pass_is_named(tmp_path: Path) -> None:
    """Skipped, failed and known deviations appear with their clauses; undeclared is no failure."""
    outcomes = {"LOOK-1": "skipped", "JOB-2": "deviation", "CAP-1": "undeclared"}
    cells = row_of(page_of(tmp_path, report(verdict="partial", clauses=clauses_with(outcomes))))
    assert cells[5] == f"{len(CLAUSES) - 3} of {len(CLAUSES) - 1}"
    assert cells[6] == "skipped: LOOK-1; deviation: JOB-2"


def test_clauses_that_came_later_are_open(tmp_path: Path) -> None:
    """The report of an old suite does not speak for new clauses."""
    cells = row_of(page_of(tmp_path, report(clauses=clauses_with({})[1:])))
    assert cells[6] == f"not in this suite: {CLAUSES[0].id}"


def test_more_time_is_shown(tmp_path: Path) -> None:
    """A run whose limits were stretched says so."""
    cells = row_of(page_of(tmp_path, {**report(), "time_scale": 4.0}))
    assert cells[8].endswith("time scale 4)")


def test_lines_are_in_order(tmp_path: Path) -> None:
    """By type and package, whatever the files are called."""
    text = page_of(tmp_path, report(type="zeta"), report(type="alpha"))
    assert text.index("`alpha`") < text.index("`zeta`")


def test_a_strangers_text_cannot_break_the_table(tmp_path: Path) -> None:
    """Bars, line ends, links and code marks in a name stay text."""
    text = page_of(tmp_path, report(origin="a|b\n[x](y) `c` <i>"))
    assert r"| a\|b \[x](y) c \<i> |" in text


def test_without_reports_there_is_a_page(tmp_path: Path) -> None:
    """An empty folder is no error."""
    assert page(tmp_path).endswith("There are no reports yet.\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no conformance-report.json"),
        ('{"tiers": []}', "schema: Field required"),
        (json.dumps({**report(), "schema": 9}), "has schema 9, expected 1"),
        (json.dumps(report(verdict="splendid")), "tiers.0.verdict"),
        (
            json.dumps(report(clauses=clauses_with({"LOOK-1": "failed"}))),
            "said to be conformant, but LOOK-1 did not pass",
        ),
    ],
)
def test_what_is_no_report_is_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is named, and why; nothing is printed."""
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(CompatibilityError, match=r"bad\.json"):
        page(tmp_path)
    assert main([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_the_command_prints_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints is what belongs into the docs."""
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == page(tmp_path)
