"""Knows whether any other instance has a namespace open.

Everybody who has it open holds a shared ``flock`` on one file, readers included. Who gets that
lock for itself alone knows that nobody else has a segment open, and may overwrite one.

**Who owns what.** Any thread may call anything. ``_lock`` guards the descriptor and is held for as
long as :meth:`Membership.alone` is: to join on the same descriptor would turn the exclusive lock
into a shared one. Of all processes, one at a time asks, holding the lock of the root: two that ask
at once would each drop the shared lock for a moment, and one of them might find itself alone. A
fork inherits the descriptor and closes it first thing, without ``_lock``, which a thread may have
that does not exist there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, final

from kv_tier_fs._beneath import open_beneath
from kv_tier_fs._folders import FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["MEMBERS_LOCK_NAME", "Membership"]

logger = logging.getLogger(__name__)

MEMBERS_LOCK_NAME: Final = "members.lock"
"""In the folder of the namespace."""

_PAUSE_S: Final = 0.001

_joined: weakref.WeakSet[Membership] = weakref.WeakSet()


def _leave_in_fork() -> None:
    for membership in list(_joined):
        membership.close_in_fork()


os.register_at_fork(after_in_child=_leave_in_fork)


@final
class Membership:
    """The shared lock of one instance.

    Args:
        root: Folder below which no symbolic link is followed.
        folder: Folder of the namespace.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._path = folder / MEMBERS_LOCK_NAME
        self._lock = threading.Lock()
        self._descriptor: int | None = None

    def join(self, timeout_s: float, *, create: bool = True) -> bool:
        """Take the shared lock; fine when it is held already.

        When somebody has removed the file, the new one of that name is locked instead, if there is
        one or it can be made: who opens the namespace from now on has that one.

        Args:
            timeout_s: How long to wait for somebody who is alone at the moment.
            create: Whether to make the file when it does not exist.

        Returns:
            Whether it is held now.

        Raises:
            OSError: The file cannot be opened.
        """
        with self._lock:
            if self._descriptor is None or not self._is_named(self._descriptor):
                try:
                    self._open(create=create)
                except (FileNotFoundError, NotADirectoryError):
                    # A member stays one of the file that it has: there is nothing to look at.
                    if create and self._descriptor is None:
                        raise
            descriptor = self._descriptor
            return descriptor is not None and self._share(descriptor, timeout_s)

    def _open(self, *, create: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        descriptor = open_beneath(self._root, self._path, flags | os.O_NONBLOCK, FILE_MODE)
        before, self._descriptor = self._descriptor, descriptor
        _joined.add(self)
        if before is not None:
            os.close(before)
        if create:
            os.fchmod(descriptor, FILE_MODE)

    @staticmethod
    def _share(descriptor: int, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    return False
                time.sleep(_PAUSE_S)
            else:
                return True

    @contextmanager
    def alone(self, timeout_s: float) -> Iterator[bool]:
        """Say whether nobody else has the namespace open, and keep others out as long.

        Args:
            timeout_s: How long to wait at the end for the shared lock, which somebody else may
                have to give back first.
        """
        with self._lock:
            descriptor = self._descriptor
            if descriptor is None or not self._is_named(descriptor):
                yield False
                return
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # The attempt has cost the shared lock: the kernel drops it first.
                self._share(descriptor, timeout_s)
                yield False
                return
            try:
                yield True
            finally:
                self._share(descriptor, timeout_s)

    def _is_named(self, descriptor: int) -> bool:
        """Say whether the file is still there: others would hold a new one."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(self._path))
        except OSError:
            return False

    def leave(self) -> None:
        """Give the lock up. Idempotent."""
        with self._lock:
            self.close_in_fork()

    def close_in_fork(self) -> None:
        """Close the descriptor. In a process that was forked off: no other thread is there."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
