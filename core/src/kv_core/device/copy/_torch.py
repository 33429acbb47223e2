"""Copies through torch, one ``copy_`` per range: works for every device torch knows.

The fallback for device memory that no faster back end knows; exercised with CPU tensors in the
tests, and not yet run on real hardware. All state belongs to the worker's thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from kv_core.device._canonical import tensor_address
from kv_core.device._streams import OrderedStream
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kv_core.device.copy._protocol import CopyBatch, CopyStream, CopyTicket

__all__ = ["TorchCopyBackend"]


@final
class TorchCopyBackend:
    """Copies between any two of a set of torch tensors.

    Addresses alone are not enough for torch, so the back end is given the tensors that ranges
    may lie in.
    """

    name: Final = "torch"

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register memory.

        Args:
            tensors: int8 tensors, on any device. They may share memory, as the layers of a
                region do.
        """
        self._memory = _Memory(tensors)
        self._cuda_device = next((t.device for t in tensors if t.device.type == "cuda"), None)

    def open_stream(self, name: str) -> CopyStream:  # noqa: ARG002 - torch streams have no name
        """Open a CUDA stream where a tensor is on CUDA; else copies run in ``submit``."""
        return _TorchStream(self._memory, self._cuda_device)


@final
class _Memory:
    """Finds the tensor that an address range lies in."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Without tensors that lie in another one, starts and ends both increase; then the last
        # one that begins at or before a range has all of it, if any has.
        self._flat: list[torch.Tensor] = []
        starts: list[int] = []
        ends: list[int] = []
        for tensor in sorted(
            tensors, key=lambda tensor: (tensor_address(tensor), -_extent(tensor))
        ):
            start = tensor_address(tensor)
            end = start + _extent(tensor)
            if not ends or end > ends[-1]:
                self._flat.append(tensor.as_strided((end - start,), (1,)))
                starts.append(start)
                ends.append(end)
        self._starts = np.array(starts, dtype=np.int64)
        self._ends = np.array(ends, dtype=np.int64)

    def ranges(
        self, addresses: np.ndarray[Any, np.dtype[np.int64]], sizes: np.ndarray[Any, Any]
    ) -> list[torch.Tensor]:
        owners = np.searchsorted(self._starts, addresses, side="right") - 1
        if len(addresses) and (owners.min() < 0 or (addresses + sizes > self._ends[owners]).any()):
            raise ValueError("a copy range lies in none of the registered tensors")
        offsets = addresses - self._starts[owners]
        return [
            self._flat[owner][offset : offset + size]
            for owner, offset, size in zip(
                owners.tolist(), offsets.tolist(), sizes.tolist(), strict=True
            )
        ]


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to past the last element of a strided int8 tensor."""
    if tensor.numel() == 0:
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int(last) + 1


@final
class _TorchStream:
    def __init__(self, memory: _Memory, cuda_device: torch.device | None) -> None:
        self._memory: _Memory | None = memory
        self._stream: OrderedStream | None = None
        if cuda_device is not None:
            import torch

            self._stream = OrderedStream(torch.cuda, cuda_device)

    def submit(self, batch: CopyBatch) -> CopyTicket:
        if self._memory is None:
            raise EngineStateError("the copy stream is closed")
        sources = self._memory.ranges(batch.sources, batch.sizes)
        destinations = self._memory.ranges(batch.destinations, batch.sizes)
        if self._stream is not None:
            return self._stream.run(lambda _stream: _copy_all(sources, destinations))
        started = time.perf_counter()
        _copy_all(sources, destinations)
        return _EndedTicket(time.perf_counter() - started)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        # Its tensors are exports of the shared region, which could not be unmapped while they live.
        self._memory = None


def _copy_all(sources: list[torch.Tensor], destinations: list[torch.Tensor]) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source, non_blocking=True)


@final
class _EndedTicket:
    """The outcome of copies that ended before ``submit`` returned."""

    def __init__(self, elapsed_seconds: float) -> None:
        self.elapsed_seconds = elapsed_seconds
        self.error: BaseException | None = None

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass
