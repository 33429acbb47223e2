"""The copy thread: copies in order, and one number a direction that says how far it has got."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from typing_extensions import override

from kv_core.device import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kv_core.simple import NO_EVENT, DmaCopyBackend, HostComputeOrder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from kv_core.device.copy import CopyBatch


class Ticket:
    """A copy that ends when the test says so."""

    error = None
    elapsed_seconds = 0.5

    def __init__(self) -> None:
        self.ended = threading.Event()

    def done(self) -> bool:
        """Say whether it has ended."""
        return self.ended.is_set()

    def wait(self) -> None:
        """Wait for the test."""
        assert self.ended.wait(30)


class Stream:
    """Keeps what is submitted."""

    def __init__(self) -> None:
        self.batches: list[CopyBatch] = []
        self.tickets: list[Ticket] = []
        self.is_closed = False
        self.submitted = threading.Semaphore(0)

    def submit(self, batch: CopyBatch) -> Ticket:
        """Take a batch."""
        self.batches.append(batch)
        ticket = Ticket()
        self.tickets.append(ticket)
        self.submitted.release()
        return ticket

    def close(self) -> None:
        """Take note."""
        self.is_closed = True


class Backend:
    """Opens streams and keeps them by name."""

    name = "test"

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}

    def open_stream(self, name: str) -> Stream:
        """Open a stream."""
        return self.streams.setdefault(name, Stream())


def open_copies(
    backend: Backend,
) -> tuple[DmaCopyBackend, npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Return copies between tensors whose GPU pages are padded to 32 bytes."""
    gpu = np.zeros((4, 32), dtype=np.int8)[:, :24]
    cpu = np.zeros((4, 24), dtype=np.int8)
    caches = CanonicalKVCaches((CanonicalKVCacheTensor(gpu, 24),), ((CanonicalKVCacheRef(0, 24),),))
    return DmaCopyBackend(caches, [cpu], backend, HostComputeOrder()), gpu, cpu


def test_a_direction_has_got_as_far_as_its_last_copy_in_order() -> None:
    """A later copy that ended earlier does not count before the others have."""
    backend = Backend()
    copies, _, _ = open_copies(backend)
    for event in (3, 4, 7):
        copies.launch_copy(event, [1], [1], is_store=True)
    copies.launch_copy(0, [2], [2], is_store=False)
    for name in ("store", "store", "store", "load"):
        assert backend.streams[name].submitted.acquire(timeout=30)
    tickets = backend.streams["store"].tickets
    assert copies.high_water_mark(is_store=True) == NO_EVENT
    tickets[1].ended.set()
    assert copies.poll(is_store=True) == []
    tickets[0].ended.set()
    assert [copy.event for copy in copies.poll(is_store=True)] == [3, 4]
    assert copies.high_water_mark(is_store=True) == 4
    assert copies.high_water_mark(is_store=False) == NO_EVENT
    for stream in backend.streams.values():
        for ticket in stream.tickets:
            ticket.ended.set()
    copies.flush()
    (last,) = copies.poll(is_store=True)
    assert (last.event, last.error, last.num_bytes, last.seconds) == (7, None, 24, 0.5)
    assert copies.high_water_mark(is_store=True) == 7
    copies.shutdown()
    assert all(stream.is_closed for stream in backend.streams.values())


def test_descriptors_name_the_pages_of_both_sides() -> None:
    """Rows of the GPU tensor are farther apart than its pages are long."""
    backend = Backend()
    copies, gpu, cpu = open_copies(backend)
    copies.launch_copy(0, [3, 1], [0, 2], is_store=True)
    copies.launch_copy(0, [3, 1], [0, 2], is_store=False)
    copies.shutdown()
    (store,), (load,) = (backend.streams[name].batches for name in ("store", "load"))
    gpu_addresses = [gpu.ctypes.data + 32 * block_id for block_id in (3, 1)]
    cpu_addresses = [cpu.ctypes.data + 24 * block_id for block_id in (0, 2)]
    assert (store.sources.tolist(), store.destinations.tolist()) == (gpu_addresses, cpu_addresses)
    assert (load.sources.tolist(), load.destinations.tolist()) == (cpu_addresses, gpu_addresses)
    assert store.sizes.tolist() == load.sizes.tolist() == [24, 24]


def test_sides_that_do_not_fit_are_refused() -> None:
    """Before anything is copied, with both sizes."""
    gpu = np.zeros((2, 8), dtype=np.int8)
    caches = CanonicalKVCaches((CanonicalKVCacheTensor(gpu, 8),), ((CanonicalKVCacheRef(0, 8),),))
    cpu = np.zeros((2, 16), dtype=np.int8)
    with pytest.raises(ValueError, match=r"rows of \[16\] bytes, expected .* \[8\]"):
        DmaCopyBackend(caches, [cpu], Backend(), HostComputeOrder())


class LeavingBackend(Backend):
    """Its first copies try to end the thread that submits them."""

    @override
    def open_stream(self, name: str) -> Stream:
        """Open a stream."""
        stream = super().open_stream(name)
        submit: Final = stream.submit

        def leave(batch: CopyBatch) -> Ticket:
            stream.submit = submit  # type: ignore[method-assign]
            raise SystemExit(3)

        stream.submit = leave  # type: ignore[method-assign]
        return stream


def test_what_ends_a_thread_fails_one_copy() -> None:
    """A flush would wait for ever for a thread that is gone."""
    backend = LeavingBackend()
    copies, _, _ = open_copies(backend)
    copies.launch_copy(0, [1], [1], is_store=True)
    copies.flush()
    (refused,) = copies.poll(is_store=True)
    assert (refused.event, type(refused.error)) == (0, SystemExit)
    copies.launch_copy(1, [1], [1], is_store=True)
    assert backend.streams["store"].submitted.acquire(timeout=30)
    backend.streams["store"].tickets[0].ended.set()
    copies.flush()
    assert [copy.error for copy in copies.poll(is_store=True)] == [None]
    copies.shutdown()


def test_memory_lives_as_long_as_copies_may_use_it() -> None:
    """Descriptors are addresses: nothing else keeps the tensors if the owner just drops them."""
    copies, gpu, cpu = open_copies(Backend())
    alive = weakref.ref(gpu), weakref.ref(cpu)
    copies.launch_copy(0, [1], [1], is_store=True)
    del gpu, cpu
    gc.collect()
    assert [tensor() is None for tensor in alive] == [False, False]
    copies.shutdown()
    gc.collect()
    assert [tensor() is None for tensor in alive] == [True, True]


def test_a_stream_that_ends_badly_does_not_stop_a_shutdown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other stream is closed, and the caller goes on to release the memory."""
    backend = Backend()
    copies, _, _ = open_copies(backend)

    def fail() -> None:
        raise OSError("the device is lost")

    backend.streams["load"].close = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        copies.shutdown()
    assert "ended badly" in caplog.text
    assert backend.streams["store"].is_closed


def test_a_mark_that_fails_is_the_outcome_of_its_copy() -> None:
    """The engine's step goes on, and nothing is copied that might overtake the engine's work."""

    class FailingOrder:
        def mark(self) -> AbstractContextManager[None]:
            raise RuntimeError("the device is lost")

    backend = Backend()
    gpu, cpu = np.zeros((2, 8), dtype=np.int8), np.zeros((2, 8), dtype=np.int8)
    caches = CanonicalKVCaches((CanonicalKVCacheTensor(gpu, 8),), ((CanonicalKVCacheRef(0, 8),),))
    copies = DmaCopyBackend(caches, [cpu], backend, FailingOrder())
    copies.launch_copy(4, [1], [1], is_store=False)
    copies.flush()
    (refused,) = copies.poll(is_store=False)
    assert (refused.event, str(refused.error)) == (4, "the device is lost")
    assert backend.streams["load"].batches == []
    copies.shutdown()


def test_a_stream_without_the_other_is_closed() -> None:
    """No thread is left of a start that failed."""

    class HalfBackend(Backend):
        @override
        def open_stream(self, name: str) -> Stream:
            if name == "store":
                raise OSError("no second stream")
            return super().open_stream(name)

    backend = HalfBackend()
    with pytest.raises(OSError, match="no second stream"):
        open_copies(backend)
    assert backend.streams["load"].is_closed
