"""What does the file tier's index cost, alone and against a plain dict?

Run ``python tests/benchmarks/fs_index.py`` (``--quick`` for a smoke run, ``--json`` for machines).
The same keys are put into the index and into a dict, each in a fresh process: growth of resident
memory, the filling from frames as an opening does it, lookups in the order of storing, lookups at
random, misses, single stores, and the longest call that the engine's thread has to wait for while
a segment of 8,192 blocks is dropped. No disk is involved: ``fs_tier.py`` opens a real cache.

Times are processor time of the thread. The last line is the verdict; a full run exits with 1 when
a budget is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kv_core.contract import OffloadKey
from kv_tier_fs.segments._format import Frame, FrameKind
from kv_tier_fs.segments._index import BlockIndex
from kv_tier_fs.segments._segment import Segment, SegmentName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEY_BYTES: Final = 36
JOB_BLOCKS: Final = 32
SEGMENT_BLOCKS: Final = 8192
LOOKUPS: Final = 50_000
WRITER: Final = b"w" * 16

BUDGETS: Final = {"fill_s": 2.0, "memory_bytes": 150.0, "lookup_us": 1.0}


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def cost_us(call: Callable[[], object], count: int, repeats: int = 7) -> float:
    """Return what a part of a call costs, in microseconds of this thread: the best of a few."""
    samples = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        samples.append((time.thread_time() - start) / count)
    return min(samples) * 1e6


def segments_of(num_blocks: int) -> list[tuple[Segment, list[Frame]]]:
    """Return segments full of random keys, in jobs of 32."""
    found = []
    for number in range(-(-num_blocks // SEGMENT_BLOCKS)):
        name = SegmentName(WRITER, number + 1)
        segment = Segment(name, Path(f"{number + 1:08d}.seg"), SEGMENT_BLOCKS)
        count = min(SEGMENT_BLOCKS, num_blocks - number * SEGMENT_BLOCKS)
        frames = []
        for start in range(0, count, JOB_BLOCKS):
            blocks = min(JOB_BLOCKS, count - start)
            slots = np.arange(start, start + blocks, dtype=np.uint32)
            keys = os.urandom(blocks * KEY_BYTES)
            checksums = slots.astype(np.uint64)
            frames.append(
                Frame(FrameKind.STORED, WRITER, name.number, KEY_BYTES, keys, slots, checksums)
            )
        found.append((segment, frames))
    return found


class Holder(Protocol):
    """Whatever has keys."""

    def __contains__(self, key: OffloadKey, /) -> bool:
        """Say whether a key is there."""


def lookups(holder: Holder, keys: Sequence[OffloadKey]) -> dict[str, float]:
    """Return what lookups cost: in order, at random, in vain."""

    def look(chosen: Sequence[OffloadKey]) -> float:
        def run() -> None:
            for key in chosen:
                key in holder  # noqa: B015 - the answer is not what is measured

        return cost_us(run, len(chosen))

    middle = max(0, len(keys) // 2 - LOOKUPS)
    absent = [OffloadKey(os.urandom(KEY_BYTES)) for _ in range(LOOKUPS)]
    return {
        "lookup_us": look(keys[middle : middle + LOOKUPS]),
        "random_lookup_us": look(random.Random(1).sample(keys, min(LOOKUPS, len(keys)))),
        "miss_us": look(absent),
    }


def measure_index(num_blocks: int) -> dict[str, float]:
    """Measure the index."""
    segments = segments_of(num_blocks)
    gc.collect()
    before = resident_bytes()
    start = time.thread_time()
    index = BlockIndex()
    for segment, frames in segments:
        index.load(segment, frames)
    index.end_load()
    results = {"fill_s": time.thread_time() - start}
    gc.collect()
    results["memory_bytes"] = (resident_bytes() - before) / num_blocks
    keys = [key for _, frames in segments for frame in frames for key in frame.split_keys()]
    if len(index) != num_blocks or keys[-1] not in index:
        raise RuntimeError("the index does not hold what was put into it")
    results |= lookups(index, keys)
    results |= _changes(index, segments[0][0])
    return results


def _changes(index: BlockIndex, oldest: Segment) -> dict[str, float]:
    """Return what stores and the drop of a segment cost."""
    jobs = [
        [OffloadKey(os.urandom(KEY_BYTES)) for _ in range(JOB_BLOCKS)]
        for _ in range(SEGMENT_BLOCKS // JOB_BLOCKS)
    ]
    segment = Segment(SegmentName(WRITER, 0), Path("0.seg"), SEGMENT_BLOCKS)
    pauses = []
    for number, keys in enumerate(jobs):
        slots = range(number * JOB_BLOCKS, (number + 1) * JOB_BLOCKS)
        start = time.thread_time()
        index.put(segment, keys, slots, slots)
        pauses.append(time.thread_time() - start)
    store_us = sum(pauses) / SEGMENT_BLOCKS * 1e6
    index.post_drop(oldest)
    while index.has_changes:
        start = time.thread_time()
        index.apply()
        pauses.append(time.thread_time() - start)
    return {"store_us": store_us, "longest_pause_us": max(pauses) * 1e6}


def measure_dict(num_blocks: int) -> dict[str, float]:
    """Measure a dict that knows as much: segment, slot, checksum and last use of a key."""
    gc.collect()
    before = resident_bytes()
    found = {OffloadKey(os.urandom(KEY_BYTES)): number for number in range(num_blocks)}
    gc.collect()
    results = {"memory_bytes": (resident_bytes() - before) / num_blocks}
    return results | lookups(found, list(found))


def in_fresh_process(subject: str, num_blocks: int) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--subject", subject, "--blocks", str(num_blocks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def median_of(subject: str, num_blocks: int, repeats: int) -> dict[str, float]:
    """Return the median of each figure."""
    runs = [in_fresh_process(subject, num_blocks) for _ in range(repeats)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="does it still run? judges nothing")
    parser.add_argument("--subject", choices=["index", "dict"], help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help="number of blocks (1,000,000)")
    options = parser.parse_args(arguments)
    num_blocks = options.blocks or (100_000 if options.quick else 1_000_000)
    if options.subject:
        measure = measure_index if options.subject == "index" else measure_dict
        sys.stdout.write(json.dumps(measure(num_blocks)))
        return 0
    repeats = 1 if options.quick else 3
    index = median_of("index", num_blocks, repeats)
    plain = median_of("dict", num_blocks, repeats)
    missed = [name for name, bound in BUDGETS.items() if index[name] > bound]
    if options.json:
        report = {"blocks": num_blocks, "index": index, "dict": plain, "missed": missed}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(f"{num_blocks:,} blocks{'':12} index       dict   budget\n")
        for name, value in index.items():
            other = f"{plain[name]:10.2f}" if name in plain else f"{'':10}"
            bound = f"{BUDGETS[name]:8g}" if name in BUDGETS else ""
            sys.stdout.write(f"{name:<17} {value:10.2f} {other} {bound}\n")
    if options.quick:
        sys.stdout.write("not judged: a quick run\n")
        return 0
    sys.stdout.write(f"missed: {', '.join(missed)}\n" if missed else "all budgets met\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
