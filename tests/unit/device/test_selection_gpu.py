"""Copies on a CUDA device: bytes, order, overlap. Not yet run on real hardware.

Nothing waits for a length of time: a kernel that spins for about a second keeps a stream busy, and
what must happen meanwhile is asked of events.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from kv_core.device import tensor_address
from kv_core.device.copy import (
    CopyBatch,
    CudaCopier,
    CudaCopyBackend,
    CudaDriver,
    MemoryKind,
    PinnedRows,
    TorchCopyBackend,
    choose_backend,
    host_registrar_of,
)
from kv_core.device.copy._triton import TritonCopier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_core.device.copy import CopyBackend, CopyStream

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

ROWS = 48
SPIN_CYCLES = 2_000_000_000  # about a second


@pytest.fixture
def torch() -> Any:
    """Return torch, where it sees a device."""
    module: Any = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return module


class Memory:
    """Rows in host memory, which may be pinned, and a pool of pages on the device."""

    def __init__(self, torch: Any, page_bytes: int, *, pinned: bool) -> None:
        # Twice the page, so that a guard follows each; and rows of whole words.
        self.stride = -(-2 * page_bytes // 8) * 8
        self.page_bytes = page_bytes
        self._mapping = mmap.mmap(-1, ROWS * self.stride)
        self.rows: npt.NDArray[np.int8] = np.frombuffer(self._mapping, dtype=np.int8).reshape(
            ROWS, self.stride
        )
        random = np.random.default_rng(page_bytes)
        self.rows[:] = random.integers(-128, 128, self.rows.shape, dtype=np.int8)
        self.pool = torch.zeros((ROWS, self.stride), dtype=torch.int8, device="cuda")
        self.pool.copy_(torch.from_numpy(random.permutation(self.rows.ravel()).reshape(ROWS, -1)))
        torch.cuda.synchronize()
        self._pinned: PinnedRows | None = None
        if pinned:
            registrar = host_registrar_of(self.pool)
            assert registrar is not None
            self._pinned = PinnedRows(registrar, self.rows.ctypes.data, ROWS, self.stride)
            assert self._pinned.is_pinned

    def close(self) -> None:
        """Unpin. The mapping goes with the last array over it."""
        if self._pinned is not None:
            self._pinned.release()

    def on_host(self) -> npt.NDArray[np.int8]:
        """Return a copy of the pool, when the device has finished all work."""
        return np.array(self.pool.cpu().numpy())

    def batch(self, pages: list[int], rows: list[int], *, to_cpu: bool) -> CopyBatch:
        """Describe a copy of pages of the pool to or from rows."""
        gpu = tensor_address(self.pool) + np.array(pages, dtype=np.int64) * self.stride
        cpu = self.rows.ctypes.data + np.array(rows, dtype=np.int64) * self.stride
        sizes = np.full(len(pages), self.page_bytes, dtype=np.int64)
        return CopyBatch(*((gpu, cpu) if to_cpu else (cpu, gpu)), sizes)

    def backend(self) -> CopyBackend:
        """Return what a worker would get for this memory."""
        return choose_backend([self.pool[:, : self.page_bytes]], [self.rows])


@pytest.fixture(params=[True, False], ids=["pinned", "pageable"])
def pinned(request: pytest.FixtureRequest) -> bool:
    """Return whether host memory is pinned."""
    return bool(request.param)


@pytest.fixture(params=[8, 1001, 4096, 28 * 1024 - 8, 65536, 2**21])
def memory(torch: Any, request: pytest.FixtureRequest, pinned: bool) -> Iterator[Memory]:
    """Return memory with pages of several sizes: for the kernel, unaligned, for copy engines."""
    memory = Memory(torch, request.param, pinned=pinned)
    yield memory
    memory.close()


@pytest.fixture
def small(torch: Any) -> Iterator[Memory]:
    """Return pinned memory with pages that the kernel would load."""
    memory = Memory(torch, 4096, pinned=True)
    yield memory
    memory.close()


def _move(stream: CopyStream, batch: CopyBatch) -> None:
    ticket = stream.submit(batch)
    ticket.wait()
    assert ticket.error is None
    assert ticket.elapsed_seconds > 0


@pytest.mark.parametrize("count", [1, 15, 40])
def test_stores_and_loads_move_pages_and_nothing_else(memory: Memory, count: int) -> None:
    """Whatever way is chosen: the bytes are those of a copy in a loop, guards included."""
    size, random = memory.page_bytes, np.random.default_rng(count)
    backend = memory.backend()
    assert isinstance(backend, CudaCopyBackend)
    for to_cpu in (True, False):
        pages, rows = (random.permutation(ROWS)[:count].tolist() for _ in range(2))
        gpu, cpu = memory.on_host(), memory.rows.copy()
        if to_cpu:
            cpu[rows, :size] = gpu[pages, :size]
        else:
            gpu[pages, :size] = cpu[rows, :size]
        stream = backend.open_stream("test")
        _move(stream, memory.batch(pages, rows, to_cpu=to_cpu))
        stream.close()
        np.testing.assert_array_equal(memory.rows, cpu)
        np.testing.assert_array_equal(memory.on_host(), gpu)


def test_torch_moves_the_same(torch: Any, memory: Memory) -> None:
    """The fallback is right with the same memory."""
    everything = [memory.pool, torch.from_numpy(memory.rows)]
    stream = TorchCopyBackend(everything).open_stream("test")
    expected = memory.on_host()[5, : memory.page_bytes]
    _move(stream, memory.batch([5], [7], to_cpu=True))
    stream.close()
    np.testing.assert_array_equal(memory.rows[7, : memory.page_bytes], expected)


def test_the_driver_knows_kinds_of_memory(torch: Any, pinned: bool) -> None:
    """What the rule is built on: device memory, pinned rows, and rows that are neither."""
    memory = Memory(torch, 4096, pinned=pinned)
    driver = CudaDriver()
    assert driver.kind_of(tensor_address(memory.pool)) is MemoryKind.DEVICE
    expected = MemoryKind.PINNED if pinned else MemoryKind.PAGEABLE
    assert driver.kind_of(memory.rows.ctypes.data) is expected
    memory.close()
    assert driver.kind_of(memory.rows.ctypes.data) is MemoryKind.PAGEABLE


def test_a_new_driver_has_the_batch_call(torch: Any) -> None:
    """From CUDA 12.8 on."""
    driver = CudaDriver()
    assert driver.has_batch_copy == (driver.version >= 12080)


def test_the_kernel_can_be_compiled(torch: Any, small: Memory) -> None:
    """Otherwise every test of loads would go through the driver and show nothing."""
    assert CudaCopier(CudaDriver(), torch.cuda, small.pool.device, [4096]).has_kernel


def test_the_kernel_takes_pages_of_any_size(torch: Any, small: Memory) -> None:
    """Compiled, as under the interpreter: sizes that are no multiple of the chunk, many pages."""
    copier = TritonCopier(torch.cuda, small.pool.device, [4096])
    random = np.random.default_rng(9)
    sizes = random.permutation(np.arange(1, 1 + ROWS, dtype=np.int64) * 128)
    gpu, cpu = small.on_host(), small.rows
    for row in range(ROWS):
        gpu[row, : sizes[row]] = cpu[row, : sizes[row]]
    whole = small.batch(list(range(ROWS)), list(range(ROWS)), to_cpu=False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copier.copy(CopyBatch(whole.sources, whole.destinations, sizes), stream)
    stream.synchronize()
    np.testing.assert_array_equal(small.on_host(), gpu)


@pytest.fixture(params=[4096, 65536], ids=["kernel", "copy engines"])
def ordered(torch: Any, request: pytest.FixtureRequest) -> Iterator[Memory]:
    """Return pinned memory, for each way to load."""
    memory = Memory(torch, request.param, pinned=True)
    yield memory
    memory.close()


def test_a_store_waits_for_the_kernel_that_writes_its_pages(torch: Any, ordered: Memory) -> None:
    """vllm#45704: the store copies what the kernels ahead of it leave, not what was there."""
    stream = ordered.backend().open_stream("gpu-to-cpu")
    _move(stream, ordered.batch([0], [0], to_cpu=True))
    torch.cuda._sleep(SPIN_CYCLES)
    ordered.pool.fill_(42)
    _move(stream, ordered.batch(list(range(20)), list(range(20)), to_cpu=True))
    assert (ordered.rows[:20, : ordered.page_bytes] == 42).all()
    stream.close()


