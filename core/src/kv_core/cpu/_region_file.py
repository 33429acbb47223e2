"""The file behind a region: exclusive creation, reclaiming, and removal of its name.

A name says little: it may be a leftover of a killed process, or already belong to a successor.
So ownership is an flock on the inode, and every removal compares inodes first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from typing import TYPE_CHECKING, Final, final

from kv_core.cpu._progress import CHUNK_BYTES, Progress
from kv_core.errors import InsufficientSpaceError, RegionError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RegionFile", "remove_leftover"]

_MODE: Final = 0o600
# Losing the name to somebody who reclaims it is possible once or twice, not for ever.
_ATTEMPTS: Final = 8
# Whoever reclaims a leftover holds its lock for a few system calls, an owner for good.
_RECLAIM_PAUSES_S: Final = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})


@final
class RegionFile:
    """The open file of a region.

    Attributes:
        path: Name it was created under.
        descriptor: Open for reading and writing; locks last as long as it is open.
    """

    def __init__(self, path: Path, descriptor: int, *, is_owner: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self._owner_process_id = os.getpid() if is_owner else None

    @property
    def is_owner(self) -> bool:
        """Whether this process created and locked the file, and may remove its name.

        A forked child has a copy of this object, and is not the process that others look for.
        """
        return self._owner_process_id == os.getpid()

    @classmethod
    def create(cls, path: Path) -> RegionFile:
        """Create the file, empty, mode 0600. A leftover under the name is reclaimed.

        Raises:
            RegionError: A live process owns the name, or the folder cannot be used.
        """
        for _ in range(_ATTEMPTS):
            try:
                descriptor = os.open(
                    path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE
                )
            except FileExistsError:
                _reclaim(path)
                continue
            except OSError as error:
                raise RegionError(
                    f"the region cannot be created at {path}: {error.strerror}. Name a writable "
                    "folder on a memory file system with 'shm_dir' (--shm-dir)"
                ) from error
            # Between creation and lock the file looks like a leftover to anybody else.
            if _try_lock(descriptor) and _is_named(path, descriptor):
                os.fchmod(descriptor, _MODE)
                return cls(path, descriptor, is_owner=True)
            os.close(descriptor)
        raise RegionError(
            f"the region cannot be created at {path}: other processes keep creating and removing "
            "it. Give each engine instance its own engine id."
        )

    def allocate(self, size_bytes: int) -> None:
        """Give the file its size, and reserve all of its pages.

        Reserving now turns a late SIGBUS into an early error. The size comes at once and the
        pages piece by piece: a signal in the middle undoes one piece, not hundreds of gigabytes.

        Raises:
            InsufficientSpaceError: There is too little space.
            RegionError: The file system refuses for another reason.
        """
        status = os.fstatvfs(self.descriptor)
        available_bytes = status.f_bavail * status.f_frsize
        # A file system without a limit has no blocks to count.
        if status.f_blocks and available_bytes < size_bytes:
            raise self._too_little(size_bytes, available_bytes)
        progress = Progress("memory reserved for the primary tier", size_bytes)
        try:
            os.ftruncate(self.descriptor, size_bytes)
            for offset in range(0, size_bytes, CHUNK_BYTES):
                chunk_bytes = min(CHUNK_BYTES, size_bytes - offset)
                os.posix_fallocate(self.descriptor, offset, chunk_bytes)
                progress.add(chunk_bytes)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise RegionError(
                    f"{size_bytes} bytes cannot be allocated at {self.path}: {error}"
                ) from error
            status = os.fstatvfs(self.descriptor)
            raise self._too_little(size_bytes, status.f_bavail * status.f_frsize) from error

    def _too_little(self, needed_bytes: int, available_bytes: int) -> InsufficientSpaceError:
        return InsufficientSpaceError(
            f"the CPU region needs {needed_bytes} bytes in {self.path.parent}, but only "
            f"{available_bytes} are available. Enlarge the mount (Docker: --shm-size; Kubernetes: "
            "sizeLimit of the emptyDir with medium Memory), remove leftovers from it, or lower "
            "'cpu_bytes_to_use' (--cpu-bytes).",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
        )

    def has_name(self) -> bool:
        """Tell whether the name is still this file's."""
        return self.descriptor >= 0 and _is_named(self.path, self.descriptor)

    def unlink(self) -> bool:
        """Remove the name, if it still is this file's and this process owns it.

        Nobody can put another file in its place between the check and the removal: whoever
        removes a name holds the lock of the file that it names.

        Returns:
            Whether it was.
        """
        if not self.is_owner or not self.has_name():
            return False
        self.path.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Remove the name, if this process owns it, and give up all locks. Idempotent."""
        if self.descriptor >= 0:
            self.unlink()
            os.close(self.descriptor)
            self.descriptor = -1


def remove_leftover(path: Path) -> bool:
    """Remove a name whose process has died. Everything else is left alone.

    Returns:
        Whether there is no such name any more.
    """
    try:
        _reclaim(path)
    except RegionError:
        return False
    return True


def _reclaim(path: Path) -> None:
    """Remove a leftover of a dead process.

    Raises:
        RegionError: It is no leftover, or cannot be removed.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RegionError(
            f"{path} exists and cannot be opened: {error}. Remove it, or set another engine id."
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RegionError(f"{path} exists and is not a regular file; remove it")
        if not _lock_once_reclaimed(descriptor):
            raise RegionError(
                f"the region {path} belongs to a running process. Stop that engine, or give this "
                "one another engine id."
            )
        if _is_named(path, descriptor):
            _remove(path)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RegionError(
            f"{path} is a leftover and cannot be removed: {error}. Remove it, or set another "
            "engine id."
        ) from error


def _lock_once_reclaimed(descriptor: int) -> bool:
    """Lock a file, after others that are about to remove its name, if there are any.

    Returns:
        Whether nobody owns the file.
    """
    for pause_s in _RECLAIM_PAUSES_S:
        if _try_lock(descriptor):
            return True
        time.sleep(pause_s)
    return _try_lock(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(path: Path, descriptor: int) -> bool:
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))
