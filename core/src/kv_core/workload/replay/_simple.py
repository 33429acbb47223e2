"""Below the GPU pool: the simple mode, which is CPU memory and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_core.connector import memory_limit_bytes
from kv_core.device import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kv_core.device.copy import host_registrar_of
from kv_core.errors import InsufficientSpaceError
from kv_core.simple import SimpleCPUOffloadScheduler, SimpleCPUOffloadWorker
from kv_core.workload._checker import BlockChecker
from kv_core.workload._content import POISON_BYTE
from kv_core.workload.replay._levels import StepEnd
from kv_core.workload.replay._memory import open_gpu_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_core.connector import KVRequest, StepSchedule
    from kv_core.simple import GpuBlockPoolView
    from kv_core.workload._trace import Trace
    from kv_core.workload.replay._config import ReplayConfig
    from kv_core.workload.replay._measurements import Measurements
    from kv_core.workload.replay._memory import GpuMemory

__all__ = ["SimpleLevels"]


@final
class SimpleLevels:
    """The simple mode with one worker; implements ``LowerLevels``."""

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        memory: GpuMemory | None,
        pool: GpuBlockPoolView,
        measurements: Measurements,
    ) -> None:
        """Allocate CPU memory and start the worker.

        Args:
            trace: Gives the tokens of a block.
            config: Sizes and limits.
            memory: Pages of the GPU pool; by default they are allocated.
            pool: The books of the GPU pool.
            measurements: Takes note of transfers.

        Raises:
            ConfigError: There is no memory of that size.
            InsufficientSpaceError: The process cannot have so much memory.
        """
        simple = config.simple_config(trace.block_tokens)
        num_cpu_blocks = simple.num_cpu_blocks
        _require_memory(num_cpu_blocks * config.block_bytes)
        self._memory = memory or open_gpu_memory(config.gpu_blocks, config.block_bytes)
        self._measure = measurements.stopwatch.measure
        self._checker = BlockChecker()
        self._scheduler = SimpleCPUOffloadScheduler(
            simple, pool, cpu_block_freed=self._poison_cpu_block
        )
        self._worker = SimpleCPUOffloadWorker(
            self._memory.copy_backend,
            registrar=host_registrar_of(self._memory.tensor),
            transfer_finished=measurements.transfer_finished,
        )
        self._worker.register_kv_caches(
            CanonicalKVCaches(
                tensors=(CanonicalKVCacheTensor(self._memory.tensor, config.block_bytes),),
                group_data_refs=((CanonicalKVCacheRef(0, config.block_bytes),),),
            ),
            num_cpu_blocks,
        )

    def _poison_cpu_block(self, block_id: int) -> None:
        for tensor in self._worker.cpu_tensors:
            tensor[block_id] = POISON_BYTE - 256

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the GPU pool is."""
        return (str(getattr(self._memory.tensor, "device", "cpu")),)

    @property
    def stores_declined(self) -> int:
        """Offers of blocks that found no room so far."""
        return self._scheduler.stores_declined

    @property
    def num_transfers_in_flight(self) -> int:
        """Transfers between GPU and CPU that have not ended."""
        return self._scheduler.num_transfers_in_flight

    @property
    def num_jobs_in_flight(self) -> int:
        """Return none: there are no tiers."""
        return 0

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look into CPU memory, which always knows."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Begin a load, or give up what was found."""
        self._scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    def hit_levels(self, request: KVRequest) -> list[str]:
        """Name the only level there is, for each block of a request's load in flight."""
        return ["cpu"] * self._scheduler.num_blocks_loading(request)

    def end_scheduling(self, schedule: StepSchedule) -> None:
        """Collect the orders of the step."""
        self._worker.bind_connector_metadata(self._scheduler.build_connector_meta(schedule))

    def run_step(self, poison: Sequence[int], fill: Sequence[tuple[int, bytes]]) -> StepEnd:
        """Run the step: copies are launched behind its forward pass."""
        with self._measure("starting transfers"):
            self._worker.handle_preemptions()
        with self._measure("poisoning"):
            self._memory.poison(poison)
        with self._measure("writing prefill"):
            for block_id, key in fill:
                self._memory.fill(block_id, key)
        with self._measure("waiting for transfers"):
            # Those of the last step had this one to run in. It took a fraction of the time that
            # an engine's takes, in which they would not pile up over many steps.
            self._worker.flush()
        with self._measure("finishing transfers"):
            output = self._worker.get_finished()
            loads = self._scheduler.update_connector_output(output)
        any_finished = bool(output.completed_load_events or output.completed_store_events)
        return StepEnd(loads.loaded_req_ids, loads.failed_req_ids, any_finished)

    def count_wrong_bytes(self, blocks: Sequence[tuple[int, bytes]]) -> list[list[int]]:
        """Compare GPU blocks with what their keys demand."""
        count = self._checker.count_wrong_bytes
        return [[count(key, self._memory.read(block_id)) for block_id, key in blocks]]

    def request_finished(self, request: KVRequest) -> bool:
        """Tell the scheduler."""
        return self._scheduler.request_finished(request)

    def has_pending_work(self) -> bool:
        """Say whether transfers have to end."""
        return self._scheduler.has_pending_work()

    def get_stats(self) -> Mapping[str, float]:
        """Return the state of CPU memory."""
        return self._scheduler.get_stats()

    def shutdown(self) -> None:
        """Finish transfers and release CPU memory. Idempotent."""
        self._worker.shutdown()


def _require_memory(needed_bytes: int) -> None:
    """Refuse CPU memory that would get the process killed once it is used.

    Raises:
        InsufficientSpaceError: It is more than the process can have.
    """
    available_bytes = memory_limit_bytes()
    if needed_bytes > available_bytes:
        raise InsufficientSpaceError(
            f"{needed_bytes} bytes of CPU memory are more than the {available_bytes} that a "
            "process can have here. Lower 'cpu_bytes' (--cpu-bytes), or raise the memory limit of "
            "the container",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
        )
