"""What a mutant is, and the list of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from kv_conformance.harness import Harness

__all__ = ["MUTANTS", "HarnessFunction", "Mutant", "mutant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A tier that breaks one promise.

    Attributes:
        name: Name of the function that makes its harness.
        clause: The clause that must catch it.
        breaks: What it does wrong, in one sentence.
        source: The public report it comes from, or the reason to fear it.
        reference: ``module:function``, for ``--conformance-harness``.
        also: Other clauses that it breaks by its nature.
    """

    name: str
    clause: str
    breaks: str
    source: str
    reference: str
    also: frozenset[str]


MUTANTS: Final[dict[str, Mutant]] = {}
"""All mutants by name. Filled when :mod:`kv_conformance.mutants` is imported."""

HarnessFunction = Callable[["Path"], "Harness"]


def mutant(
    clause: str, *, breaks: str, source: str, also: frozenset[str] = frozenset()
) -> Callable[[HarnessFunction], HarnessFunction]:
    """Register a function that makes the harness of a mutant."""

    def decorate(function: HarnessFunction) -> HarnessFunction:
        name = function.__name__
        if name in MUTANTS:
            raise ValueError(f"two mutants have the name {name!r}")
        MUTANTS[name] = Mutant(
            name=name,
            clause=clause,
            breaks=breaks,
            source=source,
            reference=f"{function.__module__}:{name}",
            also=also,
        )
        return function

    return decorate
