"""Showing things on a terminal: what the commands of kv-core and those of tiers have in common.

For commands that a tier package registers. Needs ``rich``, which kv-core's command line brings.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["format_ages", "format_field", "widened"]

_PIPE_WIDTH: Final = 120
_UNITS: Final = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def widened(console: Console) -> Console:
    """Return the console, wide enough for a table where rich knows no width."""
    if not console.is_terminal:
        # In a pipe rich assumes 80 columns, which would fold every cell.
        console.width = max(console.width, _PIPE_WIDTH)
    return console


def format_ages(
    now_s: float, latest_s: float | None, oldest_s: float | None, *, unknown: str
) -> str:
    """Return how long ago something happened, from the latest time to the first: '2 h to 3 d ago'.

    Args:
        now_s: Now, in seconds since 1970. Clocks of other hosts may be ahead of it.
        latest_s: When it happened last; ``None``: there is no such time.
        oldest_s: When it happened first.
        unknown: What to say where there is no time.
    """
    if latest_s is None or oldest_s is None:
        return unknown
    latest, oldest = _age(now_s - latest_s), _age(now_s - oldest_s)
    return f"{latest} ago" if latest == oldest else f"{latest} to {oldest} ago"


def format_field(value: Any) -> str:
    """Return a value of a JSON document for a cell: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "0 s"
