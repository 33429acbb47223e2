"""The commands that are always there.

The module of a command holds its options and may be imported for the sake of ``--help``: what
the command needs to do its work is imported inside the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import typer

from kv_core.cli._check_config import check_config
from kv_core.cli._demo import demo
from kv_core.cli._new_tier import new_tier
from kv_core.cli._replay import replay
from kv_core.cli._tiers import tiers

__all__ = ["add_builtin_commands", "builtin_names"]

_COMMANDS: Final[dict[str, Callable[..., Any]]] = {
    "tiers": tiers,
    "check-config": check_config,
    "demo": demo,
    "replay": replay,
    "new-tier": new_tier,
}


def builtin_names() -> frozenset[str]:
    """Return the names of all built-in commands."""
    return frozenset(_COMMANDS)


def add_builtin_commands(app: typer.Typer) -> None:
    """Add all built-in commands, in the order in which the help lists them."""
    for name, command in _COMMANDS.items():
        app.command(name)(command)
