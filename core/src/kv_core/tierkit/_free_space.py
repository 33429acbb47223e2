"""Keeps a floor of free space: whatever shares the file system is to go on working.

**Who owns what.** Pool threads call :meth:`FreeSpace.take` before they write; ``_lock`` guards
everything that changes. It is held while the file system is asked, which only stores wait for.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final, final

from kv_core.errors import BlockDeclinedError
from kv_core.units import format_bytes

if TYPE_CHECKING:
    from kv_core.contract import Clock

__all__ = ["LOOK_EVERY_S", "FreeSpace"]

LOOK_EVERY_S: Final = 1.0
"""How long an answer of the file system is good for. Own writes are counted in between, so only
what others write meanwhile can go below the floor."""


@final
class FreeSpace:
    """Declines stores while a file system has less free space than it should keep.

    Args:
        folder: A folder on the file system.
        floor_bytes: What is to stay free.
        clock: Monotonic seconds.
    """

    def __init__(self, folder: str, floor_bytes: int, clock: Clock) -> None:
        self._folder = folder
        self._floor_bytes = floor_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        # None where free space is not known.
        self._free_bytes: int | None = None
        self._taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Count a file that is about to be written.

        Raises:
            BlockDeclinedError: There is less free space than the floor.
        """
        with self._lock:
            now = self._clock()
            # Declined on a fresh answer only: a file may have been removed since, or one that was
            # counted not been written. It costs less than the write would have.
            if now - self._asked_at >= LOOK_EVERY_S or self._is_below():
                self._free_bytes = _free_bytes(self._folder)
                self._asked_at, self._taken_bytes = now, 0
            if self._is_below():
                raise BlockDeclinedError(
                    f"the file system of {self._folder} has "
                    f"{format_bytes(self._free_bytes or 0)} free, less than 'min_free_bytes' "
                    f"({format_bytes(self._floor_bytes)})"
                )
            self._taken_bytes += size_bytes

    def _is_below(self) -> bool:
        free_bytes = self._free_bytes
        return free_bytes is not None and free_bytes - self._taken_bytes < self._floor_bytes


def _free_bytes(folder: str) -> int | None:
    """Return what a process without privileges could still write, or ``None`` if not known."""
    try:
        status = os.statvfs(folder)
    except OSError:
        # The write that follows meets the same trouble, and says more about it.
        return None
    # Network file systems that know no limit have no blocks to count.
    return status.f_bavail * status.f_frsize if status.f_blocks else None
