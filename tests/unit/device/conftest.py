"""Shared pieces of the device tests: memory on both sides, an oracle, and copies on command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import pytest

from kv_core.device import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CpuGpuOffloadingHandlers,
    KVTensor,
)
from kv_core.device.copy import CopyBackend, CopyBatch, HostCopyBackend, TorchCopyBackend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec

Bytes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Layout:
    """Sizes of one worker's memory.

    Attributes:
        pages: Bytes of a GPU page of each tensor, padding included.
        groups: For each group, (tensor, unpadded bytes) of its references.
        factor: GPU blocks in one offloaded block.
        gpu_blocks: Rows of the GPU tensors.
        cpu_blocks: Slots.
    """

    pages: tuple[int, ...] = (32, 24)
    groups: tuple[tuple[tuple[int, int], ...], ...] = (((0, 32), (1, 24)),)
    factor: int = 1
    gpu_blocks: int = 8
    cpu_blocks: int = 6


class Memory:
    """GPU and CPU memory of a layout: random bytes, with a guard on every side.

    The CPU side is one array whose rows hold the pages of all tensors and then padding, as in the
    shared region.
    """

    GUARD = 16

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        random = np.random.default_rng(7)

        def block(rows: int, width: int) -> Bytes:
            shape = (rows + 2, width + self.GUARD)
            return random.integers(-128, 128, size=shape, dtype=np.int8)

        self.gpu = [block(layout.gpu_blocks, page) for page in layout.pages]
        self.cpu = block(layout.cpu_blocks, sum(layout.pages) * layout.factor)

    @property
    def everything(self) -> list[Bytes]:
        """All arrays, guards included."""
        return [*self.gpu, self.cpu]

    def gpu_tensors(self) -> list[Bytes]:
        """Return the GPU tensors: strided, because of the guards."""
        pages = self.layout.pages
        return [array[1:-1, :page] for array, page in zip(self.gpu, pages, strict=True)]

    def cpu_tensors(self) -> list[Bytes]:
        """Return the place of each tensor in the slots."""
        tensors, start = [], 0
        for page in self.layout.pages:
            width = page * self.layout.factor
            tensors.append(self.cpu[1:-1, start : start + width])
            start += width
        return tensors

    def copy_in_a_loop(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, to_cpu: bool) -> None:
        """Do what a transfer should do, one page at a time: the oracle."""
        layout = self.layout
        gpu_ids, cpu_ids = iter(gpu.block_ids.tolist()), iter(cpu.block_ids.tolist())
        for refs, count, first in zip(
            layout.groups, gpu.group_sizes, gpu.block_indices, strict=True
        ):
            slot = None
            for logical in range(first, first + count):
                if slot is None or logical % layout.factor == 0:
                    slot = next(cpu_ids)
                    if to_cpu:
                        self._clear_unused(refs, slot)
                gpu_id = next(gpu_ids)
                for tensor, size in refs:
                    page = self.gpu_tensors()[tensor][gpu_id, :size]
                    start = logical % layout.factor * layout.pages[tensor]
                    place = self.cpu_tensors()[tensor][slot, start : start + size]
                    if to_cpu:
                        place[:] = page
                    else:
                        page[:] = place

    def _clear_unused(self, refs: Sequence[tuple[int, int]], slot: int) -> None:
        """Zero what a group does not write of a slot, one GPU page at a time."""
        for index, page_bytes in enumerate(self.layout.pages):
            row = self.cpu_tensors()[index][slot]
            used_bytes = max((size for tensor, size in refs if tensor == index), default=0)
            for start in range(0, len(row), page_bytes):
                row[start + used_bytes : start + page_bytes] = 0

    def kv_caches(self, tensors: Sequence[KVTensor]) -> CanonicalKVCaches:
        """Describe the GPU side."""
        return CanonicalKVCaches(
            tuple(map(CanonicalKVCacheTensor, tensors, self.layout.pages)),
            tuple(
                tuple(CanonicalKVCacheRef(tensor, size) for tensor, size in refs)
                for refs in self.layout.groups
            ),
        )


class OpenHandlers(Protocol):
    """Makes handlers over a memory, with a real back end or the given one."""

    def __call__(
        self, memory: Memory, backend: CopyBackend | None = None
    ) -> CpuGpuOffloadingHandlers:
        """Make the handlers."""


@pytest.fixture
def make_memory() -> type[Memory]:
    """Return the class of test memories."""
    return Memory


@pytest.fixture
def make_layout() -> type[Layout]:
    """Return the class of layouts."""
    return Layout


def open_on_host(memory: Memory, backend: CopyBackend | None = None) -> CpuGpuOffloadingHandlers:
    """Make handlers over numpy arrays."""
    return CpuGpuOffloadingHandlers(
        memory.kv_caches(memory.gpu_tensors()),
        memory.cpu_tensors(),
        memory.layout.factor,
        HostCopyBackend() if backend is None else backend,
    )


def open_on_torch(memory: Memory, backend: CopyBackend | None = None) -> CpuGpuOffloadingHandlers:
    """Make handlers over torch tensors that share the memory."""
    torch: Any = pytest.importorskip("torch")
    gpu = [torch.from_numpy(array) for array in memory.gpu_tensors()]
    cpu = [torch.from_numpy(array) for array in memory.cpu_tensors()]
    return CpuGpuOffloadingHandlers(
        memory.kv_caches(gpu),
        cpu,
        memory.layout.factor,
        TorchCopyBackend([*gpu, *cpu]) if backend is None else backend,
    )


@pytest.fixture(
    params=[
        pytest.param(open_on_host, id="host"),
        pytest.param(open_on_torch, id="torch", marks=pytest.mark.torch),
    ]
)
def open_handlers(request: pytest.FixtureRequest) -> Iterator[OpenHandlers]:
    """Return a function that makes handlers, for each kind of memory."""
    opened: list[CpuGpuOffloadingHandlers] = []

    def open_and_remember(
        memory: Memory, backend: CopyBackend | None = None
    ) -> CpuGpuOffloadingHandlers:
        opened.append(cast("OpenHandlers", request.param)(memory, backend))
        return opened[-1]

    yield open_and_remember
    for handlers in opened:
        handlers.gpu_to_cpu.shutdown()
        handlers.cpu_to_gpu.shutdown()


@dataclass(eq=False)
class ManualTicket:
    """A batch that ends when the test says so."""

    batch: CopyBatch
    ended: bool = False
    error: BaseException | None = None
    elapsed_seconds: float = 0.25
    waits: int = 0

    def done(self) -> bool:
        """Say whether the test has ended it."""
        return self.ended

    def wait(self) -> None:
        """Count the call, and end."""
        self.waits += 1
        self.ended = True


@dataclass(eq=False)
class ManualStream:
    """Keeps batches instead of copying them."""

    tickets: list[ManualTicket] = field(default_factory=list)
    closed: bool = False

    def submit(self, batch: CopyBatch) -> ManualTicket:
        """Remember a batch."""
        self.tickets.append(ManualTicket(batch))
        return self.tickets[-1]

    def close(self) -> None:
        """End everything."""
        self.closed = True
        for ticket in self.tickets:
            ticket.ended = True


@dataclass(eq=False)
class ManualBackend:
    """Hands out streams that the test controls, by name."""

    name: str = "manual"
    streams: dict[str, ManualStream] = field(default_factory=dict)

    def open_stream(self, name: str) -> ManualStream:
        """Open a stream."""
        self.streams[name] = ManualStream()
        return self.streams[name]


@pytest.fixture
def manual() -> ManualBackend:
    """Return a back end whose copies end on command and move nothing."""
    return ManualBackend()
