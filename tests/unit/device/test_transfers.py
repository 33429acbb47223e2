"""Transfers of both directions over real memory, against a loop that copies page by page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_core.cpu import PrimaryGeometry, SharedOffloadRegion
from kv_core.device import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CpuGpuOffloadingHandlers,
)
from kv_core.device.copy import HostCopyBackend
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.device.conftest import Layout, Memory, OpenHandlers


def _transfer(
    handlers: CpuGpuOffloadingHandlers, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, to_cpu: bool
) -> None:
    handler = handlers.gpu_to_cpu if to_cpu else handlers.cpu_to_gpu
    assert handler.transfer_async(1, (gpu, cpu) if to_cpu else (cpu, gpu))
    handler.wait([1])
    (result,) = handler.get_finished()
    assert result.success


def _assert_like_the_loop(
    open_handlers: OpenHandlers,
    make_memory: type[Memory],
    layout: Layout,
    gpu: GPULoadStoreSpec,
    cpu: CPULoadStoreSpec,
    *,
    to_cpu: bool,
) -> Memory:
    """Copy, and compare every byte of all memory, guards and padding included."""
    memory, expected = make_memory(layout), make_memory(layout)
    _transfer(open_handlers(memory), gpu, cpu, to_cpu)
    expected.copy_in_a_loop(gpu, cpu, to_cpu)
    for found, wanted in zip(memory.everything, expected.everything, strict=True):
        np.testing.assert_array_equal(found, wanted)
    return memory


BOTH_WAYS = pytest.mark.parametrize("to_cpu", [True, False], ids=["store", "load"])


@BOTH_WAYS
def test_blocks_land_in_their_slots(
    open_handlers: OpenHandlers, make_memory: type[Memory], make_layout: type[Layout], to_cpu: bool
) -> None:
    """Ids in any order; every tensor of the group moves, nothing else changes."""
    gpu, cpu = GPULoadStoreSpec([5, 2, 7], [3], [0]), CPULoadStoreSpec([0, 4, 1])
    memory = _assert_like_the_loop(
        open_handlers, make_memory, make_layout(), gpu, cpu, to_cpu=to_cpu
    )
    for gpu_tensor, cpu_tensor in zip(memory.gpu_tensors(), memory.cpu_tensors(), strict=True):
        np.testing.assert_array_equal(gpu_tensor[[5, 2, 7]], cpu_tensor[[0, 4, 1]])


@BOTH_WAYS
def test_a_start_within_an_offloaded_block_skips_its_first_part(
    open_handlers: OpenHandlers, make_memory: type[Memory], make_layout: type[Layout], to_cpu: bool
) -> None:
    """Factor 2: from logical block 3 on, the first half of the first slot is left alone."""
    layout = make_layout(factor=2, pages=(32,), groups=(((0, 32),),))
    gpu, cpu = GPULoadStoreSpec([1, 2, 3, 4], [4], [3]), CPULoadStoreSpec([0, 1, 2])
    before = make_memory(layout)
    memory = _assert_like_the_loop(open_handlers, make_memory, layout, gpu, cpu, to_cpu=to_cpu)
    slots = memory.cpu_tensors()[0].copy().reshape(-1, 2, 32)
    old = before.cpu_tensors()[0].copy().reshape(-1, 2, 32)
    np.testing.assert_array_equal(slots[0, 0], old[0, 0])
    np.testing.assert_array_equal(slots[2, 1], old[2, 1])
    np.testing.assert_array_equal(slots[1], memory.gpu_tensors()[0][[2, 3]])


@BOTH_WAYS
def test_a_start_at_an_offloaded_block_skips_nothing(
    open_handlers: OpenHandlers, make_memory: type[Memory], make_layout: type[Layout], to_cpu: bool
) -> None:
    """Factor 2: logical block 2 begins a slot."""
    layout = make_layout(factor=2, pages=(32,), groups=(((0, 32),),))
    gpu, cpu = GPULoadStoreSpec([1, 2, 3, 4], [4], [2]), CPULoadStoreSpec([3, 1])
    memory = _assert_like_the_loop(open_handlers, make_memory, layout, gpu, cpu, to_cpu=to_cpu)
    slots = memory.cpu_tensors()[0].copy().reshape(-1, 2, 32)
    np.testing.assert_array_equal(
        slots[[3, 1]].reshape(4, 32), memory.gpu_tensors()[0][[1, 2, 3, 4]]
    )


@BOTH_WAYS
def test_groups_move_their_own_tensors(
    open_handlers: OpenHandlers, make_memory: type[Memory], make_layout: type[Layout], to_cpu: bool
) -> None:
    """Groups with different tensors, starts and sizes share one list of slots, in group order."""
    layout = make_layout(
        pages=(16, 48, 8), groups=(((0, 16), (2, 8)), ((1, 48),), ((0, 16),)), factor=2
    )
    gpu = GPULoadStoreSpec([1, 2, 3, 4, 5, 6], [3, 2, 1], [1, 4, 0])
    cpu = CPULoadStoreSpec([5, 0, 2, 3])
    _assert_like_the_loop(open_handlers, make_memory, layout, gpu, cpu, to_cpu=to_cpu)


@BOTH_WAYS
def test_empty_groups_take_no_slots(
    open_handlers: OpenHandlers, make_memory: type[Memory], make_layout: type[Layout], to_cpu: bool
) -> None:
    """A group without blocks is skipped, also when its start lies within an offloaded block."""
    layout = make_layout(groups=(((0, 32),), ((1, 24),), ((0, 32),)), factor=2)
    gpu, cpu = GPULoadStoreSpec([3, 4], [0, 2, 0], [1, 2, 3]), CPULoadStoreSpec([1])
    _assert_like_the_loop(open_handlers, make_memory, layout, gpu, cpu, to_cpu=to_cpu)


@BOTH_WAYS
def test_padding_of_a_page_does_not_move(
    open_handlers: OpenHandlers, make_memory: type[Memory], make_layout: type[Layout], to_cpu: bool
) -> None:
    """Only the unpadded bytes of the reference are copied, from and to the start of the page.

    On the CPU side a store leaves zeros in the padding, on the GPU side nobody writes it.
    """
    layout = make_layout(pages=(32,), groups=(((0, 20),),), factor=2)
    gpu, cpu = GPULoadStoreSpec([2, 3], [2], [0]), CPULoadStoreSpec([4])
    before = make_memory(layout)
    memory = _assert_like_the_loop(open_handlers, make_memory, layout, gpu, cpu, to_cpu=to_cpu)
    for found, old in zip(
        (memory.gpu_tensors()[0], memory.cpu_tensors()[0]),
        (before.gpu_tensors()[0], before.cpu_tensors()[0]),
        strict=True,
    ):
        others = np.arange(len(found)) != 4
        np.testing.assert_array_equal(found[others, 20:32], old[others, 20:32])
    padding = memory.cpu_tensors()[0][4, 20:32]
    np.testing.assert_array_equal(padding, 0 if to_cpu else before.cpu_tensors()[0][4, 20:32])


@BOTH_WAYS
def test_a_transfer_of_nothing_succeeds(
    open_handlers: OpenHandlers, make_memory: type[Memory], make_layout: type[Layout], to_cpu: bool
) -> None:
    """No blocks is a transfer like any other: reported, with zero bytes."""
    nothing = GPULoadStoreSpec([], [0], [0]), CPULoadStoreSpec([])
    _assert_like_the_loop(open_handlers, make_memory, make_layout(), *nothing, to_cpu=to_cpu)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[dict[str, object], list[int], list[int], list[int], int]:
    """Draw the fields of a layout, group sizes, first indices, GPU ids and a seed for slots."""
    pages = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    refs = st.lists(
        st.integers(0, len(pages) - 1).flatmap(
            lambda tensor: st.tuples(st.just(tensor), st.integers(1, pages[tensor]))
        ),
        max_size=2,
        unique_by=lambda ref: ref[0],
    )
    groups = tuple(map(tuple, draw(st.lists(refs, min_size=1, max_size=3))))
    sizes = draw(st.lists(st.integers(0, 5), min_size=len(groups), max_size=len(groups)))
    first = draw(st.lists(st.integers(0, 9), min_size=len(groups), max_size=len(groups)))
    gpu_ids = draw(st.permutations(range(sum(sizes) + 2)))[: sum(sizes)]
    fields = {
        "pages": pages,
        "groups": groups,
        "factor": draw(st.integers(1, 4)),
        "gpu_blocks": sum(sizes) + 2,
    }
    return fields, sizes, first, gpu_ids, draw(st.integers(0, 2**16))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=_cases(), to_cpu=st.booleans())
def test_any_transfer_equals_the_loop(
    open_handlers: OpenHandlers,
    make_memory: type[Memory],
    make_layout: type[Layout],
    case: tuple[dict[str, object], list[int], list[int], list[int], int],
    to_cpu: bool,
) -> None:
    """Any layout, factor, start and order: all bytes of all memory equal the oracle's."""
    fields, sizes, first, gpu_ids, seed = case
    layout = replace(make_layout(), **fields)  # type: ignore[arg-type] # drawn by name
    slots = sum(
        -(-(size + start % layout.factor) // layout.factor) if size else 0
        for size, start in zip(sizes, first, strict=True)
    )
    layout = replace(layout, cpu_blocks=slots + 2)
    cpu_ids = np.random.default_rng(seed).permutation(slots + 2)[:slots]
    _assert_like_the_loop(
        open_handlers,
        make_memory,
        layout,
        GPULoadStoreSpec(gpu_ids, sizes, first),
        CPULoadStoreSpec(cpu_ids.tolist()),
        to_cpu=to_cpu,
    )


def test_the_shared_region_is_a_cpu_side(tmp_path: Path) -> None:
    """Two layers of a worker in a region: stored into its rows, and loaded back from there."""
    geometry = PrimaryGeometry(
        num_blocks=4, num_workers=1, worker_page_bytes=2 * 1500, row_stride=4096, block_bytes=4096
    )
    region = SharedOffloadRegion(
        "transfers", geometry, namespace_fingerprint="0" * 64, shm_dir=tmp_path
    )
    view = region.create_kv_memoryview()
    layers = [np.full((6, size), 0, dtype=np.int8) for size in (500, 250)]
    for layer in layers:
        layer[:] = np.arange(6, dtype=np.int8)[:, None] + layer.shape[1] % 100
    handlers = CpuGpuOffloadingHandlers(
        CanonicalKVCaches(
            tuple(CanonicalKVCacheTensor(layer, layer.shape[1]) for layer in layers),
            ((CanonicalKVCacheRef(0, 500), CanonicalKVCacheRef(1, 250)),),
        ),
        [region.create_next_view(0, layer.shape[1] * 4) for layer in layers],
        4,
        HostCopyBackend(),
    )
    gpu, cpu = GPULoadStoreSpec([4, 5], [2], [3]), CPULoadStoreSpec([3, 1])
    _transfer(handlers, gpu, cpu, to_cpu=True)
    rows = np.asarray(view).view(np.int8).copy()
    np.testing.assert_array_equal(rows[3, 1500:2000], layers[0][4])
    np.testing.assert_array_equal(rows[1, 0:500], layers[0][5])
    np.testing.assert_array_equal(rows[3, 2000 + 750 : 3000], layers[1][4])
    np.testing.assert_array_equal(rows[1, 2000:2250], layers[1][5])
    assert np.count_nonzero(rows) == 2 * 750

    expected = [layer.copy() for layer in layers]
    for layer in layers:
        layer[:] = -1
    _transfer(handlers, gpu, cpu, to_cpu=False)
    for layer, wanted in zip(layers, expected, strict=True):
        np.testing.assert_array_equal(layer[4:], wanted[4:])
        assert (layer[:4] == -1).all()

    handlers.gpu_to_cpu.shutdown()
    handlers.cpu_to_gpu.shutdown()
    view.release()
    region.close()


@pytest.mark.torch
def test_a_region_can_be_closed_after_torch_used_it(tmp_path: Path) -> None:
    """After the handlers' shutdown nothing exports the region any more."""
    torch = pytest.importorskip("torch")
    from kv_core.device.copy import TorchCopyBackend

    geometry = PrimaryGeometry(
        num_blocks=3, num_workers=1, worker_page_bytes=64, row_stride=4096, block_bytes=4096
    )
    region = SharedOffloadRegion(
        "torch", geometry, namespace_fingerprint="0" * 64, shm_dir=tmp_path
    )
    gpu = torch.arange(4, dtype=torch.int8).repeat_interleave(64).reshape(4, 64)
    cpu = [region.create_next_view(0, 64)]
    handlers = CpuGpuOffloadingHandlers(
        CanonicalKVCaches((CanonicalKVCacheTensor(gpu, 64),), ((CanonicalKVCacheRef(0, 64),),)),
        cpu,
        1,
        TorchCopyBackend([gpu, *map(torch.from_numpy, cpu)]),
    )
    _transfer(handlers, GPULoadStoreSpec([3, 1], [2], [0]), CPULoadStoreSpec([0, 2]), to_cpu=True)
    assert cpu[0][:, 0].tolist() == [3, 0, 1]
    handlers.gpu_to_cpu.shutdown()
    handlers.cpu_to_gpu.shutdown()
    cpu.clear()
    region.close()
