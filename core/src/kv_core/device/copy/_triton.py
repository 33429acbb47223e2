"""Copies of many small pages from pinned host memory, by a kernel on the GPU.

A copy engine starts anew for each range, which for small pages takes longer than the copy. A
kernel reads the addresses itself and moves the pages of a dozen ranges at a time.

All state belongs to the thread that submits. Runs in the tests under Triton's interpreter, and has
not been run on real hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from kv_core.device._streams import StreamApi, StreamEvent
    from kv_core.device.copy._protocol import CopyBatch

__all__ = ["TritonCopier", "chunk_bytes_of"]

# Enough to keep the link busy, few enough to leave the other hundred processors to the engine.
_NUM_PROGRAMS: Final = 12

_WORD_BYTES: Final = 8
_LARGEST_CHUNK_BYTES: Final = 8 * 2**10
_SMALLEST_CAPACITY: Final = 1024


def chunk_bytes_of(page_bytes: int) -> int:
    """Return how many bytes of a page a program moves at a time: a power of two."""
    power_of_two = 1 << (max(page_bytes, _WORD_BYTES) - 1).bit_length()
    return min(power_of_two, _LARGEST_CHUNK_BYTES)


@final
class TritonCopier:
    """Queues the kernel on the current stream.

    The kernel is compiled for each chunk size when the copier is made; a batch that would want
    another one is copied with what there is.
    """

    def __init__(self, api: StreamApi, device: torch.device, page_sizes: Iterable[int]) -> None:
        """Compile.

        Args:
            api: Makes events.
            device: Where the kernel runs.
            page_sizes: Bytes of the pages that batches will have.

        Raises:
            ImportError: Triton is not installed.
            Exception: Triton cannot compile here: without a C compiler, for one.
        """
        from kv_core.device.copy._triton_kernel import copy_pages

        self._kernel: Any = copy_pages
        self._api = api
        self._device = device
        self._spare: list[_Descriptors] = []
        self._in_flight: list[_Descriptors] = []
        self._chunk_sizes = sorted({chunk_bytes_of(size) for size in page_sizes})
        descriptors = self._take(0)
        # Triton compiles for the current device, which need not be this one.
        with api.stream(api.current_stream(device)):
            for chunk_bytes in self._chunk_sizes:
                self._launch(descriptors, 0, chunk_bytes)
        self._spare.append(descriptors)

    def copy(self, batch: CopyBatch, stream: Any) -> None:
        """Queue a batch.

        Args:
            batch: Copies whose addresses and sizes are multiples of 8, and which the device can
                reach at their addresses.
            stream: The current stream.
        """
        count = len(batch.sizes)
        if count == 0:
            return
        wanted = chunk_bytes_of(int(batch.sizes.max()))
        chunk_bytes = next((size for size in self._chunk_sizes if size >= wanted), None)
        descriptors = self._take(count)
        try:
            descriptors.write(batch)
            self._launch(descriptors, count, chunk_bytes or self._chunk_sizes[-1])
        finally:
            # Also after a failure, when the descriptors may be on their way.
            descriptors.mark.record(stream)
            self._in_flight.append(descriptors)

    def _launch(self, descriptors: _Descriptors, count: int, chunk_bytes: int) -> None:
        self._kernel[(_NUM_PROGRAMS,)](
            *descriptors.on_device, count, CHUNK_WORDS=chunk_bytes // _WORD_BYTES
        )

    def _take(self, count: int) -> _Descriptors:
        """Return descriptors that no kernel reads any more, with room for so many."""
        ended = [used for used in self._in_flight if used.mark.query()]
        if ended:
            self._in_flight = [used for used in self._in_flight if used not in ended]
            self._spare += ended
        for index, spare in enumerate(self._spare):
            if spare.capacity >= count:
                return self._spare.pop(index)
        # Smaller ones have been outgrown.
        self._spare.clear()
        capacity = _SMALLEST_CAPACITY
        while capacity < count:
            capacity *= 2
        return _Descriptors(capacity, self._device, self._api.Event(enable_timing=False))


@final
class _Descriptors:
    """Addresses and sizes of a batch, where a kernel reads them.

    Attributes:
        capacity: Most copies.
        mark: Reached once the kernel has read them.
        on_device: Sources, destinations and sizes: int64 tensors, shape ``(capacity,)``.
    """

    def __init__(self, capacity: int, device: torch.device, mark: StreamEvent) -> None:
        import torch

        self.capacity = capacity
        self.mark = mark
        is_cuda = device.type == "cuda"
        # Pinned: from other memory, even an asynchronous copy would wait for the stream.
        self._staging = torch.empty((3, capacity), dtype=torch.int64, pin_memory=is_cuda)
        self._array = self._staging.numpy()
        self._tensor = torch.empty((3, capacity), dtype=torch.int64, device=device)
        self.on_device = tuple(self._tensor)

    def write(self, batch: CopyBatch) -> None:
        """Queue the way of a batch's descriptors to the device, on the current stream."""
        count = len(batch.sizes)
        np.stack([batch.sources, batch.destinations, batch.sizes], out=self._array[:, :count])
        self._tensor.copy_(self._staging, non_blocking=True)
