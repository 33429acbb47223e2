"""Stores: eager ones, taken from requests as they compute, and lazy ones, from the free queue.

GPU blocks are referenced, and CPU blocks known but not readable, from the step that begins a
store until every rank has reported its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_core.simple._lazy import FreeQueueCursor
from kv_core.simple._matching import BlockNames
from kv_core.simple._metadata import NO_EVENT
from kv_core.simple._states import NO_TRANSFER, StoreBatch, StoreRequestState, TransferMeta

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kv_core.keys import OffloadKey
    from kv_core.simple._config import SimpleOffloadConfig
    from kv_core.simple._cpu_blocks import CpuBlockPool
    from kv_core.simple._protocol import (
        GpuBlockPoolView,
        SimpleRequest,
        SimpleStep,
        SimpleStepRequest,
    )

__all__ = ["StepStores", "StoreBook"]


@dataclass(frozen=True, slots=True)
class StepStores:
    """The stores that a step begins.

    Attributes:
        event: Their event, or :data:`NO_EVENT`.
        transfer: All of them.
    """

    event: int = NO_EVENT
    transfer: TransferMeta = NO_TRANSFER


@final
class StoreBook:
    """Every store of the scheduler, from the choice of blocks to the last rank's report."""

    def __init__(
        self, config: SimpleOffloadConfig, cpu_blocks: CpuBlockPool, gpu_blocks: GpuBlockPoolView
    ) -> None:
        self._config = config
        self._cpu = cpu_blocks
        self._gpu = gpu_blocks
        self._requests: dict[str, StoreRequestState] = {}
        self._batches: dict[int, StoreBatch] = {}
        self._next_event = 0
        self._queue = FreeQueueCursor(gpu_blocks, config.target_free)
        self._has_failed_lately = False
        self.num_declined = 0
        """Offers of which a part found no room so far."""
        self.num_failed = 0
        """Batches that failed so far."""

    @property
    def num_in_flight(self) -> int:
        """Events that not every rank has reported."""
        return len(self._batches)

    @property
    def num_requests(self) -> int:
        """Requests that are remembered."""
        return len(self._requests)

    def names(self, request: SimpleRequest) -> BlockNames:
        """Return the keys of a request, from now on remembered until it has finished."""
        return self._state(request).names

    def _state(self, request: SimpleRequest) -> StoreRequestState:
        state = self._requests.get(request.req_id)
        # A finished one is there for its stores only: a new request may have its name.
        if state is None or state.finished:
            names = BlockNames(request, self._config.groups, self._config.tokens_per_hash)
            state = StoreRequestState(request.req_id, names, [0] * len(self._config.groups))
            self._requests[request.req_id] = state
        return state

    def note_used(self, block_ids: Collection[int]) -> None:
        """Take note of GPU blocks that a request found or got."""
        self._queue.note_used(block_ids)

    def preempt(self, req_ids: Iterable[str]) -> bool:
        """Let requests start over.

        Returns:
            Whether blocks of one of them are being stored.
        """
        being_stored = False
        for req_id in req_ids:
            state = self._requests.get(req_id)
            if state is not None:
                # What was stored may be evicted before they have computed it again.
                state.cursors = [0] * len(state.cursors)
                being_stored |= bool(state.store_events)
        return being_stored

    def begin_step(self, step: SimpleStep) -> StepStores:
        """Choose the blocks that a step stores, as one event.

        The step's allocations have been made, and nothing of the step has been computed yet.
        """
        batch = self._take_from_queue(step) if self._config.lazy else self._take_computed(step)
        if not batch.keys:
            return StepStores()
        event = self._next_event
        self._next_event += 1
        self._batches[event] = batch
        for state in batch.requests:
            state.store_events.add(event)
        self._gpu.acquire(batch.transfer.gpu_block_ids)
        return StepStores(event, batch.transfer)

    # -- eager ----------------------------------------------------------------------------------

    def _take_computed(self, step: SimpleStep) -> StoreBatch:
        """Take the full blocks that requests have computed when the step has run."""
        keys: list[OffloadKey] = []
        gpu_ids: list[int] = []
        cpu_ids: list[int] = []
        requests: list[StoreRequestState] = []
        for scheduled in step.scheduled:
            state = self._state(scheduled.request)
            if scheduled.num_computed_tokens == 0:
                # It starts from nothing, so nothing of it is from before a reset.
                state.is_outdated = False
            if state.is_outdated:
                continue
            before = len(keys)
            self._take_of_request(state, scheduled, keys, gpu_ids, cpu_ids)
            if len(keys) > before:
                requests.append(state)
        transfer = TransferMeta(tuple(gpu_ids), tuple(cpu_ids))
        return StoreBatch(
            keys=tuple(keys),
            transfer=transfer,
            requests=requests,
            reports_due=self._config.world_size,
        )

    def _take_of_request(
        self,
        state: StoreRequestState,
        scheduled: SimpleStepRequest,
        keys: list[OffloadKey],
        gpu_ids: list[int],
        cpu_ids: list[int],
    ) -> None:
        computed = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        tokens = min(computed, scheduled.request.num_tokens, state.names.num_hashed_tokens)
        declined = False
        for group_idx, table in enumerate(scheduled.block_ids):
            start = state.cursors[group_idx]
            stop = min(tokens // self._config.groups[group_idx].tokens_per_block, len(table))
            if stop <= start:
                continue
            most = self._cpu.num_available
            known: list[OffloadKey] = []
            offered: dict[OffloadKey, int] = {}
            for index, key in enumerate(state.names.keys(group_idx, start, stop), start):
                if self._cpu.is_known(key):
                    known.append(key)
                # The null block stands for tokens that left a sliding window.
                elif table[index] != 0:
                    offered[key] = index
                    if len(offered) > most:
                        # There is no room for this one, and none for those behind it.
                        break
            self._cpu.touch(known)
            # Not at the cost of their own prefix: without its head, a tail is of no use.
            reserved = self._cpu.reserve(tuple(offered), protected=state.names.all_keys)
            taken = list(offered.items())[: len(reserved)]
            keys += [key for key, _ in taken]
            gpu_ids += [table[index] for _, index in taken]
            cpu_ids += reserved
            if len(reserved) < len(offered):
                # It stops at what found no room, which is offered again: no hole in a prefix.
                stop = list(offered.values())[len(reserved)]
                declined = True
            state.cursors[group_idx] = stop
        self.num_declined += declined

    # -- lazy -----------------------------------------------------------------------------------

    def _take_from_queue(self, step: SimpleStep) -> StoreBatch:
        """Take blocks from the head of the GPU's free queue that CPU memory does not have."""
        if self._has_failed_lately and not step.scheduled:
            # Trying again and again would keep an engine busy that has nothing to do.
            return StoreBatch(reports_due=self._config.world_size)
        self._has_failed_lately = False
        self._queue.note_used(step.allocated_block_ids)
        # While they are being stored they cannot be handed out; the other half can.
        in_flight = self._queue.num_being_stored
        share = (self._gpu.num_free + in_flight) // 2 - in_flight
        limit = max(0, min(share, self._cpu.num_available))
        taken = self._queue.take(limit, lambda key: not self._cpu.is_known(key))
        # Of a prefix, the queue has the tail first.
        taken.reverse()
        keys = tuple(key for _, key in taken)
        transfer = TransferMeta(
            tuple(block_id for block_id, _ in taken), tuple(self._cpu.reserve(keys))
        )
        return StoreBatch(keys=keys, transfer=transfer, reports_due=self._config.world_size)

    # -- completions ----------------------------------------------------------------------------

    def complete(self, event: int, count: int, *, failed: bool) -> bool:
        """Take in the reports of some ranks; blocks are readable when every rank has reported.

        Returns:
            Whether the event is known.
        """
        batch = self._batches.get(event)
        if batch is None:
            return False
        if batch.take_reports(count, failed=failed):
            del self._batches[event]
            self._complete(event, batch)
        return True

    def _complete(self, event: int, batch: StoreBatch) -> None:
        gpu_ids = batch.transfer.gpu_block_ids
        if batch.failed:
            self.num_failed += 1
            self._has_failed_lately = True
            self._cpu.discard(batch.transfer.cpu_block_ids)
            self._offer_again(batch.keys)
        else:
            self._cpu.publish(batch.transfer.cpu_block_ids)
        if self._config.lazy:
            self._queue.stored(gpu_ids)
            self._gpu.release(gpu_ids, to_front=True)
            if batch.failed:
                # The cursor may have passed them.
                self._queue.restart()
            else:
                self._queue.returned(gpu_ids)
        else:
            self._gpu.release(gpu_ids)
        for state in batch.requests:
            state.store_events.discard(event)
            self._forget_if_over(state)

    def _offer_again(self, keys: Iterable[OffloadKey]) -> None:
        """Move cursors back to blocks that were not stored after all.

        Not only those of the request that tried: others were told that the blocks are known.
        """
        failed = frozenset(keys)
        for state in self._requests.values():
            for group_idx, cursor in enumerate(state.cursors):
                taken = state.names.keys(group_idx, 0, cursor)
                state.cursors[group_idx] = next(
                    (index for index, key in enumerate(taken) if key in failed), cursor
                )

    def reset(self) -> None:
        """Offer nothing of what was computed so far, nor what is computed on top of it.

        Stores in flight end as usual; the pool knows that their blocks have lost their keys.
        """
        for state in self._requests.values():
            state.cursors = [0] * len(state.cursors)
            state.is_outdated = True
        self._queue.restart()

    def finish(self, req_id: str) -> None:
        """Take note of a request's end; it is forgotten when its stores have ended."""
        state = self._requests.get(req_id)
        if state is not None:
            state.finished = True
            self._forget_if_over(state)

    def _forget_if_over(self, state: StoreRequestState) -> None:
        is_over = state.finished and not state.store_events
        if is_over and self._requests.get(state.req_id) is state:
            del self._requests[state.req_id]
