"""Descriptors: how many, in which buffers, and what they cost."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.device._descriptors import DescriptorBuffers, DescriptorBuilder
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec

if TYPE_CHECKING:
    from types import FrameType

    from tests.unit.device.conftest import Layout, ManualBackend, Memory, OpenHandlers


@pytest.fixture
def buffers() -> DescriptorBuffers:
    """Return a pool that has nothing yet."""
    return DescriptorBuffers()


def test_a_buffer_is_used_again(buffers: DescriptorBuffers) -> None:
    """What came back is given out before new memory is taken."""
    first = buffers.take(10)
    buffers.give_back(first)
    assert buffers.take(1000) is first
    assert buffers.take(10) is not first


def test_buffers_grow_with_the_largest_transfer(buffers: DescriptorBuffers) -> None:
    """Smaller ones are let go, and from then on all have room for as much."""
    buffers.give_back(buffers.take(1))
    large = buffers.take(3000)
    assert large.shape == (3, 4096)
    assert buffers.num_spare == 0
    assert buffers.take(1).shape == (3, 4096)


def test_few_buffers_are_kept(buffers: DescriptorBuffers) -> None:
    """A burst of transfers does not hold its memory for ever."""
    for buffer in [buffers.take(1) for _ in range(100)]:
        buffers.give_back(buffer)
    assert buffers.num_spare == 8


def _builder(memory: Memory) -> DescriptorBuilder:
    caches = memory.kv_caches(memory.gpu_tensors())
    return DescriptorBuilder(caches, memory.cpu_tensors(), memory.layout.factor)


def test_one_descriptor_for_each_gpu_block_and_reference(
    make_memory: type[Memory], make_layout: type[Layout]
) -> None:
    """Factor 2, blocks 0, 1, 2, skip 1: (0,1), (1,0), (1,1), (2,0), and that for each tensor."""
    memory = make_memory(make_layout(factor=2))
    builder = _builder(memory)
    gpu, cpu = GPULoadStoreSpec([3, 5, 4, 7], [4], [1]), CPULoadStoreSpec([0, 1, 2])
    parts = builder.split(gpu, cpu)
    assert builder.count(parts) == 8
    batch = builder.build(parts, np.empty((3, 100), dtype=np.int64), to_cpu=True)
    expected = []
    for gpu_tensor, cpu_tensor in zip(memory.gpu_tensors(), memory.cpu_tensors(), strict=True):
        page = gpu_tensor.shape[1]
        places = zip([3, 5, 4, 7], [(0, 1), (1, 0), (1, 1), (2, 0)], strict=True)
        expected += [
            (
                gpu_tensor.ctypes.data + gpu_id * gpu_tensor.strides[0],
                cpu_tensor.ctypes.data + slot * cpu_tensor.strides[0] + part * page,
                page,
            )
            for gpu_id, (slot, part) in places
        ]
    arrays = (batch.sources, batch.destinations, batch.sizes)
    assert list(zip(*(array.tolist() for array in arrays), strict=True)) == expected


def test_the_directions_are_each_other_s_mirror(
    make_memory: type[Memory], make_layout: type[Layout]
) -> None:
    """A load has the store's ranges, the other way round."""
    builder = _builder(make_memory(make_layout(factor=3)))
    parts = builder.split(GPULoadStoreSpec([1, 2, 3, 4], [4], [2]), CPULoadStoreSpec([5, 0]))
    store, load = (
        builder.build(parts, np.empty((3, 8), dtype=np.int64), to_cpu=to_cpu)
        for to_cpu in (True, False)
    )
    np.testing.assert_array_equal(store.sources, load.destinations)
    np.testing.assert_array_equal(store.destinations, load.sources)
    np.testing.assert_array_equal(store.sizes, load.sizes)


