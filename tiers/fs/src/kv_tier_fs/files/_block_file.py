"""Reads and writes block files, straight from and to the slots of the primary tier.

**Who owns what.** Any pool thread may call any method. Each thread has a page of its own for
trailers. ``direct_read`` and ``direct_write`` only ever change from true to false; a thread that
misses the change finds out by itself.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
from typing import TYPE_CHECKING, Final, final

from kv_core.errors import BlockDamagedError
from kv_tier_fs._beneath import folder_beneath
from kv_tier_fs._folders import FILE_MODE
from kv_tier_fs.files._trailer import TRAILER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from kv_core.contract import OffloadKey
    from kv_tier_fs.files._trailer import TrailerFormat

__all__ = ["BlockFile", "BlockFiles", "FileIdentity", "identity_of"]

logger = logging.getLogger(__name__)

FileIdentity = tuple[int, int, int]
"""Device, inode and time of the last write: which file it was, whatever its name says now.

The time, because inodes are used again, and nothing writes to a file once it is published.
"""

_OPEN_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW


def identity_of(status: os.stat_result) -> FileIdentity:
    """Return which file a status is of."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


class _ThreadPages(threading.local):
    """A page for trailers per thread, aligned for direct I/O."""

    def __init__(self) -> None:
        self.trailer = memoryview(mmap.mmap(-1, TRAILER_BYTES))


