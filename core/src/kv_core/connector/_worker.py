"""The worker's half of the connector.

All state belongs to the worker's thread. In each step the engine calls ``handle_preemptions`` and
``start_load_kv`` before the forward pass and ``get_finished`` after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_core.connector._protocol import ConnectorOutput
from kv_core.device import OffloadingWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.connector._protocol import ConnectorMetadata, Transfer
    from kv_core.device import CanonicalKVCaches
    from kv_core.engine import OffloadingSpec, TransferResult

__all__ = ["OffloadingConnectorWorker"]


@final
class OffloadingConnectorWorker:
    """Carries out the scheduler's orders on one worker."""

    def __init__(
        self,
        spec: OffloadingSpec,
        *,
        transfer_finished: Callable[[TransferResult], None] | None = None,
    ) -> None:
        """Prepare a worker.

        Args:
            spec: Makes the handlers, once the KV caches are known.
            transfer_finished: Told of every transfer that ended, for measurements.
        """
        self._spec = spec
        self._transfer_finished = transfer_finished
        self._worker = OffloadingWorker()
        self._deferred: tuple[Transfer, ...] = ()
        self._not_begun: set[int] = set()

    def register_kv_caches(self, kv_caches: CanonicalKVCaches) -> None:
        """Say where the worker's KV caches are. Called once, before the first step."""
        for source_type, destination_type, handler in self._spec.get_handlers(kv_caches):
            self._worker.register_handler(source_type, destination_type, handler)

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """Begin a step: start the stores deferred from the last one, finish what is to be flushed.

        On return, no transfer touches memory that the step hands out again.
        """
        for store in self._deferred:
            self._begin(store)
        for store in metadata.stores:
            if store.job_id in metadata.flush_job_ids:
                self._begin(store)
        if metadata.flush_job_ids:
            self._worker.wait(metadata.flush_job_ids)
        self._deferred = tuple(
            store for store in metadata.stores if store.job_id not in metadata.flush_job_ids
        )

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """Start the step's loads and return. Called after :meth:`handle_preemptions`."""
        for load in metadata.loads:
            self._begin(load)

    def _begin(self, transfer: Transfer) -> None:
        if not self._worker.transfer_async(transfer.job_id, transfer.spec):
            self._not_begun.add(transfer.job_id)

    def get_finished(self) -> ConnectorOutput:
        """Return the transfers that ended, well or badly, since the last call."""
        output = ConnectorOutput(dict.fromkeys(self._not_begun, 1), set(self._not_begun))
        self._not_begun.clear()
        for result in self._worker.get_finished():
            output.finished[result.job_id] = 1
            if not result.success:
                output.failed.add(result.job_id)
            if self._transfer_finished is not None:
                self._transfer_finished(result)
        return output

    def shutdown(self) -> None:
        """Finish transfers in flight and release everything. Idempotent."""
        self._worker.shutdown()
        # Handlers hold arrays over the shared region, which could not be unmapped under them.
        self._worker = OffloadingWorker()
