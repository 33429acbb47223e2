"""What a full run is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from _fs_bench._throughput import BUDGET_JOB, RAW
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _fs_bench._latency import Mixed, Steady
    from _fs_bench._lookups import IndexCost, LookupsUnderLoad
    from _fs_bench._throughput import Speeds

__all__ = ["Budget", "latency_budgets", "lookup_budgets", "speed_budgets", "verdict"]

_OF_RAW: Final = 0.85
# From this block size on, how many times vLLM's speed a store and a load shall have.
_OF_VLLM: Final = ((2**15, 5.0, 2.5), (2**18, 3.0, 1.2), (2**20, 1.05, 1.0))
_MIXED: Final = 3.0
_STEADY: Final = 0.7
_OPEN_S: Final = 2.0
_BLOCK_MEMORY: Final = 150.0
_LOOKUP_US: Final = 1.0
_BUSY_LOOKUP_US: Final = 50.0


@dataclass(frozen=True, slots=True)
class Budget:
    """One figure and its bound.

    Attributes:
        name: What it is of.
        found: The figure.
        bound: What it is compared with.
        at_most: Whether the bound is the largest allowed, rather than the smallest.
    """

    name: str
    found: float
    bound: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure keeps the bound."""
        return self.found <= self.bound if self.at_most else self.found >= self.bound

    @override
    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        state = "met   " if self.met else "MISSED"
        return f"{state} {self.name}: {self.found:.3g} (budget {sign} {self.bound:g})"


def speed_budgets(speeds: Speeds, name: str, vllm: str | None) -> Iterator[Budget]:
    """Yield the budgets of a tier against the raw disk, and against vLLM's tier if it ran."""
    kinds = ("store", "load")
    sizes = sorted({size for (who, _, size, _), _ in speeds.lines() if who == name})
    for size in sizes:
        label = f"{size // 1024} KiB"
        for kind in kinds:
            found = speeds.of_raw(name, kind, size)
            if found is not None:
                yield Budget(f"{kind}, {label}, of {RAW}", found, _OF_RAW)
        if vllm is None:
            continue
        bounds = [(store, load) for least, store, load in _OF_VLLM if least <= size]
        for kind, bound in zip(kinds, bounds[-1] if bounds else (), strict=False):
            ratio = speeds.ratio((name, kind, size, BUDGET_JOB), (vllm, kind, size, BUDGET_JOB))
            theirs = speeds.median((vllm, kind, size, BUDGET_JOB))
            if ratio is None or theirs is None:
                continue
            # Nobody is faster than the disk: where it is slow, their tier keeps up with it, too.
            # And no more of raw is asked for than above, whoever else gets more.
            raw_ratio = speeds.raw(kind, size) / theirs
            most = _OF_RAW * raw_ratio
            capped = ""
            if bound > raw_ratio:
                capped = f", {bound:g} is more than {RAW} reaches"
            elif bound > most:
                capped = f", {bound:g} is more than {_OF_RAW:g} of {RAW}"
            yield Budget(
                f"{kind}, {label}, times {vllm}{capped}", ratio, round(min(bound, most), 2)
            )


def latency_budgets(mixed: Mixed, steady: Steady) -> Iterator[Budget]:
    """Yield the budgets of loads beside stores, and of stores that evict."""
    yield Budget("p99 of a load beside stores, times alone", mixed.ratio, _MIXED, at_most=True)
    yield Budget("store at capacity, of unbounded", steady.ratio, _STEADY)


def lookup_budgets(index: IndexCost, busy: LookupsUnderLoad) -> Iterator[Budget]:
    """Yield the budgets of the index."""
    yield Budget("open with the index, seconds", index.open_s, _OPEN_S, at_most=True)
    yield Budget("memory of a block, bytes", index.block_memory, _BLOCK_MEMORY, at_most=True)
    yield Budget("lookup, microseconds", index.lookup_us, _LOOKUP_US, at_most=True)
    yield Budget(
        "p99 of a lookup beside 16 I/O threads, microseconds",
        busy.p99_us,
        _BUSY_LOOKUP_US,
        at_most=True,
    )


def verdict(budgets: Sequence[Budget], *, judged: bool) -> str:
    """Return the line that a run ends with."""
    missed = [budget for budget in budgets if not budget.met]
    if not judged:
        kept = len(budgets) - len(missed)
        return f"verdict: it runs, all bytes right; {kept} of {len(budgets)} budgets kept, unjudged"
    if missed:
        names = "; ".join(f"{budget.name} {budget.found:.3g}" for budget in missed)
        return f"verdict: MISSED {len(missed)} of {len(budgets)} budgets: {names}"
    return f"verdict: all {len(budgets)} budgets met, all bytes right"
