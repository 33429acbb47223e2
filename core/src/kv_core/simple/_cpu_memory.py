"""The CPU memory of one rank. All state belongs to the worker's thread."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, final

import numpy as np

from kv_core.device.copy import PinnedRows
from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kv_core.device.copy import HostRegistrar

__all__ = ["CpuMemory"]


@final
class CpuMemory:
    """One tensor for each canonical KV cache tensor, of exactly the bytes it needs.

    Allocators of pinned memory round up to powers of two, which for half the sizes wastes a
    quarter of the memory and more. So memory is mapped first, and then pinned where it is.

    Attributes:
        tensors: int8, shape ``(num_blocks, page_bytes)`` each; empty once released.
    """

    def __init__(
        self, num_blocks: int, page_bytes: Sequence[int], registrar: HostRegistrar | None = None
    ) -> None:
        """Map and pin.

        Args:
            num_blocks: Blocks.
            page_bytes: Bytes of one block in each tensor.
            registrar: Pins the memory for a device; ``None`` leaves it unpinned.

        Raises:
            ConfigError: There is not so much memory.
        """
        self.tensors: tuple[npt.NDArray[np.int8], ...] = tuple(
            _map(num_blocks, size, num_blocks * sum(page_bytes)) for size in page_bytes
        )
        self._pinned: list[PinnedRows] = []
        if registrar is not None:
            for tensor in self.tensors:
                row_bytes = tensor.shape[1]
                address = int(tensor.ctypes.data)
                self._pinned.append(PinnedRows(registrar, address, num_blocks, row_bytes))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def release(self) -> None:
        """Unpin everything and let go of the tensors, after the last copy. Idempotent."""
        while self._pinned:
            self._pinned.pop().release()
        # The mappings go with the last array over them.
        self.tensors = ()


def _map(num_blocks: int, page_bytes: int, total_bytes: int) -> npt.NDArray[np.int8]:
    """Map zeroed pages; those that are never written take no memory."""
    try:
        mapping = mmap.mmap(
            -1, num_blocks * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        raise ConfigError(
            f"{num_blocks} CPU blocks take {total_bytes} bytes of memory, which cannot be had "
            f"({error}). Give the rank less CPU memory ('cpu_bytes')",
            setting="cpu_bytes",
        ) from error
    return np.frombuffer(mapping, dtype=np.int8).reshape(num_blocks, page_bytes)
