"""Does memory stay flat over ten thousand puts and gets?"""

from __future__ import annotations

import os
import statistics
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from _fs_bench._memory import Memory
    from _object_bench._contenders import TierContender

__all__ = ["Growth", "measure_growth"]

_BLOCK_BYTES: Final = 2**16
_JOB_BLOCKS: Final = 32
_MOST_JOBS: Final = 4
_CHECKS: Final = 12
_LEAST_ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class Growth:
    """How much more memory there is at the end than after the warm-up.

    Attributes:
        tier: Name of the tier.
        blocks: Blocks that were stored, looked up and loaded.
        resident_bytes: Growth of what the process has resident: the last third over the first.
        traced_bytes: Growth of what Python has allocated.
        resident_samples: Resident bytes at each check.
    """

    tier: str
    blocks: int
    resident_bytes: float
    traced_bytes: float
    resident_samples: tuple[int, ...]


def measure_growth(
    contender: TierContender, memory: Memory, num_blocks: int, random: np.random.Generator
) -> Growth:
    """Store, look up and load blocks, a few jobs at a time, and watch the memory."""
    batch = _JOB_BLOCKS * min(_MOST_JOBS, max(1, num_blocks // (_JOB_BLOCKS * _CHECKS)))
    rounds = max(_LEAST_ROUNDS, -(-num_blocks // batch))
    warm_up = max(3, rounds // 8)
    tracemalloc.start()
    contender.open(_BLOCK_BYTES)
    resident, traced = [], []
    try:
        for number in range(-warm_up, rounds):
            plan = memory.plan(batch, _BLOCK_BYTES, random)
            contender.find(plan.keys)
            contender.put(plan.stores(_JOB_BLOCKS))
            contender.find(plan.keys)
            contender.get(plan.loads(_JOB_BLOCKS))
            if number >= 0:
                resident.append(_resident_bytes())
                traced.append(tracemalloc.get_traced_memory()[0])
    finally:
        contender.close()
        tracemalloc.stop()
    return Growth(
        contender.name,
        rounds * batch,
        _growth(resident),
        _growth(traced),
        tuple(resident[:: max(1, rounds // _CHECKS)]),
    )


def _growth(samples: list[int]) -> float:
    third = len(samples) // 3
    return statistics.median(samples[-third:]) - statistics.median(samples[:third])


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
