"""The index of removals of a writer: which slots, of whatever writer, do not count any more.

A removal is moot once its segment is gone. So the file is made anew from time to time, without
what is moot: a process that removes blocks for months must not fill the disk with saying so.

**Who owns what.** One thread at a time may call: the caller sees to it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from kv_tier_fs.segments._format import FrameKind
from kv_tier_fs.segments._index_reader import IndexReader
from kv_tier_fs.segments._listing import UNFINISHED_SUFFIX
from kv_tier_fs.segments._segment import SegmentName, segment_path
from kv_tier_fs.segments._segment_file import IndexFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_tier_fs.segments._format import IndexHeader

__all__ = ["RemovalIndex"]

logger = logging.getLogger(__name__)

_NO_CHECKSUM: Final = 0
_LEAST_COMPACTED_BYTES: Final = 1 << 18


@final
class RemovalIndex:
    """A file that is there from the first removal on.

    Args:
        root: Folder below which no symbolic link is followed.
        path: The file.
        header: Its header.
        sync: Whether a removal returns only when the disk has it.
    """

    def __init__(self, root: Path, path: Path, header: IndexHeader, *, sync: bool) -> None:
        self._root = root
        self._path = path
        self._header = header
        self._sync = sync
        self._file: IndexFile | None = None
        self._compact_at_bytes = _LEAST_COMPACTED_BYTES

    def append(self, name: SegmentName, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Publish a removal.

        Raises:
            OSError: That could not be written down.
        """
        if self._file is not None and self._file.is_removed():
            # With its folder perhaps, in which case there will be another one.
            self.close()
        if self._file is None:
            self._file = self._make(self._path)
        self._file.append(FrameKind.REMOVED, name, [(keys, slots, [_NO_CHECKSUM] * len(keys))])
        if self._file.size_bytes >= self._compact_at_bytes:
            self._compact(self._file)

    def _make(self, path: Path) -> IndexFile:
        return IndexFile(self._root, path, self._header, sync=self._sync)

    def _compact(self, old: IndexFile) -> None:
        unfinished = self._path.with_suffix(UNFINISHED_SUFFIX)
        fresh: IndexFile | None = None
        try:
            unfinished.unlink(missing_ok=True)
            fresh = self._make(unfinished)
            for frame in IndexReader(self._root, self._path).read():
                folder = self._path.parent.parent / frame.writer.hex()
                if segment_path(folder, frame.segment).exists():
                    fresh.append(
                        frame.kind,
                        SegmentName(frame.writer, frame.segment),
                        [(frame.split_keys(), frame.slots.tolist(), frame.checksums.tolist())],
                    )
            fresh.move(self._path)
        except OSError as error:
            logger.warning("%s cannot be made anew without what is moot: %s", self._path, error)
            if fresh is not None:
                with suppress(OSError):
                    fresh.remove()
            self._compact_at_bytes *= 2
            return
        old.close()
        self._file = fresh
        self._compact_at_bytes = max(_LEAST_COMPACTED_BYTES, 2 * fresh.size_bytes)

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
