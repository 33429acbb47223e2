"""Wakes an event loop while the thread that does so keeps the interpreter.

**Who owns what.** Any thread rings. The loop's thread empties ``_callbacks`` and closes the bell.
``_lock`` orders a ring and the closing, and is held for a few instructions only.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["Doorbell"]


def _find_write() -> Any:
    """Return a function that adds to an eventfd without letting go of the interpreter."""
    write: Any = None
    if hasattr(os, "eventfd"):
        # This door to the C library keeps the interpreter; every function of ``os`` lets it go.
        with suppress(OSError, AttributeError):
            write = ctypes.PyDLL(None).eventfd_write
            write.argtypes = (ctypes.c_int, ctypes.c_uint64)
    return write


_WRITE: Final = _find_write()


@final
class Doorbell:
    """Has a loop call something soon.

    asyncio's own way is to send a byte over a socket, and for the time of that a thread lets go of
    the interpreter. The loop is awake at once, takes it, and keeps it until it waits for something:
    with a hundred requests to begin, for up to the switch interval of 5 ms, for which the engine's
    thread is held up. An eventfd is written to in a microsecond and never blocks, so nobody needs
    to be let in meanwhile. Where there are none, asyncio's way is used.

    Args:
        loop: The loop; not running yet.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._callbacks: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._event: int | None = None
        if _WRITE is not None:
            self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            loop.add_reader(self._event, self._answer)

    def ring(self, callback: Callable[[], object]) -> None:
        """Have the loop call something soon. Nothing happens after :meth:`close`. Thread-safe."""
        with self._lock:
            if self._closed:
                return
            if self._event is not None:
                self._callbacks.append(callback)
                _WRITE(self._event, 1)
                return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Answer no more. Before the loop is closed, and while it does not run. Idempotent."""
        with self._lock:
            event, self._event = self._event, None
            self._closed = True
        # Not before: the number may be that of another file soon.
        if event is not None:
            self._loop.remove_reader(event)
            os.close(event)

    def _answer(self) -> None:
        if self._event is not None:
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)
        while self._callbacks:
            self._loop.call_soon(self._callbacks.popleft())
