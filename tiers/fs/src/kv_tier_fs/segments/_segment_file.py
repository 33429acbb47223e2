"""The two files of one segment, from their creation to the moment when nothing is added any more.

**Who owns what.** Any thread may write payloads, each to slots of its own. One thread at a time
appends to the index and seals: the caller sees to it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias, final

from kv_tier_fs._beneath import open_beneath, sync_folder
from kv_tier_fs._folders import FILE_MODE
from kv_tier_fs.segments._direct import transfer
from kv_tier_fs.segments._format import FrameKind, IndexHeader, encode_frames

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_tier_fs.segments._direct import DirectIO
    from kv_tier_fs.segments._segment import Segment, SegmentName

__all__ = ["SEALED_MODE", "Batch", "IndexFile", "PayloadFile"]

SEALED_MODE: Final = 0o400
"""Mode of the files of a segment to which nothing will be added: seen by every process at once."""

Batch: TypeAlias = "tuple[Sequence[OffloadKey], Sequence[int], Sequence[int]]"
"""Keys, slots and checksums of some blocks, in the same order."""

_NO_PREALLOCATION: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

# The C library's own: os.posix_fallocate writes to every page where the file system cannot
# allocate, which takes seconds for a segment.
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _preallocate(descriptor: int, size_bytes: int) -> None:
    """Make a file as long as that, with its space allocated where that can be done.

    Raises:
        OSError: There is not so much space, among others.
    """
    if _fallocate(descriptor, 0, 0, size_bytes) == 0:
        return
    code = ctypes.get_errno()
    if code not in _NO_PREALLOCATION:
        raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, size_bytes)


def _create(root: Path, path: Path, flags: int) -> int:
    descriptor = open_beneath(root, path, flags | os.O_CREAT | os.O_EXCL, FILE_MODE)
    os.fchmod(descriptor, FILE_MODE)
    return descriptor


def _create_or_reopen(root: Path, path: Path, flags: int) -> int:
    try:
        return _create(root, path, flags)
    except FileExistsError:
        if flags & os.O_DIRECT:
            raise
        # Some file systems have made the file by the time they refuse direct I/O. No other
        # process makes files of this name.
        return _reopen(root, path, flags)


def _reopen(root: Path, path: Path, flags: int) -> int:
    """Open a sealed file for writing again."""
    sealed = open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fchmod(sealed, FILE_MODE)
    finally:
        os.close(sealed)
    return open_beneath(root, path, flags)


@final
class IndexFile:
    """An index that is being written.

    Frames go where the last whole one ended: what a failed append has left behind is cut off, or
    overwritten by the next where that fails, too.

    Args:
        root: Folder below which no symbolic link is followed.
        path: The file, which must not exist.
        header: What it is the index of.
        sync: Whether an append ends only when the disk has it.

    Raises:
        OSError: It cannot be made. There is nothing left of it.
    """

    def __init__(self, root: Path, path: Path, header: IndexHeader, *, sync: bool) -> None:
        self._root = root
        self._path = path
        self._seed = header.seed
        self._sync = sync
        self._end = 0
        self._descriptor = _create(root, path, os.O_WRONLY)
        try:
            self._write(header.encode())
            if sync:
                # What is published is lost with the name of its file. Payloads are made before.
                sync_folder(root, path.parent)
        except BaseException:
            self.remove()
            raise

    def append(self, kind: int, name: SegmentName, batches: Sequence[Batch]) -> None:
        """Publish what was stored in, or removed from, some slots of a segment.

        Raises:
            OSError: Nothing was published.
        """
        frames = b""
        for keys, slots, checksums in batches:
            frames += encode_frames(
                self._seed,
                self._end + len(frames),
                kind,
                name.writer,
                name.number,
                keys,
                slots,
                checksums,
            )
        self._write(frames)

    def is_removed(self) -> bool:
        """Say whether somebody has removed the file: what is appended is lost."""
        try:
            return not os.fstat(self._descriptor).st_nlink
        except OSError:
            # The storage does not answer. That it has removed the file is the least likely reason.
            return False

    def _write(self, data: bytes) -> None:
        try:
            self._write_behind(data)
        except OSError:
            # The first of several frames may be whole, and whoever has read it would look for the
            # next one behind it.
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)

    def _write_behind(self, data: bytes) -> None:
        written = 0
        while written < len(data):
            step = os.pwrite(self._descriptor, data[written:], self._end + written)
            if not step:
                raise OSError(errno.EIO, "a write moved no bytes and gave no reason")
            written += step
        if self._sync:
            os.fdatasync(self._descriptor)

    @property
    def size_bytes(self) -> int:
        """Where the last whole frame ends."""
        return self._end

    def move(self, path: Path) -> None:
        """Give the file another name, in the place of what has that name.

        Raises:
            OSError: It has kept its name.
        """
        self._path.rename(path)
        self._path = path
        if self._sync:
            with suppress(OSError):
                # It has its new name by now: an error would say that it has not.
                sync_folder(self._root, path.parent)

    def seal(self) -> None:
        """Drop what is behind the last whole frame, and close."""
        try:
            os.ftruncate(self._descriptor, self._end)
            os.fchmod(self._descriptor, SEALED_MODE)
        finally:
            os.close(self._descriptor)

    def close(self) -> None:
        """Close. Frames may be added by nobody any more."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Close and remove the file."""
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)


