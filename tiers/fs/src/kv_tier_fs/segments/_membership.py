"""Knows whether any other instance has a namespace open.

Everybody who has it open holds a shared ``flock`` on one file, readers included. Who gets that
lock for itself alone knows that nobody else has a segment open, and may overwrite one.

**Who owns what.** One thread at a time may call :meth:`Membership.alone`, while the lock of the
root is held: two that ask at once would each drop the shared lock for a moment, and one of them
might find itself alone. A fork inherits the descriptor and closes it first thing.
"""

from __future__ import annotations

import fcntl
import logging
import os
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
        membership.leave()


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
        self._descriptor: int | None = None

    def join(self, timeout_s: float, *, create: bool = True) -> bool:
        """Take the shared lock; fine when it is held already.

        Args:
            timeout_s: How long to wait for somebody who is alone at the moment.
            create: Whether to make the file when it does not exist.

        Returns:
            Whether it is held now.

        Raises:
            OSError: The file cannot be opened.
        """
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
            try:
                descriptor = open_beneath(self._root, self._path, flags | os.O_NONBLOCK, FILE_MODE)
            except FileNotFoundError:
                if create:
                    raise
                return False
            self._descriptor = descriptor
            _joined.add(self)
            if create:
                os.fchmod(descriptor, FILE_MODE)
        return self._share(self._descriptor, timeout_s)

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
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
