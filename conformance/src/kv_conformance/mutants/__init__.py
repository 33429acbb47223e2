"""Tiers that break one promise each: the suite must catch every one of them.

Run one with ``pytest --conformance --conformance-harness kv_conformance.mutants:NAME``.
"""

import importlib
import pkgutil
from typing import Any

from kv_conformance.mutants._mutant import MUTANTS, HarnessFunction, Mutant, mutant

__all__ = ["MUTANTS", "Mutant", "mutant"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def __getattr__(name: str) -> Any:
    """Return the function that makes the harness of a mutant."""
    if name in MUTANTS:
        return _function(MUTANTS[name])
    raise AttributeError(f"there is no mutant {name!r}; known are {', '.join(sorted(MUTANTS))}")


def _function(found: Mutant) -> HarnessFunction:
    loaded: HarnessFunction = getattr(
        importlib.import_module(found.reference.partition(":")[0]), found.name
    )
    return loaded
