"""The scheduler's half of the simple mode.

All state belongs to the scheduler's thread. Within a step the engine calls
``get_num_new_matched_tokens`` and ``update_state_after_alloc`` for requests it considers, and
then ``build_connector_meta`` once; ``update_connector_output`` and ``request_finished`` come
between steps.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, final

from kv_core.simple._cpu_blocks import CpuBlockPool
from kv_core.simple._loads import LoadBook, SimpleLoadReport
from kv_core.simple._metadata import SimpleCPUOffloadMetadata
from kv_core.simple._stores import StoreBook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_core.contract import OffloadingEvent
    from kv_core.simple._config import SimpleOffloadConfig
    from kv_core.simple._metadata import SimpleCPUOffloadWorkerMetadata
    from kv_core.simple._protocol import GpuBlockPoolView, SimpleRequest, SimpleStep

__all__ = ["SimpleCPUOffloadScheduler"]

_LOGGER: Final = logging.getLogger(__name__)


@final
class SimpleCPUOffloadScheduler:
    """Keeps the map of CPU memory and decides, once per step, what to load and what to store.

    GPU blocks that a transfer reads or writes are referenced in the engine's own pool, so that
    nobody gets them before it has ended: requests may finish or be aborted at any time.
    """

    def __init__(
        self,
        config: SimpleOffloadConfig,
        gpu_block_pool: GpuBlockPoolView,
        *,
        cpu_block_freed: Callable[[int], None] | None = None,
    ) -> None:
        """Start with empty CPU memory.

        Args:
            config: Sizes.
            gpu_block_pool: The engine's pool.
            cpu_block_freed: Told of every CPU block whose content is given up, at once.
        """
        self._cpu = CpuBlockPool(
            config.num_cpu_blocks,
            block_freed=cpu_block_freed,
            record_events=config.record_events,
        )
        self._loads = LoadBook(config, self._cpu, gpu_block_pool)
        self._stores = StoreBook(config, self._cpu, gpu_block_pool)

    # -- within a step --------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: SimpleRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Say how many tokens beyond those on the GPU can be loaded, and hold their blocks.

        Args:
            request: A request that is not running. Asking again voids the earlier answer.
            num_computed_tokens: Leading tokens whose KV is on the GPU.

        Returns:
            The number of tokens, and whether the load is asynchronous (always, when there is
            one). The request's last token is never counted, so the number ends within a block
            when every block was found.
        """
        names = self._stores.names(request)
        tokens = self._loads.promise(request, names, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: SimpleRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Take note of a request's GPU blocks, and begin the load that was promised.

        Args:
            request: The request.
            block_ids: Its block table, per group: blocks that were computed and new ones.
            num_external_tokens: Tokens to load, at most as many as were answered; 0 for none,
                and then nothing is held for it any more. With sliding windows as many as were
                answered or none: what fewer tokens need was not held.

        Raises:
            EngineStateError: So many tokens were not promised, or the block table is too short.
        """
        for table in block_ids:
            self._stores.note_used(frozenset(table))
        self._loads.allocate(request, block_ids, num_external_tokens)

    def build_connector_meta(self, step: SimpleStep) -> SimpleCPUOffloadMetadata:
        """End the scheduling of a step and collect the workers' orders.

        Args:
            step: What the engine decided. Empty when it only lets transfers finish.
        """
        preempted = step.preempted_req_ids
        # Blocks that transfers hold are not free, and preemption says that free ones ran short.
        need_flush = self._stores.preempt(preempted) or self._loads.are_in_flight(preempted)
        loads = self._loads.begin_step()
        stores = self._stores.begin_step(step)
        return SimpleCPUOffloadMetadata(
            load_event=loads.event,
            load_gpu_blocks=loads.transfer.gpu_block_ids,
            load_cpu_blocks=loads.transfer.cpu_block_ids,
            load_event_to_reqs={loads.event: loads.req_ids} if loads.req_ids else {},
            store_event=stores.event,
            store_gpu_blocks=stores.transfer.gpu_block_ids,
            store_cpu_blocks=stores.transfer.cpu_block_ids,
            need_flush=need_flush,
        )

    # -- between steps --------------------------------------------------------------------------

    def update_connector_output(self, output: SimpleCPUOffloadWorkerMetadata) -> SimpleLoadReport:
        """Take in what workers report; an event counts once every rank has reported it.

        Returns:
            The loads that ended.
        """
        report = SimpleLoadReport()
        for event, count in output.completed_load_events.items():
            failed = event in output.failed_load_events
            if not self._loads.complete(event, count, failed=failed, report=report):
                _LOGGER.warning("a worker reported load event %d, which is not in flight", event)
        for event, count in output.completed_store_events.items():
            failed = event in output.failed_store_events
            if not self._stores.complete(event, count, failed=failed):
                _LOGGER.warning("a worker reported store event %d, which is not in flight", event)
        return report

    def request_finished(self, request: SimpleRequest) -> bool:
        """Note the end of a request, finished or aborted. Unknown requests are fine.

        What transfers in flight need is kept until they have ended.

        Returns:
            ``False``: the engine may release its GPU blocks now.
        """
        self._loads.finish(request.req_id)
        self._stores.finish(request.req_id)
        return False

    def reset_cache(self) -> None:
        """Forget everything in CPU memory, for example because the weights have changed.

        Called between steps, when the engine has made its own pool forget its blocks: lazy stores
        take what the pool has a name for. Nothing from before is found again. Loads in flight are
        reported as failed, stores in flight are dropped, and both hold their blocks until every
        rank has reported. Requests that go on with what they have computed keep it to themselves.
        """
        self._loads.reset()
        self._stores.reset()
        self._cpu.clear()

    def has_pending_work(self) -> bool:
        """Say whether the engine must keep stepping although no request can run."""
        return self.num_transfers_in_flight > 0

    def take_events(self) -> list[OffloadingEvent]:
        """Return what became present in CPU memory, and what left it, since the last call."""
        return self._cpu.take_events()

    # -- measurements ---------------------------------------------------------------------------

    @property
    def num_transfers_in_flight(self) -> int:
        """Events of either direction that not every rank has reported."""
        return self._loads.num_in_flight + self._stores.num_in_flight

    @property
    def num_requests(self) -> int:
        """Requests that something is remembered of."""
        return self._stores.num_requests

    @property
    def stores_declined(self) -> int:
        """Offers of which a part found no room in CPU memory so far."""
        return self._stores.num_declined

    def num_blocks_loading(self, request: SimpleRequest) -> int:
        """Return the blocks of a request's load in flight; 0 without one."""
        return self._loads.num_blocks_loading(request.req_id)

    def get_stats(self) -> dict[str, float]:
        """Return the state of CPU memory, and what did not work so far."""
        return {
            **self._cpu.get_stats(),
            "stores_declined": self._stores.num_declined,
            "stores_failed": self._stores.num_failed,
        }
