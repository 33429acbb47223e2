"""What a legal extreme is, and the list of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from kv_conformance.harness import Harness

__all__ = ["EXTREMES", "Extreme", "HarnessFunction", "extreme"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """A tier that is unusual and keeps every promise.

    Attributes:
        name: Name of the function that makes its harness.
        does: What is unusual about it, in one sentence.
        relies_on: Clauses whose allowance it uses.
        reference: ``module:function``, for ``--conformance-harness``.
    """

    name: str
    does: str
    relies_on: frozenset[str]
    reference: str


EXTREMES: Final[dict[str, Extreme]] = {}
"""All legal extremes by name. Filled when :mod:`kv_conformance.extremes` is imported."""

HarnessFunction = Callable[["Path"], "Harness"]


def extreme(
    *, does: str, relies_on: frozenset[str] = frozenset()
) -> Callable[[HarnessFunction], HarnessFunction]:
    """Register a function that makes the harness of a legal extreme."""

    def decorate(function: HarnessFunction) -> HarnessFunction:
        name = function.__name__
        if name in EXTREMES:
            raise ValueError(f"two extremes have the name {name!r}")
        EXTREMES[name] = Extreme(
            name=name,
            does=does,
            relies_on=relies_on,
            reference=f"{function.__module__}:{name}",
        )
        return function

    return decorate
