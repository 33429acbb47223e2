"""What a full run is judged by, and how its figures are printed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from _fs_bench._budgets import Budget
from _object_bench._speeds import what_moves

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _object_bench._blocking import Blocking
    from _object_bench._growth import Growth
    from _object_bench._pairs import Pair
    from _object_bench._speeds import Samples, Scale

__all__ = ["budgets_of", "print_tables"]

_OF_BARE: Final = 0.9
_FINDING: Final = 2.0
_BLOCKED_MS: Final = 1.0
# What allocators keep for themselves comes and goes.
_RESIDENT_BYTES: Final = 4 * 2**20
_TRACED_BYTES: Final = 2**18


def budgets_of(
    pairs: Sequence[Pair],
    scale: Scale,
    moving: Samples,
    finding: Samples,
    blocking: Sequence[Blocking],
    growth: Sequence[Growth],
) -> Iterator[Budget]:
    """Yield every figure that has a bound."""
    for pair in pairs:
        name = pair.tier.name
        for block_bytes in scale.block_sizes:
            for kind in ("put", "get"):
                what = what_moves(kind, block_bytes)
                found = moving.ratio(name, what)
                yield Budget(f"{name}: {what}, of bare {pair.bare.name}", found, _OF_BARE)
        for what in ("present", "missing"):
            found = finding.ratio(name, f"{scale.num_keys} {what}")
            label = f"{name}: {scale.num_keys} keys {what}, times bare {pair.bare.name}"
            yield Budget(label, found, _FINDING, at_most=True)
    for line in blocking:
        label = f"{line.tier}: usual longest wait of the engine's thread, {_mib(line)} MiB, ms"
        yield Budget(label, line.blocked_usual, _BLOCKED_MS, at_most=True)
    for grown in growth:
        label = f"{grown.tier}: growth over {grown.blocks} puts and gets"
        resident, traced = grown.resident_bytes, grown.traced_bytes
        yield Budget(f"{label}, resident bytes", resident, _RESIDENT_BYTES, at_most=True)
        yield Budget(f"{label}, bytes of Python", traced, _TRACED_BYTES, at_most=True)


def print_tables(found: dict[str, Any], budgets: Sequence[Budget]) -> None:
    """Write everything to standard output."""
    machine = found["machine"]
    _line(
        f"{machine['server']}, {machine['processors']} processors, load {machine['load']}, Linux "
        f"{machine['system']}"
    )
    _line()
    _line("jobs of 32 blocks, MB/s".ljust(40) + "".join(f"{n:>9}" for n in _COLUMNS))
    for line in found["moving"]:
        _print_pair(line, 1e-6, ".0f")
    _line()
    _line("lookups, ms".ljust(40) + "".join(f"{name:>9}" for name in _COLUMNS))
    for line in found["finding"]:
        _print_pair(line, 1e3, ".0f")
    _line()
    _line("calls of the engine's thread, ms: p99.9 and max")
    for line in found["blocking"]:
        _line(
            f"  {line['tier']}, {line['block_bytes'] // 2**20} MiB: {line['calls']} calls, "
            f"{line['moved_blocks']} blocks moved; wall {line['wall_p999']:.2f} "
            f"{line['wall_max']:.2f}, own work {line['cpu_p999']:.2f} {line['cpu_max']:.2f}, "
            f"blocked {line['blocked_p999']:.2f} {line['blocked_max']:.2f} ({line['slowest']})"
            + ("" if line["sees_queue"] else "; waits for a processor count as blocked")
        )
    _line()
    for line in found["growth"]:
        _line(
            f"memory of {line['tier']}, {line['blocks']} puts and gets of 64 KiB: resident "
            f"{line['resident_bytes'] / 2**20:+.1f} MiB, Python {line['traced_bytes'] / 2**10:+.0f}"
            " KiB"
        )
    _line()
    for budget in budgets:
        _line(str(budget))


_COLUMNS: Final = ("tier", "bare", "ratio")


def _print_pair(line: dict[str, Any], factor: float, form: str) -> None:
    label = f"  {line['tier']}, {line['what']}"
    spread = f"   {line['ratios'][0]:.2f} to {line['ratios'][-1]:.2f}"
    _line(
        label.ljust(40)
        + f"{line['found'] * factor:9{form}}{line['bare'] * factor:9{form}}{line['ratio']:9.2f}"
        + spread
    )


def _mib(line: Blocking) -> int:
    return line.block_bytes // 2**20


def _line(text: str = "") -> None:
    sys.stdout.write(text + "\n")
