"""Cost of the ledger on the scheduler's thread, in microseconds a block.

Run ``python tests/benchmarks/control_plane.py`` (``--quick`` for a smoke run, ``--json`` for
machines). The time is CPU time of the calling thread: what tiers do on threads of their own is
not in it, nor is waiting. Each line is the median over repeats; the lines take turns within a
repeat, so that a slow second of the machine does not land on one line only.

The lines about tiers need ``kv-tier-example`` and are left out where it is not installed.
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

from kv_core.contract import (
    Namespace,
    NullMetrics,
    OffloadKey,
    PrimaryView,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from kv_core.cpu import CPUOffloadingManager, CPUPrimaryTierOffloadingManager
from kv_core.engine import LookupResult
from kv_core.keys import GroupGeometry
from kv_core.plugins import TierRegistry, open_tier
from kv_core.tiering import TieringConfig, TieringOffloadingManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kv_core.plugins import OpenTier

BATCH_BLOCKS = 64
STEP_END = ScheduleEndContext()

# Small: the tier's copies shall not get in the way of what is measured.
TIER_BLOCK_BYTES = 512
POLL_SECONDS = 0.002
PATIENCE_SECONDS = 60.0


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
        start = time.thread_time()
        work()
        self._seconds_per_block[line].append((time.thread_time() - start) / num_blocks)

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


# -- the tiering manager ------------------------------------------------------------------------


def open_example_tiers(count: int, num_blocks: int, view: memoryview) -> list[OpenTier]:
    """Return so many in-memory tiers that hold every block."""
    namespace = Namespace(
        model="benchmark",
        model_fingerprint="benchmark",
        revision="local",
        dtype="bfloat16",
        kv_layout="benchmark",
        groups=(GroupGeometry(16, TIER_BLOCK_BYTES, 1),),
        block_bytes=TIER_BLOCK_BYTES,
        tokens_per_hash=16,
        hash_algorithm="sha256",
        hash_seed="0",
    )
    return [
        open_tier(
            "example",
            name=f"example-{index}",
            settings={"max_blocks": num_blocks},
            namespace=namespace,
            primary=PrimaryView(view, TIER_BLOCK_BYTES),
            clock=time.monotonic,
            metrics=NullMetrics(),
        )
        for index in range(count)
    ]


def measure_tiering_manager(lines: Lines, num_tiers: int, scale: Scale) -> None:
    """Measure the two lives of a block: stored and cascaded, and found below and loaded."""
    # Promotions and their leases hold pins while the step goes on; half of the slots suffice.
    num_blocks = scale.num_blocks // 4
    view = memoryview(bytearray(num_blocks * TIER_BLOCK_BYTES)).cast(
        "B", (num_blocks, TIER_BLOCK_BYTES)
    )
    tiers = open_example_tiers(num_tiers, num_blocks, view)
    manager = TieringOffloadingManager(
        CPUPrimaryTierOffloadingManager(num_blocks, view, TIER_BLOCK_BYTES),
        tiers,
        config=TieringConfig(lease_share=1.0),
    )
    keys = make_keys(num_blocks, "tiered")
    stored, loaded = list(batches(keys, "writer")), list(batches(keys, "loader"))

    def end_step_until_idle() -> None:
        manager.on_schedule_end(STEP_END)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while manager.num_jobs_in_flight:
            if time.monotonic() > deadline:
                raise RuntimeError("the tiers did not finish their jobs")
            time.sleep(POLL_SECONDS)
            manager.on_schedule_end(STEP_END)

    def store() -> None:
        for context, offered in stored:
            manager.on_new_request(context)
            output = manager.prepare_store(offered, context)
            if output is None or len(output.keys_to_store) != len(offered):
                raise RuntimeError("a store was declined that had room")
            manager.complete_store(offered, context)
            manager.on_request_finished(context)
        end_step_until_idle()

    def hit() -> None:
        for context, wanted in loaded:
            manager.on_new_request(context)
            for key in wanted:
                manager.lookup(key, context)
        end_step_until_idle()
        for context, wanted in loaded:
            for key in wanted:
                if manager.lookup(key, context) is not LookupResult.HIT:
                    raise RuntimeError("a block that a tier has was not promoted")
            manager.prepare_load(wanted, context)
            manager.complete_load(wanted, context)
            manager.on_request_finished(context)
        manager.on_schedule_end(STEP_END)

    name = f"tiering, {num_tiers} tiers"
    lines.measure(f"{name}: store life cycle", num_blocks, store)
    if num_tiers:
        # The tiers keep what the primary loses, so every block has to be promoted.
        manager.reset_cache()
        manager.on_reset_flushed()
    lines.measure(f"{name}: hit life cycle", num_blocks, hit)
    manager.shutdown()


# -- the script ---------------------------------------------------------------------------------


def measure(scale: Scale) -> dict[str, float]:
    """Return microseconds a block by line."""
    lines = Lines()
    has_example_tier = any(claim.type == "example" for claim in TierRegistry().installed())
    for _ in range(scale.repeats):
        for policy in ("lru", "arc"):
            measure_cpu_manager(lines, policy, scale)
        for num_tiers in (0, 1, 3) if has_example_tier else (0,):
            measure_tiering_manager(lines, num_tiers, scale)
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
