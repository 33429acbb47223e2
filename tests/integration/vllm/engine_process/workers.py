"""vLLM's tiering spec on the CPU, and workers that do their copies wrong on purpose.

vLLM's own specs refuse every platform but CUDA and XPU, although only their worker needs one. The
worker here copies between CPU tensors, so that vLLM's ``TieringOffloadingManager``, with its
shared region and tiers, runs end to end on a machine without a GPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, final

import torch
from typing_extensions import override
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CPUTieringOffloadingSpec", "HostWorker", "SabotagedWorker", "sabotaged"]

SABOTAGE = "KV_CORE_TEST_SABOTAGE"


@final
class HostWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM has its types to itself
    """Copies blocks between a KV cache in CPU memory and the shared region, at once.

    Args:
        kv_caches: vLLM's canonical view of the KV cache.
        blocks_per_chunk: Engine blocks in one block of the region.
        region: This worker's part of the shared region; closed with the worker.
    """

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._groups = kv_caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._engine = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            for cache in kv_caches.tensors
        ]
        self._host = [
            region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk)
            for cache in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    @override
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        size = 0
        for engine, host in self._pages(src_spec, dst_spec):
            host.copy_(engine)
            size += engine.numel()
        self._finished.append(TransferResult(job_id, True, size, 1e-6))
        return True

    @override
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        size = 0
        for engine, host in self._pages(dst_spec, src_spec):
            engine.copy_(host)
            size += engine.numel()
        self._finished.append(TransferResult(job_id, True, size, 1e-6))
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Return: every copy has ended by the time that it was submitted."""

    @override
    def shutdown(self) -> None:
        self._host.clear()
        self._engine.clear()
        self._region.cleanup()

    def _pages(self, engine_spec: GPULoadStoreSpec, host_spec: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the pairs of pages to copy between, group after group."""
        first_block, first_chunk = 0, 0
        for group, size, index in zip(
            self._groups, engine_spec.group_sizes, engine_spec.block_indices, strict=True
        ):
            skip = index % self._blocks_per_chunk
            for position in range(size):
                block = int(engine_spec.block_ids[first_block + position])
                chunk_index, part = divmod(skip + position, self._blocks_per_chunk)
                chunk = int(host_spec.chunk_ids[first_chunk + chunk_index])
                for reference in group:
                    engine = self._engine[reference.tensor_idx]
                    begin = part * engine.shape[1]
                    host = self._host[reference.tensor_idx]
                    yield (
                        engine[block, : reference.page_size_bytes],
                        host[chunk, begin : begin + reference.page_size_bytes],
                    )
            first_block += size
            first_chunk += -(-(size + skip) // self._blocks_per_chunk) if size else 0


@final
class SabotagedWorker(OffloadingWorker):  # type: ignore[misc]  # as above
    """Lets a real worker do its work, except that loads go wrong in one way.

    ``skip`` reports loads that it never made, ``zero`` zeroes one block of each load after it
    arrived, ``swap`` lets the first blocks of two loads change places, ``hold`` makes the loads
    and does not report them. What it does is read from a file at each load, so that a test can
    change it while the engine runs; a number after the word means that rank alone.

    Blocks are swapped between loads, for within one prompt their order means nothing to full
    attention: the keys carry their positions.

    Args:
        worker: The real one.
        kv_caches: vLLM's canonical view of the KV cache.
        rank: Which worker of the engine it is.
    """

    def __init__(self, worker: Any, kv_caches: Any, rank: int) -> None:
        self._worker = worker
        self._rank = rank
        self._engine = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            for cache in kv_caches.tensors
        ]
        # Of each load that is to go wrong after it arrived: how, and its first block.
        self._marked: dict[int, tuple[str, int]] = {}
        self._skipped: list[TransferResult] = []
        self._kept: list[tuple[TransferResult, str, int]] = []

    @override
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return bool(self._worker.submit_store(job_id, src_spec, dst_spec))

    @override
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        mode = self._mode()
        if mode == "skip":
            self._skipped.append(TransferResult(job_id, True, 0, 1e-6))
            return True
        if mode != "none":
            self._marked[job_id] = (mode, int(dst_spec.block_ids[0]))
        return bool(self._worker.submit_load(job_id, src_spec, dst_spec))

    @override
    def get_finished(self) -> list[TransferResult]:
        finished, self._skipped = self._skipped, []
        for result in self._worker.get_finished():
            mode, block = self._marked.pop(result.job_id, ("none", 0))
            if mode in {"swap", "hold"}:
                self._kept.append((result, mode, block))
                continue
            if mode == "zero":
                for tensor in self._engine:
                    tensor[block].zero_()
            finished.append(result)
        return finished + self._take_pairs() + self._take_held()

    @override
    def wait(self, job_ids: set[int]) -> None:
        self._worker.wait(job_ids)

    @override
    def shutdown(self) -> None:
        self._worker.shutdown()

    def _take_pairs(self) -> list[TransferResult]:
        swaps = [kept for kept in self._kept if kept[1] == "swap"]
        taken: list[TransferResult] = []
        for (one, _, first), (other, _, second) in zip(swaps[::2], swaps[1::2], strict=False):
            for tensor in self._engine:
                tensor[[first, second]] = tensor[[second, first]]
            taken += [one, other]
        self._kept = [kept for kept in self._kept if kept[0] not in taken]
        return taken

    def _take_held(self) -> list[TransferResult]:
        if self._mode() == "hold":
            return []
        taken = [result for result, mode, _ in self._kept if mode == "hold"]
        self._kept = [kept for kept in self._kept if kept[1] != "hold"]
        return taken

    def _mode(self) -> str:
        with open(os.environ[SABOTAGE]) as file:
            mode, *ranks = file.read().split()
        return mode if not ranks or str(self._rank) in ranks else "none"


def sabotaged(worker: Any, kv_caches: Any, rank: int) -> Any:
    """Return a worker that can be sabotaged where the test asks for one, else the worker."""
    return SabotagedWorker(worker, kv_caches, rank) if SABOTAGE in os.environ else worker


class CPUTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]  # as above
    """vLLM's spec with tiers, unchanged but for the worker."""

    _host_worker: Any = None

    @override
    def get_worker(self, kv_caches: Any) -> Any:
        if self._host_worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            worker = HostWorker(kv_caches, self.blocks_per_chunk, region)
            self._host_worker = sabotaged(worker, kv_caches, self.config.parallel.rank)
        return self._host_worker
