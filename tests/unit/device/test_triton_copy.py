"""The kernel for loads of small pages, under Triton's interpreter, against numpy."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from kv_core.device.copy import CopyBatch, CudaCopyBackend
from kv_core.device.copy._triton import TritonCopier, chunk_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Triton comes with torch, and interprets kernels over torch's tensors.
needs_torch = pytest.mark.torch

KERNEL = "kv_core.device.copy._triton_kernel"
GUARD = 77


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Define the kernel anew, for the interpreter, and let nobody else find it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    yield
    sys.modules.pop(KERNEL, None)


class Mark:
    """An event that is reached when the test says so."""

    def __init__(self) -> None:
        self.records = 0
        self.is_reached = True

    def record(self, stream: object) -> None:
        """Count."""
        self.records += 1

    def query(self) -> bool:
        """Say what the test has said."""
        return self.is_reached

    def synchronize(self) -> None:
        """Be reached."""

    def elapsed_time(self, end_event: object) -> float:
        """Return nothing of interest."""
        return 0.0


class Api:
    """Makes streams and events, keeps the events, and knows the current stream."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.current: object = None

    def Stream(self, device: object) -> Any:  # noqa: N802 - torch.cuda's name
        """Make a stream."""
        return SimpleNamespace(device=device)

    def Event(self, *, enable_timing: bool) -> Mark:  # noqa: N802 - torch.cuda's name
        """Make an event."""
        self.marks.append(Mark())
        return self.marks[-1]

    def current_stream(self, device: object) -> Any:
        """Return the compute stream of a device."""
        return f"compute stream of {device}"

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        """Make a stream the current one."""
        self.current, before = stream, self.current
        yield
        self.current = before


def _copier(api: Api, *page_sizes: int) -> TritonCopier:
    torch: Any = pytest.importorskip("torch")
    pytest.importorskip("triton")
    return TritonCopier(api, torch.device("cpu"), page_sizes)


class Pages(NamedTuple):
    """Pages on two sides in different orders, and what the destination should hold then."""

    batch: CopyBatch
    source: npt.NDArray[np.int8]
    found: npt.NDArray[np.int8]
    expected: npt.NDArray[np.int8]


def _pages(sizes: list[int]) -> Pages:
    """Lay pages out with a guard of 8 bytes around each, at addresses that are multiples of 8."""
    random = np.random.default_rng(len(sizes))
    spans = np.array(sizes, dtype=np.int64) + 8
    total = int(spans.sum()) + 8
    source = np.frombuffer(random.bytes(total), dtype=np.int8)
    found = np.full(total, GUARD, dtype=np.int8)
    expected = found.copy()
    order = random.permutation(len(sizes))
    starts = np.empty(len(sizes), dtype=np.int64)
    starts[order] = 8 + np.concatenate([[0], np.cumsum(spans[order])[:-1]])
    places = 8 + np.concatenate([[0], np.cumsum(spans)[:-1]])
    for start, place, size in zip(starts.tolist(), places.tolist(), sizes, strict=True):
        expected[place : place + size] = source[start : start + size]
    batch = CopyBatch(
        source.ctypes.data + starts, found.ctypes.data + places, np.array(sizes, dtype=np.int64)
    )
    return Pages(batch, source, found, expected)


@needs_torch
@pytest.mark.parametrize(
    ("count", "page_bytes"),
    [
        pytest.param(1, 8, id="one word"),
        pytest.param(1, 4096, id="one page"),
        pytest.param(11, 24, id="fewer pages than programs"),
        pytest.param(12, 512, id="a page for each program"),
        pytest.param(40, 4104, id="not a multiple of the chunk"),
        pytest.param(13, 8192, id="one chunk"),
        pytest.param(16, 28 * 1024 - 8, id="several chunks and a part"),
        pytest.param(2000, 16, id="thousands"),
    ],
)
def test_pages_arrive_whole_and_nothing_beside_them(count: int, page_bytes: int) -> None:
    """Any number and size: the bytes are those of a copy in a loop, guards included."""
    pages = _pages([page_bytes] * count)
    _copier(Api(), page_bytes).copy(pages.batch, stream=None)
    np.testing.assert_array_equal(pages.found, pages.expected)


