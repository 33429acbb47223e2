"""What the workers of a replay do, and one of them.

All state of a :class:`Worker` belongs to one thread: the replay's, or the main thread of a worker
process. Copies run on the threads of its copy back end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, final

from kv_core.connector import ConnectorMetadata, ConnectorOutput, OffloadingConnectorWorker
from kv_core.device import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kv_core.workload._checker import BlockChecker
from kv_core.workload.replay._report import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.engine import OffloadingSpec, TransferResult
    from kv_core.workload.replay._memory import GpuMemory

__all__ = ["StepOrders", "StepOutcome", "Worker", "WorkerGroup", "content_key"]

_RANK_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepOrders:
    """One step, identical for all workers.

    Attributes:
        metadata: Transfers to start.
        poison: GPU blocks that the step hands out: nothing that was there may pass for what a
            load or the prefill brings.
        fill: What the forward pass writes: GPU block and key of its content.
    """

    metadata: ConnectorMetadata
    poison: tuple[int, ...] = ()
    fill: tuple[tuple[int, bytes], ...] = ()


@dataclass(slots=True)
class StepOutcome:
    """What workers report after a step.

    Attributes:
        output: For the scheduler's half of the connector.
        transfers: Transfers that ended, for measurements; one per transfer and worker.
    """

    output: ConnectorOutput = field(default_factory=ConnectorOutput)
    transfers: list[TransferResult] = field(default_factory=list)


class WorkerGroup(Protocol):
    """The workers of a replay, in rank order."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the GPU pool of each worker is, for example ``"cuda:0"`` or ``"cpu"``."""

    def run_step(self, orders: StepOrders) -> StepOutcome:
        """Run one step on all workers; their reports are added up."""

    def count_wrong_bytes(self, blocks: Sequence[tuple[int, bytes]]) -> list[list[int]]:
        """Compare GPU blocks with what their keys demand.

        Args:
            blocks: GPU block and key of the content that it should have.

        Returns:
            For each worker, the number of wrong bytes in each block.
        """

    def shutdown(self) -> None:
        """Finish transfers in flight and release everything. Idempotent."""


@final
class Worker:
    """One worker with its GPU pool: a group of one, or one process of a larger group."""

    def __init__(
        self,
        spec: OffloadingSpec,
        memory: GpuMemory,
        block_bytes: int,
        *,
        rank: int = 0,
        num_workers: int = 1,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """Build the handlers over the pool and the worker's part of the primary tier.

        Args:
            spec: Makes the handlers; shut down by its owner, after the worker.
            memory: The GPU pool.
            block_bytes: Bytes of one of its blocks.
            rank: Which worker this is.
            num_workers: How many there are.
            stopwatch: Where the time of the parts of a step is added up.

        Raises:
            KVCoreError: The primary tier cannot be mapped.
        """
        self._memory = memory
        self._rank = rank
        self._num_workers = num_workers
        self._stopwatch = stopwatch or Stopwatch()
        self._checker = BlockChecker()
        self._transfers: list[TransferResult] = []
        self._connector = OffloadingConnectorWorker(spec, transfer_finished=self._note_transfer)
        self._connector.register_kv_caches(
            CanonicalKVCaches(
                tensors=(CanonicalKVCacheTensor(memory.tensor, block_bytes),),
                group_data_refs=((CanonicalKVCacheRef(0, block_bytes),),),
            )
        )

    def _note_transfer(self, result: TransferResult) -> None:
        self._transfers.append(result)

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the GPU pool is."""
        return (str(getattr(self._memory.tensor, "device", "cpu")),)

    def run_step(self, orders: StepOrders) -> StepOutcome:
        """Run one step, in the order of the step protocol."""
        measure, metadata = self._stopwatch.measure, orders.metadata
        with measure("starting transfers"):
            self._connector.handle_preemptions(metadata)
        with measure("poisoning"):
            self._memory.poison(orders.poison)
        with measure("starting transfers"):
            self._connector.start_load_kv(metadata)
        with measure("writing prefill"):
            for block_id, key in orders.fill:
                self._memory.fill(block_id, self._content_key(key))
        with measure("finishing transfers"):
            output = self._connector.get_finished()
        transfers, self._transfers = self._transfers, []
        return StepOutcome(output, transfers)

    def count_wrong_bytes(self, blocks: Sequence[tuple[int, bytes]]) -> list[list[int]]:
        """Compare GPU blocks with what their keys demand of this worker."""
        count = self._checker.count_wrong_bytes
        return [
            [count(self._content_key(key), self._memory.read(block_id)) for block_id, key in blocks]
        ]

    def _content_key(self, key: bytes) -> bytes:
        return content_key(key, self._rank, self._num_workers)

    def shutdown(self) -> None:
        """Finish transfers in flight and let go of the primary tier. Idempotent."""
        self._connector.shutdown()


def content_key(key: bytes, rank: int, num_workers: int) -> bytes:
    """Return what the bytes of a worker's page of a block are derived from.

    Each rank has bytes of its own, so that a page that reaches another rank is seen.

    Args:
        key: Key of the block.
        rank: The worker.
        num_workers: Workers of the replay; a single one has the content of the key itself.
    """
    return key if num_workers == 1 else key + rank.to_bytes(_RANK_BYTES, "big")
