"""Writes down when segments were used, in the times of their files, for people and restarts.

``ls -l`` shows the age of the last hit, and namespaces and segments of the whole root can be
compared that no process knows the blocks of.

**Who owns what.** Any thread may call; two that use one segment at the same moment may both write.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kv_tier_fs.segments._segment import Segment

__all__ = ["UseTimes"]

_EVERY_S: Final = 1.0


@final
class UseTimes:
    """Touches segments that are used, each once a second at most.

    Args:
        using: Lends the descriptor of a segment.
        now: Seconds since the epoch.
    """

    def __init__(
        self,
        using: Callable[[Segment], AbstractContextManager[int]],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._using = using
        self._now = now

    def note_use(self, segment: Segment) -> None:
        """Note that a segment is used now."""
        now = self._now()
        # A clock that was set back must not end this until it has caught up.
        if abs(now - segment.touched_s) < _EVERY_S:
            return
        segment.touched_s = now
        try:
            with self._using(segment) as descriptor:
                os.utime(descriptor, (now, now))
        except OSError:
            # Removed, or a folder that may only be read: the time is a hint.
            return
