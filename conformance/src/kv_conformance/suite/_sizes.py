"""Opening a tier with blocks of a size that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_conformance.harness import HarnessError
from kv_conformance.rig import Broken

if TYPE_CHECKING:
    from kv_conformance.rig import Rig, Rigs

__all__ = ["blocks_for", "fitting", "opened_with_blocks"]

# What a tier notes of so many blocks is little beside the memory that tests leave it, and one that
# looks through all of them for each is not too slow yet.
_MOST_BLOCKS: Final = 256


def fitting(rigs: Rigs, block_bytes: int) -> int:
    """Return a size, or the largest one that the tier declares."""
    return min(block_bytes, rigs.limits().max_block_bytes or block_bytes)


def blocks_for(rigs: Rigs, total_bytes: int, block_bytes: int) -> int:
    """Return how many blocks of a size that the tier takes make up so many bytes, within reason.

    Args:
        rigs: The tier.
        total_bytes: What all of them should have.
        block_bytes: The size that is wished for; a tier may declare that it takes only less.
    """
    return min(_MOST_BLOCKS, total_bytes // fitting(rigs, block_bytes))


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
