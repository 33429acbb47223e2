"""The other namespaces below a root folder: counted, and removed when nobody uses them.

Nothing is known of their blocks here, only of their files; so what was used least recently is what
was touched least recently. Every function is called while the lock of the root is held, but for
:meth:`Neighbours.used_bytes`, which only looks.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, final

from kv_tier_fs.segments._file_lock import FileLock
from kv_tier_fs.segments._folder import LOCK_NAME, remove_writer_folder
from kv_tier_fs.segments._format import index_bytes
from kv_tier_fs.segments._index_reader import read_header
from kv_tier_fs.segments._leftovers import reclaim_leftovers, remove_unfinished
from kv_tier_fs.segments._listing import list_writer, list_writers, namespace_folders
from kv_tier_fs.segments._membership import MEMBERS_LOCK_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kv_tier_fs.segments._listing import FileEntry, Listing

__all__ = ["Neighbours"]

logger = logging.getLogger(__name__)


@final
class Neighbours:
    """All namespaces of a root but one.

    Args:
        root_dir: Root folder.
        own: Folder of this layout of the namespace that is not meant.
    """

    def __init__(self, root_dir: Path, own: Path) -> None:
        self._root_dir = root_dir
        self._own = own

    def _folders(self) -> list[Path]:
        return [folder for folder in namespace_folders(self._root_dir) if folder != self._own]

    def _listings(self) -> Iterator[Listing]:
        for folder in self._folders():
            for writer in list_writers(folder):
                yield list_writer(writer)

    def used_bytes(self) -> int:
        """Return what they take, with what the indexes may yet grow to that are being written."""
        used_bytes = 0
        for listing in self._listings():
            used_bytes += listing.size_bytes
            for _, payload, index in listing.segments():
                if not payload.sealed:
                    used_bytes += self._growth_bytes(index)
        return used_bytes

    def _growth_bytes(self, index: FileEntry) -> int:
        header = None
        with suppress(OSError):
            header = read_header(self._root_dir, index.path)
        return 0 if header is None else max(0, index_bytes(header.num_slots) - index.size_bytes)

    def remove_oldest(self, missing_bytes: int, younger_than_s: float) -> int:
        """Remove segments, those that were touched least recently first.

        Args:
            missing_bytes: How much should go.
            younger_than_s: Those touched later stay; seconds since the epoch.

        Returns:
            Bytes that went.
        """
        if missing_bytes <= 0:
            return 0
        for folder in self._folders():
            # What a dead writer had in work can go, too, once it is cut.
            reclaim_leftovers(self._root_dir, folder)
        segments = [
            (payload.modified_s, payload, index)
            for listing in self._listings()
            for _, payload, index in listing.segments()
            if payload.sealed and payload.modified_s < younger_than_s
        ]
        segments.sort(key=lambda segment: segment[0])
        removed_bytes = 0
        for _, payload, index in segments:
            if removed_bytes >= missing_bytes:
                break
            if _remove_files(index, payload):
                removed_bytes += payload.size_bytes + index.size_bytes
        return removed_bytes

    def remove_unused(self, unused_for_s: float) -> int:
        """Remove namespaces that nobody has open and that were not touched for so long.

        Returns:
            Number of namespaces that went.
        """
        removed = 0
        for folder in self._folders():
            try:
                removed += _remove_namespace(
                    self._root_dir, folder, touched_before_s=time.time() - unused_for_s
                )
            except OSError as error:
                logger.warning("the unused namespace in %s cannot be removed: %s", folder, error)
        return removed


def _remove_files(*files: FileEntry) -> bool:
    try:
        for file in files:
            file.path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("a segment of another namespace cannot be removed: %s", error)
        return False
    return True


def _remove_namespace(root_dir: Path, folder: Path, *, touched_before_s: float) -> bool:
    listings = [list_writer(writer) for writer in list_writers(folder)]
    times = [folder.stat().st_mtime]
    times += [file.modified_s for listing in listings for file in listing.payloads.values()]
    times += [file.modified_s for listing in listings for file in listing.indexes.values()]
    if max(times) >= touched_before_s:
        return False
    paths = [folder / MEMBERS_LOCK_NAME, *(found.folder / LOCK_NAME for found in listings)]
    locks: list[FileLock] = []
    try:
        for path in paths:
            lock = FileLock.try_take(root_dir, path, create=False)
            if lock is not None:
                locks.append(lock)
            elif path.exists():
                # Somebody has it open.
                return False
        logger.info("removing the namespace in %s, which was not used for long", folder)
        for listing in listings:
            for file in (*listing.indexes.values(), *listing.payloads.values()):
                file.path.unlink(missing_ok=True)
            remove_unfinished(listing.folder)
            remove_writer_folder(listing.folder)
    finally:
        for lock in locks:
            lock.release()
    for name in (*folder.glob("config.json*"), *folder.glob("*.lock")):
        name.unlink(missing_ok=True)
    folder.rmdir()
    with suppress(OSError):
        # Another layout may have something in it.
        folder.parent.rmdir()
    return True
