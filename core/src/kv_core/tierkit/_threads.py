"""What the pools of threads share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

__all__ = ["join_all"]


def join_all(threads: Iterable[threading.Thread], timeout_s: float | None) -> bool:
    """Wait for threads to end, for all of them together at most so long.

    Args:
        threads: Threads that have been told to stop.
        timeout_s: Longest wait in seconds, or ``None``.

    Returns:
        Whether all have ended.
    """
    awaited = list(threads)
    end = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in awaited:
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in awaited)
