"""The report: for machines, for people, and a badge."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import kv_conformance
from kv_conformance.harness import Fault, HarnessError
from kv_conformance.run._integrity import suite_digest
from kv_conformance.run._verdict import Verdict
from kv_core.contract import CONTRACT_VERSION, Capability

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kv_conformance.run._verdict import ClauseResult, TierVerdict

__all__ = ["SCHEMA", "make_report", "make_room", "write_report"]

SCHEMA: Final = 1
"""Version of the report's layout. Fields are only ever added within one."""

_JSON: Final = "conformance-report.json"
_MARKDOWN: Final = "conformance-report.md"
_BADGE: Final = "conformance-badge-{}.json"

_COLOURS: Final = {
    Verdict.CONFORMANT: "brightgreen",
    Verdict.PARTIAL: "yellow",
    Verdict.NON_CONFORMANT: "red",
    Verdict.ERROR: "lightgrey",
}


def make_report(
    verdicts: Sequence[TierVerdict],
    *,
    time_scale: float,
    problems: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the report as plain values.

    Args:
        verdicts: One per tier.
        time_scale: The factor on time limits.
        problems: What kept the suite from judging.
        plugins: pytest plugins that were loaded besides.
    """
    return {
        "schema": SCHEMA,
        "contract": str(CONTRACT_VERSION),
        "suite": kv_conformance.__version__,
        "suite_sha256": suite_digest(),
        "time_scale": time_scale,
        "environment": {
            "python": platform.python_version(),
            "implementation": sys.implementation.name,
            "system": f"{platform.system()} {platform.release()}",
            "machine": platform.machine(),
            "kv-core": metadata.version("kv-core"),
            "pytest": metadata.version("pytest"),
            "pytest_plugins": list(plugins),
            "optimized": sys.flags.optimize > 0,
        },
        "problems": list(problems),
        "tiers": [_tier(verdict) for verdict in verdicts],
    }


def _tier(verdict: TierVerdict) -> dict[str, Any]:
    declared = set(verdict.capabilities)
    return {
        "type": verdict.tier,
        "origin": verdict.origin,
        "verdict": verdict.verdict.value,
        "capabilities": sorted(declared),
        "undeclared": sorted({member.value for member in Capability} - declared),
        "faults": sorted(verdict.faults),
        "faults_left_out": _left_out(verdict),
        "problems": list(verdict.problems),
        "clauses": [_clause(result) for result in verdict.results],
    }


def _left_out(verdict: TierVerdict) -> list[str]:
    return sorted({fault.value for fault in Fault} - set(verdict.faults))


def _clause(result: ClauseResult) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": result.clause.id,
        "outcome": result.outcome.value,
        "seconds": result.seconds,
        "messages": list(result.messages),
    }
    if result.clause.provisional:
        entry["provisional"] = True
    if result.deviation is not None:
        entry["deviation"] = {
            "reason": result.deviation.reason,
            "issue": result.deviation.issue,
            "expiry": result.deviation.expiry.isoformat(),
        }
    return entry


def make_room(folder: Path) -> None:
    """Remove the report of an earlier run: nobody must take it for that of this one.

    Raises:
        HarnessError: There is no writing to the folder. Better to say so before the run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in (_JSON, _MARKDOWN, _BADGE.format("*")):
            for file in folder.glob(pattern):
                file.unlink()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise HarnessError(
            f"no report can be written to '{folder}': {error}. Name a folder with "
            "--conformance-report DIR"
        ) from error


def write_report(
    folder: Path,
    verdicts: Sequence[TierVerdict],
    *,
    time_scale: float,
    problems: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> list[Path]:
    """Write ``conformance-report.json``, ``conformance-report.md`` and a badge for each tier.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = make_report(verdicts, time_scale=time_scale, problems=problems, plugins=plugins)
    files = {
        _JSON: json.dumps(report, indent=2) + "\n",
        _MARKDOWN: _markdown(report, verdicts),
    }
    for verdict in verdicts:
        files[_BADGE.format(verdict.tier)] = json.dumps(_badge(verdict)) + "\n"
    for name, text in files.items():
        _write(folder / name, text)
    return [folder / name for name in files]


def _write(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all, also on a disk that is full."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _badge(verdict: TierVerdict) -> dict[str, Any]:
    """Return a badge in the format that shields.io reads from an address."""
    return {
        "schemaVersion": 1,
        "label": f"kv-core contract {CONTRACT_VERSION}",
        "message": verdict.verdict.value,
        "color": _COLOURS[verdict.verdict],
    }


def _markdown(report: dict[str, Any], verdicts: Sequence[TierVerdict]) -> str:
    environment = report["environment"]
    lines = [
        "# Conformance report",
        "",
        (
            f"Contract {report['contract']}, suite {report['suite']} "
            f"(`{report['suite_sha256'][:16]}`), time scale {report['time_scale']:g}. "
            f"Python {environment['python']}, kv-core {environment['kv-core']}, "
            f"pytest {environment['pytest']}, {environment['system']} {environment['machine']}."
        ),
    ]
    if environment["pytest_plugins"]:
        lines += ["", f"Other pytest plugins loaded: {', '.join(environment['pytest_plugins'])}."]
    lines += [f"\nProblem: {problem}" for problem in report["problems"]]
    for verdict in verdicts:
        declared = ", ".join(sorted(verdict.capabilities)) or "none"
        lines += [
            "",
            f"## `{verdict.tier}`: {verdict.verdict.value}",
            "",
            (
                f"From {verdict.origin}. Capabilities declared: {declared}. Faults of the storage "
                f"that the harness makes: {', '.join(sorted(verdict.faults)) or 'none'}; left out: "
                f"{', '.join(_left_out(verdict)) or 'none'}."
            ),
            "",
            "| clause | outcome | seconds | found |",
            "|---|---|---|---|",
        ]
        for result in verdict.results:
            found = "; ".join(result.messages).replace("|", "\\|").replace("\n", " ")
            lines.append(
                f"| [{result.clause.id}]({result.clause.link}) | {result.outcome.value} | "
                f"{result.seconds:g} | {found} |"
            )
    return "\n".join(lines) + "\n"
