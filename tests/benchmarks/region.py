"""What does a shared region cost, compared with writing its memory once?

Run ``python tests/benchmarks/region.py`` (``--quick`` for a smoke run, ``--json`` for machines).
Creates the region of one process, which reserves all of its memory and makes every page present,
and closes it again; then takes as much fresh memory of the same file system and writes every byte
of it with one memset, which does both on the way. Alternating, medians. A third line is the same
memset over memory that is present already: what remains for the first copies after a start.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kv_core.cpu import PrimaryGeometry, SharedOffloadRegion

if TYPE_CHECKING:
    from collections.abc import Sequence

ROW_BYTES = 2**20
SHM_DIR = "/dev/shm"  # noqa: S108 - shared memory is what is measured


def create(shm_dir: Path, num_bytes: int) -> float:
    """Return the seconds until a region is ready to be used."""
    geometry = PrimaryGeometry(num_bytes // ROW_BYTES, 1, ROW_BYTES, ROW_BYTES, ROW_BYTES)
    start = time.perf_counter()
    region = SharedOffloadRegion(
        "benchmark", geometry, namespace_fingerprint="0" * 64, shm_dir=shm_dir
    )
    elapsed = time.perf_counter() - start
    region.close()
    return elapsed


def write(shm_dir: Path, num_bytes: int) -> tuple[float, float]:
    """Return the seconds of a memset over fresh memory, and of the next one over the same."""
    descriptor = os.open(shm_dir, os.O_TMPFILE | os.O_RDWR)
    try:
        os.ftruncate(descriptor, num_bytes)
        with mmap.mmap(descriptor, num_bytes) as mapping:
            target = ctypes.c_char.from_buffer(mapping)
            samples = []
            for value in (1, 2):
                start = time.perf_counter()
                ctypes.memset(ctypes.byref(target), value, num_bytes)
                samples.append(time.perf_counter() - start)
            del target
    finally:
        os.close(descriptor)
    return samples[0], samples[1]


def measure(num_bytes: int, repeats: int) -> dict[str, float]:
    """Measure alternately, so that a slow moment of the machine hits both."""
    created, fresh, present = [], [], []
    with tempfile.TemporaryDirectory(prefix="kv-core-region-", dir=SHM_DIR) as name:
        for _ in range(repeats):
            created.append(create(Path(name), num_bytes))
            first, second = write(Path(name), num_bytes)
            fresh.append(first)
            present.append(second)
    ratios = [mine / plain for mine, plain in zip(created, fresh, strict=True)]
    return {
        "region, seconds": statistics.median(created),
        "memset of fresh memory, seconds": statistics.median(fresh),
        "memset of present memory, seconds": statistics.median(present),
        "region against memset": statistics.median(ratios),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small and few: does it still run?")
    options = parser.parse_args(arguments)
    num_bytes, repeats = (2**27, 1) if options.quick else (2**32, 3)
    results = {line: round(value, 3) for line, value in measure(num_bytes, repeats).items()}
    if options.json:
        sys.stdout.write(json.dumps({"bytes": num_bytes, "lines": results}, indent=2) + "\n")
        return 0
    sys.stdout.write(f"{num_bytes / 2**30:g} GiB\n")
    width = max(map(len, results))
    for line, value in results.items():
        sys.stdout.write(f"{line:<{width}}  {value:8.3f}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
