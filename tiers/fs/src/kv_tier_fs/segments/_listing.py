"""What lies in the folders of segments: found by listing, not by what anybody remembers.

Pure reading, without locks: what is listed may be gone by the time it is looked at.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from kv_tier_fs.segments._segment import INDEX_SUFFIX, PAYLOAD_SUFFIX, SegmentName

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "LAYOUT_FOLDER",
    "REMOVALS_NUMBER",
    "UNFINISHED_SUFFIX",
    "FileEntry",
    "Listing",
    "list_writer",
    "list_writers",
    "namespace_folders",
]

LAYOUT_FOLDER: Final = "segments-v1"
"""Folder of this layout in the folder of a namespace; the format's version is part of its name."""

REMOVALS_NUMBER: Final = 0
"""Number of the index of removals."""

UNFINISHED_SUFFIX: Final = ".new"
"""Of an index of removals that will replace the present one."""

# What is removed is named by what somebody has put into a folder: nothing like ".." passes.
_WRITER: Final = re.compile(r"[0-9a-f]{32}")
_FILE: Final = re.compile(rf"([0-9]{{8,}})(\{PAYLOAD_SUFFIX}|\{INDEX_SUFFIX})")


@final
@dataclass(frozen=True, slots=True)
class FileEntry:
    """A regular file.

    Attributes:
        path: The file.
        size_bytes: Its length, or the space it takes where that is more.
        modified_s: When it was written to or touched last, seconds since the epoch.
        sealed: Whether nothing will be added to it.
        inode: Which file it is, whatever its name says later.
    """

    path: Path
    size_bytes: int
    modified_s: float
    sealed: bool
    inode: int


@final
@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one writer.

    Attributes:
        folder: Its folder.
        writer: Its id.
        payloads: Files of payloads, by number of the segment.
        indexes: Indexes, by number of the segment; that of removals has
            :data:`REMOVALS_NUMBER`.
    """

    folder: Path
    writer: bytes
    payloads: dict[int, FileEntry]
    indexes: dict[int, FileEntry]

    @property
    def size_bytes(self) -> int:
        """Bytes that all of it takes."""
        files = (*self.payloads.values(), *self.indexes.values())
        return sum(file.size_bytes for file in files)

    def segments(self) -> Iterator[tuple[SegmentName, FileEntry, FileEntry]]:
        """Return every segment that has both files, in the order in which they were made."""
        for number in sorted(self.payloads.keys() & self.indexes.keys()):
            yield (
                SegmentName(self.writer, number),
                self.payloads[number],
                self.indexes[number],
            )


def list_writers(layout_folder: Path) -> list[Path]:
    """Return the folders of all writers of a namespace, in no order; none without the folder."""
    try:
        with os.scandir(layout_folder) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if _WRITER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_writer(folder: Path) -> Listing:
    """Return the files of a writer; none when the folder is gone."""
    listing = Listing(folder, bytes.fromhex(folder.name), {}, {})
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = _FILE.fullmatch(entry.name)
                if match is None:
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    files = listing.payloads if match[2] == PAYLOAD_SUFFIX else listing.indexes
                    files[int(match[1])] = _entry(entry.path, status)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return listing


def _entry(path: str, status: os.stat_result) -> FileEntry:
    return FileEntry(
        path=Path(path),
        # Space that is reserved counts before it is written to, and so do the file system's own
        # blocks where it needs some.
        size_bytes=max(status.st_size, status.st_blocks * 512),
        modified_s=status.st_mtime,
        sealed=not status.st_mode & stat.S_IWUSR,
        inode=status.st_ino,
    )


def namespace_folders(root_dir: Path) -> list[Path]:
    """Return the folders of this layout of all namespaces below a root folder."""
    found = []
    with os.scandir(root_dir) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folder = Path(entry.path, LAYOUT_FOLDER)
                if folder.is_dir() and not folder.is_symlink():
                    found.append(folder)
    return found