def test_groups_have_their_own_skips_and_partial_ends(
    make_memory: type[Memory], make_layout: type[Layout]
) -> None:
    """Groups that begin within an offloaded block take ceil((size + skip) / factor) slots each."""
    layout = make_layout(pages=(32, 24), groups=(((0, 32),), ((1, 24),), ((1, 8),)), factor=4)
    builder = _builder(make_memory(layout))
    gpu = GPULoadStoreSpec([0, 1, 2, 3, 4, 5, 6], [3, 0, 4], [6, 9, 5])
    parts = builder.split(gpu, CPULoadStoreSpec([3, 1, 0, 5]))
    assert [
        (part.group_idx, part.gpu_ids.tolist(), part.cpu_ids.tolist(), part.skip) for part in parts
    ] == [(0, [0, 1, 2], [3, 1], 2), (2, [3, 4, 5, 6], [0, 5], 1)]


def test_negative_logical_blocks_are_refused(
    make_memory: type[Memory], make_layout: type[Layout]
) -> None:
    """They would be skipped to some place in the middle of an offloaded block."""
    builder = _builder(make_memory(make_layout(factor=2)))
    with pytest.raises(ValueError, match=r"is 0 or more, found \[-1\]"):
        builder.split(GPULoadStoreSpec([0], [1], [-1]), CPULoadStoreSpec([0]))


@pytest.mark.parametrize("factor", [0, -1])
def test_an_offloaded_block_has_gpu_blocks(memory_factor_one: Memory, factor: int) -> None:
    """Less than one is a mistake of the configuration."""
    caches = memory_factor_one.kv_caches(memory_factor_one.gpu_tensors())
    with pytest.raises(ValueError, match=f"found the block_size_factor {factor}"):
        DescriptorBuilder(caches, memory_factor_one.cpu_tensors(), factor)


@pytest.fixture
def memory_factor_one(make_memory: type[Memory], make_layout: type[Layout]) -> Memory:
    """Return a memory whose offloaded blocks are GPU blocks."""
    return make_memory(make_layout())


def test_a_buffer_in_flight_is_not_given_out(
    open_handlers: OpenHandlers, memory_factor_one: Memory, manual: ManualBackend
) -> None:
    """Only when a transfer has been seen to end may the next one write over its descriptors."""
    handler = open_handlers(memory_factor_one, manual).gpu_to_cpu
    gpu, cpu = GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([0])
    for job_id in range(3):
        handler.transfer_async(job_id, (gpu, cpu))
    first, second, third = manual.streams["gpu-to-cpu"].tickets
    memory = [ticket.batch.sources.ctypes.data for ticket in (first, second, third)]
    assert len(set(memory)) == 3
    first.ended = third.ended = True
    handler.get_finished()
    handler.transfer_async(3, (gpu, cpu))
    handler.transfer_async(4, (gpu, cpu))
    fourth, fifth = (t.batch.sources.ctypes.data for t in manual.streams["gpu-to-cpu"].tickets[3:])
    assert fourth == memory[0]
    assert fifth not in memory


def _lines_run(builder: DescriptorBuilder, blocks: int) -> int:
    """Return how many lines of Python building a batch takes."""
    gpu = GPULoadStoreSpec(np.arange(blocks, dtype=np.int32), [blocks], [0])
    cpu = CPULoadStoreSpec(np.arange(blocks, dtype=np.int32))
    buffer = np.empty((3, 4096), dtype=np.int64)
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        builder.build(builder.split(gpu, cpu), buffer, to_cpu=True)
    finally:
        sys.settrace(before)
    return lines


def test_no_python_runs_per_page(make_memory: type[Memory], make_layout: type[Layout]) -> None:
    """A thousand blocks in four tensors take as many lines of Python as one block in one."""
    one = make_layout(pages=(8,), groups=(((0, 8),),), gpu_blocks=1, cpu_blocks=1)
    many = make_layout(
        pages=(8,) * 4,
        groups=(tuple((index, 8) for index in range(4)),),
        gpu_blocks=1000,
        cpu_blocks=1000,
    )
    assert _lines_run(_builder(make_memory(one)), 1) == _lines_run(
        _builder(make_memory(many)), 1000
    )
