"""Makes the pages of a mapping present, so that no copy pays for that later.

The memory is reserved when the file is allocated; what is left is to clear each page and to
enter it into the page table of the process. Clearing is most of the work and happens once per
page, whoever comes first: so each worker begins with the pages that hold its own part of the
rows, all at the same time, and the scheduler takes the rest.
"""

from __future__ import annotations

import errno
import mmap
from typing import TYPE_CHECKING, Final

import numpy as np

from kv_core.cpu._progress import CHUNK_BYTES, Progress
from kv_core.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kv_core.cpu._geometry import PrimaryGeometry

__all__ = ["map_file", "populate", "worker_spans"]

# Not in the mmap module before Python 3.14, and known to Linux from 5.14 on.
_MADV_POPULATE_WRITE: Final = 23


def map_file(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map a file, shared and writable.

    Raises:
        RegionError: The system refuses.
    """
    try:
        return mmap.mmap(descriptor, size_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise RegionError(f"{size_bytes} bytes cannot be mapped: {error}") from error


def worker_spans(geometry: PrimaryGeometry, worker: int) -> Iterator[tuple[int, int]]:
    """Yield the kernel's pages that hold a worker's part of the rows.

    Rows are interleaved, so there is a span for each row, and pages at its ends may hold bytes
    of neighbours as well: making them present twice is harmless, because it writes nothing.

    Yields:
        Offset and length in bytes, multiples of the kernel's page, ascending and disjoint.
    """
    start = stop = 0
    for block in range(geometry.num_blocks):
        first = block * geometry.row_stride + worker * geometry.worker_page_bytes
        next_start = first // mmap.PAGESIZE * mmap.PAGESIZE
        next_stop = -(-(first + geometry.worker_page_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if next_start <= stop:
            stop = next_stop
            continue
        if stop:
            yield start, stop - start
        start, stop = next_start, next_stop
    yield start, stop - start


def populate(mapping: mmap.mmap, spans: Iterable[tuple[int, int]], progress: Progress) -> None:
    """Make pages present and writable. Their content stays what it is.

    Args:
        mapping: The region.
        spans: Offsets and lengths in bytes; offsets are multiples of the kernel's page.
        progress: Told of each chunk.

    Raises:
        RegionError: The system has no memory for them.
    """
    for start, length in spans:
        for offset in range(start, start + length, CHUNK_BYTES):
            chunk_bytes = min(CHUNK_BYTES, start + length - offset)
            _populate_chunk(mapping, offset, chunk_bytes)
            progress.add(chunk_bytes)


def _populate_chunk(mapping: mmap.mmap, offset: int, length: int) -> None:
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, offset, length)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise RegionError(
                f"the memory of the region cannot be made present: {error}. Look at the memory "
                "limit of the container and at the free memory of the host, or lower "
                "'cpu_bytes_to_use' (--cpu-bytes)."
            ) from error
        # Older kernels. Reading is enough to map the pages, and races with nobody's write.
        pages = np.frombuffer(mapping, dtype=np.uint8, count=length, offset=offset)
        pages[:: mmap.PAGESIZE].sum()
