"""Opening a tier with blocks of a size that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_conformance.harness import HarnessError
from kv_conformance.rig import Broken

if TYPE_CHECKING:
    from kv_conformance.rig import Rig, Rigs

__all__ = ["fitting", "opened_with_blocks"]


def fitting(rigs: Rigs, block_bytes: int) -> int:
    """Return a size, or the largest one that the tier declares."""
    return min(block_bytes, rigs.limits().max_block_bytes or block_bytes)


def opened_with_blocks(
    rigs: Rigs,
    block_bytes: int,
    *,
    num_blocks: int = 32,
    row_stride: int | None = None,
    retention_blocks: int = 64,
) -> Rig:
    """Open a tier with blocks of a size, or of the largest one that it declares.

    Raises:
        Broken: It refuses them (GEO-1).
    """
    block_bytes = fitting(rigs, block_bytes)
    try:
        return rigs.open(
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            row_stride=row_stride,
            retention_blocks=retention_blocks,
        )
    except HarnessError as error:
        raise Broken(f"blocks of {block_bytes} bytes are refused: {error}", "GEO-1") from error
