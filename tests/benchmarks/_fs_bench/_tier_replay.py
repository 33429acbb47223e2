"""Replays requests over the real tier, with small blocks."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

from _fs_bench._contenders import FsContender
from _fs_bench._memory import Batch, Memory
from _fs_bench._policies import Counter, Outcome

from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["replay_tier"]

_BLOCK_BYTES: Final = 4096
# What an index keeps of a block: a thirtieth of these small ones, and next to nothing of real ones.
_INDEX_BYTES: Final = 128
_HALF_BYTES: Final = 2**22


def replay_tier(
    folder: Path, requests: Sequence[Sequence[int]], num_blocks: int, capacity: int
) -> Outcome:
    """Look up, load what is there up to the first miss, and store all the rest, request by request.

    Storing what is present counts as a use of it, so an engine's store of a whole prompt is one.

    Raises:
        RuntimeError: A job failed.
    """
    keys = [example_key(number) for number in range(num_blocks)]
    counter = Counter()
    with Memory(_HALF_BYTES) as memory:
        room = memory.half_bytes // _BLOCK_BYTES
        contender = FsContender(memory, "segments")
        capacity_bytes = capacity * (_BLOCK_BYTES + _INDEX_BYTES)
        contender.open(folder, _BLOCK_BYTES, capacity_bytes=capacity_bytes)
        try:
            stored = 0
            for request in requests:
                found = [bool(contender.tier.lookup(keys[n], contender.request)) for n in request]
                counter.add(found)
                stored += found.count(False)
                distinct = list(dict.fromkeys(request))
                for at in range(0, len(distinct), room):
                    some = tuple(distinct[at : at + room])
                    contender.store([Batch(some, tuple(range(len(some))))])
            contender.close(keep=True)
            written = _written_blocks(folder)
        finally:
            shutil.rmtree(folder)
    return counter.outcome(written / stored)


def _written_blocks(root: Path) -> int:
    """Count what went into segments, also those that are gone: they are numbered from 1 on."""
    sizes = {int(path.stem): path.stat().st_size for path in root.glob("*/*/*/*.seg")}
    last = max(sizes)
    # All but the last were full when the next one was begun.
    return (last - 1) * max(sizes.values()) // _BLOCK_BYTES + sizes[last] // _BLOCK_BYTES