@final
class PayloadFile:
    """The payloads of a segment that is being written, with their index.

    Args:
        root: Folder below which no symbolic link is followed.
        segment: Which segment; neither of its files may exist.
        header: Header of its index.
        direct: Whether to bypass the page cache.
        sync: Whether what is published is on the disk.
        reuse: A file of the right length to be renamed and written over.

    Raises:
        OSError: It cannot be made. There is nothing left of it.
    """

    def __init__(
        self,
        root: Path,
        segment: Segment,
        header: IndexHeader,
        direct: DirectIO,
        *,
        sync: bool,
        reuse: Path | None = None,
    ) -> None:
        self.segment = segment
        self._direct = direct
        self._sync = sync
        self._block_bytes = header.block_bytes
        make = _create_or_reopen if reuse is None else _reopen
        if reuse is not None:
            reuse.rename(segment.path)
        try:
            self._descriptor = direct.open(
                lambda more: make(root, segment.path, os.O_WRONLY | more), writing=True
            )
        except BaseException:
            if reuse is not None:
                segment.path.unlink(missing_ok=True)
            raise
        try:
            _preallocate(self._descriptor, header.num_slots * header.block_bytes)
            # Payloads without an index are leftovers; an index without payloads would promise.
            self._index = IndexFile(root, segment.index_path, header, sync=sync)
        except BaseException:
            os.close(self._descriptor)
            segment.path.unlink(missing_ok=True)
            raise

    def write(self, slot: int, blocks: Sequence[memoryview]) -> None:
        """Write payloads to consecutive slots. Several threads at a time, to different slots.

        Raises:
            OSError: Some may have been written.
        """
        size = len(blocks) * self._block_bytes
        offset = slot * self._block_bytes
        if transfer(self._direct, self._descriptor, blocks, offset, writing=True) < size:
            raise OSError(errno.EIO, "a write moved no bytes and gave no reason")
        if self._sync:
            os.fdatasync(self._descriptor)

    def publish(self, batches: Sequence[Batch]) -> None:
        """Make what was written findable. One thread at a time.

        Raises:
            FileNotFoundError: Somebody has removed the segment.
            OSError: None of it is findable.
        """
        self._index.append(FrameKind.STORED, self.segment.name, batches)
        if self.is_removed():
            raise FileNotFoundError(
                errno.ENOENT, "somebody has removed the segment", str(self.segment.path)
            )

    def is_removed(self) -> bool:
        """Say whether somebody has removed the segment: what is written to it is lost."""
        return self._index.is_removed()

    def seal(self, used_slots: int) -> None:
        """Give back the space that was not used, and close. Nothing may be in flight.

        Raises:
            OSError: The files are closed, but may be longer than what they hold.
        """
        if not used_slots:
            self.remove()
            return
        self.segment.sealed = True
        try:
            os.ftruncate(self._descriptor, used_slots * self._block_bytes)
            if self._sync:
                os.fdatasync(self._descriptor)
            os.fchmod(self._descriptor, SEALED_MODE)
        finally:
            os.close(self._descriptor)
            self._index.seal()

    def remove(self) -> None:
        """Close and remove both files: the index first, as everybody does."""
        try:
            self._index.remove()
        finally:
            os.close(self._descriptor)
            self.segment.path.unlink(missing_ok=True)
