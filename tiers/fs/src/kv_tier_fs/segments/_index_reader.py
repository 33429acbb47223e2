"""Reads the index of a segment from its file: all of it, or what has been added since."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, final

from kv_tier_fs._beneath import open_beneath
from kv_tier_fs.segments._format import (
    HEADER_BYTES,
    IndexFormatError,
    IndexHeader,
    decode_frames,
    find_frames,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kv_tier_fs.segments._format import Frame

__all__ = ["IndexReader", "read_header"]


def read_header(root_dir: Path, path: Path) -> IndexHeader | None:
    """Return what an index is of; ``None`` when it has no header that this version reads.

    Raises:
        OSError: The file cannot be read.
    """
    descriptor = open_beneath(root_dir, path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return IndexHeader.decode(os.pread(descriptor, HEADER_BYTES, 0))
    except IndexFormatError:
        return None
    finally:
        os.close(descriptor)


@final
class IndexReader:
    """Follows one index, whose file may still be written.

    Args:
        root_dir: Folder below which no symbolic link is followed.
        path: The file.

    Attributes:
        path: The file.
        header: What it is the index of; ``None`` until enough of it has been written.
        end: Where the last whole frame that was read ends.
        size_bytes: How long the file was when it was read last.
        is_of_another_version: Whether another version of the format wrote it.
    """

    __slots__ = ("_root_dir", "end", "header", "is_of_another_version", "path", "size_bytes")

    def __init__(self, root_dir: Path, path: Path) -> None:
        self._root_dir = root_dir
        self.path = path
        self.header: IndexHeader | None = None
        self.end = 0
        self.size_bytes = 0
        self.is_of_another_version = False

    def read(self) -> list[Frame]:
        """Return the frames that have been added since the last call.

        Raises:
            OSError: The file cannot be read.
        """
        data = self._read_rest()
        if self.header is None:
            try:
                self.header = IndexHeader.decode(data)
            except IndexFormatError:
                self.is_of_another_version = IndexHeader.is_of_another_version(data)
                return []
            self.end = HEADER_BYTES
            data = data[HEADER_BYTES:]
        frames = []
        start = self.end
        for frame, end in decode_frames(data, self.header.seed, start):
            frames.append(frame)
            self.end = end
        return frames

    def read_behind(self) -> list[Frame]:
        """Return the whole frames behind bytes that are none, and that end the index.

        There are none behind a frame that is being appended, nor behind one that was not finished
        when its writer died.

        Raises:
            OSError: The file cannot be read.
        """
        data = self._read_rest()
        if self.header is None or any(decode_frames(data, self.header.seed, self.end)):
            # What was not whole at the last look, is by now.
            return []
        return list(find_frames(data, self.header.seed, self.end))

    def _read_rest(self) -> memoryview:
        descriptor = open_beneath(self._root_dir, self.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return memoryview(b"")
            parts = []
            at = self.end
            while at < status.st_size and (part := os.pread(descriptor, status.st_size - at, at)):
                parts.append(part)
                at += len(part)
        finally:
            os.close(descriptor)
        self.size_bytes = at
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
