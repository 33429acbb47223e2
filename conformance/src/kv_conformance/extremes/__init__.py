"""Tiers that are unusual and keep every promise: the suite must not fail any of them.

Run one with ``pytest --conformance --conformance-harness kv_conformance.extremes:NAME``.
"""

import importlib
import pkgutil
from typing import Any

from kv_conformance.extremes._extreme import EXTREMES, Extreme, HarnessFunction, extreme

__all__ = ["EXTREMES", "Extreme", "extreme"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def __getattr__(name: str) -> Any:
    """Return the function that makes the harness of an extreme."""
    if name in EXTREMES:
        return _function(EXTREMES[name])
    raise AttributeError(f"there is no extreme {name!r}; known are {', '.join(sorted(EXTREMES))}")


def _function(found: Extreme) -> HarnessFunction:
    loaded: HarnessFunction = getattr(
        importlib.import_module(found.reference.partition(":")[0]), found.name
    )
    return loaded
