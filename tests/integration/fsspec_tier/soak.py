"""Stores and loads many blocks through the fsspec tier on a folder, and watches the memory.

``python soak.py --blocks 10000``: the last line is a verdict, the exit status 1 when memory grew.
Blocks are removed as they are read, so the disk holds a few hundred at a time.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_fsspec import kv_core_register_tier

BLOCK_BYTES: Final = 64 << 10
JOB_BLOCKS: Final = 32

# What a long run may need more than a short one: the allocator's own; and the names of folders
# that are known to exist, of which there are 4096 at most.
MOST_RESIDENT_BYTES: Final = 4 << 20
MOST_TRACED_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Growth:
    """How memory grew after the warm-up.

    Attributes:
        resident_bytes: By so much the process grew, at each quarter.
        traced_bytes: By so much what Python has allocated grew, in a run of a quarter.
        seconds: How long it took.
    """

    resident_bytes: tuple[int, ...]
    traced_bytes: int
    seconds: float

    @property
    def is_flat(self) -> bool:
        """Whether neither grew by more than a run of any length may need."""
        return (
            max(self.resident_bytes) <= MOST_RESIDENT_BYTES
            and self.traced_bytes <= MOST_TRACED_BYTES
        )


def run(folder: Path, blocks: int, *, warm_up: int = 512) -> Growth:
    """Put and get so many blocks, each once, and return what memory did after the warm-up."""
    spec = kv_core_register_tier()
    settings = {"url": f"file://{folder}", "min_free_bytes": 1}
    config = parse_tier_config("cold", spec.config_model, settings)
    with TierDriver(spec.factory, config, num_blocks=JOB_BLOCKS, block_bytes=BLOCK_BYTES) as driver:
        done, quarter = 0, blocks // 4

        def pass_blocks(count: int) -> None:
            nonlocal done
            for first in range(done, done + count, JOB_BLOCKS):
                _round_trip(driver, folder, first)
            done += -(-count // JOB_BLOCKS) * JOB_BLOCKS
            gc.collect()

        pass_blocks(warm_up)
        resident, grown = _resident_bytes(), []
        began = time.monotonic()
        for _ in range(4):
            pass_blocks(quarter)
            grown.append(_resident_bytes() - resident)
        seconds = time.monotonic() - began
        # Not before: what it notes for each allocation is memory, too.
        tracemalloc.start()
        try:
            pass_blocks(JOB_BLOCKS)
            before, _ = tracemalloc.get_traced_memory()
            pass_blocks(quarter)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    return Growth(tuple(grown), after - before, seconds)


def _round_trip(driver: TierDriver, folder: Path, first: int) -> None:
    keys = [example_key(number) for number in range(first, first + JOB_BLOCKS)]
    request = driver.request.__class__(f"request-{first}")
    driver.tier.on_new_request(request)
    if driver.resolve(keys, request) != [False] * JOB_BLOCKS:
        raise AssertionError(f"blocks {first} and on were there before they were stored")
    if not driver.store(keys, request).success:
        raise AssertionError(f"blocks {first} and on were not stored")
    if not driver.load(keys, request).success or driver.loaded(keys) != keys:
        raise AssertionError(f"blocks {first} and on were not loaded as they were stored")
    driver.tier.on_request_finished(request)
    # The driver's own memory: every result that there ever was.
    driver._results.clear()
    for path in folder.rglob("*.kv"):
        path.unlink()


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def main() -> int:
    """Run it and print what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=10_000)
    blocks = parser.parse_args().blocks
    with tempfile.TemporaryDirectory(prefix="kv-fsspec-soak-") as folder:
        growth = run(Path(folder), blocks)
    quarters = ", ".join(f"{grown / 2**20:+.1f}" for grown in growth.resident_bytes)
    print(
        f"{blocks:,} blocks of {BLOCK_BYTES >> 10} KiB stored and loaded in "
        f"{growth.seconds:.1f} s: resident {quarters} MiB at each quarter (at most "
        f"{MOST_RESIDENT_BYTES >> 20} MiB); allocated {growth.traced_bytes / 1024:+.0f} KiB in "
        f"another quarter (at most {MOST_TRACED_BYTES >> 10} KiB)"
    )
    print("verdict: memory is flat" if growth.is_flat else "verdict: MEMORY GROWS")
    return 0 if growth.is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
