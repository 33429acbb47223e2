"""What was found: promises that were broken, whichever test saw it.

A test of one clause watches all the others at the same time. What it sees is put down to the
clause that was broken, so that a tier which duplicates results fails JOB-1 and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Never

__all__ = ["Broken", "Findings", "Violation", "expect"]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise.

    Attributes:
        clause: Id of the clause.
        message: What was seen, in one sentence.
    """

    clause: str
    message: str


class Broken(Exception):  # noqa: N818 - what happened to a promise, not to the suite
    """A promise was broken, and the test cannot go on.

    Attributes:
        clause: Id of the clause; ``None`` for that of the running test.
        message: What was seen.
    """

    def __init__(self, message: str, clause: str | None = None) -> None:
        super().__init__(message if clause is None else f"{clause}: {message}")
        self.clause = clause
        self.message = message


def expect(condition: object, message: str, *, clause: str | None = None) -> None:
    """End the test with a broken promise unless a condition holds.

    Unlike an assertion it works under ``python -O``.

    Args:
        condition: What should hold.
        message: What was seen instead.
        clause: Whose promise it is; by default that of the running test.

    Raises:
        Broken: It does not hold.
    """
    if not condition:
        raise Broken(message, clause)


@final
class Findings:
    """Collects violations of one test.

    Args:
        report: Called with each violation at once: the process may not live to the end.
    """

    def __init__(self, report: Callable[[Violation], None]) -> None:
        self._report = report
        self._seen: set[tuple[str, str]] = set()

    def add(self, clause: str, message: str) -> None:
        """Put a violation down, once."""
        if (clause, message) not in self._seen:
            self._seen.add((clause, message))
            self._report(Violation(clause, message))

    def fail(self, clause: str, message: str) -> Never:
        """Put a violation down and end the test.

        Raises:
            Broken: Always.
        """
        self.add(clause, message)
        raise Broken(message, clause)
