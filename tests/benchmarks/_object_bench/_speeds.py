"""How fast a tier moves blocks and finds them, each time right before or after its library."""

from __future__ import annotations

import statistics
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from _fs_bench._memory import Memory, Plan
    from _object_bench._contenders import Contender
    from _object_bench._pairs import Pair

__all__ = ["JOB_BLOCKS", "Samples", "Scale", "measure_finding", "measure_moving"]

JOB_BLOCKS: Final = 32

_STORES: Final = 2
_LOADS: Final = 4
"""In a sample, by the tier and its library in turn: what the server does beside one of them may
double its time. All loads are of the same blocks."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much work a run does.

    Attributes:
        block_sizes: Bytes of a block.
        sample_jobs: Jobs in flight in one sample, for each block size.
        repeats: Samples.
        num_keys: Keys that are looked up at a time.
        find_repeats: Samples of that.
    """

    block_sizes: tuple[int, ...]
    sample_jobs: tuple[int, ...]
    repeats: int
    num_keys: int
    find_repeats: int


@final
class Samples:
    """Figures of pairs, by what was done: bytes per second, or seconds."""

    def __init__(self) -> None:
        self._found: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

    def add(self, tier: str, what: str, found: float, bare: float) -> None:
        """Note what a tier did, and what its library did beside it."""
        self._found[tier, what].append((found, bare))

    def ratio(self, tier: str, what: str) -> float:
        """Return the median of the ratios: both figures of each come from the same moment."""
        return statistics.median(found / bare for found, bare in self._found[tier, what])

    def table(self) -> list[dict[str, str | float | list[float]]]:
        """Return a line for each tier and thing done, with medians."""
        return [
            {
                "tier": tier,
                "what": what,
                "found": statistics.median(found for found, _ in samples),
                "bare": statistics.median(bare for _, bare in samples),
                "ratio": self.ratio(tier, what),
                "ratios": sorted(round(found / bare, 3) for found, bare in samples),
            }
            for (tier, what), samples in self._found.items()
        ]


def measure_moving(
    pairs: Sequence[Pair],
    memory: Memory,
    scale: Scale,
    random: np.random.Generator,
    say: Callable[[str], None],
) -> Samples:
    """Store and load jobs of 32 blocks.

    Raises:
        RuntimeError: A loaded block is not what was stored.
    """
    samples = Samples()
    for block_bytes, jobs in zip(scale.block_sizes, scale.sample_jobs, strict=True):
        say(f"blocks of {block_bytes // 1024} KiB")
        for _ in range(scale.repeats):
            for place in random.permutation(len(pairs)).tolist():
                pair = pairs[place]
                moved = _move(pair, memory, block_bytes, jobs, random)
                for kind, (found, bare) in moved.items():
                    samples.add(pair.tier.name, what_moves(kind, block_bytes), found, bare)
    return samples


def what_moves(kind: str, block_bytes: int) -> str:
    """Return the name of a measurement."""
    return f"{kind} {block_bytes // 2**20} MiB"


def _move(
    pair: Pair, memory: Memory, block_bytes: int, jobs: int, random: np.random.Generator
) -> dict[str, tuple[float, float]]:
    """Return bytes per second, stored and loaded, of the tier and of its library."""
    both: list[Contender] = [pair.tier, pair.bare]
    seconds = {"put": [0.0, 0.0], "get": [0.0, 0.0]}
    with ExitStack() as stack:
        for contender in both:
            contender.open(block_bytes)
            stack.callback(contender.close)
            # Connections, memory, and what a library imports or makes at its first request.
            warm = memory.plan(JOB_BLOCKS, block_bytes, random)
            contender.put(warm.stores(JOB_BLOCKS))
            contender.get(warm.loads(JOB_BLOCKS))
        for _ in range(_STORES):
            plan = memory.plan(jobs * JOB_BLOCKS, block_bytes, random)
            for turn in random.permutation(2).tolist():
                seconds["put"][turn] += both[turn].put(plan.stores(JOB_BLOCKS))
        for _ in range(_LOADS):
            for turn in random.permutation(2).tolist():
                memory.poison()
                seconds["get"][turn] += both[turn].get(plan.loads(JOB_BLOCKS))
                _check(both[turn].name, memory, plan, block_bytes)
    num_bytes = len(plan.keys) * block_bytes
    times = {"put": _STORES, "get": _LOADS}
    return {
        kind: (times[kind] * num_bytes / tier_s, times[kind] * num_bytes / bare_s)
        for kind, (tier_s, bare_s) in seconds.items()
    }


def _check(name: str, memory: Memory, plan: Plan, block_bytes: int) -> None:
    wrong = memory.wrong_blocks(plan, block_bytes)
    if wrong:
        raise RuntimeError(
            f"{name}: {wrong} of {len(plan.keys)} blocks of {block_bytes} bytes came back with "
            "other bytes than were stored"
        )


def measure_finding(
    pairs: Sequence[Pair], memory: Memory, scale: Scale, random: np.random.Generator
) -> Samples:
    """Look up many keys, of small blocks that are there and of such that are not.

    Raises:
        RuntimeError: Somebody finds a key that is not there, or does not find one that is.
    """
    samples = Samples()
    block_bytes = 4096
    for pair in pairs:
        both: list[Contender] = [pair.tier, pair.bare]
        plan = memory.plan(scale.num_keys, block_bytes, random)
        missing = memory.plan(scale.num_keys, block_bytes, random).keys
        for contender in both:
            contender.open(block_bytes)
        try:
            for contender in both:
                contender.put(plan.stores(JOB_BLOCKS))
                contender.find(plan.keys[:JOB_BLOCKS])
            for _ in range(scale.find_repeats):
                for what, keys, count in (
                    ("present", plan.keys, len(plan.keys)),
                    ("missing", missing, 0),
                ):
                    seconds: dict[str, float] = {}
                    for turn in random.permutation(2).tolist():
                        name = both[turn].name
                        seconds[name], found = both[turn].find(keys)
                        if found != count:
                            raise RuntimeError(f"{name}: {found} of {count} keys found")
                    samples.add(
                        pair.tier.name,
                        f"{len(keys)} {what}",
                        seconds[pair.tier.name],
                        seconds[pair.bare.name],
                    )
        finally:
            for contender in both:
                contender.close()
    return samples
