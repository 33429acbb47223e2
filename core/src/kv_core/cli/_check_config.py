"""``kv-core check-config``: what an engine would make of a configuration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kv_core.cli._frame import EXIT_PROBLEM
from kv_core.cli._frame import report as say
from kv_core.units import parse_bytes

if TYPE_CHECKING:
    from kv_core.plugins import TierRegistry

__all__ = ["check_config"]


def check_config(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSON or TOML (recognized by content), '-' for stdin, or a JSON object itself. "
            "The settings, or a vLLM KVTransferConfig around them.",
        ),
    ],
    block_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of one GPU block of one worker, all layers."),
    ] = None,
    tokens_per_block: Annotated[
        int | None, typer.Option(min=1, help="Tokens in one GPU block.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers that share the primary tier.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Check a configuration and show it as the engine would see it, without its secrets.

    Tiers are imported and their settings validated, but nothing is opened. Exits with status 2
    when an engine would refuse the configuration; warnings do not change the status.
    """
    from kv_core.cli._config_input import read_config_input
    from kv_core.cli._config_report import ModelShape, check

    registry: TierRegistry = context.obj
    shape = ModelShape(
        None if block_bytes is None else parse_bytes(block_bytes, setting="--block-bytes"),
        tokens_per_block,
        workers,
    )
    report = check(read_config_input(file), shape, registry)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        from rich.console import Console

        from kv_core.cli._config_tables import print_config_report

        print_config_report(Console(highlight=False), report)
        for error in report.errors:
            say(f"error: {error}")
    if report.errors:
        raise typer.Exit(EXIT_PROBLEM)
