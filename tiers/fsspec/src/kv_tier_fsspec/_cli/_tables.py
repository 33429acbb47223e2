"""Shows on a terminal what the commands found."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from kv_core.terminal import format_ages, format_field
from kv_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kv_tier_fsspec._cli._survey import FoundNamespace, Report

__all__ = ["print_listing", "print_usage"]


def print_listing(console: Console, rows: Sequence[tuple[FoundNamespace, Report]]) -> None:
    """Print each namespace with its description, its objects and their ages."""
    now = time.time()
    for found, report in rows:
        table = Table(title=escape(found.name), show_header=False)
        table.add_column(style="bold")
        table.add_column()
        table.add_row("objects", f"{report.objects:,}")
        table.add_row("size", format_bytes(report.object_bytes))
        if report.unfinished:
            unfinished = f"{report.unfinished}, {format_bytes(report.unfinished_bytes)}"
            table.add_row("unfinished", unfinished)
        table.add_row(
            "written", format_ages(now, report.latest_s, report.oldest_s, unknown="not known")
        )
        if found.problem:
            table.add_row("problem", f"[red]{escape(found.problem)}[/red]")
        for field, value in found.description.items():
            table.add_row(escape(field), escape(format_field(value)))
        console.print(table)


def print_usage(console: Console, rows: Sequence[tuple[FoundNamespace, Report]]) -> None:
    """Print one line for each namespace, and their sum."""
    table = Table("namespace")
    for title in ("objects", "size", "unfinished"):
        table.add_column(title, justify="right")
    for found, report in rows:
        table.add_row(escape(found.name), *_sizes(*_numbers(report)))
    if len(rows) > 1:
        table.add_section()
        total = (
            sum(column) for column in zip(*(_numbers(report) for _, report in rows), strict=True)
        )
        table.add_row("all", *_sizes(*total))
    console.print(table)


def _numbers(report: Report) -> tuple[int, int, int]:
    return report.objects, report.object_bytes, report.unfinished_bytes


def _sizes(objects: int, object_bytes: int, unfinished_bytes: int) -> list[str]:
    return [f"{objects:,}", format_bytes(object_bytes), format_bytes(unfinished_bytes)]
