"""Locks between processes: ``flock`` on a file, which the kernel gives up when the holder dies.

**Who owns what.** A :class:`FileLock` belongs to the thread that took it. Two locks of one file
exclude each other within a process, too: each has a descriptor of its own. A fork inherits the
descriptors and would hold the locks beyond the death of its parent: it closes them first thing.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from typing import TYPE_CHECKING, Final, final

from kv_tier_fs._beneath import open_beneath
from kv_tier_fs._folders import FILE_MODE

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

__all__ = ["FileLock"]

# From one attempt to the next; flock itself knows no deadline.
_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.02

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _let_go_in_fork() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_fork)


@final
class FileLock:
    """A lock that is held. A context manager that gives it up."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def try_take(cls, root: Path, path: Path, *, create: bool) -> FileLock | None:
        """Take a lock now.

        Args:
            root: Folder below which no symbolic link is followed.
            path: The file.
            create: Whether to make it when it does not exist.

        Returns:
            ``None`` when somebody holds it, or when there is no such file.

        Raises:
            OSError: The file cannot be opened.
        """
        flags = os.O_RDWR | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        try:
            descriptor = open_beneath(root, path, flags, FILE_MODE)
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            if create:
                os.fchmod(descriptor, FILE_MODE)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between the opening and the locking, another may have removed the file: a lock on
            # what has no name any more excludes nobody.
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return cls(path, descriptor)
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    @classmethod
    def take(cls, root: Path, path: Path, timeout_s: float) -> FileLock:
        """Wait for a lock, and make its file when it does not exist.

        Raises:
            TimeoutError: Somebody else had it all the time.
            OSError: The file cannot be opened.
        """
        end = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            lock = cls.try_take(root, path, create=True)
            if lock is not None:
                return lock
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"{path} was locked by another process for {timeout_s:g} s: if one of those "
                    "that share the folder is stopped, let it go on or end it"
                )
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def release(self) -> None:
        """Give the lock up. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
