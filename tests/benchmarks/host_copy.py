"""How close do copies within host memory come to one memcpy of the same bytes?

Run ``python tests/benchmarks/host_copy.py`` (``--quick`` for a smoke run, ``--json`` for machines).
Copies pages between random places of two large arrays: with the host back end; with one
``memmove`` a page; with ``process_vm_readv`` on this process, 1024 pages a call, where the kernel
allows it; and with one ``memmove`` of as many bytes. Alternating, medians. The budget of the back
end is 80 % of the memcpy for pages of 64 KiB; below that, it should beat what it is compared with.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from kv_core.device.copy import CopyBatch, HostCopyBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Copy = Callable[[CopyBatch], None]

PAGE_SIZES = (2**12, 2**13, 2**14, 2**16, 2**18, 2**20)
RANGES_PER_CALL = 1024  # IOV_MAX


def memmove_calls(batch: CopyBatch) -> None:
    """Copy page by page."""
    columns = (batch.destinations, batch.sources, batch.sizes)
    for destination, source, size in zip(*(c.tolist() for c in columns), strict=True):
        ctypes.memmove(destination, source, size)


def vm_readv_calls(batch: CopyBatch) -> None:
    """Let the kernel copy from this process to itself.

    Raises:
        OSError: The kernel does not allow it.
    """
    readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    readv.restype = ctypes.c_ssize_t
    number, address, count = ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong
    readv.argtypes = [number, address, count, address, count, count]
    local = np.stack([batch.destinations, batch.sizes], axis=1)
    remote = np.stack([batch.sources, batch.sizes], axis=1)
    for first in range(0, len(local), RANGES_PER_CALL):
        some = min(RANGES_PER_CALL, len(local) - first)
        at = first * local.itemsize * 2
        copied = readv(os.getpid(), local.ctypes.data + at, some, remote.ctypes.data + at, some, 0)
        if copied != int(batch.sizes[first : first + some].sum()):
            raise OSError(ctypes.get_errno(), "process_vm_readv")


def ways_to_copy(whole: CopyBatch) -> dict[str, Copy]:
    """Return what is compared, by name; the first is the measure of the others."""
    stream = HostCopyBackend().open_stream("benchmark")

    def host(batch: CopyBatch) -> None:
        ticket = stream.submit(batch)
        ticket.wait()
        if ticket.error is not None:
            raise ticket.error

    ways: dict[str, Copy] = {
        "memcpy": lambda _: memmove_calls(whole),
        "host back end": host,
        "memmove calls": memmove_calls,
    }
    try:
        vm_readv_calls(CopyBatch(whole.sources, whole.destinations, whole.sizes.clip(max=4096)))
    except (AttributeError, OSError) as error:
        sys.stderr.write(f"without process_vm_readv: {error}\n")
    else:
        ways["process_vm_readv"] = vm_readv_calls
    return ways


def measure(num_bytes: int, repeats: int) -> dict[int, dict[str, float]]:
    """Return the median GB/s of each way, for each page size, measured alternately."""
    # Twice what is copied, so that pages lie apart; far more than any cache.
    source = np.ones(2 * num_bytes, dtype=np.int8)
    # Written, not just mapped: the first copy would pay for its pages.
    destination = np.full(2 * num_bytes, 2, dtype=np.int8)
    random = np.random.default_rng(1)
    whole = CopyBatch(
        *(np.array([n]) for n in (source.ctypes.data, destination.ctypes.data, num_bytes))
    )
    ways = ways_to_copy(whole)
    results = {}
    for size in PAGE_SIZES:
        count = num_bytes // size
        places = (random.permutation(2 * count)[:count] * size for _ in range(2))
        batch = CopyBatch(
            source.ctypes.data + next(places),
            destination.ctypes.data + next(places),
            np.full(count, size, dtype=np.int64),
        )
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            # In another order each time: who comes second finds some pages in the cache.
            for name in random.permutation(list(ways)).tolist():
                copy = ways[name]
                start = time.perf_counter()
                copy(batch)
                seconds[name].append(time.perf_counter() - start)
        results[size] = {
            name: num_bytes / statistics.median(samples) / 1e9 for name, samples in seconds.items()
        }
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small and few: does it still run?")
    options = parser.parse_args(arguments)
    num_bytes, repeats = (2**22, 2) if options.quick else (2**26, 15)
    results = measure(num_bytes, repeats)
    if options.json:
        lines = {str(size): line for size, line in results.items()}
        sys.stdout.write(json.dumps({"bytes": num_bytes, "gb_per_s": lines}, indent=2) + "\n")
        return 0
    sys.stdout.write("GB/s, and of one memcpy\n")
    for size, line in results.items():
        base = line["memcpy"]
        cells = (f"{name} {speed:5.1f} {speed / base:4.0%}" for name, speed in line.items())
        sys.stdout.write(f"{size // 1024:5} KiB   " + "   ".join(cells) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
