"""Holds Ctrl-C back until the engine is between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts_held_back"]


@contextmanager
def interrupts_held_back() -> Iterator[Callable[[], None]]:
    """Turn an interrupt into a request to stop, as long as the block runs.

    Python raises ``KeyboardInterrupt`` between any two statements, also between those that hand
    a job to a tier and those that note it, and a job nobody knows of cannot be ended. A second
    interrupt is not held back: whoever presses Ctrl-C twice does not want to wait.

    Yields:
        A function that raises the interrupt, if there was one. The end of the block does so, too.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # Ignored, as in background jobs of a shell, or somebody else's.
        yield lambda: None
        return
    interrupted = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
