"""One clause: an id, a sentence and its reason."""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kv_core.contract import Capability

__all__ = ["Clause", "ClauseKind", "UnknownClauseError"]

_PAGE: Final = "https://github.com/kv-core/kv-core/blob/main/docs/spec/tier-contract.md"


class ClauseKind(enum.Enum):
    """What a clause does."""

    DUTY = "duty"
    """A tier must do this. At least one mutant is caught by it."""
    ALLOWANCE = "allowance"
    """A tier may do this, and callers must live with it. A legal extreme relies on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """One promise of the contract.

    Attributes:
        id: Stable for ever: never reused, and a changed meaning gets a new one.
        sentence: The normative sentence.
        reason: Why it is there: what goes wrong without it.
        reports: Public reports of what went wrong, as ``project#number``.
        kind: Duty or allowance.
        capability: Applies to tiers that declare this capability; ``None`` for all tiers.
        absent: Applies to tiers that do *not* declare ``capability`` instead.
        provisional: New in this minor version: reported, not counted.
    """

    id: str
    sentence: str
    reason: str
    reports: tuple[str, ...] = ()
    kind: ClauseKind = ClauseKind.DUTY
    capability: Capability | None = None
    absent: bool = False
    provisional: bool = False

    @property
    def family(self) -> str:
        """The part of the id before the number."""
        return self.id.rpartition("-")[0]

    @property
    def anchor(self) -> str:
        """The anchor of the clause in the specification."""
        return self.id.lower()

    @property
    def link(self) -> str:
        """Where the clause is explained."""
        return f"{_PAGE}#{self.anchor}"

    def applies_to(self, capabilities: frozenset[Capability]) -> bool:
        """Say whether a tier with these declared capabilities owes this clause."""
        return self.capability is None or (self.capability in capabilities) is not self.absent


class UnknownClauseError(ValueError):
    """There is no clause of this id.

    Attributes:
        clause_id: What was asked for.
    """

    def __init__(self, clause_id: str, known: tuple[str, ...]) -> None:
        close = difflib.get_close_matches(clause_id.upper(), known, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"Known are {', '.join(known)}"
        super().__init__(f"there is no clause {clause_id!r}. {hint}")
        self.clause_id = clause_id
