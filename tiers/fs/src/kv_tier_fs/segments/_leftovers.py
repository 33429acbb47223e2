"""Takes care of what dead writers left behind; what live ones are at work on stays as it is.

A dead writer's blocks are as good as any: its segments stay, cut to what they hold. What goes are
payloads that no index speaks of, indexes without payloads, torn ends, and folders with nothing in
them. Every function here is called while the lock of the root is held.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kv_tier_fs._beneath import open_beneath
from kv_tier_fs._folders import FILE_MODE
from kv_tier_fs.segments._file_lock import FileLock
from kv_tier_fs.segments._folder import LOCK_NAME, remove_writer_folder
from kv_tier_fs.segments._format import FrameKind
from kv_tier_fs.segments._index_reader import IndexReader
from kv_tier_fs.segments._listing import (
    REMOVALS_NUMBER,
    UNFINISHED_SUFFIX,
    list_writer,
    list_writers,
)
from kv_tier_fs.segments._probe import PROBE_NAME
from kv_tier_fs.segments._segment import segment_path
from kv_tier_fs.segments._segment_file import SEALED_MODE

if TYPE_CHECKING:
    from pathlib import Path

    from kv_tier_fs.segments._listing import FileEntry, Listing

__all__ = ["reclaim_leftovers", "remove_unfinished"]

logger = logging.getLogger(__name__)


def reclaim_leftovers(root_dir: Path, layout_folder: Path) -> int:
    """Reclaim what dead writers of a namespace left behind.

    Args:
        root_dir: Root folder.
        layout_folder: Folder of the namespace.

    Returns:
        Number of dead writers whose folders changed.
    """
    changed = 0
    for folder in list_writers(layout_folder):
        try:
            changed += _reclaim_writer(root_dir, layout_folder, folder)
        except OSError as error:
            # Of another user, or on a disk that fails there: not a reason to refuse the rest.
            logger.warning("what is left of a writer in %s cannot be reclaimed: %s", folder, error)
    return changed


def _reclaim_writer(root_dir: Path, layout_folder: Path, folder: Path) -> bool:
    lock = FileLock.try_take(root_dir, folder / LOCK_NAME, create=False)
    if lock is None and (folder / LOCK_NAME).exists():
        return False
    try:
        listing = list_writer(folder)
        changed = _reclaim_segments(root_dir, listing)
        if REMOVALS_NUMBER in listing.indexes:
            changed |= _reclaim_removals(root_dir, layout_folder, listing)
        remove_unfinished(folder)
        if all(path.name == LOCK_NAME for path in folder.iterdir()):
            remove_writer_folder(folder)
            changed = True
        return changed
    finally:
        if lock is not None:
            lock.release()


def remove_unfinished(folder: Path) -> None:
    """Remove the files of a dead writer that are there for a moment only.

    Raises:
        OSError: That cannot be done.
    """
    (folder / f"{REMOVALS_NUMBER:08d}{UNFINISHED_SUFFIX}").unlink(missing_ok=True)
    (folder / PROBE_NAME).unlink(missing_ok=True)


def _reclaim_segments(root_dir: Path, listing: Listing) -> bool:
    changed = False
    for number in listing.indexes.keys() - listing.payloads.keys() - {REMOVALS_NUMBER}:
        listing.indexes[number].path.unlink(missing_ok=True)
        changed = True
    for number, payload in listing.payloads.items():
        index = listing.indexes.get(number)
        if index is not None and payload.sealed and index.sealed:
            continue
        changed |= _reclaim_segment(root_dir, payload, index)
    return changed


def _reclaim_segment(root_dir: Path, payload: FileEntry, index: FileEntry | None) -> bool:
    """Cut a segment to what it holds, and seal it; remove it when that is nothing."""
    used_slots, end, block_bytes = 0, 0, 0
    if index is not None:
        reader = IndexReader(root_dir, index.path)
        stored = [frame for frame in reader.read() if frame.kind == FrameKind.STORED]
        if reader.is_of_another_version:
            # It knows better what to do with it.
            return False
        used_slots = max((int(frame.slots.max()) + 1 for frame in stored), default=0)
        end = reader.end
        block_bytes = 0 if reader.header is None else reader.header.block_bytes
    if not used_slots:
        if index is not None:
            index.path.unlink(missing_ok=True)
        payload.path.unlink(missing_ok=True)
        return True
    _cut(root_dir, payload.path, used_slots * block_bytes)
    if index is not None:
        _cut(root_dir, index.path, end)
    return True


def _cut(root_dir: Path, path: Path, size_bytes: int) -> None:
    # The writer may have died after it sealed one of the two files: that one is read-only.
    descriptor = open_beneath(root_dir, path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_size > size_bytes:
            os.fchmod(descriptor, FILE_MODE)
            writable = open_beneath(root_dir, path, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.ftruncate(writable, size_bytes)
            finally:
                os.close(writable)
        os.fchmod(descriptor, SEALED_MODE)
    finally:
        os.close(descriptor)


def _reclaim_removals(root_dir: Path, layout_folder: Path, listing: Listing) -> bool:
    """Remove the index of removals when everything that it speaks of is gone."""
    path = listing.indexes[REMOVALS_NUMBER].path
    reader = IndexReader(root_dir, path)
    frames = reader.read()
    if reader.is_of_another_version:
        return False
    for frame in frames:
        if segment_path(layout_folder / frame.writer.hex(), frame.segment).exists():
            return False
    path.unlink(missing_ok=True)
    return True
