"""The one home of the shared memory that tiers read from and write to."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PrimaryView"]


@final
class PrimaryView:
    """Zero-copy access to the slots of the primary tier.

    The primary tier is one mapping of ``num_blocks`` rows of ``row_stride`` bytes. The first
    ``block_bytes`` of a row are the payload; the rest is padding that belongs to nobody.

    A memoryview that :meth:`block` returned is an export of the mapping. Drop it when the job
    is done: the engine unmaps the region after ``shutdown()``, and an export that is still alive
    then is an error of the tier (ZC-3).

    Thread-safe: the object is immutable apart from :meth:`release`.

    Attributes:
        view: The whole mapping, shape ``(num_blocks, row_stride)``, format ``B``. CPython cannot
            index it by row (``view[b]`` raises NotImplementedError), hence :meth:`block`.
        num_blocks: Number of slots.
        row_stride: Bytes from one slot to the next.
        block_bytes: Payload bytes of one slot, at most ``row_stride``.
        readonly: Whether the views of this object refuse writes.
    """

    __slots__ = ("_base", "_flat", "block_bytes", "num_blocks", "readonly", "row_stride", "view")

    def __init__(self, view: memoryview, block_bytes: int) -> None:
        """Wrap a two-dimensional, C-contiguous memoryview of format ``B``.

        Raises:
            ValueError: The view has another shape or format, or rows shorter than a block.
        """
        if view.ndim != 2 or view.format != "B" or not view.c_contiguous or view.shape is None:
            raise ValueError(
                "the primary view must be a C-contiguous memoryview of shape (num_blocks, "
                f"row_stride) and format 'B', found shape {view.shape} and format {view.format!r}"
            )
        self.num_blocks, self.row_stride = view.shape
        if not 0 < block_bytes <= self.row_stride:
            raise ValueError(
                f"block_bytes must be between 1 and the row stride {self.row_stride}, "
                f"found {block_bytes}"
            )
        self.view = view
        self.block_bytes = block_bytes
        self.readonly = view.readonly
        self._flat = view.cast("B")
        # A number, not an array: an array would stay an export of the mapping.
        self._base = int(np.frombuffer(self._flat, dtype=np.uint8).ctypes.data)

    def block(self, block_id: int) -> memoryview:
        """Return the payload of one slot: flat, format ``B``, ``block_bytes`` long, no copy.

        Raises:
            IndexError: There is no such slot.
        """
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block id {block_id} is not in 0..{self.num_blocks - 1}")
        start = int(block_id) * self.row_stride
        return self._flat[start : start + self.block_bytes]

    def blocks(self, block_ids: Iterable[int]) -> list[memoryview]:
        """Return the payloads of several slots, in the given order."""
        return [self.block(block_id) for block_id in block_ids]

    def address(self, block_id: int) -> int:
        """Return the virtual address of a slot's payload, for native I/O engines.

        Raises:
            IndexError: There is no such slot.
        """
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block id {block_id} is not in 0..{self.num_blocks - 1}")
        return self._base + int(block_id) * self.row_stride

    def as_readonly(self) -> PrimaryView:
        """Return a view of the same memory that refuses writes. Stores work on such a view."""
        return PrimaryView(self.view.toreadonly(), self.block_bytes)

    def release(self) -> None:
        """Give the exports of this object back. Later use raises ValueError. Idempotent."""
        self._flat.release()
        self.view.release()

    @override
    def __repr__(self) -> str:
        return (
            f"PrimaryView(num_blocks={self.num_blocks}, row_stride={self.row_stride}, "
            f"block_bytes={self.block_bytes}, readonly={self.readonly})"
        )
