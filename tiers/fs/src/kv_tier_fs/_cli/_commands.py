"""The commands themselves: options, progress, output and exit statuses."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kv_core.errors import ConfigError
from kv_core.units import format_bytes, parse_bytes

__all__ = ["add_commands"]

_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|min|h|d)")
_SECONDS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_DAMAGE_STATUS: Final = 1

_Root = Annotated[Path, typer.Argument(metavar="ROOT", help="The 'root_dir' of a tier.")]
_Namespace = Annotated[
    str | None,
    typer.Option(help="Only what begins with this: a folder's name, or the digits at its end."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def add_commands(app: typer.Typer) -> None:
    """Add the group ``fs`` to an application."""
    group = typer.Typer(
        help="Look into the folders of the tier 'fs', check them and collect in them. Safe while "
        "engines run.",
        no_args_is_help=True,
    )
    group.command("ls")(_list)
    group.command("du")(_usage)
    group.command("fsck")(_check)
    group.command("gc")(_collect)
    app.add_typer(group, name="fs")


def _list(root: _Root, namespace: _Namespace = None, as_json: _Json = False) -> None:
    """List the namespaces: full description, blocks, bytes, ages."""
    from rich.console import Console

    from kv_core.terminal import widened
    from kv_tier_fs._cli._survey import find_stores
    from kv_tier_fs._cli._tables import print_listing

    rows = [(store, store.report()) for store in find_stores(root.absolute(), namespace)]
    if as_json:
        _print_json(
            [
                {
                    "namespace": store.name,
                    "layout": store.layout,
                    "problem": store.problem,
                    **asdict(report),
                    "description": store.description,
                }
                for store, report in rows
            ]
        )
    elif not rows:
        typer.echo(f"{root} holds no namespace")
    else:
        print_listing(widened(Console(highlight=False)), rows)


def _usage(root: _Root, namespace: _Namespace = None, as_json: _Json = False) -> None:
    """Say what takes how much space."""
    from rich.console import Console

    from kv_core.terminal import widened
    from kv_tier_fs._cli._survey import find_stores, free_bytes
    from kv_tier_fs._cli._tables import print_usage

    rows = [(store, store.report()) for store in find_stores(root.absolute(), namespace)]
    free = free_bytes(root)
    if as_json:
        sizes = [
            {
                "namespace": store.name,
                "layout": store.layout,
                "blocks": report.blocks,
                "payload_bytes": report.payload_bytes,
                "disk_bytes": report.disk_bytes,
            }
            for store, report in rows
        ]
        _print_json({"namespaces": sizes, "free_bytes": free})
    elif not rows:
        typer.echo(f"{root} holds no namespace")
    else:
        print_usage(widened(Console(highlight=False)), rows, free)


def _check(
    root: _Root,
    namespace: _Namespace = None,
    retire: Annotated[
        bool,
        typer.Option(
            "--retire", help="Make damaged blocks unfindable, so that they are stored anew."
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Read every block and every index, and verify their checksums.

    Status 1: there is damage, and it was not retired; damage of an index never is.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from kv_tier_fs._cli._survey import find_stores
    from kv_tier_fs._root import check_root

    root = root.absolute()
    stores = find_stores(root, namespace)
    if retire:
        check_root(root)
    found: list[dict[str, Any]] = []
    checked_bytes = 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        for store in stores:
            task = progress.add_task(store.name, total=store.report().payload_bytes)

            def advance(size_bytes: int, task: Any = task) -> None:
                nonlocal checked_bytes
                checked_bytes += size_bytes
                progress.advance(task, size_bytes)

            try:
                for damage in store.check(advance):
                    retired = retire and damage.retire is not None
                    if retired and damage.retire is not None:
                        damage.retire()
                    found.append(
                        {
                            "namespace": store.name,
                            "path": str(damage.path),
                            "key": None if damage.key is None else damage.key.hex(),
                            "problem": damage.problem,
                            "retired": retired,
                        }
                    )
            finally:
                store.close()
    left = sum(not line["retired"] for line in found)
    if as_json:
        _print_json({"checked_bytes": checked_bytes, "damage": found})
    else:
        for line in found:
            typer.echo(f"{line['path']}: {line['problem']}" + " (retired)" * line["retired"])
        summary = f", {len(found) - left} retired" if found else ""
        typer.echo(f"{format_bytes(checked_bytes)} checked, {len(found)} damaged{summary}")
    if left:
        raise typer.Exit(_DAMAGE_STATUS)


def _collect(
    root: _Root,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Remove the least recently used until all of it takes at most this, for example "
            "200GiB.",
        ),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Remove namespaces that nobody has used for so long, for example 30d, 12h.",
        ),
    ] = None,
    namespace: _Namespace = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing.")] = False,
    as_json: _Json = False,
) -> None:
    """Collect by hand: what dead writers left, and what the options say."""
    from kv_tier_fs._cli._collection import collect
    from kv_tier_fs._cli._survey import find_stores

    root = root.absolute()
    done = collect(
        root,
        find_stores(root, namespace),
        capacity_bytes=None if capacity is None else parse_bytes(capacity, setting="--capacity"),
        unused_for_s=None if ttl is None else _parse_duration(ttl),
        dry_run=dry_run,
    )
    if as_json:
        _print_json({**asdict(done), "dry_run": dry_run})
        return
    would = "would go" if dry_run else "went"
    for name in done.namespaces:
        typer.echo(f"{name}: unused, {would} as a whole")
    typer.echo(
        f"{done.files} files {would}, {format_bytes(done.freed_bytes)} freed, "
        f"{format_bytes(done.disk_bytes)} left"
    )


def _parse_duration(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--ttl: {text!r} is no duration; expected a number with s, min, h or d, for example "
            "'30d'",
            setting="--ttl",
        )
    return float(match[1]) * _SECONDS[match[2]]


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))
