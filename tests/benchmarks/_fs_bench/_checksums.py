"""Which checksum of a block: speed over a memoryview, with one thread and with two."""

from __future__ import annotations

import importlib
import mmap
import threading
import time
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["measure_checksums"]

_SIZES: Final = (2**15, 2**20)
_THREADS: Final = (1, 2)
_BUFFERS_BYTES: Final = 2**28  # out of the caches, as blocks in the primary tier are


def measure_checksums(*, seconds: float) -> list[dict[str, object]]:
    """Return GB/s of each checksum that is installed, for each size and number of threads."""
    ways = _ways()
    lines: list[dict[str, object]] = []
    with mmap.mmap(-1, _BUFFERS_BYTES) as mapping:
        np.frombuffer(mapping, np.uint64)[:] = np.random.default_rng(3).integers(
            2**64, size=_BUFFERS_BYTES // 8, dtype=np.uint64
        )
        flat = memoryview(mapping)
        for size in _SIZES:
            buffers = [flat[at : at + size] for at in range(0, _BUFFERS_BYTES, size)]
            for threads in _THREADS:
                for name, way in ways.items():
                    speed = _speed(way, buffers, threads, seconds)
                    lines.append(
                        {"name": name, "bytes": size, "threads": threads, "gb_per_s": speed}
                    )
            for buffer in buffers:
                buffer.release()
        flat.release()
    return lines


def _ways() -> dict[str, Callable[[memoryview], int]]:
    ways: dict[str, Callable[[memoryview], int]] = {
        "xxh3_64": xxhash.xxh3_64_intdigest,
        "zlib.crc32": zlib.crc32,
    }
    # Not a dependency: here to be compared with, where it happens to be installed.
    with suppress(ImportError):
        ways["isal.crc32"] = importlib.import_module("isal.isal_zlib").crc32
    return ways


def _speed(
    way: Callable[[memoryview], int], buffers: list[memoryview], threads: int, seconds: float
) -> float:
    moved = [0] * threads
    begin = threading.Event()

    def work(number: int) -> None:
        begin.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for buffer in buffers[number::threads]:
                way(buffer)
                moved[number] += len(buffer)

    pool = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in pool:
        thread.start()
    start = time.perf_counter()
    begin.set()
    for thread in pool:
        thread.join()
    return round(sum(moved) / (time.perf_counter() - start) / 1e9, 2)
