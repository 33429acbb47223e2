"""Handlers over the memory of a CUDA device: bytes, order, and overlap with the engine's kernels.

Where order matters the engine's kernels are slow on purpose: they spin for some clock cycles.
Written for one large device, and not run on one yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.device import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CpuGpuOffloadingHandlers,
    KVLayout,
    RegisteredLayer,
    canonicalize_kv_caches,
)
from kv_core.device.copy import choose_backend
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.device.conftest import Layout, Memory

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 400_000_000  # About a quarter of a second.
KIB = 1024


@pytest.fixture(scope="module")
def torch() -> Any:
    """Return torch, if it sees a device."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch


class Opened:
    """Handlers that a test made, for the end of the test."""

    def __init__(self) -> None:
        self.handlers: list[CpuGpuOffloadingHandlers] = []

    def open(
        self, caches: CanonicalKVCaches, cpu_tensors: list[Any], factor: int = 1
    ) -> CpuGpuOffloadingHandlers:
        """Make handlers with the back end that is chosen for this memory."""
        backend = choose_backend([tensor.tensor for tensor in caches.tensors], cpu_tensors)
        self.handlers.append(CpuGpuOffloadingHandlers(caches, cpu_tensors, factor, backend))
        return self.handlers[-1]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Return what makes handlers, and shuts them down afterwards."""
    opened = Opened()
    yield opened
    for handlers in opened.handlers:
        handlers.gpu_to_cpu.shutdown()
        handlers.cpu_to_gpu.shutdown()


@pytest.mark.parametrize("to_cpu", [True, False], ids=["store", "load"])
@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "unpinned"])
@pytest.mark.parametrize(
    ("pages", "factor"),
    [
        pytest.param((40, 24), 3, id="40 and 24 bytes, factor 3"),
        pytest.param((33, 7), 2, id="odd sizes"),
        pytest.param((16 * KIB, 4 * KIB), 1, id="16 KiB"),
        pytest.param((64 * KIB, 27 * KIB), 4, id="64 KiB, factor 4"),
        pytest.param((2048 * KIB,), 1, id="2 MiB"),
    ],
)
def test_transfers_equal_the_loop(
    torch: Any,
    opened: Opened,
    make_memory: type[Memory],
    make_layout: type[Layout],
    pages: tuple[int, ...],
    factor: int,
    is_pinned: bool,
    to_cpu: bool,
) -> None:
    """All memory, guards and padding included, is as a page-by-page copy leaves it."""
    groups = (tuple((i, page) for i, page in enumerate(pages)), ((0, max(1, pages[0] - 8)),))
    layout = make_layout(pages, groups, factor, gpu_blocks=48, cpu_blocks=40)
    memory, expected = make_memory(layout), make_memory(layout)
    gpu_arrays = [torch.from_numpy(array).cuda() for array in memory.gpu]
    gpu_tensors = [array[1:-1, :page] for array, page in zip(gpu_arrays, layout.pages, strict=True)]
    if is_pinned:
        memory.cpu = torch.from_numpy(memory.cpu).pin_memory().numpy()
    handlers = opened.open(memory.kv_caches(gpu_tensors), memory.cpu_tensors(), factor)

    random = np.random.default_rng(5)
    sizes, first = [20, 13], [1, 6]
    slots = sum(
        -(-(size + start % factor) // factor) for size, start in zip(sizes, first, strict=True)
    )
    gpu = GPULoadStoreSpec(random.permutation(48)[:33].tolist(), sizes, first)
    cpu = CPULoadStoreSpec(random.permutation(40)[:slots].tolist())
    handler = handlers.gpu_to_cpu if to_cpu else handlers.cpu_to_gpu
    handler.transfer_async(1, (gpu, cpu) if to_cpu else (cpu, gpu))
    handler.wait([1])
    (result,) = handler.get_finished()
    assert (result.success, result.transfer_time > 0) == (True, True)

    expected.copy_in_a_loop(gpu, cpu, to_cpu)
    np.testing.assert_array_equal(memory.cpu, expected.cpu)
    for array, wanted in zip(gpu_arrays, expected.gpu, strict=True):
        np.testing.assert_array_equal(array.cpu().numpy(), wanted)


class Rig:
    """64 pages of a megabyte on the device, as many pinned slots, and a compute stream."""

    def __init__(self, torch: Any, opened: Opened, compute: Any) -> None:
        self.torch = torch
        self.compute = compute
        self.gpu = torch.zeros(64, 2**20, dtype=torch.int8, device="cuda")
        self.cpu = torch.zeros(64, 2**20, dtype=torch.int8, pin_memory=True)
        torch.cuda.synchronize()
        caches = CanonicalKVCaches(
            (CanonicalKVCacheTensor(self.gpu, 2**20),), ((CanonicalKVCacheRef(0, 2**20),),)
        )
        self.handlers = opened.open(caches, [self.cpu])

    def store(self, job_id: int, pages: list[int], slots: list[int]) -> None:
        """Submit a store."""
        gpu, cpu = GPULoadStoreSpec(pages, [len(pages)], [0]), CPULoadStoreSpec(slots)
        assert self.handlers.gpu_to_cpu.transfer_async(job_id, (gpu, cpu))

    def load(self, job_id: int, slots: list[int], pages: list[int]) -> None:
        """Submit a load."""
        gpu, cpu = GPULoadStoreSpec(pages, [len(pages)], [0]), CPULoadStoreSpec(slots)
        assert self.handlers.cpu_to_gpu.transfer_async(job_id, (cpu, gpu))

    def spin(self) -> Any:
        """Keep the compute stream busy; return an event behind that."""
        self.torch.cuda._sleep(SPIN_CYCLES)
        event = self.torch.cuda.Event()
        event.record()
        return event


@pytest.fixture(params=["default stream", "own stream"])
def rig(request: pytest.FixtureRequest, torch: Any, opened: Opened) -> Iterator[Rig]:
    """Return a worker whose compute stream is the default one, or another."""
    compute = torch.cuda.Stream() if request.param == "own stream" else torch.cuda.default_stream()
    with torch.cuda.stream(compute):
        yield Rig(torch, opened, compute)
    torch.cuda.synchronize()


def test_a_store_waits_for_the_writers_of_its_pages(rig: Rig) -> None:
    """The kernel that fills the page has not begun when the store is submitted (vllm#45704)."""
    for turn in range(1, 9):
        rig.spin()
        rig.gpu[5].fill_(turn)
        rig.store(turn, [5], [turn])
        rig.handlers.gpu_to_cpu.wait([turn])
    stored = rig.cpu[1:9]
    assert stored.amin(dim=1).tolist() == stored.amax(dim=1).tolist() == list(range(1, 9))


def test_a_load_waits_for_the_readers_of_its_pages(rig: Rig) -> None:
    """The kernel that reads the page has not begun when the load is submitted (vllm#47282)."""
    seen = rig.torch.zeros(8, 2**20, dtype=rig.torch.int8, device="cuda")
    rig.cpu[:8] = rig.torch.arange(1, 9, dtype=rig.torch.int8)[:, None]
    for turn in range(8):
        rig.spin()
        seen[turn].copy_(rig.gpu[5])
        rig.load(turn, [turn], [5])
        rig.handlers.cpu_to_gpu.wait([turn])
    rig.torch.cuda.synchronize()
    assert seen.amin(dim=1).tolist() == seen.amax(dim=1).tolist() == list(range(8))
    assert rig.gpu[5].unique().tolist() == [8]


@pytest.mark.parametrize("direction", ["store", "load"])
def test_submitting_does_not_wait_for_the_device(rig: Rig, direction: str) -> None:
    """The engine's thread is back before the kernels are done that the copy waits for."""
    getattr(rig, direction)(0, [0], [0])  # The first copy prepares what later ones use.
    handler = rig.handlers.gpu_to_cpu if direction == "store" else rig.handlers.cpu_to_gpu
    handler.wait([0])
    handler.get_finished()
    busy = rig.spin()
    getattr(rig, direction)(1, [1, 2], [1, 2])
    assert handler.get_finished() == []
    assert not busy.query()
    handler.wait([1])
    assert busy.query()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_transfers_overlap_with_the_engine_s_next_kernels(rig: Rig, direction: str) -> None:
    """A copy ends while a kernel still runs that was started after it."""
    pages = list(range(64))
    getattr(rig, direction)(1, pages, pages)
    busy = rig.spin()
    handler = rig.handlers.gpu_to_cpu if direction == "store" else rig.handlers.cpu_to_gpu
    handler.wait([1])
    assert not busy.query()
    (result,) = handler.get_finished()
    assert (result.success, result.transfer_size) == (True, 64 * 2**20)


def test_directions_overlap(rig: Rig) -> None:
    """A small load does not wait for a large store that was submitted before it."""
    pages = list(range(32))
    for job_id in range(64):
        rig.store(job_id, pages, pages)
    rig.load(100, [40], [40])
    rig.handlers.cpu_to_gpu.wait([100])
    assert len(rig.handlers.gpu_to_cpu.get_finished()) < 64


def test_many_transfers_in_flight_keep_their_descriptors(rig: Rig) -> None:
    """Hundreds wait for a kernel, polled all the while; each copies its own pages."""
    rig.gpu[:] = rig.torch.arange(64, dtype=rig.torch.int8, device="cuda")[:, None]
    rig.spin()
    order = np.random.default_rng(1).permutation(64)
    finished = 0
    for job_id in range(512):
        rig.store(job_id, [int(order[job_id % 64])], [job_id % 64])
        finished += len(rig.handlers.gpu_to_cpu.get_finished())
    rig.handlers.gpu_to_cpu.wait(range(512))
    results = rig.handlers.gpu_to_cpu.get_finished()
    assert finished + len(results) == 512
    assert all(result.success for result in results)
    assert rig.cpu.amin(dim=1).tolist() == rig.cpu.amax(dim=1).tolist() == order.tolist()


def test_shutdown_lets_transfers_in_flight_end(rig: Rig) -> None:
    """Bytes are in place when it returns, and the results can still be had."""
    rig.spin()
    rig.gpu.fill_(9)
    rig.store(1, list(range(64)), list(range(64)))
    rig.handlers.gpu_to_cpu.shutdown()
    assert [(r.job_id, r.success) for r in rig.handlers.gpu_to_cpu.get_finished()] == [(1, True)]
    assert rig.cpu.unique().tolist() == [9]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (KVLayout.KV_FIRST, (2, 32, 16, 8, 128)),
        (KVLayout.BLOCK_FIRST, (32, 2, 16, 8, 128)),
        (KVLayout.SINGLE, (32, 16, 576)),
    ],
)
def test_registered_layers_survive_a_round_trip(
    torch: Any, opened: Opened, layout: KVLayout, shape: tuple[int, ...]
) -> None:
    """Four bfloat16 layers of each real layout: stored, wiped, loaded, equal."""
    layers = [torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(4)]
    expected = [layer.clone() for layer in layers]
    caches = canonicalize_kv_caches(
        [RegisteredLayer(f"layers.{i}", layer, 0, layout) for i, layer in enumerate(layers)],
        num_blocks=32,
        num_groups=1,
    )
    cpu = [
        torch.zeros(16, 2 * tensor.page_size_bytes, dtype=torch.int8, pin_memory=True)
        for tensor in caches.tensors
    ]
    handlers = opened.open(caches, cpu, factor=2)
    order = np.random.default_rng(2).permutation(32).tolist()
    gpu_spec, cpu_spec = GPULoadStoreSpec(order, [32], [0]), CPULoadStoreSpec(range(16))
    handlers.gpu_to_cpu.transfer_async(1, (gpu_spec, cpu_spec))
    handlers.gpu_to_cpu.wait([1])
    for layer in layers:
        layer.zero_()
    handlers.cpu_to_gpu.transfer_async(2, (cpu_spec, gpu_spec))
    handlers.cpu_to_gpu.wait([2])
    assert all(torch.equal(*pair) for pair in zip(layers, expected, strict=True))
