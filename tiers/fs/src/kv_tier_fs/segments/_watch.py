"""Waits until something changes in some folders, or a while has passed.

On a local file system the kernel tells (inotify). Elsewhere nobody does: a network file system
knows nothing of other hosts, and one in user space is not asked.

**Who owns what.** A watch belongs to one thread. Another one may only set the event that it waits
for and then ring its bell, which is guarded by a lock against the end of the watch.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import threading
from typing import TYPE_CHECKING, Final, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from typing_extensions import Self

__all__ = ["InotifyWatch", "TimerWatch", "Watch", "is_local", "open_watch"]

logger = logging.getLogger(__name__)

# Many appends in a row are one change.
_GATHER_S: Final = 0.005

_LOCAL: Final = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
)

_IN_MODIFY: Final = 0x2
_IN_MOVED_TO: Final = 0x80
_IN_CREATE: Final = 0x100
_IN_DELETE: Final = 0x200
_IN_ONLYDIR: Final = 0x0100_0000
_IN_DONT_FOLLOW: Final = 0x0200_0000
_EVENTS: Final = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_ONLYDIR | _IN_DONT_FOLLOW


class Watch(Protocol):
    """Whoever waits. A context manager that closes it."""

    def wait(self, timeout_s: float, folders: Iterable[Path], stop: threading.Event) -> None:
        """Wait until something changes in a folder, the time is over, or the event is set.

        Args:
            timeout_s: How long at most.
            folders: Folders to watch from now on.
            stop: The event. Whoever sets it calls :meth:`wake` afterwards.
        """

    def wake(self) -> None:
        """End the wait that goes on, because the event is set. Any thread, also after the end."""

    def __enter__(self) -> Self:
        """Return the watch."""

    def __exit__(self, *_: object) -> None:
        """Close it."""


@final
class TimerWatch:
    """Waits for the time only."""

    def wait(self, timeout_s: float, folders: Iterable[Path], stop: threading.Event) -> None:
        """See :meth:`Watch.wait`."""
        del folders
        stop.wait(timeout_s)

    def wake(self) -> None:
        """Do nothing: the event is all that is waited for."""

    def __enter__(self) -> Self:
        """Return the watch."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


@final
class InotifyWatch:
    """Waits for the kernel to tell.

    Args:
        top: Folder in which folders of writers appear.

    Raises:
        OSError: There are too many watches, or the kernel has none.
    """

    def __init__(self, top: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._add = libc.inotify_add_watch
        self._add.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        self._descriptor = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor < 0:
            raise _last_error()
        self._watched: set[Path] = set()
        self._is_full = False
        self._closing = threading.Lock()
        self._is_closed = False
        try:
            self._watch(top)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)

    def _watch(self, folder: Path) -> None:
        if self._add(self._descriptor, os.fsencode(folder), _EVENTS) < 0:
            raise _last_error()
        self._watched.add(folder)

    def wait(self, timeout_s: float, folders: Iterable[Path], stop: threading.Event) -> None:
        """See :meth:`Watch.wait`."""
        for folder in folders:
            if folder not in self._watched and not self._is_full:
                try:
                    self._watch(folder)
                except OSError as error:
                    # Gone again, or one too many: the timer sees to that one.
                    self._is_full = error.errno == errno.ENOSPC
        if not stop.is_set() and self._poll.poll(timeout_s * 1e3):
            stop.wait(_GATHER_S)
            self._drain()

    def _drain(self) -> None:
        try:
            while os.read(self._descriptor, 1 << 16):
                pass
        except BlockingIOError:
            pass

    def wake(self) -> None:
        """See :meth:`Watch.wake`."""
        with self._closing:
            # A number that is closed may be that of somebody else's file by now.
            if not self._is_closed:
                os.eventfd_write(self._bell, 1)

    def __enter__(self) -> Self:
        """Return the watch."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the descriptors."""
        with self._closing:
            self._is_closed = True
            os.close(self._bell)
            os.close(self._descriptor)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def is_local(path: Path, mounts: str = "/proc/self/mountinfo") -> bool:
    """Say whether all who write to a folder do so through this kernel, as far as is known.

    Args:
        path: An existing folder.
        mounts: The kernel's list of mounts.
    """
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(mounts, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1] in _LOCAL
    except (OSError, ValueError, IndexError):
        pass
    return False


def open_watch(top: Path, *, local: bool) -> Watch:
    """Return the best watch that there is for a folder."""
    if local:
        try:
            return InotifyWatch(top)
        except OSError as error:
            logger.info("changes in %s are found by looking, not by inotify: %s", top, error)
    return TimerWatch()
