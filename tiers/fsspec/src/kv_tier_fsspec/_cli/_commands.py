"""The commands themselves: options, progress, output and exit statuses."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from kv_core.errors import ConfigError, KVCoreError
from kv_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rich.progress import Progress

    from kv_tier_fsspec._cli._check import Finding
    from kv_tier_fsspec._cli._survey import FoundNamespace, Report
    from kv_tier_fsspec._config import FsspecConfig

__all__ = ["add_commands"]

ResultT = TypeVar("ResultT")

_DAMAGE_STATUS: Final = 1
_UNKNOWN_STATUS: Final = 3

_Url = Annotated[
    str, typer.Argument(metavar="URL", help="The 'url' of a tier, or 's3://' bucket and prefix.")
]
_Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="An option of the filesystem; may be repeated. Secrets belong into --options or the "
        "environment.",
    ),
]
_OptionsFile = Annotated[
    Path | None,
    typer.Option("--options", metavar="FILE", help="A file with options as one JSON object."),
]
_Namespace = Annotated[
    str | None,
    typer.Option(help="Only what begins with this: a folder's name, or the digits at its end."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def add_commands(app: typer.Typer) -> None:
    """Add the group ``object`` to an application."""
    group = typer.Typer(
        help="Look at blocks that are kept as objects, on any filesystem or object store, and "
        "check them. Safe while engines run.",
        no_args_is_help=True,
    )
    group.command("ls")(_list)
    group.command("du")(_usage)
    group.command("fsck")(_check)
    app.add_typer(group, name="object")


def _list(
    url: _Url,
    option: _Options = None,
    options: _OptionsFile = None,
    namespace: _Namespace = None,
    as_json: _Json = False,
) -> None:
    """List the namespaces: full description, objects, bytes, ages."""
    from rich.console import Console

    from kv_core.terminal import widened
    from kv_tier_fsspec._cli._options import config_of
    from kv_tier_fsspec._cli._tables import print_listing

    rows = _survey(config_of(url, option or [], options), namespace)
    if as_json:
        _print_json([_row(found, report, everything=True) for found, report in rows])
    elif not rows:
        typer.echo(f"{url} holds no namespace")
    else:
        print_listing(widened(Console(highlight=False)), rows)


def _usage(
    url: _Url,
    option: _Options = None,
    options: _OptionsFile = None,
    namespace: _Namespace = None,
    as_json: _Json = False,
) -> None:
    """Say what takes how much space."""
    from rich.console import Console

    from kv_core.terminal import widened
    from kv_tier_fsspec._cli._options import config_of
    from kv_tier_fsspec._cli._tables import print_usage

    rows = _survey(config_of(url, option or [], options), namespace)
    if as_json:
        _print_json([_row(found, report, everything=False) for found, report in rows])
    elif not rows:
        typer.echo(f"{url} holds no namespace")
    else:
        print_usage(widened(Console(highlight=False)), rows)


def _check(
    url: _Url,
    option: _Options = None,
    options: _OptionsFile = None,
    namespace: _Namespace = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove damaged blocks, so that they are stored anew.")
    ] = False,
    reads: Annotated[int, typer.Option(min=1, max=256, help="Blocks that are read at a time.")] = 8,
    as_json: _Json = False,
) -> None:
    """Read every block and verify its trailer and checksum.

    Status 1: there is damage, and it was not deleted, or a namespace cannot be told. Status 3:
    some blocks could not be read, or lie in a namespace without a description, so nothing is known
    of them. Status 2: there is nothing to check.
    """
    from kv_tier_fsspec._cli._options import config_of

    config = config_of(url, option or [], options)
    outcome = _run(config, _check_all(config, namespace, delete=delete, reads=reads))
    damaged = [finding for finding in outcome.findings if finding.is_damaged]
    unread = len(outcome.findings) - len(damaged)
    left = sum(not finding.is_deleted for finding in damaged)
    if as_json:
        _print_json(
            {
                "objects": outcome.objects,
                "checked_bytes": outcome.checked_bytes,
                "problems": outcome.problems,
                "findings": [asdict(finding) for finding in outcome.findings],
            }
        )
    else:
        for name, problem in outcome.problems.items():
            typer.echo(f"{name}: not checked: {problem}")
        for finding in outcome.findings:
            unreadable = "" if finding.is_damaged else "cannot be read: "
            typer.echo(
                f"{finding.name}: {unreadable}{finding.problem}{' (deleted)' * finding.is_deleted}"
            )
        summary = f", {len(damaged) - left} deleted" if damaged else ""
        summary += f", {unread} not readable" if unread else ""
        typer.echo(
            f"{outcome.objects:,} objects, {format_bytes(outcome.checked_bytes)} checked, "
            f"{len(damaged)} damaged{summary}"
        )
    if left or len(outcome.problems) > outcome.undescribed:
        raise typer.Exit(_DAMAGE_STATUS)
    if unread or outcome.undescribed:
        raise typer.Exit(_UNKNOWN_STATUS)


class _Outcome:
    """What a check came to.

    Attributes:
        findings: Blocks that failed.
        problems: By name, namespaces that could not be checked, and why.
        undescribed: How many of these have no description.
        objects: Blocks that were looked at.
        checked_bytes: Their bytes.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.problems: dict[str, str] = {}
        self.undescribed = 0
        self.objects = 0
        self.checked_bytes = 0


