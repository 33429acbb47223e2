"""Cost of the ledger on the scheduler's thread, in microseconds a block.

Run ``python tests/benchmarks/control_plane.py`` (``--quick`` for a smoke run, ``--json`` for
machines). Nothing is copied: this is the price of the bookkeeping alone. Each line is the median
over repeats; the lines take turns within a repeat, so that a slow second of the machine does not
land on one line only.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_core.contract import OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from kv_core.cpu import CPUOffloadingManager
from kv_core.engine import LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BATCH_BLOCKS = 64
STEP_END = ScheduleEndContext()


@dataclass(frozen=True, slots=True)
class Scale:
    """How much work one run does.

    Attributes:
        num_blocks: Slots of the primary tier, a multiple of the batch size.
        repeats: Measurements of each line.
    """

    num_blocks: int
    repeats: int


class Lines:
    """Collects measurements by line."""

    def __init__(self) -> None:
        self._seconds_per_block: defaultdict[str, list[float]] = defaultdict(list)

    def measure(self, line: str, num_blocks: int, work: Callable[[], None]) -> None:
        """Time one piece of work over so many blocks."""
        gc.collect()
        start = time.perf_counter()
        work()
        self._seconds_per_block[line].append((time.perf_counter() - start) / num_blocks)

    def medians_us(self) -> dict[str, float]:
        """Return the median of each line, in microseconds a block."""
        return {
            line: round(statistics.median(seconds) * 1e6, 3)
            for line, seconds in self._seconds_per_block.items()
        }


def make_keys(count: int, salt: str) -> list[OffloadKey]:
    """Return distinct keys of the usual length (SHA-256 and a group index)."""
    return [
        make_offload_key(hashlib.sha256(f"{salt}-{index}".encode()).digest(), 0)
        for index in range(count)
    ]


def batches(
    keys: Sequence[OffloadKey], owner: str
) -> Iterator[tuple[ReqContext, list[OffloadKey]]]:
    """Cut keys into the blocks of consecutive requests."""
    for start in range(0, len(keys), BATCH_BLOCKS):
        yield ReqContext(f"{owner}-{start}"), list(keys[start : start + BATCH_BLOCKS])


# -- the plain CPU manager ----------------------------------------------------------------------


def measure_cpu_manager(lines: Lines, policy: str, scale: Scale) -> None:
    """Measure one life of a CPU manager: fill, look up, touch, load, and store when full."""
    num_blocks = scale.num_blocks
    manager = CPUOffloadingManager(num_blocks, policy)
    keys = make_keys(num_blocks, "resident")
    resident = list(batches(keys, "writer"))
    readers = list(batches(keys, "reader"))
    loaders = list(batches(keys, "loader"))
    absent = list(batches(make_keys(num_blocks, "absent"), "asker"))
    incoming = list(batches(make_keys(num_blocks, "incoming"), "newcomer"))

    def store(offers: list[tuple[ReqContext, list[OffloadKey]]]) -> None:
        for context, offered in offers:
            output = manager.prepare_store(offered, context)
            if output is None or len(output.keys_to_store) != len(offered):
                raise RuntimeError("a store was declined that had room")
            manager.complete_store(offered, context)
            manager.on_request_finished(context)
            manager.on_schedule_end(STEP_END)

    def look_up(asked: list[tuple[ReqContext, list[OffloadKey]]], expected: LookupResult) -> None:
        for context, wanted in asked:
            lookup = manager.lookup
            for key in wanted:
                if lookup(key, context) is not expected:
                    raise RuntimeError(f"a lookup did not answer {expected}")
            manager.on_schedule_end(STEP_END)

    def touch() -> None:
        for context, used in readers:
            manager.touch(used, context)
            manager.on_request_finished(context)

    def load() -> None:
        for context, wanted in loaders:
            manager.prepare_load(wanted, context)
            manager.complete_load(wanted, context)
            manager.on_request_finished(context)

    name = f"cpu {policy}"
    lines.measure(f"{name}: fill", num_blocks, lambda: store(resident))
    lines.measure(f"{name}: lookup hit", num_blocks, lambda: look_up(readers, LookupResult.HIT))
    lines.measure(f"{name}: lookup miss", num_blocks, lambda: look_up(absent, LookupResult.MISS))
    lines.measure(f"{name}: touch", num_blocks, touch)
    lines.measure(f"{name}: load + complete", num_blocks, load)
    lines.measure(f"{name}: evicting store", num_blocks, lambda: store(incoming))


# -- the script ---------------------------------------------------------------------------------


def measure(scale: Scale) -> dict[str, float]:
    """Return microseconds a block by line."""
    lines = Lines()
    for _ in range(scale.repeats):
        for policy in ("lru", "arc"):
            measure_cpu_manager(lines, policy, scale)
    return lines.medians_us()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small and few: does it still run?")
    options = parser.parse_args(arguments)
    scale = Scale(num_blocks=1024, repeats=2) if options.quick else Scale(16_384, 9)
    results = measure(scale)
    if options.json:
        sys.stdout.write(json.dumps({"unit": "us/block", "lines": results}, indent=2) + "\n")
    else:
        width = max(map(len, results))
        for line, microseconds in results.items():
            sys.stdout.write(f"{line:<{width}}  {microseconds:8.3f} us/block\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
