"""The application: options of its own, built-in commands, and those of installed tiers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from kv_core import __version__
from kv_core.cli._builtin import add_builtin_commands, builtin_names
from kv_core.cli._frame import report, run_framed
from kv_core.contract import CONTRACT_VERSION
from kv_core.plugins import TierRegistry

__all__ = ["build_app", "main"]

_HELP_OPTIONS = frozenset({"--help", "-h"})


def main(argv: Sequence[str] | None = None, *, registry: TierRegistry | None = None) -> int:
    """Run the command line and return its exit status.

    Status 0 is success, 2 a problem of the input or the surroundings (said in one message on
    stderr), 130 an interrupt. Anything unexpected leaves as an exception, with its traceback.

    Args:
        argv: Arguments without the program's name; default those of the process.
        registry: Where tiers are found; default the environment.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    tiers = TierRegistry() if registry is None else registry

    def run() -> None:
        app = build_app()
        if _needs_plugins(arguments):
            for problem in tiers.command_plugins(app):
                report(f"warning: {problem}")
        get_command(app)(args=arguments, prog_name="kv-core", obj=tiers)

    return run_framed(run)


def build_app() -> typer.Typer:
    """Return the application with its built-in commands."""
    app = typer.Typer(
        callback=_root,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": sorted(_HELP_OPTIONS)},
    )
    add_builtin_commands(app)
    return app


def _needs_plugins(arguments: Sequence[str]) -> bool:
    """Say whether the commands of tiers can matter: only then their packages are imported."""
    for argument in arguments:
        if argument in _HELP_OPTIONS:
            return True
        if not argument.startswith("-"):
            return argument not in builtin_names()
    return not arguments


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"kv-core {__version__}, tier contract {CONTRACT_VERSION}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print versions and exit."
        ),
    ] = False,
) -> None:
    """Tiering engine and storage-backend contract for LLM KV caches."""
