"""From the blocks of a transfer to the byte ranges that are copied.

The work is done for whole groups at a time, by numpy, into buffers that are used again. All
state belongs to the worker's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_core.device._canonical import check_page_tensor, row_stride_bytes, tensor_address
from kv_core.device._sub_blocks import compute_sub_block_ptrs
from kv_core.device.copy import CopyBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kv_core.device._canonical import CanonicalKVCaches, KVTensor
    from kv_core.engine import BlockIDsLoadStoreSpec, CPULoadStoreSpec, GPULoadStoreSpec

__all__ = ["DescriptorBuffers", "DescriptorBuilder", "GroupPart"]

_SMALLEST_BUFFER: Final = 1024
_MOST_SPARE_BUFFERS: Final = 8


@final
class DescriptorBuffers:
    """Memory for descriptors, given out for one transfer at a time.

    A device may read descriptors until a transfer's end event, so a buffer comes back only then.
    """

    def __init__(self) -> None:
        self._spare: list[npt.NDArray[np.int64]] = []
        self._capacity = _SMALLEST_BUFFER

    @property
    def num_spare(self) -> int:
        """Buffers that wait to be used again."""
        return len(self._spare)

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """Return a buffer for so many descriptors or more: ``int64``, shape ``(3, capacity)``.

        Buffers grow with the largest transfer seen, by doubling; smaller ones are let go.
        """
        while self._capacity < count:
            self._capacity *= 2
        while self._spare:
            buffer = self._spare.pop()
            if buffer.shape[1] >= count:
                return buffer
        return np.empty((3, self._capacity), dtype=np.int64)

    def give_back(self, buffer: npt.NDArray[np.int64]) -> None:
        """Take back a buffer whose transfer has ended."""
        if len(self._spare) < _MOST_SPARE_BUFFERS:
            self._spare.append(buffer)


@dataclass(frozen=True, slots=True, eq=False)
class _GroupMemory:
    """Where one group's pages are: ``int64`` columns, a row for each reference.

    Attributes:
        gpu_bases: Addresses of the GPU tensors.
        gpu_strides: Bytes from one GPU block to the next.
        cpu_bases: Addresses of the CPU tensors.
        cpu_strides: Bytes from one slot to the next.
        gpu_page_bytes: Bytes from one GPU page to the next within a slot.
        copied_bytes: Bytes of a page that are copied.
    """

    gpu_bases: npt.NDArray[np.int64]
    gpu_strides: npt.NDArray[np.int64]
    cpu_bases: npt.NDArray[np.int64]
    cpu_strides: npt.NDArray[np.int64]
    gpu_page_bytes: npt.NDArray[np.int64]
    copied_bytes: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupPart:
    """What one group has in a transfer.

    Attributes:
        group_idx: The group.
        gpu_ids: GPU blocks, ``int32``.
        cpu_ids: Slots, ``int32``.
        skip: GPU pages left out at the start of the first slot.
    """

    group_idx: int
    gpu_ids: npt.NDArray[np.int32]
    cpu_ids: npt.NDArray[np.int32]
    skip: int


@final
class DescriptorBuilder:
    """Knows where all pages of a worker are, on both sides.

    It keeps addresses only; whoever made it keeps the tensors alive.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, cpu_tensors: Sequence[KVTensor], block_size_factor: int
    ) -> None:
        """Look at both sides once.

        Args:
            kv_caches: The GPU side.
            cpu_tensors: The CPU side: for each canonical tensor an int8 tensor of shape
                ``(num_cpu_blocks, page_size_bytes * block_size_factor)``.
            block_size_factor: GPU blocks in one offloaded block.

        Raises:
            ValueError: The two sides do not fit each other.
        """
        if block_size_factor < 1:
            raise ValueError(
                f"an offloaded block has at least one GPU block, found the block_size_factor "
                f"{block_size_factor}"
            )
        _check_sides(kv_caches, cpu_tensors, block_size_factor)
        self._factor = block_size_factor
        self._gpu_rows = min((t.tensor.shape[0] for t in kv_caches.tensors), default=0)
        self._cpu_rows = min((t.shape[0] for t in cpu_tensors), default=0)
        self._groups = tuple(
            _group_memory(kv_caches, cpu_tensors, group_idx)
            for group_idx in range(len(kv_caches.group_data_refs))
        )

    def split(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> list[GroupPart]:
        """Check a transfer against the memory and split it by group, without the empty groups.

        Raises:
            ValueError: Group sizes or the number of slots do not fit, or ids are out of range: an
                address computed from one could be anybody's.
        """
        num_groups = len(self._groups)
        if len(gpu.group_sizes) != num_groups or min(gpu.group_sizes, default=0) < 0:
            raise ValueError(
                f"found the group sizes {list(gpu.group_sizes)}, expected a number of blocks for "
                f"each of the {num_groups} KV cache groups"
            )
        if min(gpu.block_indices, default=0) < 0:
            raise ValueError(
                f"the first logical block of a group is 0 or more, found {list(gpu.block_indices)}"
            )
        parts = []
        gpu_start = cpu_start = 0
        for group_idx, (count, first) in enumerate(
            zip(gpu.group_sizes, gpu.block_indices, strict=True)
        ):
            if count:
                skip = first % self._factor
                gpu_stop = gpu_start + count
                cpu_stop = cpu_start - (-(count + skip) // self._factor)
                parts.append(
                    GroupPart(
                        group_idx,
                        gpu.block_ids[gpu_start:gpu_stop],
                        cpu.block_ids[cpu_start:cpu_stop],
                        skip,
                    )
                )
                gpu_start, cpu_start = gpu_stop, cpu_stop
        if len(cpu.block_ids) != cpu_start:
            raise ValueError(
                f"groups of {list(gpu.group_sizes)} GPU blocks that begin at the logical blocks "
                f"{list(gpu.block_indices)} fill {cpu_start} offloaded block(s) of "
                f"{self._factor}, found {len(cpu.block_ids)} CPU block ids"
            )
        _check_ids(gpu, self._gpu_rows)
        _check_ids(cpu, self._cpu_rows)
        return parts

    def count(self, parts: Sequence[GroupPart]) -> int:
        """Return how many descriptors a transfer has: one per GPU block and reference."""
        return sum(
            len(part.gpu_ids) * len(self._groups[part.group_idx].copied_bytes) for part in parts
        )

    def build(
        self, parts: Sequence[GroupPart], buffer: npt.NDArray[np.int64], *, to_cpu: bool
    ) -> CopyBatch:
        """Write the descriptors of a transfer, reference by reference and in the order of blocks.

        Args:
            parts: From :meth:`split`.
            buffer: ``int64``, shape ``(3, capacity)``, with room for :meth:`count` descriptors. The
                batch is made of views of it.
            to_cpu: The direction.
        """
        gpu_row, cpu_row = (0, 1) if to_cpu else (1, 0)
        start = 0
        for part in parts:
            memory = self._groups[part.group_idx]
            num_refs, num_blocks = len(memory.copied_bytes), len(part.gpu_ids)
            stop = start + num_refs * num_blocks
            # A view, since only the last axis is split: nothing is copied afterwards.
            window = buffer[:, start:stop].reshape(3, num_refs, num_blocks)
            compute_sub_block_ptrs(
                memory.gpu_bases,
                memory.gpu_strides,
                part.gpu_ids,
                1,
                0,
                num_blocks,
                0,
                out=window[gpu_row],
            )
            compute_sub_block_ptrs(
                memory.cpu_bases,
                memory.cpu_strides,
                part.cpu_ids,
                self._factor,
                part.skip,
                num_blocks,
                memory.gpu_page_bytes,
                out=window[cpu_row],
            )
            window[2] = memory.copied_bytes
            start = stop
        return CopyBatch(buffer[0, :start], buffer[1, :start], buffer[2, :start])


def _check_sides(
    kv_caches: CanonicalKVCaches, cpu_tensors: Sequence[KVTensor], factor: int
) -> None:
    if len(cpu_tensors) != len(kv_caches.tensors):
        raise ValueError(
            f"{len(kv_caches.tensors)} canonical tensors need as many CPU tensors, "
            f"found {len(cpu_tensors)}"
        )
    for index, (gpu, cpu) in enumerate(zip(kv_caches.tensors, cpu_tensors, strict=True)):
        check_page_tensor(cpu, f"CPU tensor {index}")
        if cpu.shape[1] != gpu.page_size_bytes * factor:
            raise ValueError(
                f"CPU tensor {index} has rows of {cpu.shape[1]} bytes; {factor} "
                f"GPU page(s) of {gpu.page_size_bytes} bytes are "
                f"{gpu.page_size_bytes * factor}"
            )


def _group_memory(
    kv_caches: CanonicalKVCaches, cpu_tensors: Sequence[KVTensor], group_idx: int
) -> _GroupMemory:
    refs = kv_caches.group_data_refs[group_idx]
    gpu = [kv_caches.tensors[ref.tensor_idx] for ref in refs]
    cpu = [cpu_tensors[ref.tensor_idx] for ref in refs]
    return _GroupMemory(
        gpu_bases=_column([tensor_address(tensor.tensor) for tensor in gpu]),
        gpu_strides=_column([row_stride_bytes(tensor.tensor) for tensor in gpu]),
        cpu_bases=_column([tensor_address(tensor) for tensor in cpu]),
        cpu_strides=_column([row_stride_bytes(tensor) for tensor in cpu]),
        gpu_page_bytes=_column([tensor.page_size_bytes for tensor in gpu]),
        copied_bytes=_column([ref.page_size_bytes for ref in refs]),
    )


def _column(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64).reshape(-1, 1)


def _check_ids(spec: BlockIDsLoadStoreSpec, rows: int) -> None:
    if len(spec.block_ids) == 0:
        return
    low, high = int(spec.block_ids.min()), int(spec.block_ids.max())
    if low < 0 or high >= rows:
        raise ValueError(f"{spec.medium()} block ids must be in 0..{rows - 1}, found {low}..{high}")
