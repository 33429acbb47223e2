"""The suite's own list: every clause has a test, or a tier would pass it by being asked nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_conformance.clauses import Clause
    from kv_conformance.run._case import Case

__all__ = ["find_untested"]


def find_untested(clauses: Iterable[Clause], cases: Iterable[Case]) -> list[str]:
    """Return the ids of the clauses that no case tests, in the order of the clauses."""
    tested = {case.clause.id for case in cases}
    return [clause.id for clause in clauses if clause.id not in tested]
