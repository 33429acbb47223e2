"""What nobody finds any more because an index is not as it was written.

Whoever reads an index ends at the first bytes that are no whole frame. A writer may be about to
write them, or have died before it was through: then there is no frame behind them, and nothing is
lost that was reported. Anything else is damage: a frame behind them, or a sealed index that has
such bytes at all, or that ends too early. The payloads may be as good as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kv_tier_fs.segments._format import Frame
    from kv_tier_fs.segments._index_reader import IndexReader
    from kv_tier_fs.segments._listing import FileEntry

__all__ = ["describe_lost_blocks", "describe_lost_removals", "read_frames"]


def read_frames(reader: IndexReader) -> list[Frame]:
    """Return the frames of an index up to the first bytes that are none.

    Raises:
        OSError: The file cannot be read.
    """
    frames = reader.read()
    if reader.end < reader.size_bytes:
        # Once more: its writer may have been at it, and memory and buses fail as well.
        frames += reader.read()
    return frames


def describe_lost_blocks(
    reader: IndexReader,
    index: FileEntry,
    payload: FileEntry | None,
    frames: Sequence[Frame],
    removed: Collection[int],
) -> str | None:
    """Say what is lost with the index of a segment; ``None`` when nothing is wrong with it.

    Args:
        reader: Has read the index.
        index: The file, as it was listed before.
        payload: File of the payloads, if there is one.
        frames: What was read.
        removed: Slots that do not count any more.

    Raises:
        OSError: A file cannot be read.
    """
    where = _find_damage(reader)
    if index.sealed and payload is not None and payload.sealed and reader.header is not None:
        num_slots = payload.path.lstat().st_size // reader.header.block_bytes
        missing = _Missing(num_slots, frames, removed)
        if where is None and missing.is_at_the_end:
            where = f"the index ends at byte {reader.end}, before the segment does"
        if where is None:
            return None
        return f"{where}; blocks that cannot be found: {missing.count} of {num_slots} at most"
    behind = 0 if where is None else _count_behind(reader)
    if behind or (where is not None and index.sealed):
        return f"{where}; blocks that cannot be found: {behind} or more"
    return None


def describe_lost_removals(reader: IndexReader) -> str | None:
    """Say what is lost with an index of removals; ``None`` when nothing is wrong with it.

    Raises:
        OSError: The file cannot be read.
    """
    where = _find_damage(reader)
    behind = 0 if where is None else _count_behind(reader)
    return f"{where}; removals that do not count: {behind} or more" if behind else None


class _Missing:
    """Blocks of a sealed segment of which no frame speaks.

    Args:
        num_slots: Blocks that the payloads have room for.
        frames: What the index says.
        removed: Slots that do not count any more.

    Attributes:
        count: Those that cannot be found; of some of them, the store may have failed.
        is_at_the_end: Whether the last is one of them: a segment is cut behind the last that was
            stored.
    """

    def __init__(self, num_slots: int, frames: Sequence[Frame], removed: Collection[int]) -> None:
        known = np.zeros(num_slots, dtype=np.bool_)
        for frame in frames:
            known[frame.slots[frame.slots < num_slots]] = True
        self.is_at_the_end = num_slots > 0 and not known[-1]
        known[[slot for slot in removed if slot < num_slots]] = True
        self.count = int(np.count_nonzero(~known))


def _find_damage(reader: IndexReader) -> str | None:
    if reader.end == reader.size_bytes:
        return None
    return f"the index is not what was written from byte {reader.end} on"


def _count_behind(reader: IndexReader) -> int:
    return sum(map(len, reader.read_behind()))
