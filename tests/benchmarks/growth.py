"""Does a step of the tiering manager get dearer as blocks and requests pile up?

Run ``python tests/benchmarks/growth.py`` (``--quick`` for a smoke run, ``--json`` for machines).
The same step is measured over a primary tier that is filled further and further, with few and with
many live requests: a request arrives, looks up blocks that are nowhere, stores a batch at the cost
of older blocks, and ends. What a step costs must depend on what happens in it, not on what is
there.
Also prints the growth of resident memory per block, the table of slots included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kv_core.contract import OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from kv_core.cpu import CPUPrimaryTierOffloadingManager
from kv_core.tiering import TieringOffloadingManager

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_BLOCKS = 64
# The bytes of the blocks are not what is measured.
BLOCK_BYTES = 1
STEPS = 200


def key(index: int) -> OffloadKey:
    """Return the key of a number."""
    return make_offload_key(hashlib.sha256(index.to_bytes(8, "big")).digest(), 0)


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Engine:
    """A tiering manager that is filled batch by batch."""

    def __init__(self, num_blocks: int) -> None:
        view = memoryview(bytearray(num_blocks * BLOCK_BYTES)).cast("B", (num_blocks, BLOCK_BYTES))
        primary = CPUPrimaryTierOffloadingManager(num_blocks, view, BLOCK_BYTES)
        self.manager = TieringOffloadingManager(primary, [])
        self._next_key = 0
        self._next_request = 0

    def step(self, *, ends: bool = True) -> None:
        """Let one request come, look up, store a batch, and end."""
        context = ReqContext(f"r{self._next_request}")
        self._next_request += 1
        keys = [key(self._next_key + offset) for offset in range(BATCH_BLOCKS)]
        self._next_key += BATCH_BLOCKS
        self.manager.on_new_request(context)
        for missing in keys:
            self.manager.lookup(missing, context)
        if self.manager.prepare_store(keys, context) is None:
            raise RuntimeError("a store was declined although older blocks could leave")
        self.manager.complete_store(keys, context)
        if ends:
            self.manager.on_request_finished(context)
        self.manager.on_schedule_end(ScheduleEndContext(frozenset({context.req_id})))

    def median_step_us(self, repeats: int) -> float:
        """Return what a step costs now, in microseconds of this thread."""
        samples = []
        for _ in range(repeats):
            start = time.thread_time()
            for _ in range(STEPS):
                self.step()
            samples.append((time.thread_time() - start) / STEPS)
        return statistics.median(samples) * 1e6


def measure(num_blocks: int, num_requests: int, repeats: int) -> dict[str, float]:
    """Fill a primary tier in three strides and measure after each, then add live requests."""
    before = resident_bytes()
    engine = Engine(num_blocks)
    results: dict[str, float] = {}
    filled = 0
    for share in (0.01, 0.1, 1.0):
        while filled < num_blocks * share:
            engine.step()
            filled += BATCH_BLOCKS
        results[f"{filled} blocks"] = engine.median_step_us(repeats)
        filled += STEPS * repeats * BATCH_BLOCKS
    results["bytes per block"] = (resident_bytes() - before) / num_blocks
    for _ in range(num_requests):
        engine.step(ends=False)
    results[f"and {num_requests} live requests"] = engine.median_step_us(repeats)
    # Tables grow by leaps now and then, so the least of a few rounds tells what is kept for good.
    kept = []
    for _ in range(4):
        before = resident_bytes()
        for _ in range(num_requests):
            engine.step()
        kept.append((resident_bytes() - before) / num_requests)
    results["bytes kept per ended request"] = max(0.0, min(kept))
    return {name: round(value, 1) for name, value in results.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small and few: does it still run?")
    options = parser.parse_args(arguments)
    results = measure(100_000, 500, 2) if options.quick else measure(1_000_000, 10_000, 5)
    steps = [value for name, value in results.items() if not name.startswith("bytes")]
    results["dearest step against cheapest"] = round(max(steps) / min(steps), 2)
    if options.json:
        sys.stdout.write(json.dumps({"unit": "us/step", "lines": results}, indent=2) + "\n")
        return 0
    width = max(map(len, results))
    for line, value in results.items():
        sys.stdout.write(
            f"{line:<{width}}  {value:10.1f}\n"
            if value > 10
            else f"{line:<{width}}  {value:10.2f}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
