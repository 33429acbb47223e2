"""Copies begin after the engine's own work, although another thread submits them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.device import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kv_core.simple import DmaCopyBackend, HostComputeOrder, StreamComputeOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from kv_core.device.copy import CopyBatch
    from kv_core.simple import ComputeOrder


class FakeEvent:
    """Reached when its stream gets to where it was recorded."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.is_reached = False

    def record(self, stream: FakeStream) -> None:
        """Put it behind what the stream was given."""
        self.is_reached = False
        stream.work.append(self._reach)

    def _reach(self) -> bool:
        self.is_reached = True
        return True


class FakeStream:
    """Work in order; a piece says whether it is done or has to wait."""

    def __init__(self) -> None:
        self.work: list[Callable[[], bool]] = []

    def wait_event(self, event: FakeEvent) -> None:
        """Hold later work back until the event."""
        self.work.append(lambda: event.is_reached)

    def advance(self) -> bool:
        """Do one piece of work if that is possible."""
        if self.work and self.work[0]():
            del self.work[0]
            return True
        return False


class FakeDevice:
    """Streams that run only when the test says so; the part of ``torch.cuda`` that is used."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.compute = self.Stream()
        self._current = threading.local()
        self._current.stream = self.compute

    Event = FakeEvent

    def Stream(self, device: Any = None) -> FakeStream:  # noqa: N802 - as torch names it
        """Open a stream."""
        stream = FakeStream()
        # The newest first: copies run as early as they are allowed to.
        self.streams.insert(0, stream)
        return stream

    def current_stream(self, device: Any = None) -> FakeStream:
        """Return the stream of this thread; another thread's is not the compute stream."""
        if not hasattr(self._current, "stream"):
            self._current.stream = self.Stream()
        stream: FakeStream = self._current.stream
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream this thread's current one."""
        before, self._current.stream = self.current_stream(), stream
        yield
        self._current.stream = before

    def run(self) -> None:
        """Run all work, copies first where their order allows it."""
        while any(stream.advance() for stream in self.streams):
            pass

    # -- the copy back end ----------------------------------------------------------------------

    name = "fake"

    def open_stream(self, name: str) -> FakeCopies:
        """Open a stream for copies."""
        return FakeCopies(self)


class FakeCopies:
    """Copies on a stream of their own, ordered after the submitting thread's current one."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._stream = device.Stream()

    def submit(self, batch: CopyBatch) -> FakeTicket:
        """Queue a batch."""
        before = FakeEvent()
        before.record(self._device.current_stream())
        self._stream.wait_event(before)
        ticket = FakeTicket()

        def copy() -> bool:
            import ctypes

            parts = (batch.destinations.tolist(), batch.sources.tolist(), batch.sizes.tolist())
            for destination, source, size in zip(*parts, strict=True):
                ctypes.memmove(destination, source, size)
            ticket.is_done = True
            return True

        self._stream.work.append(copy)
        return ticket

    def close(self) -> None:
        """Nothing to release."""


class FakeTicket:
    """Done once the copy ran."""

    error = None
    elapsed_seconds = 0.0
    is_done = False

    def done(self) -> bool:
        """Say whether the copy ran."""
        return self.is_done

    def wait(self) -> None:
        """Nothing to wait for: the test runs the device."""


class Rig:
    """One GPU block and one CPU block, and copies between them."""

    def __init__(self, order: Callable[[FakeDevice], ComputeOrder]) -> None:
        self.device = FakeDevice()
        self.gpu: npt.NDArray[np.int8] = np.zeros((2, 8), dtype=np.int8)
        self.cpu: npt.NDArray[np.int8] = np.zeros((2, 8), dtype=np.int8)
        caches = CanonicalKVCaches(
            (CanonicalKVCacheTensor(self.gpu, 8),), ((CanonicalKVCacheRef(0, 8),),)
        )
        self.copies = DmaCopyBackend(caches, [self.cpu], self.device, order(self.device))

    def copy(self, *, is_store: bool) -> None:
        """Launch a copy of block 1, and see that it was submitted."""
        self.copies.launch_copy(0, [1], [1], is_store=is_store)
        self.copies.flush()

    def kernel(self, work: Callable[[], Any]) -> None:
        """Queue work of the engine."""

        def run() -> bool:
            work()
            return True

        self.device.compute.work.append(run)


def streams(device: Any) -> ComputeOrder:
    """Return what is under test."""
    return StreamComputeOrder(device, "cuda:0")


def without_order(device: FakeDevice) -> ComputeOrder:
    """Return an order that is none on a device."""
    return HostComputeOrder()


@pytest.mark.parametrize(("order", "stored"), [(streams, 7), (without_order, 0)])
def test_a_store_has_what_was_written_just_before(
    order: Callable[[FakeDevice], ComputeOrder], stored: int
) -> None:
    """The writer runs on another stream, later than the launch (vllm#45704, vllm#46278)."""
    rig = Rig(order)
    rig.kernel(lambda: rig.gpu[1].fill(7))
    rig.copy(is_store=True)
    rig.device.run()
    rig.copies.shutdown()
    assert rig.cpu[1].tolist() == [stored] * 8


@pytest.mark.parametrize(("order", "read"), [(streams, 1), (without_order, 9)])
def test_a_load_waits_for_earlier_readers(
    order: Callable[[FakeDevice], ComputeOrder], read: int
) -> None:
    """What the engine reads of the block is what was there, not what comes (vllm#47282)."""
    rig = Rig(order)
    rig.gpu[1].fill(1)
    rig.cpu[1].fill(9)
    seen: list[list[int]] = []
    rig.kernel(lambda: seen.append(rig.gpu[1].tolist()))
    rig.copy(is_store=False)
    rig.device.run()
    rig.copies.shutdown()
    assert seen == [[read] * 8]
    assert rig.gpu[1].tolist() == [9] * 8


def test_copies_do_not_wait_for_later_work() -> None:
    """Only what was submitted before the launch has to end before."""
    rig = Rig(streams)
    rig.copy(is_store=True)
    rig.device.compute.work.append(lambda: False)
    rig.device.run()
    assert [copy.event for copy in rig.copies.poll(is_store=True)] == [0]
    rig.copies.shutdown()
