"""What the user reads last: the verdict, and what it rests on."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Final

from rich.console import Console

from kv_conformance.run._verdict import ClauseOutcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kv_conformance.run._verdict import TierVerdict

__all__ = ["show"]

_QUIET: Final = (ClauseOutcome.PASSED, ClauseOutcome.UNDECLARED, ClauseOutcome.DECLARED)
_MOST_MESSAGES: Final = 4
_MOST_NOT_RUN: Final = 8


def show(verdicts: Sequence[TierVerdict], problems: Sequence[str], files: Sequence[Path]) -> None:
    """Print the outcome of a run.

    Args:
        verdicts: One per tier.
        problems: What kept the suite from judging.
        files: The files of the report.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a tier says is in any script, and a terminal may know only one.
        sys.stdout.reconfigure(errors="backslashreplace")
    console.rule("conformance")
    for problem in problems:
        console.print(f"error: {problem}", style="red")
    for verdict in verdicts:
        for line in _lines(verdict):
            console.print(line)
        good = verdict.verdict is Verdict.CONFORMANT
        console.print(
            f"{verdict.tier} ({verdict.origin}): {verdict.verdict.value}",
            style="bold green" if good else "bold red",
        )
    if files:
        console.print(f"report: {', '.join(str(file) for file in files)}")


def _lines(verdict: TierVerdict) -> Iterator[str]:
    """Yield what did not pass, with its sentence and a link."""
    not_run = [r.clause.id for r in verdict.results if r.outcome is ClauseOutcome.NOT_RUN]
    for result in verdict.results:
        if result.outcome in (*_QUIET, ClauseOutcome.NOT_RUN):
            continue
        yield f"  {result.clause.id} {result.outcome.value}: {result.clause.sentence}"
        for message in result.messages[:_MOST_MESSAGES]:
            yield f"      found: {message}"
        if len(result.messages) > _MOST_MESSAGES:
            yield f"      and {len(result.messages) - _MOST_MESSAGES} more, see the report"
        if result.outcome is ClauseOutcome.BLOCKED:
            yield "      a test of it broke off where another clause was broken: repair that first"
        if result.deviation is not None:
            yield f"      known deviation: {result.deviation.reason} ({result.deviation.issue})"
        yield f"      {result.clause.link}"
    if len(not_run) > _MOST_NOT_RUN:
        yield f"  not run: {len(not_run)} clauses, see the report"
    elif not_run:
        yield f"  not run: {', '.join(not_run)}"
