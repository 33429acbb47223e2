"""Copies within host memory, on one thread per stream.

The thread that submits owns a stream's queue end and ``_closed``; the stream's own thread takes
batches from the queue in order and is the only one that writes a ticket's outcome, before it
sets the ticket's event. Bytes move without the interpreter lock.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Final, final

from kv_core.device.copy._host_ranges import copy_ranges
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from kv_core.device.copy._protocol import CopyBatch, CopyStream

__all__ = ["HostCopyBackend"]


@final
class HostCopyBackend:
    """Copies between CPU tensors. The reference for the other back ends."""

    name: Final = "host"

    def open_stream(self, name: str) -> CopyStream:
        """Start a thread for one direction."""
        return _HostStream(name)


@final
class _HostTicket:
    __slots__ = ("_ended", "batch", "elapsed_seconds", "error")

    def __init__(self, batch: CopyBatch) -> None:
        self.batch = batch
        self.error: BaseException | None = None
        self.elapsed_seconds = 0.0
        self._ended = threading.Event()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()

    def run(self) -> None:
        started = time.perf_counter()
        try:
            copy_ranges(self.batch)
        except BaseException as error:  # noqa: BLE001 - reported through the ticket
            self.error = error
        self.elapsed_seconds = time.perf_counter() - started
        self._ended.set()


@final
class _HostStream:
    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_HostTicket | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv-copy-{name}", daemon=True)
        self._thread.start()

    def submit(self, batch: CopyBatch) -> _HostTicket:
        if self._closed:
            raise EngineStateError("the copy stream is closed")
        ticket = _HostTicket(batch)
        self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            ticket.run()
