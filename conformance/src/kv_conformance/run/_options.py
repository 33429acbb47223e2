"""The options of the plugin, as both processes read them."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

__all__ = ["INI_OVERRIDES", "Options", "add_options", "read_options"]

_DEVIATIONS: Final = "conformance-deviations.toml"

INI_OVERRIDES: Final = (
    "python_files=test_*.py",
    "python_functions=test_",
    "python_classes=Test",
    "testpaths=",
    "usefixtures=",
    "filterwarnings=",
    "norecursedirs=.*",
    # Most tiers do not owe every clause.
    "empty_parameter_set_mark=skip",
)
"""Settings of the author's own tests that would change how the suite is collected or run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for.

    Attributes:
        tiers: Tier types; empty for all that are installed.
        harnesses: References ``module:function``.
        clauses: Ids of the clauses to run; empty for all.
        time_scale: Multiplies every time limit of the suite.
        report_dir: Where the report is written.
        junit: Where a report in JUnit's form is written, or ``None``.
        deviations: File of known deviations, or ``None``.
        workdir: Parent folder for storages; ``None`` for a temporary one.
    """

    tiers: tuple[str, ...]
    harnesses: tuple[str, ...]
    clauses: tuple[str, ...]
    time_scale: float
    report_dir: Path
    junit: Path | None
    deviations: Path | None
    workdir: Path | None


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise argparse.ArgumentTypeError(f"expected a number above 0, such as 4, found {text!r}")
    return factor


def add_options(parser: pytest.Parser) -> None:
    """Add the options to pytest's."""
    group = parser.getgroup("conformance", "conformance of kv-core tiers")
    group.addoption(
        "--conformance",
        action="store_true",
        help="run the conformance suite of the tier contract instead of your own tests; "
        "arguments are tier types then (default: every installed tier)",
    )
    group.addoption(
        "--conformance-harness",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="test a tier that is not installed: FUNCTION(workdir) returns its harness",
    )
    group.addoption(
        "--conformance-clause",
        action="append",
        default=[],
        metavar="ID",
        help="run the tests of this clause only (the outcome is at best 'partial')",
    )
    group.addoption(
        "--conformance-explain",
        metavar="ID",
        help="print a clause with its reason and what breaks it, and exit",
    )
    group.addoption(
        "--conformance-time-scale",
        type=_factor,
        default=1.0,
        metavar="FACTOR",
        help="multiply the suite's own time limits, for slow machines",
    )
    group.addoption(
        "--conformance-report",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder for the report (default: the working directory)",
    )
    group.addoption(
        "--conformance-deviations",
        type=Path,
        metavar="FILE",
        help=f"known deviations (default: {_DEVIATIONS} where it exists)",
    )
    group.addoption(
        "--conformance-workdir",
        type=Path,
        metavar="DIR",
        help="parent folder for the storages of the run (default: a temporary folder)",
    )


def read_options(config: pytest.Config, positional: tuple[str, ...]) -> Options:
    """Return what the user asked for.

    Args:
        config: pytest's configuration.
        positional: The arguments that are no options.
    """
    option = config.option
    deviations: Path | None = option.conformance_deviations
    if deviations is None and Path(_DEVIATIONS).exists():
        deviations = Path(_DEVIATIONS)
    return Options(
        tiers=positional,
        harnesses=tuple(option.conformance_harness),
        clauses=tuple(clause_id.upper() for clause_id in option.conformance_clause),
        time_scale=option.conformance_time_scale,
        report_dir=option.conformance_report,
        junit=Path(option.xmlpath) if getattr(option, "xmlpath", None) else None,
        deviations=deviations,
        workdir=option.conformance_workdir,
    )
