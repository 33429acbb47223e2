"""The memory of the GPU pool: CUDA where there is a device, else host memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from kv_core.device.copy import HostCopyBackend, choose_backend
from kv_core.errors import ConfigError
from kv_core.workload._content import POISON_BYTE, fill_block

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt
    import torch

    from kv_core.device import KVTensor
    from kv_core.device.copy import CopyBackend

__all__ = ["GpuMemory", "HostGpuMemory", "TorchGpuMemory", "open_gpu_memory"]


class GpuMemory(Protocol):
    """Pages of the GPU pool, one per block."""

    @property
    def tensor(self) -> KVTensor:
        """int8, shape ``(num_blocks, block_bytes)``."""

    def copy_backend(self, cpu_tensors: Sequence[npt.NDArray[np.int8]]) -> CopyBackend:
        """Return a back end that copies between this memory and the primary tier."""

    def fill(self, block_id: int, key: bytes) -> None:
        """Write the content of a block."""

    def poison(self, block_ids: Collection[int]) -> None:
        """Destroy the content of blocks."""

    def read(self, block_id: int) -> memoryview:
        """Return the content of a block, in host memory, valid until the next call."""


@final
class HostGpuMemory:
    """A pool in host memory, for machines without a GPU."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.tensor: npt.NDArray[np.int8] = np.zeros((num_blocks, block_bytes), dtype=np.int8)
        self._view = self.tensor.data.cast("B")
        self._block_bytes = block_bytes
        self._poison = bytes([POISON_BYTE]) * block_bytes

    def copy_backend(self, cpu_tensors: Sequence[npt.NDArray[np.int8]]) -> CopyBackend:  # noqa: ARG002
        """Return the host back end, which takes any address."""
        return HostCopyBackend()

    def fill(self, block_id: int, key: bytes) -> None:
        """Write the content of a block."""
        fill_block(key, self.read(block_id))

    def poison(self, block_ids: Collection[int]) -> None:
        """Destroy the content of blocks."""
        # numpy would give the interpreter lock away for each of them, and wait to get it back.
        for block_id in block_ids:
            self.read(block_id)[:] = self._poison

    def read(self, block_id: int) -> memoryview:
        """Return the block itself."""
        start = block_id * self._block_bytes
        return self._view[start : start + self._block_bytes]


@final
class TorchGpuMemory:
    """A pool in a torch tensor, on a CUDA device as a rule."""

    def __init__(self, num_blocks: int, block_bytes: int, device: str) -> None:
        import torch

        self.tensor: torch.Tensor = torch.zeros(
            (num_blocks, block_bytes), dtype=torch.int8, device=device
        )
        self._scratch = torch.empty(block_bytes, dtype=torch.int8)
        self._host = memoryview(self._scratch.numpy()).cast("B")

    def copy_backend(self, cpu_tensors: Sequence[npt.NDArray[np.int8]]) -> CopyBackend:
        """Return the best back end for the device of the pool."""
        return choose_backend([self.tensor], cpu_tensors)

    def fill(self, block_id: int, key: bytes) -> None:
        """Write the content of a block, by way of host memory."""
        fill_block(key, self._host)
        self.tensor[block_id].copy_(self._scratch)

    def poison(self, block_ids: Collection[int]) -> None:
        """Destroy the content of blocks, where they are."""
        import torch

        rows = torch.tensor(list(block_ids), dtype=torch.int64, device=self.tensor.device)
        self.tensor.index_fill_(0, rows, POISON_BYTE - 256)

    def read(self, block_id: int) -> memoryview:
        """Return a copy of the block in host memory."""
        self._scratch.copy_(self.tensor[block_id])
        return self._host


def open_gpu_memory(num_blocks: int, block_bytes: int, *, rank: int | None = None) -> GpuMemory:
    """Allocate a pool: a CUDA tensor when torch sees a device, else host memory.

    Args:
        num_blocks: Blocks of the pool.
        block_bytes: Bytes of one block.
        rank: Makes the device of this rank the process's current one first; ranks share devices
            if there are fewer. By default the current device is used.

    Raises:
        ConfigError: There is not so much memory.
    """
    try:
        return _allocate(num_blocks, block_bytes, rank)
    except (MemoryError, OverflowError, ValueError, RuntimeError) as error:
        # numpy has the first three, by how far the size is out of bounds; torch has the last.
        raise ConfigError(
            f"a GPU pool of {num_blocks} blocks of {block_bytes} bytes cannot be allocated "
            f"({error}). Give it fewer or smaller blocks (--gpu-blocks, --block-bytes)",
            setting="gpu_blocks",
        ) from error


def _allocate(num_blocks: int, block_bytes: int, rank: int | None) -> GpuMemory:
    # Importing torch takes seconds, so a machine without a device does not.
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return HostGpuMemory(num_blocks, block_bytes)
    try:
        import torch
    except ImportError:
        return HostGpuMemory(num_blocks, block_bytes)
    if torch.cuda.is_available():
        if rank is not None:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        return TorchGpuMemory(num_blocks, block_bytes, "cuda")
    return HostGpuMemory(num_blocks, block_bytes)