@needs_torch
def test_sizes_may_be_mixed() -> None:
    """Each page of a batch has its own size, larger or smaller than the chunk."""
    pages = _pages([8, 2048, 2056, 16, 1000, 5000, 8200, 96, 8, 6664])
    _copier(Api(), 2048).copy(pages.batch, stream=None)
    np.testing.assert_array_equal(pages.found, pages.expected)


@needs_torch
def test_no_pages_are_no_launch() -> None:
    """An empty batch takes no descriptors and leaves no mark."""
    api = Api()
    copier = _copier(api, 64)
    nothing = np.empty(0, dtype=np.int64)
    copier.copy(CopyBatch(nothing, nothing, nothing), stream=None)
    assert [mark.records for mark in api.marks] == [0]


@needs_torch
def test_descriptors_are_used_again_only_once_they_were_read() -> None:
    """A kernel that is still queued would otherwise read the addresses of another batch."""
    api = Api()
    copier = _copier(api, 64)
    pages = _pages([64] * 20)
    copier.copy(pages.batch, stream=None)
    api.marks[0].is_reached = False
    copier.copy(pages.batch, stream=None)
    assert [mark.records for mark in api.marks] == [1, 1]
    api.marks[0].is_reached = True
    for _ in range(3):
        copier.copy(pages.batch, stream=None)
    assert sum(mark.records for mark in api.marks) == 5
    assert len(api.marks) == 2


@needs_torch
def test_descriptors_grow_with_the_batch() -> None:
    """A batch larger than any before gets larger descriptors, which later ones use as well."""
    api = Api()
    copier = _copier(api, 8)
    for count in (3, 1500, 3):
        pages = _pages([8] * count)
        copier.copy(pages.batch, stream=None)
        np.testing.assert_array_equal(pages.found, pages.expected)
    assert [mark.records for mark in api.marks] == [1, 2]


@needs_torch
def test_a_failed_launch_keeps_its_descriptors_until_the_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may be on their way to the device when the launch fails."""
    api = Api()
    copier = _copier(api, 64)

    def refuse(*_arguments: object) -> None:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(copier, "_launch", refuse)
    with pytest.raises(RuntimeError, match="out of resources"):
        copier.copy(_pages([64]).batch, stream=None)
    assert api.marks[0].records == 1


@needs_torch
def test_the_kernel_is_compiled_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each chunk, when the copier is made; a batch never waits for a compiler."""
    copier = _copier(Api(), 1024, 1000, 20_000)
    launches: list[int] = []
    monkeypatch.setattr(
        copier, "_launch", lambda _descriptors, _count, chunk_bytes: launches.append(chunk_bytes)
    )
    for size in (8, 1024, 1032, 8192, 28_000):
        copier.copy(_pages([size]).batch, stream=None)
    assert launches == [1024, 1024, 8192, 8192, 8192]


@pytest.mark.parametrize(
    ("page_bytes", "chunk_bytes"),
    [
        (1, 8),
        (8, 8),
        (9, 16),
        (16, 16),
        (4095, 4096),
        (4096, 4096),
        (4097, 8192),
        (8192, 8192),
        (8193, 8192),
        (2**20, 8192),
    ],
)
def test_a_chunk_is_a_power_of_two_up_to_8_kib(page_bytes: int, chunk_bytes: int) -> None:
    """Lanes of a program come in powers of two; larger pages take several chunks."""
    assert chunk_bytes_of(page_bytes) == chunk_bytes


@needs_torch
def test_without_a_compiler_copies_go_on_without_the_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A back end whose kernel cannot be made warns once, and leaves all copies to the driver."""
    torch: Any = pytest.importorskip("torch")

    def refuse(*_arguments: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TritonCopier, "_launch", refuse)
    driver: Any = SimpleNamespace()
    backend = CudaCopyBackend(driver, Api(), torch.device("cpu"), page_sizes=[64])
    for name in ("gpu-to-cpu", "cpu-to-gpu"):
        backend.open_stream(name)
    (record,) = caplog.records
    assert "Failed to find C compiler" in record.getMessage()
    assert "TRITON_CACHE_DIR" in record.getMessage()


@needs_torch
def test_the_kernel_is_compiled_for_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the one that happens to be current when a worker starts."""
    api, seen = Api(), list[object]()
    monkeypatch.setattr(TritonCopier, "_launch", lambda *_arguments: seen.append(api.current))
    _copier(api, 64, 4096)
    assert seen == ["compute stream of cpu"] * 2
    assert api.current is None
