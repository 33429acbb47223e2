"""Finding the region that another process creates, and refusing every other one.

Nothing here creates, changes or removes a file. A process that does not find the region it was
configured for must not make a second one: it would load zeros, and nobody would notice.
"""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING, Final, final

from kv_core.cpu._attendance import CREATOR, Attendance, attached
from kv_core.cpu._region_file import RegionFile
from kv_core.cpu._trailer import TRAILER_BYTES, RegionTrailer
from kv_core.errors import RegionError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Poll", "join_region"]

_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.05

_ABSENT: Final = (
    "there is no file of that name. Either the region has not been created, or it is complete: "
    "its name was removed when all of its workers had attached, and a process that starts "
    "afterwards cannot join"
)
_LEFTOVER: Final = "the file is a leftover of a process that has ended"
_UNFINISHED: Final = "its creator has not finished it"


@final
class Poll:
    """A wait for something that another process does, with a deadline."""

    def __init__(
        self,
        deadline_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        stop: threading.Event | None = None,
    ) -> None:
        """Begin to wait.

        Args:
            deadline_s: Seconds from now; 0 allows one look.
            clock: Monotonic seconds.
            sleep: Pauses.
            stop: Ends the wait before its deadline, and a pause at once, when it is set.
        """
        self._clock = clock
        self._sleep = sleep if stop is None else stop.wait
        self._stop = stop
        self._ends_at = clock() + deadline_s
        self._pause_s = _FIRST_PAUSE_S

    def pause(self) -> bool:
        """Pause, a little longer each time.

        Returns:
            Whether there is time for another look. If not, there was no pause, or it was ended.
        """
        left_s = self._ends_at - self._clock()
        # Not "<= 0": a deadline that is no number ends at once rather than never.
        if not left_s > 0:
            return False
        self._sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._stop is None or not self._stop.is_set()


def join_region(path: Path, expected: RegionTrailer, worker: int, poll: Poll) -> RegionFile:
    """Open the region of a live creator and take the worker's place.

    Args:
        path: Name of the region.
        expected: What it has to be.
        worker: Rank of this process.
        poll: How long to wait for a complete one.

    Raises:
        RegionError: It did not appear in time, is another one, or the place is taken.
    """
    while True:
        found = _look(path, expected, worker)
        if isinstance(found, RegionFile):
            return found
        if not poll.pause():
            raise RegionError(
                f"worker {worker} found no region to attach to at {path}: {found}. Start all "
                "processes of the engine together, with the nonce of this start; restart them "
                "all when one of them died."
            )


def _look(path: Path, expected: RegionTrailer, worker: int) -> RegionFile | str:
    """Return the region, or why there is none to attach to yet."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return _ABSENT
    except OSError as error:
        raise RegionError(
            f"{path} cannot be opened: {error}. All processes of an engine run as one user and "
            "see one folder ('shm_dir')."
        ) from error
    problem: str | None = _UNFINISHED
    try:
        problem = _examine(path, descriptor, expected, worker)
    finally:
        if problem is not None:
            os.close(descriptor)
    return RegionFile(path, descriptor, is_owner=False) if problem is None else problem


def _examine(path: Path, descriptor: int, expected: RegionTrailer, worker: int) -> str | None:
    """Take the worker's place in an open file, or return why that is not possible yet."""
    attendance = Attendance(descriptor)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise RegionError(f"{path} exists and is not a regular file; remove it")
    # First of all: what a dead process left says nothing about the region that is to come.
    if not attendance.is_taken(CREATOR):
        return _LEFTOVER
    if status.st_size < TRAILER_BYTES:
        return _UNFINISHED
    # At the end of the file as it is: the trailer of another shape is to name what differs.
    trailer = RegionTrailer.unpack(
        os.pread(descriptor, TRAILER_BYTES, status.st_size - TRAILER_BYTES)
    )
    if trailer is None:
        return _UNFINISHED
    trailer.require_equal(expected)
    if not attendance.take(attached(worker)):
        raise RegionError(
            f"another process is attached to the region {path.name} as worker {worker}. Give each "
            f"of the {expected.num_workers} workers its own rank."
        )
    # The creator may have given up in the meantime, and its successor makes another region.
    return None if attendance.is_taken(CREATOR) else _LEFTOVER
