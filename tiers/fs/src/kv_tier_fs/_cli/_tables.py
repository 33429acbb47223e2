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

    from kv_tier_fs._cli._stores import Report, Store

__all__ = ["print_listing", "print_usage"]


def print_listing(console: Console, rows: Sequence[tuple[Store, Report]]) -> None:
    """Print each namespace with its description, its blocks and their ages."""
    now = time.time()
    for store, report in rows:
        table = Table(title=f"{escape(store.name)}, layout {store.layout}", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        table.add_row("blocks", f"{report.blocks:,}")
        table.add_row("payload", format_bytes(report.payload_bytes))
        table.add_row("on disk", f"{format_bytes(report.disk_bytes)} in {report.files} files")
        table.add_row("writers", f"{report.live_writers} alive, {report.dead_writers} ended")
        table.add_row(
            "written",
            format_ages(now, report.latest_write_s, report.oldest_write_s, unknown="never"),
        )
        if report.latest_use_s is not None:
            table.add_row(
                "last used",
                format_ages(now, report.latest_use_s, report.coldest_use_s, unknown="never"),
            )
        if store.problem is not None:
            table.add_row("problem", f"[red]{escape(store.problem)}[/red]")
        for field, value in store.description.items():
            table.add_row(escape(field), escape(format_field(value)))
        console.print(table)


def print_usage(
    console: Console, rows: Sequence[tuple[Store, Report]], free_bytes: int | None
) -> None:
    """Print one line for each namespace, and their sum."""
    table = Table("namespace", "layout")
    for title in ("blocks", "payload", "on disk", "unused"):
        table.add_column(title, justify="right")
    for store, report in rows:
        table.add_row(escape(store.name), store.layout, *_sizes(report))
    total = [sum(sizes) for sizes in zip(*(_numbers(report) for _, report in rows), strict=True)]
    if len(rows) > 1:
        table.add_section()
        table.add_row("all", "", f"{total[0]:,}", *map(format_bytes, total[1:]))
    console.print(table)
    if free_bytes is not None:
        console.print(f"{format_bytes(free_bytes)} free on the file system", highlight=False)


def _numbers(report: Report) -> tuple[int, int, int, int]:
    unused = max(0, report.disk_bytes - report.payload_bytes)
    return report.blocks, report.payload_bytes, report.disk_bytes, unused


def _sizes(report: Report) -> list[str]:
    blocks, *sizes = _numbers(report)
    return [f"{blocks:,}", *map(format_bytes, sizes)]
