"""What the index of a large cache costs, and how long a lookup takes while blocks move."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from _fs_bench._contenders import FsContender
from _fs_bench._memory import Memory

from kv_core.contract import ReqContext
from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.contract import OffloadKey, SecondaryTierManager
    from kv_tier_fs._config import Layout

__all__ = ["IndexCost", "LookupsUnderLoad", "measure_index", "measure_lookups_under_load"]

_BLOCK_BYTES: Final = 512
_HALF_BYTES: Final = 2**20
_JOB_BLOCKS: Final = 1024
_KEYS: Final = 100_000
_REQUEST_KEYS: Final = 512
_LOOKUP_REPEATS: Final = 5
_IO_THREADS: Final = 16
_STEP_LOOKUPS: Final = 64
_STEP_S: Final = 0.0005


@dataclass(frozen=True, slots=True)
class IndexCost:
    """What opening a cache costs a fresh process.

    Attributes:
        num_blocks: Blocks in the cache.
        open_s: Seconds of opening it.
        block_memory: Growth of the resident memory, in bytes a block.
        lookup_us: One lookup, in microseconds, of requests for blocks that were stored one after
            the other, as the prefix of a conversation is. Each request begins anywhere.
        dict_us: The same of a plain dict with as many keys, for comparison.
        scattered_lookup_us: The same of the tier, every key from anywhere: nothing of it is in
            the caches of the processor.
        scattered_dict_us: The same of the dict.
        found: Share of the keys asked for that were found; 1 unless something is wrong.
    """

    num_blocks: int
    open_s: float
    block_memory: float
    lookup_us: float
    dict_us: float
    scattered_lookup_us: float
    scattered_dict_us: float
    found: float


@dataclass(frozen=True, slots=True)
class LookupsUnderLoad:
    """Lookups while 16 threads of the tier move blocks of 32 KiB.

    Attributes:
        samples: Lookups that were timed.
        p50_us: Median, in microseconds.
        p99_us: 99th percentile, in microseconds.
    """

    samples: int
    p50_us: float
    p99_us: float


def measure_index(folder: Path, layout: Layout, num_blocks: int, repeats: int) -> IndexCost:
    """Fill a cache with small blocks, then open it in fresh processes."""
    root = folder / "index"
    _fill(root, layout, num_blocks)
    try:
        found = [_open_in_process(root, layout, num_blocks) for _ in range(repeats)]
    finally:
        shutil.rmtree(root)
    return IndexCost(
        num_blocks,
        statistics.median(cost.open_s for cost in found),
        statistics.median(cost.block_memory for cost in found),
        statistics.median(cost.lookup_us for cost in found),
        statistics.median(cost.dict_us for cost in found),
        statistics.median(cost.scattered_lookup_us for cost in found),
        statistics.median(cost.scattered_dict_us for cost in found),
        min(cost.found for cost in found),
    )


def measure_lookups_under_load(
    folder: Path,
    memory: Memory,
    contender: FsContender,
    random: np.random.Generator,
    *,
    seconds: float,
) -> LookupsUnderLoad:
    """Look up in steps, as a scheduler does, while a backlog of stores and loads is worked off."""
    block_bytes = 2**15
    blocks = memory.half_bytes // block_bytes
    contender.open(folder / "tier", block_bytes, io_threads=_IO_THREADS)
    samples: list[int] = []
    try:
        plan = memory.plan(blocks, block_bytes, random)
        contender.store(plan.stores(_JOB_BLOCKS // 32))
        keys = [example_key(number) for number in plan.keys]
        lookup, request = contender.tier.lookup, contender.request
        waiting = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if not waiting:
                more = memory.plan(blocks // 4, block_bytes, random)
                jobs = [contender.job(batch, load=False) for batch in more.stores(32)]
                jobs += [contender.job(batch, load=True) for batch in plan.loads(32)]
                waiting = len(jobs)
                for at in random.permutation(len(jobs)).tolist():
                    contender.submit(jobs[at])
            time.sleep(_STEP_S)
            for at in random.integers(len(keys), size=_STEP_LOOKUPS).tolist():
                key = keys[at]
                start = time.perf_counter_ns()
                lookup(key, request)
                samples.append(time.perf_counter_ns() - start)
            waiting -= len(list(contender.tier.get_finished_jobs()))
    finally:
        contender.close()
    p50, p99 = (float(np.percentile(samples, at)) / 1e3 for at in (50, 99))
    return LookupsUnderLoad(len(samples), p50, p99)


def _fill(root: Path, layout: Layout, num_blocks: int) -> None:
    with Memory(_HALF_BYTES) as memory:
        contender = FsContender(memory, layout)
        contender.open(root, _BLOCK_BYTES, direct_io=False)
        random = np.random.default_rng(2)
        room = _HALF_BYTES // _BLOCK_BYTES
        for at in range(0, num_blocks, room):
            plan = memory.plan(min(room, num_blocks - at), _BLOCK_BYTES, random)
            contender.store(plan.stores(_JOB_BLOCKS))
        contender.close(keep=True)


def _open_in_process(root: Path, layout: Layout, num_blocks: int) -> IndexCost:
    command = [sys.executable, "-m", "_fs_bench._lookups", str(root), layout, str(num_blocks)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return IndexCost(**json.loads(done.stdout))


def _time_dict(keys: Sequence[OffloadKey], present: dict[OffloadKey, None]) -> float:
    """Return the seconds of looking keys up in a plain dict, the median of some times."""
    samples = []
    for _ in range(_LOOKUP_REPEATS):
        start = time.perf_counter()
        _ = [key in present for key in keys]
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _scattered(num_blocks: int) -> list[int]:
    """Return numbers of keys that were stored at any time, in no order."""
    numbers: list[int] = np.random.default_rng(4).integers(num_blocks, size=_KEYS).tolist()
    return numbers


def _in_requests(num_blocks: int) -> list[int]:
    """Return as many, those of each request stored one after the other."""
    requests = -(-_KEYS // _REQUEST_KEYS)
    starts = np.random.default_rng(4).integers(num_blocks - _REQUEST_KEYS, size=requests)
    numbers: list[int] = (starts[:, None] + np.arange(_REQUEST_KEYS)).ravel()[:_KEYS].tolist()
    return numbers


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("every process has a resident size")


def _look_up(
    tier: SecondaryTierManager, keys: Sequence[OffloadKey], repeat: int
) -> tuple[float, int]:
    """Look keys up, some for each request; return the seconds, and how many are there."""
    seconds, found = 0.0, 0
    for at in range(0, len(keys), _REQUEST_KEYS):
        request = ReqContext(f"request {repeat} {at}")
        asked = keys[at : at + _REQUEST_KEYS]
        tier.on_new_request(request)
        lookup = tier.lookup
        start = time.perf_counter()
        answers = [lookup(key, request) for key in asked]
        seconds += time.perf_counter() - start
        tier.on_request_finished(request)
        found += answers.count(True)
    return seconds, found


def _main(root: Path, layout: Layout, num_blocks: int) -> None:
    with Memory(_HALF_BYTES) as memory:
        contender = FsContender(memory, layout)
        # Everything that the first opening loads is loaded before the measurement.
        contender.open(root.with_name("empty"), _BLOCK_BYTES, direct_io=False)
        contender.close()
        orders = [[example_key(n) for n in f(num_blocks)] for f in (_in_requests, _scattered)]
        before = _resident_bytes()
        start = time.perf_counter()
        contender.open(root, _BLOCK_BYTES, direct_io=False)
        open_s = time.perf_counter() - start
        memory_bytes = _resident_bytes() - before
        lookups, found = [], _KEYS
        for keys in orders:
            samples = []
            for repeat in range(_LOOKUP_REPEATS):
                seconds, hits = _look_up(contender.tier, keys, repeat)
                samples.append(seconds / len(keys) * 1e6)
                found = min(found, hits)
            lookups.append(statistics.median(samples))
        contender.close(keep=True)
    present = dict.fromkeys(example_key(number) for number in range(num_blocks))
    dicts = [_time_dict(keys, present) / len(keys) * 1e6 for keys in orders]
    cost = {
        "num_blocks": num_blocks,
        "open_s": open_s,
        "block_memory": memory_bytes / num_blocks,
        "lookup_us": lookups[0],
        "dict_us": dicts[0],
        "scattered_lookup_us": lookups[1],
        "scattered_dict_us": dicts[1],
        "found": found / _KEYS,
    }
    sys.stdout.write(json.dumps(cost) + "\n")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), "files" if sys.argv[2] == "files" else "segments", int(sys.argv[3]))
