"""The rule which way a batch of copies takes between the GPU and host memory."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from kv_core.device.copy._driver import MemoryKind

if TYPE_CHECKING:
    from kv_core.device.copy._protocol import CopyBatch

__all__ = ["CopyRoute", "choose_route"]

# From here on a copy engine moves a page in more time than it takes to begin with it. A kernel
# would be no faster, and takes processors away from the engine.
_LARGE_PAGE_BYTES: Final = 28 * 2**10

# A kernel's launch costs as much as some copies.
_FEWEST_PAGES: Final = 16

_WORD_BYTES: Final = 8


class CopyRoute(Enum):
    """A way to copy.

    Attributes:
        KERNEL: One kernel reads the addresses and moves the pages.
        BATCH: One call hands all copies to the driver, and its copy engines move the pages.
        SINGLE: A call for each copy.
    """

    KERNEL = "kernel"
    BATCH = "batch"
    SINGLE = "single"


def choose_route(
    batch: CopyBatch,
    source: MemoryKind,
    destination: MemoryKind,
    *,
    has_kernel: bool,
    has_batch_copy: bool,
) -> CopyRoute:
    """Choose the fastest way that is right for a batch.

    Args:
        batch: Copies, at least one. All sources are in memory of one kind, all destinations, too.
        source: Kind of the sources' memory.
        destination: Kind of the destinations' memory.
        has_kernel: Whether the kernel can be used here.
        has_batch_copy: Whether the driver has the batch call.
    """
    if MemoryKind.PAGEABLE in {source, destination}:
        # The driver copies it piece by piece through memory of its own, which costs far more than
        # the calls; and for this memory only the plain call has been there for all the years.
        return CopyRoute.SINGLE
    if has_kernel and _suits_kernel(batch, source, destination):
        return CopyRoute.KERNEL
    return CopyRoute.BATCH if has_batch_copy else CopyRoute.SINGLE


def _suits_kernel(batch: CopyBatch, source: MemoryKind, destination: MemoryKind) -> bool:
    # Only loads: kernels read host memory about as fast as copy engines, but stores compete with
    # the forward pass, which needs the processors, and nobody waits for a store.
    if (source, destination) != (MemoryKind.PINNED, MemoryKind.DEVICE):
        return False
    if len(batch.sizes) < _FEWEST_PAGES or int(batch.sizes.max()) >= _LARGE_PAGE_BYTES:
        return False
    bits = batch.sources | batch.destinations | batch.sizes
    return int(np.bitwise_or.reduce(bits)) % _WORD_BYTES == 0
