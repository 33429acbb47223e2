"""Carries out a list of copies within host memory, without a compiled extension of its own.

No state; any thread. The interpreter lock is free while bytes move.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kv_core.device.copy._protocol import CopyBatch

    Addresses = npt.NDArray[np.int64]

__all__ = ["copy_ranges", "merge_adjacent"]

# How the ways to copy compare with one memcpy of the same bytes, random pages, by the time of one
# thread, on a machine like CI's (tests/benchmarks/host_copy.py measures those without a compiler):
#
#   page      C loop   memmove calls   numpy pages   process_vm_readv
#   4 KiB      67 %        34 %           44 %            33 %
#   8 KiB      70 %        45 %           48 %            44 %
#   16 KiB     81 %        64 %           56 %            58 %
#   64 KiB     94 %        91 %           77 %            77 %
#
# A call costs half a microsecond or more, which small pages feel; numpy takes less for each page,
# and copies every byte twice. The kernel pins every page that it copies for us, so that its one
# call for 1024 ranges is never the fastest. One thread for a direction: the other cores are the
# engine's.
_LARGEST_NUMPY_PAGE: Final = 8 * 2**10

# Below this, setting up the arrays costs more than the calls that they save.
_FEWEST_NUMPY_PAGES: Final = 16

# What is gathered at once stays in the cache of the core until it is scattered.
_GATHER_BYTES: Final = 256 * 2**10


def copy_ranges(batch: CopyBatch) -> None:
    """Copy byte ranges that do not overlap, in any order.

    Small ranges of one size are copied by numpy, many at a time; the rest one by one.
    """
    sources, destinations, sizes = merge_adjacent(batch)
    small, counts = np.unique(sizes[sizes <= _LARGEST_NUMPY_PAGE], return_counts=True)
    for size in small[counts >= _FEWEST_NUMPY_PAGES].tolist():
        same = sizes == size
        _copy_pages(sources[same], destinations[same], size)
        rest = ~same
        sources, destinations, sizes = sources[rest], destinations[rest], sizes[rest]
    calls = map(ctypes.memmove, destinations.tolist(), sources.tolist(), sizes.tolist())
    deque(calls, maxlen=0)


def merge_adjacent(batch: CopyBatch) -> tuple[Addresses, Addresses, Addresses]:
    """Join ranges that continue each other on both sides: fewer, larger copies.

    Returns:
        Sources, destinations and sizes, ``int64``, one entry for each joined range.
    """
    sources, destinations, sizes = batch.sources, batch.destinations, batch.sizes
    if len(sizes) == 0:
        return sources, destinations, sizes
    starts = np.empty(len(sizes), dtype=bool)
    starts[0] = True
    np.logical_or(
        sources[:-1] + sizes[:-1] != sources[1:],
        destinations[:-1] + sizes[:-1] != destinations[1:],
        out=starts[1:],
    )
    first = np.flatnonzero(starts)
    return sources[first], destinations[first], np.add.reduceat(sizes, first)


def _copy_pages(sources: Addresses, destinations: Addresses, size: int) -> None:
    """Copy ranges of one size: gather some into a buffer, scatter them from there."""
    source_pages, source_offsets = _pages_between(sources, size)
    destination_pages, destination_offsets = _pages_between(destinations, size)
    for some in _slices(len(sources), max(1, _GATHER_BYTES // size)):
        destination_pages[destination_offsets[some]] = source_pages[source_offsets[some]]


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(first, first + step) for first in range(0, count, step))


def _pages_between(addresses: Addresses, size: int) -> tuple[npt.NDArray[np.void], Addresses]:
    """Return the memory from the lowest to the highest address, and where in it the pages are.

    Element ``i`` of the array is the page that begins at byte ``i``: elements overlap, and only
    those that are pages are ever touched. What lies between them may not even be mapped.
    """
    low, high = int(addresses.min()), int(addresses.max())
    return np.asarray(_Memory(low, high - low + 1, size)), addresses - low


class _Memory:
    """Memory that numpy makes an array of, an element of ``size`` bytes beginning at every byte."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, num_starts: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (num_starts,),
            "strides": (1,),
            "typestr": f"|V{size}",
        }
