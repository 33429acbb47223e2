"""Transfers between the GPU's pages and the slots of the primary tier.

All state belongs to the worker's thread; copies run wherever the copy back end runs them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, final

import numpy as np
from typing_extensions import override

from kv_core.device._canonical import check_page_tensor, row_stride_bytes, tensor_address
from kv_core.device._sub_blocks import compute_sub_block_ptrs
from kv_core.device._unused import UnusedBytes
from kv_core.device.copy import CopyBatch
from kv_core.engine import (
    BlockIDsLoadStoreSpec,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
)
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from kv_core.device._canonical import CanonicalKVCaches, KVTensor
    from kv_core.device.copy import CopyBackend, CopyTicket
    from kv_core.engine import TransferSpec

__all__ = ["CpuGpuOffloadingHandlers", "SingleDirectionOffloadingHandler"]


@final
class SingleDirectionOffloadingHandler(OffloadingHandler):
    """Copies GPU to CPU, or CPU to GPU, in order of submission."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        cpu_tensors: Sequence[KVTensor],
        block_size_factor: int,
        backend: CopyBackend,
        *,
        to_cpu: bool,
    ) -> None:
        """Prepare one direction.

        Args:
            kv_caches: The GPU side.
            cpu_tensors: The CPU side: for each canonical tensor an int8 tensor of shape
                ``(num_cpu_blocks, page_size_bytes * block_size_factor)``.
            block_size_factor: GPU blocks in one offloaded block.
            backend: Moves the bytes.
            to_cpu: The direction: ``True`` for stores.

        Raises:
            ValueError: The two sides do not fit each other.
        """
        if len(cpu_tensors) != len(kv_caches.tensors):
            raise ValueError(
                f"{len(kv_caches.tensors)} canonical tensors need as many CPU tensors, "
                f"found {len(cpu_tensors)}"
            )
        for index, (gpu, cpu) in enumerate(zip(kv_caches.tensors, cpu_tensors, strict=True)):
            check_page_tensor(cpu, f"CPU tensor {index}")
            if cpu.shape[1] != gpu.page_size_bytes * block_size_factor:
                raise ValueError(
                    f"CPU tensor {index} has rows of {cpu.shape[1]} bytes; {block_size_factor} "
                    f"GPU page(s) of {gpu.page_size_bytes} bytes are "
                    f"{gpu.page_size_bytes * block_size_factor}"
                )
        self._kv_caches = kv_caches
        self._cpu_tensors = tuple(cpu_tensors)
        self._factor = block_size_factor
        self._to_cpu = to_cpu
        self._unused = UnusedBytes(kv_caches, block_size_factor)
        self._type = ("GPU", "CPU") if to_cpu else ("CPU", "GPU")
        self._stream = backend.open_stream("-to-".join(self._type).lower())
        self._in_flight: deque[tuple[int, CopyTicket, int]] = deque()
        self._is_closed = False

    @override
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if self._is_closed:
            raise EngineStateError("the handler is shut down")
        source, destination = spec
        gpu, cpu = (source, destination) if self._to_cpu else (destination, source)
        if not isinstance(gpu, GPULoadStoreSpec) or not isinstance(cpu, CPULoadStoreSpec):
            raise TypeError(
                f"this handler copies {self._type[0]} to {self._type[1]}, found "
                f"{source.medium()} to {destination.medium()}"
            )
        batch = self._build_batch(gpu, cpu)
        self._in_flight.append((job_id, self._stream.submit(batch), batch.total_bytes))
        return True

    def _build_batch(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> CopyBatch:
        """Build one descriptor for each GPU block and tensor reference."""
        skips = [first_index % self._factor for first_index in gpu.block_indices]
        cpu_counts = [
            -(-(count + skip) // self._factor) if count else 0
            for count, skip in zip(gpu.group_sizes, skips, strict=True)
        ]
        self._check(gpu, cpu, sum(cpu_counts))
        gpu_parts, cpu_parts, sizes = [], [], []
        gpu_start = cpu_start = 0
        groups = zip(
            self._kv_caches.group_data_refs, gpu.group_sizes, skips, cpu_counts, strict=True
        )
        for group_idx, (refs, count, skip, cpu_count) in enumerate(groups):
            if count == 0:
                continue
            gpu_ids = gpu.block_ids[gpu_start : gpu_start + count]
            cpu_ids = cpu.block_ids[cpu_start : cpu_start + cpu_count]
            gpu_start += count
            cpu_start += cpu_count
            if self._to_cpu:
                self._unused.clear(self._cpu_tensors, group_idx, cpu_ids)
            for ref in refs:
                gpu_tensor = self._kv_caches.tensors[ref.tensor_idx].tensor
                cpu_tensor = self._cpu_tensors[ref.tensor_idx]
                gpu_parts.append(self._addresses(gpu_tensor, gpu_ids, 1, 0, count))
                cpu_parts.append(self._addresses(cpu_tensor, cpu_ids, self._factor, skip, count))
                sizes.append(np.full(count, ref.page_size_bytes, dtype=np.int64))
        nothing = [np.empty(0, dtype=np.int64)]
        gpu_all = np.concatenate(gpu_parts or nothing)
        cpu_all = np.concatenate(cpu_parts or nothing)
        sources, destinations = (gpu_all, cpu_all) if self._to_cpu else (cpu_all, gpu_all)
        return CopyBatch(sources, destinations, np.concatenate(sizes or nothing))

    def _check(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, cpu_count: int) -> None:
        """Refuse a transfer that does not fit the memory, before any address is computed.

        Args:
            gpu: The GPU side.
            cpu: The CPU side.
            cpu_count: Offloaded blocks that the groups fill.
        """
        num_groups = len(self._kv_caches.group_data_refs)
        if len(gpu.group_sizes) != num_groups or min(gpu.group_sizes, default=0) < 0:
            raise ValueError(
                f"found the group sizes {list(gpu.group_sizes)}, expected a number of blocks for "
                f"each of the {num_groups} KV cache groups"
            )
        if len(cpu.block_ids) != cpu_count:
            raise ValueError(
                f"groups of {list(gpu.group_sizes)} GPU blocks that begin at the logical blocks "
                f"{list(gpu.block_indices)} fill {cpu_count} offloaded block(s) of "
                f"{self._factor}, found {len(cpu.block_ids)} CPU block ids"
            )
        self._check_ids(gpu, [t.tensor.shape[0] for t in self._kv_caches.tensors])
        self._check_ids(cpu, [t.shape[0] for t in self._cpu_tensors])

    def _addresses(
        self, tensor: KVTensor, ids: npt.NDArray[np.int32], factor: int, skip: int, count: int
    ) -> npt.NDArray[np.int64]:
        return compute_sub_block_ptrs(
            tensor_address(tensor),
            row_stride_bytes(tensor),
            ids,
            factor,
            skip,
            count,
            tensor.shape[1] // factor,
        )

    @staticmethod
    def _check_ids(spec: BlockIDsLoadStoreSpec, rows: list[int]) -> None:
        """Refuse ids outside the memory: an address computed from one could be anybody's."""
        if len(spec.block_ids) == 0:
            return
        low, high = int(spec.block_ids.min()), int(spec.block_ids.max())
        if low < 0 or high >= min(rows):
            raise ValueError(
                f"{spec.medium()} block ids must be in 0..{min(rows) - 1}, found {low}..{high}"
            )

    @override
    def get_finished(self) -> list[TransferResult]:
        finished = []
        while self._in_flight and self._in_flight[0][1].done():
            job_id, ticket, size = self._in_flight.popleft()
            success = ticket.error is None
            finished.append(
                TransferResult(
                    job_id=job_id,
                    success=success,
                    transfer_size=size if success else 0,
                    transfer_time=ticket.elapsed_seconds,
                    transfer_type=self._type,
                )
            )
        return finished

    @override
    def wait(self, job_ids: Iterable[int]) -> None:
        wanted = set(job_ids)
        for job_id, ticket, _ in self._in_flight:
            if job_id in wanted:
                ticket.wait()

    @override
    def shutdown(self) -> None:
        self._is_closed = True
        self._stream.close()
        # Exports of the shared region, which could not be unmapped while they live.
        self._cpu_tensors = ()


@final
class CpuGpuOffloadingHandlers:
    """The two directions between one worker's GPU memory and the primary tier.

    Attributes:
        gpu_to_cpu: Handles stores.
        cpu_to_gpu: Handles loads.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        cpu_tensors: Sequence[KVTensor],
        block_size_factor: int,
        backend: CopyBackend,
    ) -> None:
        self.gpu_to_cpu = SingleDirectionOffloadingHandler(
            kv_caches, cpu_tensors, block_size_factor, backend, to_cpu=True
        )
        self.cpu_to_gpu = SingleDirectionOffloadingHandler(
            kv_caches, cpu_tensors, block_size_factor, backend, to_cpu=False
        )
