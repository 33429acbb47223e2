"""The worker's half of the simple mode, one for each rank.

All state belongs to the worker's thread; copies are launched by the thread of
:class:`DmaCopyBackend`. In each step the engine calls ``bind_connector_metadata`` and
``handle_preemptions`` before the forward pass, and ``get_finished`` after it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, final

from kv_core.engine import TransferResult
from kv_core.errors import EngineStateError
from kv_core.simple._compute_order import compute_order_of
from kv_core.simple._cpu_memory import CpuMemory
from kv_core.simple._dma import DmaCopyBackend
from kv_core.simple._metadata import (
    NO_EVENT,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_core.device import CanonicalKVCaches
    from kv_core.device.copy import CopyBackend, HostRegistrar
    from kv_core.simple._compute_order import ComputeOrder

__all__ = ["SimpleCPUOffloadWorker"]

_LOGGER: Final = logging.getLogger(__name__)


@final
class SimpleCPUOffloadWorker:
    """Owns the CPU memory of one rank and carries out the scheduler's orders."""

    def __init__(
        self,
        open_backend: Callable[[Sequence[npt.NDArray[np.int8]]], CopyBackend],
        *,
        registrar: HostRegistrar | None = None,
        order: ComputeOrder | None = None,
        transfer_finished: Callable[[TransferResult], None] | None = None,
    ) -> None:
        """Prepare a worker.

        Args:
            open_backend: Opens what moves bytes, given the CPU side.
            registrar: Pins CPU memory for the device; ``None`` leaves it unpinned.
            order: Orders copies after the engine's work; by default what the memory of the KV
                caches needs.
            transfer_finished: Told of every transfer that ended, for measurements.
        """
        self._open_backend = open_backend
        self._registrar = registrar
        self._order = order
        self._transfer_finished = transfer_finished
        self._memory: CpuMemory | None = None
        self._copies: DmaCopyBackend | None = None
        self._metadata = SimpleCPUOffloadMetadata()

    @property
    def cpu_tensors(self) -> tuple[npt.NDArray[np.int8], ...]:
        """The rank's CPU memory, one tensor for each canonical KV cache tensor."""
        return () if self._memory is None else self._memory.tensors

    def register_kv_caches(self, kv_caches: CanonicalKVCaches, num_cpu_blocks: int) -> None:
        """Say where the KV caches are, and allocate CPU memory. Called once.

        Args:
            kv_caches: The rank's KV caches.
            num_cpu_blocks: Blocks of CPU memory, the same on every rank.

        Raises:
            ConfigError: There is not so much memory, or no block.
            EngineStateError: It was called before.
            ValueError: There are no tensors.
        """
        if self._copies is not None:
            raise EngineStateError("the KV caches of this worker are registered already")
        if not kv_caches.tensors:
            raise ValueError(
                "the KV caches have no tensors; canonicalize_kv_caches makes them of what the "
                "engine registers"
            )
        pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self._memory = CpuMemory(num_cpu_blocks, pages, self._registrar)
        try:
            self._copies = DmaCopyBackend(
                kv_caches,
                self._memory.tensors,
                self._open_backend(self._memory.tensors),
                self._order or compute_order_of(kv_caches.tensors[0].tensor),
            )
        except BaseException:
            self._memory.release()
            raise

    def bind_connector_metadata(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Take the orders of a step, once for each step and before its forward pass."""
        self._metadata = metadata

    def handle_preemptions(self) -> None:
        """Finish the transfers of earlier steps if the step needs what they hold."""
        if self._metadata.need_flush:
            self.flush()

    def flush(self) -> None:
        """Block until every transfer that was launched has ended."""
        self._registered().flush()

    def start_load_kv(self) -> None:
        """Do nothing: loads are launched after the forward pass, with the stores.

        Whoever waits for a load does not run in this step, and the time before the forward pass
        is time that the others wait.
        """

    def get_finished(self) -> SimpleCPUOffloadWorkerMetadata:
        """Launch the step's copies, after the forward pass was submitted.

        Returns:
            The transfers that ended, well or badly, since the last call.
        """
        copies = self._registered()
        # Taken, so that a second call in a step reports without launching again.
        orders, self._metadata = self._metadata, SimpleCPUOffloadMetadata()
        if orders.load_event != NO_EVENT:
            copies.launch_copy(
                orders.load_event, orders.load_gpu_blocks, orders.load_cpu_blocks, is_store=False
            )
        if orders.store_event != NO_EVENT:
            copies.launch_copy(
                orders.store_event, orders.store_gpu_blocks, orders.store_cpu_blocks, is_store=True
            )
        report = SimpleCPUOffloadWorkerMetadata()
        self._poll(copies, report.completed_load_events, report.failed_load_events, is_store=False)
        self._poll(copies, report.completed_store_events, report.failed_store_events, is_store=True)
        return report

    def _poll(
        self, copies: DmaCopyBackend, completed: dict[int, int], failed: set[int], *, is_store: bool
    ) -> None:
        for copy in copies.poll(is_store=is_store):
            completed[copy.event] = 1
            if copy.error is not None:
                failed.add(copy.event)
                kind = "store" if is_store else "load"
                # A failed copy costs a recompute; the worker's step goes on.
                _LOGGER.error("%s event %d failed", kind, copy.event, exc_info=copy.error)
            if self._transfer_finished is not None:
                self._transfer_finished(
                    TransferResult(
                        job_id=copy.event,
                        success=copy.error is None,
                        transfer_size=copy.num_bytes,
                        transfer_time=copy.seconds,
                        transfer_type=("GPU", "CPU") if is_store else ("CPU", "GPU"),
                    )
                )

    def _registered(self) -> DmaCopyBackend:
        if self._copies is None:
            raise EngineStateError("register_kv_caches was not called")
        return self._copies

    def shutdown(self) -> None:
        """Finish transfers in flight and release all memory. Idempotent."""
        if self._copies is not None:
            self._copies.shutdown()
        if self._memory is not None:
            self._memory.release()
