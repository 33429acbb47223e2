"""Below the GPU pool: a primary tier, secondary tiers, and the connector over them."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from kv_core.connector import (
    ConnectorMetadata,
    OffloadingConnectorScheduler,
    RegionRole,
    TieringOffloadingSpec,
)
from kv_core.cpu import SharedOffloadRegion
from kv_core.device.copy import host_registrar_of
from kv_core.workload._content import POISON_BYTE
from kv_core.workload.replay._levels import StepEnd
from kv_core.workload.replay._processes import WorkerProcesses
from kv_core.workload.replay._worker import StepOrders, Worker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_core.connector import KVRequest, StepSchedule
    from kv_core.plugins import TierRegistry
    from kv_core.workload._trace import Trace
    from kv_core.workload.replay._config import ReplayConfig
    from kv_core.workload.replay._measurements import Measurements
    from kv_core.workload.replay._memory import GpuMemory
    from kv_core.workload.replay._worker import WorkerGroup

__all__ = ["TieredLevels", "let_go"]

_ENGINE_ID_PREFIX: Final = "replay-"


def let_go(error: BaseException) -> None:
    """Clear the local variables of the frames that an error has left.

    An interrupt comes anywhere, also where a frame holds a view of the region, which could not
    be unmapped before the last of them is gone.
    """
    traceback.clear_frames(error.__traceback__)


@final
class TieredLevels:
    """The real offloading engine; implements ``LowerLevels``."""

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        memory: GpuMemory | None,
        measurements: Measurements,
        registry: TierRegistry | None,
    ) -> None:
        """Build region, tiers, connector and workers.

        Args:
            trace: Gives the tokens of a block.
            config: Sizes and limits.
            memory: Pages of the GPU pool of a single worker; ``None`` for worker processes.
            measurements: Takes note of transfers and jobs.
            registry: Where tier types are looked up; by default what is installed.

        Raises:
            ConfigError: A setting is wrong.
            WorkerError: A worker process could not start.
            KVCoreError: A tier cannot be opened, or memory is lacking.
        """
        self._measurements = measurements
        self._poison = bytes([POISON_BYTE]) * config.row_bytes
        self._metadata = ConnectorMetadata()
        engine_id = f"{_ENGINE_ID_PREFIX}{os.getpid()}-{time.monotonic_ns()}"
        # Of replays killed before they had workers, which would have removed the name.
        SharedOffloadRegion.remove_leftovers(_ENGINE_ID_PREFIX, Path(config.shm_dir))
        offloading = config.offloading_config(trace, engine_id)
        role = RegionRole.of_scheduler()
        spec = TieringOffloadingSpec(
            offloading,
            registry=registry,
            observer=measurements,
            slot_freed=self._poison_slot,
            copy_backend=None if memory is None else memory.copy_backend,
            host_registrar=None if memory is None else host_registrar_of(memory.tensor),
            role=role if memory is None else None,
        )
        self._spec = spec
        try:
            self._manager = spec.get_manager()
            self._primary = spec.primary_view
            self._scheduler = OffloadingConnectorScheduler(offloading, self._manager)
            if memory is not None:
                self._workers: WorkerGroup = Worker(
                    spec, memory, config.block_bytes, stopwatch=measurements.stopwatch
                )
            else:
                self._workers = WorkerProcesses(
                    config, offloading, role, spec.wait_until_attached, measurements.stopwatch
                )
        except BaseException as error:
            let_go(error)
            spec.shutdown()
            raise

    def _poison_slot(self, block_id: int) -> None:
        self._primary.block(block_id)[:] = self._poison

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the GPU pool of each worker is."""
        return self._workers.devices

    @property
    def stores_declined(self) -> int:
        """Offers of blocks that found no room so far."""
        return self._scheduler.stores_declined

    @property
    def num_transfers_in_flight(self) -> int:
        """Transfers between GPU and CPU that have not ended."""
        return self._scheduler.num_jobs_in_flight

    @property
    def num_jobs_in_flight(self) -> int:
        """Jobs of tiers that have not ended."""
        return self._spec.num_jobs_in_flight

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask the connector."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Tell the connector."""
        self._scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    def hit_levels(self, request: KVRequest) -> list[str]:
        """Name the level of each offloaded block of a request's load in flight."""
        return self._scheduler.hit_levels(request)

    def end_scheduling(self, schedule: StepSchedule) -> None:
        """Collect the orders of the step."""
        self._metadata = self._scheduler.build_connector_meta(schedule)

    def run_step(self, poison: Sequence[int], fill: Sequence[tuple[int, bytes]]) -> StepEnd:
        """Run the step on all workers, and take in what they report."""
        orders = StepOrders(self._metadata, tuple(poison), tuple(fill))
        outcome = self._workers.run_step(orders)
        for transfer in outcome.transfers:
            self._measurements.transfer_finished(transfer)
        with self._measurements.stopwatch.measure("finishing transfers"):
            loads = self._scheduler.update_connector_output(outcome.output)
        return StepEnd(loads.loaded_req_ids, loads.failed_req_ids, bool(outcome.output.finished))

    def count_wrong_bytes(self, blocks: Sequence[tuple[int, bytes]]) -> list[list[int]]:
        """Compare GPU blocks on every worker."""
        return self._workers.count_wrong_bytes(blocks)

    def request_finished(self, request: KVRequest) -> bool:
        """Tell the connector."""
        return self._scheduler.request_finished(request)

    def has_pending_work(self) -> bool:
        """Say whether steps are needed although no request can run."""
        return self._scheduler.has_pending_work()

    def get_stats(self) -> Mapping[str, float]:
        """Return the counters of the primary tier and of the tiers."""
        return self._manager.get_stats()

    def shutdown(self) -> None:
        """Release workers, tiers and memory, in this order. Idempotent."""
        self._workers.shutdown()
        self._scheduler.shutdown()
        self._spec.shutdown()
