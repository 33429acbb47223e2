"""From block ids to addresses, without a Python loop per page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["compute_sub_block_ptrs", "expand_sub_blocks"]


def expand_sub_blocks(
    block_ids: npt.NDArray[np.int32], factor: int, skip: int, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """List the sub-blocks of consecutive offloaded blocks.

    Args:
        block_ids: Offloaded blocks, in order.
        factor: Sub-blocks in one offloaded block.
        skip: Sub-blocks left out at the start of the first block.
        count: Sub-blocks wanted.

    Returns:
        Block id and position within the block of each sub-block, ``int64``, ``(count,)`` each.
        Blocks 0, 1, 2 with factor 2, skip 1, count 4 give (0, 1), (1, 0), (1, 1), (2, 0).
    """
    if factor == 1:
        # The usual case, and the side of the GPU in every other.
        return block_ids[:count].astype(np.int64), np.zeros(count, dtype=np.int64)
    positions = np.arange(skip, skip + count, dtype=np.int64)
    return block_ids[positions // factor].astype(np.int64), positions % factor


def compute_sub_block_ptrs(
    base_address: int | npt.NDArray[np.int64],
    row_stride: int | npt.NDArray[np.int64],
    block_ids: npt.NDArray[np.int32],
    factor: int,
    skip: int,
    count: int,
    sub_block_bytes: int | npt.NDArray[np.int64],
    out: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Return the address of each sub-block of a tensor, or of several tensors at once.

    Args:
        base_address: Address of the tensor's first byte; for several tensors an array of shape
            ``(tensors, 1)``, as the two other sizes then are.
        row_stride: Bytes from one offloaded block to the next.
        block_ids: Offloaded blocks, in order.
        factor: Sub-blocks in one offloaded block.
        skip: Sub-blocks left out at the start of the first block.
        count: Sub-blocks wanted.
        sub_block_bytes: Bytes of one sub-block within a row.
        out: Where the addresses go, of the shape that is returned.

    Returns:
        ``int64``, shape ``(count,)``, or ``(tensors, count)`` for several tensors. Block ids are
        32-bit; the arithmetic is 64-bit.
    """
    ids, positions = expand_sub_blocks(block_ids, factor, skip, count)
    addresses: npt.NDArray[np.int64] = np.multiply(ids, row_stride, out=out)
    addresses += base_address
    if factor > 1:
        addresses += positions * sub_block_bytes
    return addresses
