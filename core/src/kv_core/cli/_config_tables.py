"""Prints the check of a configuration for people."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from kv_core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from kv_core.cli._config_report import ConfigReport, PrimarySize
    from kv_core.connector import Advice
    from kv_core.plugins import CheckedTier

__all__ = ["print_config_report"]

_SIZES = frozenset({"cpu_bytes_to_use", "max_inflight_store_bytes"})


def print_config_report(console: Console, report: ConfigReport) -> None:
    """Print everything but the errors, which belong on stderr."""
    if report.effective is not None:
        table = Table("setting", "value", title="Effective configuration")
        for name, value in report.effective.items():
            table.add_row(escape(name), escape(_value(name, value)))
        console.print(table)
    entries = {} if report.effective is None else report.effective["secondary_tiers"]
    modes = {entry["name"]: entry for entry in entries}
    for tier in report.tiers:
        console.print(_tier_table(tier, modes.get(tier.name, {})))
    if report.primary is not None:
        console.print(_primary_table(report.primary, report.staging_bytes))
    for title, found in (("warning", report.warnings), ("note", report.notes)):
        _print_advice(console, title, found)
    if not report.errors:
        console.print("The configuration is valid.", markup=False)


def _value(name: str, value: Any) -> str:
    if name in _SIZES:
        return f"{value} ({format_bytes(value)})"
    if name == "secondary_tiers":
        return ", ".join(entry["name"] for entry in value) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def _tier_table(tier: CheckedTier, entry: dict[str, Any]) -> Table:
    table = Table("", "", title=f"Tier {escape(tier.name)}", show_header=False)
    capabilities = sorted(capability.value for capability in tier.spec.capabilities)
    table.add_row("type", escape(f"{tier.spec.type} ({tier.origin})"))
    table.add_row("capabilities", ", ".join(capabilities) or "none")
    for name in ("mode", "fill_on_promotion"):
        if name in entry:
            table.add_row(name, escape(_value(name, entry[name])))
    table.add_section()
    for name, value in tier.shown_settings().items():
        table.add_row(escape(name), escape(_value("", value)))
    table.add_section()
    for name, value in asdict(tier.limits).items():
        table.add_row(f"limit: {name}", "none" if value is None else str(value))
    return table


def _primary_table(primary: PrimarySize, staging_bytes: int) -> Table:
    table = Table("", "", title="Primary tier", show_header=False)
    table.add_row("blocks (num_blocks)", str(primary.num_blocks))
    table.add_row("bytes of one block (row)", _bytes(primary.row_bytes))
    table.add_row("bytes used", _bytes(primary.used_bytes))
    table.add_row("bytes that tiers stage at most", _bytes(staging_bytes))
    table.add_row("tokens that fit", "not known" if primary.tokens is None else str(primary.tokens))
    table.add_row("blocks for promotions", str(primary.lease_blocks))
    return table


def _bytes(size_bytes: int) -> str:
    return f"{size_bytes} ({format_bytes(size_bytes)})"


def _print_advice(console: Console, title: str, found: tuple[Advice, ...]) -> None:
    for advice in found:
        # Outside of a table, where no column cuts the instructions off.
        console.print(f"{title}: {advice.message}", markup=False, soft_wrap=True)
