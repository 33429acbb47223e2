"""The table of compatibility: what which tier keeps, made from reports and from nothing else.

``python -m kv_conformance.compatibility docs/compatibility`` reads every ``*.json`` of a folder,
each a ``conformance-report.json`` under another name, and prints the page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, Field, ValidationError

from kv_conformance.clauses import CLAUSES
from kv_conformance.run._report import SCHEMA
from kv_conformance.run._verdict import ClauseOutcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["CompatibilityError", "main", "page"]

_HEAD: Final = """\
# Compatibility

<!-- Made by `python -m kv_conformance.compatibility docs/compatibility`. Add a report instead of
     editing this page. -->

Every line is a report of `pytest --conformance`, kept in [compatibility/](compatibility/). Nothing
is left out: what a tier does not declare it does not promise, and no clause of it was tested; what
was skipped, not run or is known to deviate stands under "left open".
[Write a tier](write-a-tier.md#be-listed) says how to add yours.
"""

_COLUMNS: Final = (
    "tier",
    "package",
    "verdict",
    "declares",
    "does not declare",
    "passed",
    "left open",
    "contract",
    "suite",
    "run on",
)

# What is no reason to look twice.
_SETTLED: Final = frozenset(
    {ClauseOutcome.PASSED, ClauseOutcome.UNDECLARED, ClauseOutcome.DECLARED}
)


class CompatibilityError(ValueError):
    """A report cannot be used. The message names the file."""


class _Clause(BaseModel):
    id: str
    outcome: ClauseOutcome
    provisional: bool = False


class _Tier(BaseModel):
    type: str
    origin: str
    verdict: Verdict
    capabilities: list[str]
    undeclared: list[str]
    clauses: list[_Clause]


class _Environment(BaseModel):
    python: str
    system: str
    machine: str
    kv_core: str = Field(alias="kv-core")


class _Report(BaseModel):
    """The part of a report that the page shows. Later suites may add fields."""

    contract: str
    suite: str
    suite_sha256: str
    time_scale: float
    environment: _Environment
    tiers: list[_Tier]


def page(folder: Path) -> str:
    """Return the page as Markdown.

    Args:
        folder: Holds the reports, ``*.json``.

    Raises:
        CompatibilityError: A file is no report, or contradicts itself.
    """
    rows = [
        (tier.type, tier.origin, file.name, report, tier)
        for file in sorted(folder.glob("*.json"))
        for report in [_read(file)]
        for tier in report.tiers
    ]
    if not rows:
        return f"{_HEAD}\nThere are no reports yet.\n"
    rows.sort(key=lambda row: row[:3])
    lines = [_line(_COLUMNS), _line("---" for _ in _COLUMNS).replace(" ", "")]
    lines += [_line(_cells(name, report, tier)) for _, _, name, report, tier in rows]
    return "\n".join([_HEAD, *lines, ""])


def _read(file: Path) -> _Report:
    try:
        text = file.read_bytes()
        schema = _Schema.model_validate_json(text).schema_version
        if schema != SCHEMA:
            raise CompatibilityError(
                f"{file}: the report has schema {schema}, expected {SCHEMA}: make it anew with "
                "this version of kv-conformance"
            )
        report = _Report.model_validate_json(text)
    except ValidationError as error:
        what = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"
            for item in error.errors(include_url=False)[:3]
        )
        raise CompatibilityError(
            f"{file}: this is no conformance-report.json ({what}). Copy the file that "
            "'pytest --conformance' has written"
        ) from None
    for tier in report.tiers:
        _check(file, tier)
    return report


class _Schema(BaseModel):
    schema_version: int = Field(alias="schema")


def _check(file: Path, tier: _Tier) -> None:
    open_clauses = [clause.id for clause in tier.clauses if _is_open(clause)]
    if tier.verdict is Verdict.CONFORMANT and open_clauses:
        raise CompatibilityError(
            f"{file}: tier {tier.type!r} is said to be conformant, but {', '.join(open_clauses)} "
            "did not pass: a report is not to be edited"
        )


def _is_open(clause: _Clause) -> bool:
    return clause.outcome not in _SETTLED and not clause.provisional


def _cells(name: str, report: _Report, tier: _Tier) -> list[str]:
    scale = "" if report.time_scale == 1 else f", time scale {report.time_scale:g}"
    passed = sum(clause.outcome is ClauseOutcome.PASSED for clause in tier.clauses)
    owed = len(tier.clauses) - sum(
        clause.outcome in (ClauseOutcome.UNDECLARED, ClauseOutcome.DECLARED)
        for clause in tier.clauses
    )
    environment = report.environment
    return [
        f"`{_plain(tier.type)}`",
        _plain(tier.origin),
        f"[{tier.verdict.value}](compatibility/{name})",
        _plain(", ".join(tier.capabilities)) or "nothing",
        _plain(", ".join(tier.undeclared)) or "nothing",
        f"{passed} of {owed}",
        _plain(_left_open(tier)),
        _plain(report.contract),
        f"{_plain(report.suite)} (`{_plain(report.suite_sha256[:12])}`{scale})",
        _plain(
            f"Python {environment.python}, kv-core {environment.kv_core}, "
            f"{environment.system.partition(' ')[0]} {environment.machine}"
        ),
    ]


def _left_open(tier: _Tier) -> str:
    by_outcome: dict[str, list[str]] = {}
    for clause in tier.clauses:
        if clause.outcome not in _SETTLED:
            by_outcome.setdefault(clause.outcome.value, []).append(clause.id)
    reported = {clause.id for clause in tier.clauses}
    # Clauses that came after the suite of the report.
    unknown = [clause.id for clause in CLAUSES if clause.id not in reported]
    if unknown:
        by_outcome["not in this suite"] = unknown
    return "; ".join(f"{outcome}: {', '.join(ids)}" for outcome, ids in by_outcome.items()) or "-"


def _plain(text: str) -> str:
    """Return a text from a stranger's file as one that cannot break the table."""
    text = " ".join(text.split())
    for character in "\\|`<[":
        text = text.replace(character, "" if character == "`" else f"\\{character}")
    return text


def _line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page for a folder of reports; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kv_conformance.compatibility", description="Print the table."
    )
    parser.add_argument("folder", type=Path, help="folder of the reports")
    folder: Path = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.error(f"{folder} is no folder")
    try:
        sys.stdout.write(page(folder))
    except CompatibilityError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