@final
class BlockFiles:
    """Block files of one namespace and block size.

    Direct I/O that turns out not to work is given up for good, separately for reads and writes:
    some file systems refuse it at ``open``, some at the first transfer, some for the buffer
    addresses of one machine only.

    Args:
        trailers: Format of the trailers.
        root_dir: Folder that all paths begin with; below it, no symbolic link is followed.
        direct_io: Whether to bypass the page cache while that works.

    Attributes:
        trailers: Format of the trailers.
        file_bytes: Length of every intact file.
        direct_read: Whether to read past the page cache.
        direct_write: Whether to write past the page cache.
    """

    def __init__(self, trailers: TrailerFormat, *, root_dir: str, direct_io: bool) -> None:
        self.trailers = trailers
        self._root_dir = root_dir
        self.file_bytes = trailers.payload_bytes + TRAILER_BYTES
        self.direct_read = direct_io
        self.direct_write = direct_io
        self._pages = _ThreadPages()

    def create(self, path: str, key: OffloadKey, payload: memoryview) -> None:
        """Write a new file. When this raises, the caller removes what there is of it.

        Raises:
            OSError: The file cannot be created or written.
        """
        trailer = self._pages.trailer
        self.trailers.fill(trailer, key, payload)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS
        with self._open(path, flags, direct=self.direct_write) as file:
            os.fchmod(file.descriptor, FILE_MODE)
            file.write(payload, trailer)

    def open(self, path: str) -> BlockFile:
        """Open a file for reading.

        Raises:
            OSError: The file cannot be opened.
        """
        # Nonblocking, lest somebody's pipe under the name of a block stops the thread.
        flags = os.O_RDONLY | os.O_NONBLOCK | _OPEN_FLAGS
        return self._open(path, flags, direct=self.direct_read)

    def _open(self, path: str, flags: int, *, direct: bool) -> BlockFile:
        trailer = self._pages.trailer
        refusal = None
        try:
            descriptor = self._open_beneath(path, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            refusal = error
            # Some file systems have created the file by the time they refuse.
            descriptor = self._open_beneath(path, flags & ~os.O_EXCL)
        try:
            file = BlockFile(self, descriptor, trailer, direct=direct and refusal is None)
        except BaseException:
            os.close(descriptor)
            raise
        # A folder or a pipe in the place of a file says nothing about files.
        if refusal is not None and file.is_regular:
            self.give_up_direct(refusal, writing=bool(flags & os.O_WRONLY))
        return file

    def _open_beneath(self, path: str, flags: int) -> int:
        with folder_beneath(self._root_dir, path) as (folder, name):
            return os.open(name, flags, FILE_MODE, dir_fd=folder)

    def give_up_direct(self, error: OSError, *, writing: bool) -> None:
        """Use the page cache from now on, and say so once."""
        if writing:
            known, self.direct_write = not self.direct_write, False
        else:
            known, self.direct_read = not self.direct_read, False
        if not known:
            name = errno.errorcode.get(error.errno or 0, "unknown")
            logger.warning(
                "direct I/O does not work for %s blocks of %d bytes here (errno %s, %s): using "
                "the page cache. Set direct_io to false to do without this attempt.",
                "writing" if writing else "reading",
                self.trailers.payload_bytes,
                error.errno,
                name,
            )


@final
class BlockFile:
    """One open file. A context manager that closes it.

    Attributes:
        descriptor: File descriptor.
        identity: Which file it is.
        is_regular: Whether it is a file at all.
    """

    __slots__ = (
        "_direct",
        "_files",
        "_size_bytes",
        "_trailer",
        "descriptor",
        "identity",
        "is_regular",
    )

    def __init__(
        self, files: BlockFiles, descriptor: int, trailer: memoryview, *, direct: bool
    ) -> None:
        self._files = files
        self._trailer = trailer
        self._direct = direct
        self.descriptor = descriptor
        status = os.fstat(descriptor)
        self.identity = identity_of(status)
        self._size_bytes = status.st_size
        self.is_regular = stat.S_ISREG(status.st_mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def write(self, payload: memoryview, trailer: memoryview) -> None:
        """Write the whole file.

        Raises:
            OSError: A part could not be written.
        """
        if self._transfer(os.pwritev, (payload, trailer), 0, writing=True) < self._files.file_bytes:
            raise OSError(errno.EIO, "a write moved no bytes and gave no reason")

    def read(self, key: OffloadKey, payload: memoryview) -> None:
        """Read the payload into a slot and check it there.

        Raises:
            BlockDamagedError: The file is not what was stored under the key.
            OSError: A part could not be read.
        """
        self._check_size(key)
        moved = self._transfer(os.preadv, (payload, self._trailer), 0, writing=False)
        self._check_moved(key, moved, self._files.file_bytes)
        checksum = self._files.trailers.check(self._trailer, key)
        self._files.trailers.check_payload(payload, key, checksum)

    def check_trailer(self, key: OffloadKey) -> None:
        """Check the length and the trailer only.

        Raises:
            BlockDamagedError: The file is not what was stored under the key.
            OSError: The trailer could not be read.
        """
        self._check_size(key)
        start = self._files.trailers.payload_bytes
        moved = self._transfer(os.preadv, (self._trailer,), start, writing=False)
        self._check_moved(key, moved, TRAILER_BYTES)
        self._files.trailers.check(self._trailer, key)

    def _check_size(self, key: OffloadKey) -> None:
        if not self.is_regular or self._size_bytes != self._files.file_bytes:
            raise BlockDamagedError(
                f"block {key.hex()}: the object is no file of {self._files.file_bytes} bytes "
                f"(it has {self._size_bytes})"
            )

    def _check_moved(self, key: OffloadKey, moved: int, expected: int) -> None:
        if moved < expected:
            raise BlockDamagedError(
                f"block {key.hex()}: the file ended after {moved} of {expected} bytes"
            )

    def _transfer(
        self,
        call: Callable[[int, list[memoryview], int], int],
        buffers: tuple[memoryview, ...],
        offset: int,
        *,
        writing: bool,
    ) -> int:
        """Call until all buffers are through or nothing moves; return the bytes moved."""
        total = sum(map(len, buffers))
        moved = 0
        while moved < total:
            rest = _rest(buffers, moved)
            try:
                step = call(self.descriptor, rest, offset + moved)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                # At an odd offset, after a short transfer, that says nothing about the rest.
                if not moved:
                    self._files.give_up_direct(error, writing=writing)
                flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self._direct = False
                continue
            finally:
                # Now, not with the frame: an exception may keep that for long.
                for view in rest:
                    view.release()
            if not step:
                break
            moved += step
        return moved


def _rest(buffers: tuple[memoryview, ...], done: int) -> list[memoryview]:
    """Return new views of what is left of the buffers after ``done`` bytes."""
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest
