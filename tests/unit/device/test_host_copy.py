"""The host back end: order, threads, merging of ranges."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.device.copy import CopyBatch, HostCopyBackend, _host
from kv_core.device.copy._host_ranges import copy_ranges
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from kv_core.device.copy import CopyStream

TIMEOUT_S = 20

Bytes = npt.NDArray[np.int8]


def _batch(*ranges: tuple[int, int, int]) -> CopyBatch:
    sources, destinations, sizes = (
        np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True)
    )
    return CopyBatch(sources, destinations, sizes)


def _batch_of_nothing() -> CopyBatch:
    nothing = np.empty(0, dtype=np.int64)
    return CopyBatch(nothing, nothing, nothing)


@pytest.fixture
def stream() -> Iterator[CopyStream]:
    """Return an open stream."""
    stream = HostCopyBackend().open_stream("test")
    yield stream
    stream.close()


class Gate:
    """Stands in for the copy loop: notes batches in order and lets each through on command."""

    def __init__(self) -> None:
        self.entered: list[CopyBatch] = []
        self.reached = threading.Event()
        self.open = threading.Event()

    def copy(self, batch: CopyBatch) -> None:
        """Wait for the gate, then do nothing."""
        self.entered.append(batch)
        self.reached.set()
        assert self.open.wait(TIMEOUT_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Put a gate in place of the copy loop."""
    gate = Gate()
    monkeypatch.setattr(_host, "copy_ranges", gate.copy)
    yield gate
    gate.open.set()


def test_submit_returns_before_the_copy_has_ended(gate: Gate, stream: CopyStream) -> None:
    """A ticket is open while its batch runs, and done when it has."""
    ticket = stream.submit(_batch_of_nothing())
    assert gate.reached.wait(TIMEOUT_S)
    assert not ticket.done()
    gate.open.set()
    ticket.wait()
    assert ticket.done()
    assert ticket.error is None


def test_batches_of_a_stream_run_one_after_the_other(gate: Gate, stream: CopyStream) -> None:
    """The second batch is not begun before the first has ended."""
    batches = [_batch_of_nothing() for _ in range(3)]
    tickets = [stream.submit(batch) for batch in batches]
    assert gate.reached.wait(TIMEOUT_S)
    assert gate.entered == batches[:1]
    gate.open.set()
    tickets[-1].wait()
    assert gate.entered == batches
    assert all(ticket.done() for ticket in tickets)


def test_close_finishes_queued_batches(gate: Gate) -> None:
    """Closing with batches in flight ends them all, then the thread."""
    stream = HostCopyBackend().open_stream("closing")
    tickets = [stream.submit(_batch_of_nothing()) for _ in range(3)]
    assert gate.reached.wait(TIMEOUT_S)
    closer = threading.Thread(target=stream.close)
    closer.start()
    assert not tickets[0].done()
    gate.open.set()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    assert all(ticket.done() for ticket in tickets)
    assert "kv-copy-closing" not in {thread.name for thread in threading.enumerate()}


def test_a_closed_stream_refuses_batches(stream: CopyStream) -> None:
    """Nobody would carry them out. Closing again is fine."""
    stream.close()
    stream.close()
    with pytest.raises(EngineStateError, match="closed"):
        stream.submit(_batch_of_nothing())


def test_an_error_ends_its_batch_only(monkeypatch: pytest.MonkeyPatch, stream: CopyStream) -> None:
    """The thread survives an exception, which the ticket reports (sglang#38428)."""
    real, failures = copy_ranges, [OSError("machine check")]

    def fail_once(batch: CopyBatch) -> None:
        if failures:
            raise failures.pop()
        real(batch)

    monkeypatch.setattr(_host, "copy_ranges", fail_once)
    data = np.arange(8, dtype=np.int8)
    out = np.zeros_like(data)
    failed = stream.submit(_batch_of_nothing())
    good = stream.submit(_batch((data.ctypes.data, out.ctypes.data, 8)))
    good.wait()
    assert isinstance(failed.error, OSError)
    assert good.error is None
    assert out.tolist() == data.tolist()


def test_adjacent_ranges_become_one_copy(
    monkeypatch: pytest.MonkeyPatch, stream: CopyStream
) -> None:
    """Ranges that continue each other on both sides are joined, others are not."""
    copies: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        ctypes, "memmove", lambda to, source, size: copies.append((source, to, size))
    )
    stream.submit(
        _batch(
            (1000, 5000, 10),
            (1010, 5010, 20),  # continues both
            (1030, 6000, 5),  # continues the source only
            (9000, 6005, 5),  # continues the destination only
            (9005, 6010, 7),  # continues both
            (8998, 6003, 7),  # ends where the one before began
        )
    ).wait()
    assert copies == [(1000, 5000, 30), (1030, 6000, 5), (9000, 6005, 12), (8998, 6003, 7)]


