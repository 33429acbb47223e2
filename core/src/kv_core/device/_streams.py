"""Device streams that copies run on, ordered after the engine's own work.

A stream belongs to the thread that submits; the device runs behind it, and is only ever asked
whether it has reached an event. A ticket belongs to one thread at a time, which may be another:
all that the two share is the list of spare events, to which one adds and from which one takes.

The same code orders every copy back end over device memory, and runs in the tests over a model of a
device that keeps no order but what events ask for. It has not been run on real hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, final

from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["DeviceStream", "OrderedStream", "StreamApi", "StreamEvent", "StreamTicket"]


class StreamEvent(Protocol):
    """A mark in a stream; ``torch.cuda.Event`` is one."""

    def record(self, stream: Any) -> None:
        """Place the mark behind the work queued so far, in place of the mark it was."""

    def query(self) -> bool:
        """Say whether the device has reached the mark. Does not block."""

    def synchronize(self) -> None:
        """Block until the device has reached the mark."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this mark to another, both reached."""


class DeviceStream(Protocol):
    """A queue of work on a device; ``torch.cuda.Stream`` is one."""

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream wait for the mark that an event is now."""

    def synchronize(self) -> None:
        """Block until all queued work has ended."""


class StreamApi(Protocol):
    """Makes streams and events; the module ``torch.cuda`` is one."""

    def Stream(self, device: Any) -> DeviceStream:  # noqa: N802 - torch.cuda's name
        """Make a stream."""

    def Event(self, *, enable_timing: bool) -> StreamEvent:  # noqa: N802 - torch.cuda's name
        """Make an event."""

    def current_stream(self, device: Any) -> Any:
        """Return the stream that the calling thread queues its work on."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the calling thread's current one for a while."""


@final
class OrderedStream:
    """A stream whose work begins only after the compute stream's earlier work.

    One rule for both directions, because both can lose a race: a store that does not wait reads
    pages that a kernel has yet to write (vllm#45704), and a load that does not wait overwrites
    pages that a kernel has yet to read (vllm#47282).

    The waiting is done on the device: no method but :meth:`close` blocks. What one ordered stream
    runs keeps its order; two ordered streams know nothing of each other.
    """

    def __init__(self, api: StreamApi, device: object) -> None:
        """Make the stream.

        Args:
            api: ``torch.cuda``, or something like it.
            device: The device, as the API names it.
        """
        self._api = api
        self._device = device
        self._stream = api.Stream(device=device)
        # Enough for all submissions: a stream waits for the mark that the event was when told to.
        self._compute_mark = api.Event(enable_timing=False)
        self._spare_events: list[StreamEvent] = []
        self._is_closed = False

    def run(self, copy: Callable[[Any], None]) -> StreamTicket:
        """Queue copies behind the compute stream, and return at once.

        The compute stream is the calling thread's current one. A thread of its own, which has
        another, first makes one current that waits for the engine's.

        Args:
            copy: Queues the copies on the stream that it is given, which is also the current one
                while it runs. What it raises becomes the ticket's error.

        Raises:
            EngineStateError: The stream is closed.
            Exception: The device refused to order the work. None of it is under way.
        """
        if self._is_closed:
            raise EngineStateError("the copy stream is closed")
        self._compute_mark.record(self._api.current_stream(self._device))
        self._stream.wait_event(self._compute_mark)
        start, end = self._take_event(), self._take_event()
        error = None
        with self._api.stream(self._stream):
            start.record(self._stream)
            try:
                copy(self._stream)
            except Exception as failure:  # noqa: BLE001 - reported through the ticket
                error = failure
            try:
                # Also after a failure: what was queued before it still touches the memory.
                end.record(self._stream)
            except Exception:
                self._stream.synchronize()
                raise
        return StreamTicket(start, end, error, self._spare_events)

    def _take_event(self) -> StreamEvent:
        if self._spare_events:
            return self._spare_events.pop()
        return self._api.Event(enable_timing=True)

    def close(self) -> None:
        """Finish what is queued. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._stream.synchronize()


@final
class StreamTicket:
    """Copies under way on an ordered stream."""

    __slots__ = ("_elapsed_seconds", "_end", "_error", "_has_ended", "_spare_events", "_start")

    def __init__(
        self,
        start: StreamEvent,
        end: StreamEvent,
        error: Exception | None,
        spare_events: list[StreamEvent],
    ) -> None:
        """Follow two events.

        Args:
            start: Recorded before the copies.
            end: Recorded behind them.
            error: Why not all of them could be queued.
            spare_events: Takes the events once they have been reached and read.
        """
        self._start = start
        self._end = end
        self._error = error
        self._spare_events = spare_events
        self._elapsed_seconds = 0.0
        self._has_ended = False

    def done(self) -> bool:
        """Say whether the copies have ended, well or badly. Does not block."""
        if not self._has_ended:
            try:
                if self._end.query():
                    self._settle()
            except Exception as failure:  # noqa: BLE001 - a lost device fails its copies, no more
                self._fail(failure)
        return self._has_ended

    def wait(self) -> None:
        """Block until the copies have ended."""
        if not self._has_ended:
            try:
                self._end.synchronize()
                self._settle()
            except Exception as failure:  # noqa: BLE001 - a lost device fails its copies, no more
                self._fail(failure)

    @property
    def error(self) -> Exception | None:
        """Why the copies failed; ``None`` before their end and after success."""
        return self._error if self._has_ended else None

    @property
    def elapsed_seconds(self) -> float:
        """Device time from the start of the copies to their end. Meaningful once done."""
        return self._elapsed_seconds

    def _settle(self) -> None:
        self._elapsed_seconds = self._start.elapsed_time(self._end) / 1000
        self._has_ended = True
        self._spare_events += (self._start, self._end)

    def _fail(self, failure: Exception) -> None:
        """Report a failed device; its events are not used again."""
        self._error = self._error or failure
        self._has_ended = True
