"""The CPU memory of one rank. All state belongs to the worker's thread."""

from __future__ import annotations

import logging
import mmap
import time
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_core.device.copy import PinnedRows
from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kv_core.device.copy import HostRegistrar

__all__ = ["CpuMemory"]

_LOGGER: Final = logging.getLogger(__name__)
_PART_BYTES: Final = 4 * 2**30


@final
class CpuMemory:
    """One tensor for each canonical KV cache tensor, of exactly the bytes it needs.

    Allocators of pinned memory round up to powers of two, which for half the sizes wastes a
    quarter of the memory and more. So memory is mapped first, and then pinned where it is.
    Pinning hundreds of gigabytes takes minutes. It goes part by part, says how far it has got, and
    ends by a deadline; whatever is not pinned whole is not pinned at all, and copies work, only
    slower.

    Attributes:
        tensors: int8, shape ``(num_blocks, page_bytes)`` each; empty once released.
    """

    def __init__(
        self,
        num_blocks: int,
        page_bytes: Sequence[int],
        registrar: HostRegistrar | None = None,
        *,
        pin_deadline_s: float = 300.0,
        part_bytes: int = _PART_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Map and pin.

        Args:
            num_blocks: Blocks.
            page_bytes: Bytes of one block in each tensor.
            registrar: Pins the memory for a device; ``None`` leaves it unpinned.
            pin_deadline_s: Seconds after which no further part is pinned.
            part_bytes: Most bytes that are pinned at once, unless a single block is larger.
            clock: Seconds, monotonic.

        Raises:
            ConfigError: There is not so much memory, or no block.
        """
        if num_blocks < 1:
            raise ConfigError(
                f"CPU memory needs at least one block, found {num_blocks}. Give the rank more CPU "
                "memory ('cpu_bytes')",
                setting="cpu_bytes",
            )
        self.tensors: tuple[npt.NDArray[np.int8], ...] = tuple(
            _map(num_blocks, size, num_blocks * sum(page_bytes)) for size in page_bytes
        )
        self._pinned: list[PinnedRows] = []
        if registrar is not None:
            self._pin(registrar, part_bytes, pin_deadline_s, clock)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_pinned(self) -> bool:
        """Whether all of it is pinned."""
        return bool(self._pinned)

    def _pin(
        self,
        registrar: HostRegistrar,
        part_bytes: int,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        total_bytes, pinned_bytes = self.num_bytes, 0
        started = clock()
        for tensor in self.tensors:
            num_rows, row_bytes = tensor.shape
            rows_per_part = max(1, part_bytes // row_bytes)
            for first in range(0, num_rows, rows_per_part):
                if clock() - started > deadline_s:
                    _LOGGER.warning(
                        "CPU memory is not pinned: after %.0f s only %d of %d bytes were. Copies "
                        "between GPU and CPU work, and are slower. Take less CPU memory, or raise "
                        "the deadline",
                        deadline_s,
                        pinned_bytes,
                        total_bytes,
                    )
                    self._unpin()
                    return
                rows = min(rows_per_part, num_rows - first)
                address = int(tensor.ctypes.data) + first * row_bytes
                part = PinnedRows(registrar, address, rows, row_bytes)
                if not part.is_pinned:
                    self._unpin()
                    return
                self._pinned.append(part)
                pinned_bytes += rows * row_bytes
                _LOGGER.info("pinned %d of %d bytes of CPU memory", pinned_bytes, total_bytes)

    def _unpin(self) -> None:
        while self._pinned:
            self._pinned.pop().release()

    def release(self) -> None:
        """Unpin everything and let go of the tensors, after the last copy. Idempotent."""
        self._unpin()
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
