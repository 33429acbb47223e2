"""Who is at a region: byte-range locks on its file, which end with the process that holds them.

A mark in shared memory would outlive the process that set it, and a process id may be another
process's by the time it is read, or mean nothing in another container. The kernel drops a lock
of an open file description when its last descriptor is closed, however the process ended, and
tells others who ask whether it is held without their taking it. The bytes that are locked have
no content: each is a place that one process can take.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Final, final

from kv_core.errors import RegionError

__all__ = ["CREATOR", "Attendance", "attached", "ready"]

CREATOR: Final = 0
"""The place of the process that created the region."""

# struct flock of 64-bit Linux: type, whence, start, length, process id; padded to its alignment.
_FLOCK: Final = struct.Struct("@hhqqi4x")


def attached(worker: int) -> int:
    """Return the place of a worker that needs the name of the region no longer."""
    return 1 + 2 * worker


def ready(worker: int) -> int:
    """Return the place of a worker whose pages are all present."""
    return 2 + 2 * worker


@final
class Attendance:
    """The places of one region, as one open file description sees them.

    Attributes:
        descriptor: Open for reading and writing. Closing it gives up what was taken through it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def take(self, place: int) -> bool:
        """Take a place for as long as the descriptor is open.

        Returns:
            Whether it was free, or already taken through this descriptor.

        Raises:
            RegionError: The file system or the kernel has no such locks.
        """
        try:
            self._call(fcntl.F_OFD_SETLK, place)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise self._unsupported(error) from error
        return True

    def is_taken(self, place: int) -> bool:
        """Tell whether a live process has taken a place through another descriptor.

        Raises:
            RegionError: The file system or the kernel has no such locks.
        """
        try:
            answer = self._call(fcntl.F_OFD_GETLK, place)
        except OSError as error:
            raise self._unsupported(error) from error
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

    def _call(self, command: int, place: int) -> bytes:
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        return fcntl.fcntl(self.descriptor, command, request)

    @staticmethod
    def _unsupported(error: OSError) -> RegionError:
        return RegionError(
            f"the region cannot be shared between processes: locks of open files fail ({error}). "
            "They need Linux 3.15 and a memory file system of its own; run with one worker, or "
            "name another folder with 'shm_dir' (--shm-dir)"
        )
