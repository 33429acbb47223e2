"""A clause in full, for the terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_conformance.clauses import Clause

__all__ = ["explain"]


def explain(clause: Clause) -> str:
    """Return the sentence, the reason, the reports, who breaks it and who relies on it."""
    # Late: these import every reference tier.
    from kv_conformance.extremes import EXTREMES
    from kv_conformance.mutants import MUTANTS

    def wrap(text: str) -> str:
        return textwrap.fill(text, 88, initial_indent="  ", subsequent_indent="  ")

    lines = [f"{clause.id} ({clause.kind.value})", wrap(clause.sentence)]
    if clause.capability is not None:
        who = "do not declare" if clause.absent else "declare"
        lines += [wrap(f"Applies to tiers that {who} {clause.capability.name}.")]
    lines += ["why", wrap(clause.reason)]
    if clause.reports:
        lines += ["public reports", wrap(", ".join(clause.reports))]
    broken_by = [mutant for mutant in MUTANTS.values() if mutant.clause == clause.id]
    if broken_by:
        lines += ["broken by"]
        lines += [wrap(f"{mutant.name}: {mutant.breaks}") for mutant in broken_by]
    relied_on_by = [extreme for extreme in EXTREMES.values() if clause.id in extreme.relies_on]
    if relied_on_by:
        lines += ["relied on by"]
        lines += [wrap(f"{extreme.name}: {extreme.does}") for extreme in relied_on_by]
    return "\n".join([*lines, clause.link])
