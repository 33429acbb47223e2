"""The first I/O: real slots are written and read, so that what does not work shows at the start."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final

from kv_tier_fs._beneath import open_beneath
from kv_tier_fs._folders import FILE_MODE
from kv_tier_fs.segments._direct import transfer

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.contract import PrimaryView
    from kv_tier_fs.segments._direct import DirectIO

__all__ = ["PROBE_NAME", "probe_io"]

PROBE_NAME: Final = "probe"
"""File in the folder of a writer, for the moment of the probe."""

_PAGE_BYTES: Final = 4096
_MOST_ALIGNMENTS: Final = 8


def probe_io(root: Path, folder: Path, direct: DirectIO, primary: PrimaryView) -> None:
    """Write and read one block for every alignment that the addresses of slots have.

    The first direct transfer that fails makes ``direct`` fall back. At the place of the second
    slot, because the first one is aligned whatever the size of a block is.

    Args:
        root: Folder below which no symbolic link is followed.
        folder: Folder of a writer, below it.
        direct: Told what does not work.
        primary: The slots. Nothing is written to them.

    Raises:
        OSError: Not even one block can be written and read.
    """
    path = folder / PROBE_NAME
    try:
        for block_id in _differently_aligned(primary):
            with primary.block(block_id) as slot:
                _write(root, path, direct, slot)
            _read(root, path, direct, primary, primary.address(block_id) % _PAGE_BYTES)
            if not (direct.reads or direct.writes):
                break
    finally:
        path.unlink(missing_ok=True)


def _differently_aligned(primary: PrimaryView) -> list[int]:
    """Return a slot for each alignment, a bounded number of them."""
    found: dict[int, int] = {}
    for block_id in range(min(primary.num_blocks, _PAGE_BYTES)):
        found.setdefault(primary.address(block_id) % _PAGE_BYTES, block_id)
        if len(found) == _MOST_ALIGNMENTS:
            break
    return list(found.values())


def _write(root: Path, path: Path, direct: DirectIO, slot: memoryview) -> None:
    descriptor = direct.open(
        lambda more: open_beneath(root, path, os.O_WRONLY | os.O_CREAT | more, FILE_MODE),
        writing=True,
    )
    try:
        transfer(direct, descriptor, [slot], len(slot), writing=True)
    finally:
        os.close(descriptor)


def _read(root: Path, path: Path, direct: DirectIO, primary: PrimaryView, alignment: int) -> None:
    size = primary.block_bytes
    descriptor = direct.open(
        lambda more: open_beneath(root, path, os.O_RDONLY | more), writing=False
    )
    try:
        # Slots must not be written before a load asks for it; this memory is aligned like one.
        with (
            mmap.mmap(-1, size + _PAGE_BYTES) as scratch,
            memoryview(scratch) as pages,
            pages[alignment : alignment + size] as target,
        ):
            transfer(direct, descriptor, [target], size, writing=False)
    finally:
        os.close(descriptor)
