"""Prints what a run has found."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _fs_bench._budgets import Budget

__all__ = ["print_tables"]


def print_tables(found: dict[str, Any], budgets: Sequence[Budget]) -> None:
    """Write everything to standard output."""
    machine = found["machine"]
    _line(
        f"{machine['processors']} processors, load {machine['load']}, Linux {machine['system']}, "
        + ("O_DIRECT" if machine["direct_io"] else "no O_DIRECT on this file system")
    )
    if "vllm" in found:
        extension = "with" if found["vllm"]["c_extension"] else "without"
        _line(f"vLLM {found['vllm']['version']}, {extension} its C extension")
    _print_speeds(found)
    mixed, steady = found["mixed"], found["steady"]
    _line()
    for where, label in (
        ("alone", "alone"),
        ("beside", f"beside {mixed['backlog_bytes'] / 2**30:g} GiB of stores"),
    ):
        _line(
            f"load of 32 blocks of {mixed['block_bytes'] // 1024} KiB {label}: p50 "
            f"{mixed[f'{where}_p50_ms']:.1f}, p99 {mixed[f'{where}_p99_ms']:.1f} ms, "
            f"{mixed['samples'][where == 'beside']} samples"
        )
    _line(
        f"store: {steady['unbounded'] / 1e9:.2f} GB/s unbounded, {steady['at_capacity'] / 1e9:.2f} "
        f"at a capacity of {steady['capacity_bytes'] / 2**30:g} GiB, {steady['declined']:.1%} "
        "declined"
    )
    index, busy = found["index"], found["lookups_beside_io"]
    _line(
        f"{index['num_blocks']} blocks: open {index['open_s']:.2f} s, {index['block_memory']:.0f} "
        f"bytes of memory each, lookup {index['lookup_us']:.2f} microseconds (in a plain dict "
        f"{index['dict_us']:.2f}), of keys from anywhere {index['scattered_lookup_us']:.2f} "
        f"({index['scattered_dict_us']:.2f})"
    )
    _line(
        f"lookups beside 16 I/O threads: p50 {busy['p50_us']:.2f}, p99 {busy['p99_us']:.2f} "
        f"microseconds, {busy['samples']} samples"
    )
    _line()
    for line in found["checksums"]:
        _line(
            f"{line['name']:12} {line['bytes'] // 1024:5} KiB  {line['threads']} threads "
            f"{line['gb_per_s']:6.1f} GB/s"
        )
    _line()
    for budget in budgets:
        _line(str(budget))


def _print_speeds(found: dict[str, Any]) -> None:
    tables: defaultdict[tuple[str, int], dict[int, dict[str, float]]] = defaultdict(dict)
    for line in found["gb_per_s"]:
        table = tables[line["kind"], line["job_blocks"]]
        table.setdefault(line["block_bytes"], {})[line["name"]] = line["gb_per_s"]
    for kind, label in (("write", "store"), ("read", "load")):
        for size, speeds in found.get("fio", {}).items():
            tables[label, 32].setdefault(size, {})["fio"] = speeds[kind] / 1e9
    titles = {"store": "store", "load": "load", "single": "random loads"}
    for (kind, job_blocks), rows in sorted(
        tables.items(), key=lambda item: (list(titles).index(item[0][0]), item[0][1])
    ):
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        _line()
        _line(
            f"{titles[kind]}, GB/s, jobs of {job_blocks}".ljust(28)
            + "".join(f"{n:>12}" for n in names)
        )
        for size, row in sorted(rows.items()):
            cells = "".join(f"{row[n]:12.2f}" if n in row else " " * 12 for n in names)
            _line(f"{size // 1024:5} KiB".ljust(28) + cells)


def _line(text: str = "") -> None:
    sys.stdout.write(text + "\n")
