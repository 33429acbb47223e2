"""The tests themselves: module-level functions, one property each, every one with its clause.

They know the tier by its declaration and its harness, never by its name.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final

__all__ = ["SUITE_FILES", "load_suite"]

SUITE_FILES: Final[tuple[Path, ...]] = tuple(sorted(Path(__file__).parent.glob("test_*.py")))
"""The files of the suite, as pytest is told to collect them."""


def load_suite() -> None:
    """Import every file of the suite, so that all cases are known."""
    for file in SUITE_FILES:
        importlib.import_module(f"{__name__}.{file.stem}")