def test_a_load_waits_for_the_kernel_that_reads_its_pages(torch: Any, ordered: Memory) -> None:
    """vllm#47282: the kernels ahead of a load see what was there before it."""
    stream = ordered.backend().open_stream("cpu-to-gpu")
    _move(stream, ordered.batch([47], [47], to_cpu=False))
    before = ordered.on_host()
    torch.cuda._sleep(SPIN_CYCLES)
    seen = ordered.pool.clone()
    _move(stream, ordered.batch(list(range(20)), list(range(20)), to_cpu=False))
    torch.cuda.synchronize()
    np.testing.assert_array_equal(seen.cpu().numpy(), before)
    assert (ordered.on_host() != before).any()
    stream.close()


@pytest.mark.parametrize("to_cpu", [True, False], ids=["store", "load"])
def test_copies_run_beside_later_kernels(torch: Any, ordered: Memory, to_cpu: bool) -> None:
    """A copy ends while the engine's next kernel is still at work."""
    stream = ordered.backend().open_stream("test")
    pages = list(range(20))
    _move(stream, ordered.batch(pages, pages, to_cpu=to_cpu))
    ticket = stream.submit(ordered.batch(pages, pages, to_cpu=to_cpu))
    torch.cuda._sleep(SPIN_CYCLES)
    computed = torch.cuda.Event()
    computed.record()
    ticket.wait()
    assert not computed.query()
    stream.close()


@pytest.mark.parametrize("to_cpu", [True, False], ids=["store", "load"])
def test_submitting_does_not_wait_for_the_device(torch: Any, ordered: Memory, to_cpu: bool) -> None:
    """The forward path goes on while the kernel that the copy waits for is still at work."""
    stream = ordered.backend().open_stream("test")
    pages = list(range(20))
    _move(stream, ordered.batch(pages, pages, to_cpu=to_cpu))
    torch.cuda._sleep(SPIN_CYCLES)
    computed = torch.cuda.Event()
    computed.record()
    ticket = stream.submit(ordered.batch(pages, pages, to_cpu=to_cpu))
    assert not computed.query()
    assert not ticket.done()
    ticket.wait()
    assert computed.query()
    stream.close()
