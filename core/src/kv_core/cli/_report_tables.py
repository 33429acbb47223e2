"""Shows replay reports on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from kv_core.terminal import widened
from kv_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

__all__ = ["level_shares", "print_reports"]

# Of the statistics of a tier, those that an operator should look into when they are not zero.
_TROUBLES: Final = (
    "store_failures",
    "load_failures",
    "lookup_errors",
    "stalled_jobs",
    "contained_exceptions",
    "ignored_results",
)


def print_reports(
    console: Console, reports: Sequence[Mapping[str, Any]], titles: Sequence[str]
) -> None:
    """Print one column per run: blocks by level, hops, and where time went; then what failed.

    Args:
        console: Where to.
        reports: Runs as :meth:`ReplayReport.to_json` gives them.
        titles: Heading of each run.
    """
    widened(console)
    console.print(_levels_table(reports, titles))
    console.print(_hops_table(reports, titles))
    console.print(_time_table(reports, titles))
    for report, title in zip(reports, titles, strict=True):
        console.print(
            f"{title}: {report['requests_finished']} of {report['requests']} requests finished, "
            f"{report['blocks_verified']} loaded blocks verified, "
            f"{report['bytes_wrong']} bytes wrong, {report['tokens_saved']} prompt tokens saved, "
            f"{report['wall_seconds']:.2f} s",
            soft_wrap=True,
        )
    for report, title in zip(reports, titles, strict=True):
        for trouble in _troubles(report):
            console.print(f"{title}: {trouble}", style="yellow", markup=False, soft_wrap=True)


def level_shares(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of prompt blocks by level, misses last; empty without blocks."""
    total = report["blocks_requested"]
    if not total:
        return {}
    hits = report["hits"]
    shares = {name: hits.get(name, 0) / total for name in ("gpu", "cpu", *_tiers(report))}
    shares["computed"] = report["misses"] / total
    return shares


def _tiers(report: Mapping[str, Any]) -> list[str]:
    """Return the names of the tiers, in lookup order."""
    return [name for name in report["hits"] if name not in {"gpu", "cpu"}]


def _troubles(report: Mapping[str, Any]) -> list[str]:
    """Say what failed without making the run fail: the price was paid in computed blocks."""
    troubles = []
    for tier in _tiers(report):
        counts = {name: int(report["stats"].get(f"tier.{tier}.{name}", 0)) for name in _TROUBLES}
        failed = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]
        if failed:
            troubles.append(f"tier {tier!r} had {', '.join(failed)}")
    if report["loads_failed"]:
        troubles.append(f"{report['loads_failed']} load(s) to the GPU failed")
    if report["stores_declined"]:
        troubles.append(f"{report['stores_declined']} store(s) found no room in CPU memory")
    return troubles


def _levels_table(reports: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> Table:
    table = Table(title="Where prompt blocks came from", title_justify="left")
    table.add_column("level")
    for title in titles:
        table.add_column(f"{title}, blocks", justify="right")
        table.add_column("share", justify="right")
    shares = [level_shares(report) for report in reports]
    levels = list(dict.fromkeys(level for share in shares for level in share))
    # Computed blocks close the list, also when a later run has a level the first one lacked.
    levels.sort(key=lambda level: level == "computed")
    for level in levels:
        cells = [level]
        for report, share in zip(reports, shares, strict=True):
            blocks = report["misses"] if level == "computed" else report["hits"].get(level, 0)
            cells += [str(blocks), f"{share.get(level, 0.0):.1%}"]
        table.add_row(*cells)
    cells = ["requested"]
    for report in reports:
        cells += [str(report["blocks_requested"]), ""]
    table.add_section()
    table.add_row(*cells)
    return table


def _hops_table(reports: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> Table:
    table = Table(title="What moved", title_justify="left")
    table.add_column("hop")
    for title in titles:
        table.add_column(title, justify="right")
        table.add_column("p50", justify="right")
        table.add_column("p99", justify="right")
    hops = list(dict.fromkeys(hop for report in reports for hop in report["bytes_moved"]))
    for hop in hops:
        cells = [hop.replace("_to_", " to ")]
        for report in reports:
            latency = report["latency_seconds"].get(hop)
            cells += [
                format_bytes(report["bytes_moved"].get(hop, 0)),
                _milliseconds(latency, "p50"),
                _milliseconds(latency, "p99"),
            ]
        table.add_row(*cells)
    return table


def _time_table(reports: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> Table:
    table = Table(title="Where time went", title_justify="left")
    table.add_column("activity")
    for title in titles:
        table.add_column(f"{title}, s", justify="right")
    names = list(dict.fromkeys(name for report in reports for name in report["time_seconds"]))
    names.sort(key=lambda name: name == "other")
    for name in names:
        table.add_row(name, *(f"{report['time_seconds'].get(name, 0.0):.3f}" for report in reports))
    return table


def _milliseconds(latency: Mapping[str, float] | None, percentile: str) -> str:
    if latency is None or not latency["count"]:
        return "-"
    return f"{latency[percentile] * 1e3:.2f} ms"