def _scattered(count: int, size: int, gap: int) -> tuple[CopyBatch, Bytes, Bytes, Bytes]:
    """Return pages in random order on both sides, the memory, and what it should hold then."""
    random = np.random.default_rng(count)
    source = random.integers(-128, 128, count * (size + gap), dtype=np.int8)
    found = np.full(count * (size + gap), 77, dtype=np.int8)
    expected = found.copy()
    starts, places = (random.permutation(count) * (size + gap) for _ in range(2))
    for start, place in zip(starts.tolist(), places.tolist(), strict=True):
        expected[place : place + size] = source[start : start + size]
    batch = CopyBatch(
        source.ctypes.data + starts, found.ctypes.data + places, np.full(count, size, np.int64)
    )
    return batch, source, found, expected


@pytest.mark.parametrize(
    ("count", "size"),
    [(16, 1), (500, 7), (200, 4096), (40, 8192), (15, 4096), (30, 8193), (1, 100_000)],
)
def test_scattered_pages_arrive_whole(count: int, size: int, stream: CopyStream) -> None:
    """Pages of any size and number are copied byte for byte, and nothing beside them."""
    batch, _source, found, expected = _scattered(count, size, gap=5)
    ticket = stream.submit(batch)
    ticket.wait()
    assert ticket.error is None
    np.testing.assert_array_equal(found, expected)


def test_sizes_may_be_mixed(stream: CopyStream) -> None:
    """Each size of a batch is copied in the way that suits it; the order does not matter."""
    parts = [_scattered(100, 512, 1), _scattered(50, 640, 3), _scattered(20, 20_000, 9)]
    order = np.random.default_rng(3).permutation(170)
    batch = CopyBatch(
        *(
            np.concatenate([getattr(part[0], column) for part in parts])[order]
            for column in ("sources", "destinations", "sizes")
        )
    )
    stream.submit(batch).wait()
    for _batch_of_part, _source, found, expected in parts:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("count", "size", "calls"), [(16, 8192, 0), (15, 8192, 15), (16, 8193, 16)]
)
def test_many_small_pages_need_no_call_each(
    count: int, size: int, calls: int, monkeypatch: pytest.MonkeyPatch, stream: CopyStream
) -> None:
    """A loop over ranges runs only where ranges are large or few."""
    made: list[int] = []
    monkeypatch.setattr(ctypes, "memmove", lambda _to, _source, n: made.append(n))
    batch, *_memory = _scattered(count, size, gap=1)
    stream.submit(batch).wait()
    assert made == [size] * calls


def test_what_lies_between_pages_need_not_be_mapped(stream: CopyStream) -> None:
    """Sources in several mappings are copied at once, and the memory between is not touched."""
    page, count = mmap.PAGESIZE, 32
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found = np.zeros(2 * page, dtype=np.int8)
    with mmap.mmap(-1, 3 * page) as memory:
        memory[:page], memory[2 * page :] = b"a" * page, b"c" * page
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert protect(start + page, page, 0) == 0
        pieces = np.arange(0, page, page // count, dtype=np.int64)[::-1]
        ticket = stream.submit(
            CopyBatch(
                start + np.concatenate([pieces, 2 * page + pieces]),
                found.ctypes.data + np.concatenate([page + pieces, pieces]),
                np.full(2 * count, page // count, dtype=np.int64),
            )
        )
        ticket.wait()
        assert ticket.error is None
    assert found.tobytes() == b"c" * page + b"a" * page


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    gaps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=12, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_merged_copies_move_the_same_bytes(
    sizes: list[int], gaps: list[tuple[int, int]], order: Random
) -> None:
    """Any batch equals one copy after the other, and bytes between the ranges are untouched."""
    source = np.random.default_rng(1).integers(-128, 128, 256, dtype=np.int8)
    found = np.full(256, 77, dtype=np.int8)
    expected = found.copy()
    ranges, source_at, destination_at = [], 0, 0
    for size, (source_gap, destination_gap) in zip(sizes, gaps, strict=False):
        source_at += source_gap
        destination_at += destination_gap
        ranges.append((source_at, destination_at, size))
        source_at += size
        destination_at += size
    tail = ranges[len(ranges) // 2 :]
    order.shuffle(tail)
    ranges[len(ranges) // 2 :] = tail
    for start, to, size in ranges:
        expected[to : to + size] = source[start : start + size]
    stream = HostCopyBackend().open_stream("merging")
    stream.submit(
        _batch(
            *((source.ctypes.data + start, found.ctypes.data + to, n) for start, to, n in ranges)
        )
    ).wait()
    stream.close()
    np.testing.assert_array_equal(found, expected)
