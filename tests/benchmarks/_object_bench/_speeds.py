"""How fast a tier moves blocks and finds them, each time right before or after its library."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from _fs_bench._memory import Memory
    from _object_bench._contenders import Contender
    from _object_bench._pairs import Pair

__all__ = ["JOB_BLOCKS", "Samples", "Scale", "measure_finding", "measure_moving"]

JOB_BLOCKS: Final = 32

_WARM_BLOCKS: Final = 16


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
                speeds: dict[str, tuple[float, float]] = {}
                both: list[Contender] = [pair.tier, pair.bare]
                for turn in random.permutation(2).tolist():
                    speeds[both[turn].name] = _move(both[turn], memory, block_bytes, jobs, random)
                tier, bare = speeds[pair.tier.name], speeds[pair.bare.name]
                for kind, found, base in zip(("put", "get"), tier, bare, strict=True):
                    samples.add(pair.tier.name, what_moves(kind, block_bytes), found, base)
    return samples


def what_moves(kind: str, block_bytes: int) -> str:
    """Return the name of a measurement."""
    return f"{kind} {block_bytes // 2**20} MiB"


def _move(
    contender: Contender, memory: Memory, block_bytes: int, jobs: int, random: np.random.Generator
) -> tuple[float, float]:
    """Return bytes per second, stored and loaded."""
    contender.open(block_bytes)
    try:
        # Connections, and what a library imports or makes at its first request.
        warm = memory.plan(_WARM_BLOCKS, block_bytes, random)
        contender.put(warm.stores(_WARM_BLOCKS))
        contender.get(warm.loads(_WARM_BLOCKS))
        plan = memory.plan(jobs * JOB_BLOCKS, block_bytes, random)
        num_bytes = len(plan.keys) * block_bytes
        stored_s = contender.put(plan.stores(JOB_BLOCKS))
        memory.poison()
        loaded_s = contender.get(plan.loads(JOB_BLOCKS))
    finally:
        contender.close()
    wrong = memory.wrong_blocks(plan, block_bytes)
    if wrong:
        raise RuntimeError(
            f"{contender.name}: {wrong} of {len(plan.keys)} blocks of {block_bytes} bytes came "
            "back with other bytes than were stored"
        )
    return num_bytes / stored_s, num_bytes / loaded_s


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