async def _check_all(
    config: FsspecConfig, only: str | None, *, delete: bool, reads: int
) -> _Outcome:
    from kv_tier_fsspec._cli._access import open_access
    from kv_tier_fsspec._cli._check import check_blocks
    from kv_tier_fsspec._cli._survey import find_namespaces, report_on

    outcome = _Outcome()
    with _progress() as progress:
        async with open_access(config) as (access, root):
            namespaces = await find_namespaces(access, root, only)
            if not namespaces:
                # Not a success: what was to be checked is somewhere else.
                raise ConfigError(
                    f"{config.url} holds no namespace; name the folder that namespaces lie in",
                    setting="url",
                )
            for found in namespaces:
                if found.namespace is None:
                    outcome.problems[found.name] = found.problem
                    outcome.undescribed += found.is_undescribed
                    continue
                # What cannot be listed is told by the check.
                total = (await report_on(access, found, lambda *_: None)).object_bytes
                task = progress.add_task(found.name, total=total)

                def advance(size_bytes: int, task: Any = task) -> None:
                    outcome.objects += 1
                    outcome.checked_bytes += size_bytes
                    progress.advance(task, size_bytes)

                async for finding in check_blocks(
                    access,
                    found,
                    delete=delete,
                    reads=reads,
                    describe=lambda error: _words(config, error),
                    advance=advance,
                ):
                    outcome.findings.append(finding)
    outcome.findings.sort(key=lambda finding: finding.name)
    return outcome


def _survey(config: FsspecConfig, only: str | None) -> list[tuple[FoundNamespace, Report]]:
    return _run(config, _survey_all(config, only))


async def _survey_all(
    config: FsspecConfig, only: str | None
) -> list[tuple[FoundNamespace, Report]]:
    from kv_tier_fsspec._cli._access import open_access
    from kv_tier_fsspec._cli._survey import find_namespaces, report_on

    async with open_access(config) as (access, root):
        return [
            (found, await report_on(access, found))
            for found in await find_namespaces(access, root, only)
        ]


def _run(config: FsspecConfig, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a command; put what a client library raises into one message."""
    from kv_tier_fsspec._blocks import open_error

    try:
        return asyncio.run(work)
    except KVCoreError:
        raise
    except Exception as error:  # noqa: BLE001 - libraries raise anything; it is told, not hidden
        raise open_error(config, error, f"looking into {config.url!r}") from None


def _words(config: FsspecConfig, error: BaseException) -> str:
    text = " ".join(config.hide_secrets(str(error)).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _row(found: FoundNamespace, report: Report, *, everything: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"namespace": found.name, **asdict(report)}
    if everything:
        row["problem"] = found.problem or None
        row["description"] = found.description
    return row


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))
