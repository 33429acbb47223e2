"""A model of a device: streams run whenever they like, except where events say otherwise.

What is queued on one stream runs in order. Between streams nothing is promised: the test, or a
seeded generator, picks the stream that goes on next. Events behave as CUDA's do: waiting is for
the mark that the event was when the wait was queued, and an event that was never recorded holds
nobody up.
"""

from __future__ import annotations

import ctypes
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.device import OrderedStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_core.device import StreamTicket
    from kv_core.device.copy import CopyBatch


class FakeEvent:
    """A mark in a stream."""

    def __init__(self, device: FakeDevice, *, enable_timing: bool) -> None:
        self.device = device
        self.enable_timing = enable_timing
        self.recorded = 0
        self.reached = 0
        self.reached_ms = 0.0

    def record(self, stream: FakeStream) -> None:
        """Place the next mark."""
        self.device.check()
        self.recorded += 1
        stream.enqueue(partial(self._reach, self.recorded))

    def _reach(self, mark: int) -> None:
        self.reached = max(self.reached, mark)
        self.reached_ms = self.device.now_ms

    def query(self) -> bool:
        """Say whether the last mark has been reached."""
        self.device.check()
        return self.reached == self.recorded

    def synchronize(self) -> None:
        """Let the device run until the last mark has been reached."""
        self.device.run_until(self.query)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        """Return the milliseconds between two events, both timed and reached."""
        if not all(event.enable_timing and event.query() for event in (self, end_event)):
            raise RuntimeError("both events must be timed, and must have been reached")
        return end_event.reached_ms - self.reached_ms


@dataclass(eq=False)
class FakeStream:
    """A queue of work: an action, or an event and the mark to wait for."""

    device: FakeDevice
    queue: deque[Callable[[], None] | tuple[FakeEvent, int]] = field(default_factory=deque)

    def enqueue(self, work: Callable[[], None]) -> None:
        """Queue work."""
        self.queue.append(work)

    def wait_event(self, event: FakeEvent) -> None:
        """Hold up later work until the device reaches the mark that the event is now."""
        self.device.check()
        self.queue.append((event, event.recorded))

    def synchronize(self) -> None:
        """Let the device run until this stream has nothing left."""
        self.device.run_until(lambda: not self.queue)

    def is_ready(self) -> bool:
        """Say whether the stream could go on now."""
        while self.queue and isinstance(first := self.queue[0], tuple):
            event, mark = first
            if event.reached < mark:
                return False
            self.queue.popleft()
        return bool(self.queue)

    def advance(self) -> None:
        """Do the next piece of work."""
        work = self.queue.popleft()
        if not isinstance(work, tuple):
            work()


def _youngest(streams: list[FakeStream]) -> FakeStream:
    """Prefer copies to the engine's work: whatever is not told to wait comes too early."""
    return streams[-1]


class FakeDevice:
    """Stands in for ``torch.cuda``.

    Attributes:
        compute: The engine's stream, the current one unless another is made so.
        streams: All streams, oldest first.
        frozen: Streams that do not go on, though they could.
        choose: Picks the stream that goes on next.
        now_ms: Device time: a millisecond for each piece of work.
        events_made: Events so far.
        is_lost: Whether every call fails from now on.
    """

    def __init__(self) -> None:
        self.compute = FakeStream(self)
        self.streams = [self.compute]
        self.frozen: list[FakeStream] = []
        self.choose: Callable[[list[FakeStream]], FakeStream] = _youngest
        self.now_ms = 0.0
        self.events_made = 0
        self.is_lost = False
        self._current = self.compute

    def check(self) -> None:
        """Fail if the device is lost."""
        if self.is_lost:
            raise RuntimeError("the device is lost")

    def Stream(self, device: object) -> FakeStream:  # noqa: N802 - torch.cuda's name
        """Make a stream."""
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802 - torch.cuda's name
        """Make an event."""
        self.events_made += 1
        return FakeEvent(self, enable_timing=enable_timing)

    def current_stream(self, device: object) -> FakeStream:
        """Return the current stream."""
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the current one for a while."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def step(self) -> bool:
        """Let one stream do one piece of work; ``False`` when none can."""
        self.check()
        ready = [s for s in self.streams if s not in self.frozen and s.is_ready()]
        if not ready:
            return False
        self.now_ms += 1
        self.choose(ready).advance()
        return True

    def run(self) -> None:
        """Let all streams do all that they can."""
        while self.step():
            pass

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Let the device run no longer than until something holds."""
        while not condition():
            assert self.step(), "the device stands still: somebody waits for ever"


class FakeCopyStream:
    """Copies through an ordered stream, a range at a time.

    Descriptors are read when the device comes to them, as a kernel would.
    """

    def __init__(self, device: FakeDevice) -> None:
        self.ordered = OrderedStream(device, "fake:0")
        self.stream = device.streams[-1]

    def submit(self, batch: CopyBatch) -> StreamTicket:
        """Queue a copy for each descriptor."""

        def queue_all(stream: Any) -> None:
            for index in range(len(batch.sizes)):
                stream.enqueue(partial(_copy_range, batch, index))

        return self.ordered.run(queue_all)

    def close(self) -> None:
        """Finish what is queued."""
        self.ordered.close()


def _copy_range(batch: CopyBatch, index: int) -> None:
    ctypes.memmove(
        int(batch.destinations[index]), int(batch.sources[index]), int(batch.sizes[index])
    )


class FakeBackend:
    """A copy back end over the model.

    Attributes:
        device: The device.
        streams: By name.
    """

    name = "fake"

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.streams: dict[str, FakeCopyStream] = {}

    def open_stream(self, name: str) -> FakeCopyStream:
        """Open a stream."""
        self.streams[name] = FakeCopyStream(self.device)
        return self.streams[name]


@pytest.fixture
def device() -> FakeDevice:
    """Return a device that prefers copies to the engine's work."""
    return FakeDevice()


@pytest.fixture
def backend(device: FakeDevice) -> FakeBackend:
    """Return a copy back end over the device."""
    return FakeBackend(device)
