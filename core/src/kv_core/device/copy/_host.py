"""Copies within host memory, on one thread per stream.

The thread that submits owns a stream's queue end and ``_closed``; the stream's own thread takes
batches from the queue in order and is the only one that writes a ticket's outcome, before it
sets the ticket's event. ``memmove`` runs without the interpreter lock.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from typing import TYPE_CHECKING, Final, final

import numpy as np

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
            _copy(self.batch)
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


def _copy(batch: CopyBatch) -> None:
    for source, destination, size in _merge_adjacent(batch):
        ctypes.memmove(destination, source, size)


def _merge_adjacent(batch: CopyBatch) -> list[tuple[int, int, int]]:
    """Join ranges that continue each other on both sides: fewer, larger copies."""
    sources, destinations, sizes = batch.sources, batch.destinations, batch.sizes
    if len(sizes) == 0:
        return []
    starts = np.empty(len(sizes), dtype=bool)
    starts[0] = True
    np.logical_or(
        sources[:-1] + sizes[:-1] != sources[1:],
        destinations[:-1] + sizes[:-1] != destinations[1:],
        out=starts[1:],
    )
    first = np.flatnonzero(starts)
    merged_sizes = np.add.reduceat(sizes, first)
    return list(
        zip(
            sources[first].tolist(),
            destinations[first].tolist(),
            merged_sizes.tolist(),
            strict=True,
        )
    )
