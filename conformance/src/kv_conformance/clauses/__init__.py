"""The clauses of the tier contract, as the suite knows them.

``docs/spec/tier-contract.md`` is the written form for people: the same ids and the same sentences,
with what is allowed beside what is required. A test of the project keeps the two equal.
"""

from __future__ import annotations

from typing import Final

from kv_conformance.clauses._capabilities import CAPABILITY_CLAUSES
from kv_conformance.clauses._clause import Clause, ClauseKind, UnknownClauseError
from kv_conformance.clauses._core import CORE_CLAUSES

__all__ = ["CLAUSES", "Clause", "ClauseKind", "UnknownClauseError", "clause_of"]

CLAUSES: Final[tuple[Clause, ...]] = CORE_CLAUSES + CAPABILITY_CLAUSES
"""All clauses, in the order of the specification."""

_BY_ID: Final = {clause.id: clause for clause in CLAUSES}


def clause_of(clause_id: str) -> Clause:
    """Return the clause with an id.

    Raises:
        UnknownClauseError: There is none.
    """
    try:
        return _BY_ID[clause_id.upper()]
    except KeyError:
        raise UnknownClauseError(clause_id, tuple(_BY_ID)) from None
