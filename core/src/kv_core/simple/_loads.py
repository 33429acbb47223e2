"""Loads: what was promised, what is under way.

A CPU block that a lookup has found is pinned from then on: until its load has ended, or until
the promise is void because the request asks again, is told of zero tokens, or ends. Without the
pins an eviction between the lookup and the load would take away what was promised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from kv_core.errors import EngineStateError
from kv_core.simple._matching import blocks_to_load, match_prefix
from kv_core.simple._metadata import NO_EVENT
from kv_core.simple._states import NO_TRANSFER, LoadBatch, LoadRequestState, TransferMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_core.keys import OffloadKey
    from kv_core.simple._config import SimpleOffloadConfig
    from kv_core.simple._cpu_blocks import CpuBlockPool
    from kv_core.simple._matching import BlockNames
    from kv_core.simple._protocol import GpuBlockPoolView, SimpleRequest

__all__ = ["LoadBook", "SimpleLoadReport", "StepLoads"]


@dataclass(slots=True)
class SimpleLoadReport:
    """Loads that ended.

    Attributes:
        loaded_req_ids: Requests whose blocks are all in place.
        failed_req_ids: Requests whose load failed; their blocks must be computed.
    """

    loaded_req_ids: set[str] = field(default_factory=set)
    failed_req_ids: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class StepLoads:
    """The loads that a step begins.

    Attributes:
        event: Their event, or :data:`NO_EVENT`.
        transfer: All of them.
        req_ids: The requests that wait for it.
    """

    event: int = NO_EVENT
    transfer: TransferMeta = NO_TRANSFER
    req_ids: tuple[str, ...] = ()


@final
class LoadBook:
    """Every load of the scheduler, from the promise to the last rank's report."""

    def __init__(
        self, config: SimpleOffloadConfig, cpu_blocks: CpuBlockPool, gpu_blocks: GpuBlockPoolView
    ) -> None:
        self._config = config
        self._cpu = cpu_blocks
        self._gpu = gpu_blocks
        self._promised: dict[str, LoadRequestState] = {}
        self._loading: dict[str, LoadRequestState] = {}
        self._not_begun: list[LoadRequestState] = []
        self._batches: dict[int, LoadBatch] = {}
        self._next_event = 0

    @property
    def num_in_flight(self) -> int:
        """Events that not every rank has reported, and loads that a step has still to begin."""
        return len(self._batches) + bool(self._not_begun)

    def promise(self, request: SimpleRequest, names: BlockNames, num_computed_tokens: int) -> int:
        """Look for loadable tokens and pin their blocks; voids an earlier promise.

        Returns:
            Tokens after the computed ones. The request's last token is never among them.
        """
        self.withdraw(request.req_id)
        groups = self._config.groups
        matched = match_prefix(names, groups, num_computed_tokens, self._is_present)
        tokens = min(matched, request.num_tokens - 1) - num_computed_tokens
        if tokens <= 0:
            return 0
        pinned = []
        for group_idx, group in enumerate(groups):
            indices = blocks_to_load(group, num_computed_tokens, num_computed_tokens + tokens)
            keys = names.keys(group_idx, indices.start, indices.stop)
            found = {index: self._cpu.find(key) for index, key in zip(indices, keys, strict=True)}
            pinned.append({index: block for index, block in found.items() if block is not None})
        state = LoadRequestState(request, num_computed_tokens, tokens, tuple(pinned))
        self._cpu.pin(state.all_pinned())
        self._promised[request.req_id] = state
        return tokens

    def _is_present(self, key: OffloadKey) -> bool:
        return self._cpu.find(key) is not None

    def withdraw(self, req_id: str) -> None:
        """Void a promise; none is fine."""
        state = self._promised.pop(req_id, None)
        if state is not None:
            self._cpu.unpin(state.all_pinned())

    def allocate(
        self, request: SimpleRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Turn a promise into a load of the next step; GPU blocks are referenced until its end.

        Raises:
            EngineStateError: So many tokens were not promised, or the block table is too short.
        """
        state = self._promised.get(request.req_id)
        if num_external_tokens == 0:
            self.withdraw(request.req_id)
            return
        promised = 0 if state is None else state.num_tokens
        if state is None or num_external_tokens > promised:
            raise EngineStateError(
                f"request {request.req_id!r}: {num_external_tokens} tokens are to be loaded, but "
                f"{promised} were promised; ask get_num_new_matched_tokens again"
            )
        cpu_ids: list[int] = []
        gpu_ids: list[int] = []
        stop_token = state.start_token + num_external_tokens
        for group_idx, (group, table) in enumerate(
            zip(self._config.groups, block_ids, strict=True)
        ):
            indices = blocks_to_load(group, state.start_token, stop_token)
            pinned = state.pinned[group_idx]
            if len(table) < indices.stop or not pinned.keys() >= set(indices):
                raise EngineStateError(
                    f"request {request.req_id!r}: loading up to token {stop_token} needs the "
                    f"blocks {indices.start} to {indices.stop - 1} of group {group_idx}; its block "
                    f"table has {len(table)}, and those promised are {sorted(pinned)}"
                )
            cpu_ids += [pinned[index] for index in indices]
            gpu_ids += table[indices.start : indices.stop]
        del self._promised[request.req_id]
        wanted = set(cpu_ids)
        self._cpu.unpin([block for block in state.all_pinned() if block not in wanted])
        self._gpu.acquire(gpu_ids)
        state.transfer = TransferMeta(tuple(gpu_ids), tuple(cpu_ids))
        self._loading[request.req_id] = state
        self._not_begun.append(state)

    def begin_step(self) -> StepLoads:
        """Hand out the loads that were allocated since the last step, as one event."""
        states, self._not_begun = self._not_begun, []
        if not states:
            return StepLoads()
        event = self._next_event
        self._next_event += 1
        self._batches[event] = LoadBatch(states=states, reports_due=self._config.world_size)
        transfer = TransferMeta(
            tuple(block for state in states for block in state.transfer.gpu_block_ids),
            tuple(block for state in states for block in state.transfer.cpu_block_ids),
        )
        return StepLoads(event, transfer, tuple(state.request.req_id for state in states))

    def complete(self, event: int, count: int, *, failed: bool, report: SimpleLoadReport) -> bool:
        """Take in the reports of some ranks.

        Returns:
            Whether the event is known.
        """
        batch = self._batches.get(event)
        if batch is None:
            return False
        if batch.take_reports(count, failed=failed):
            del self._batches[event]
            for state in batch.states:
                self._let_go(state)
                if not state.finished:
                    failed = batch.failed or state.is_outdated
                    ended = report.failed_req_ids if failed else report.loaded_req_ids
                    ended.add(state.request.req_id)
        return True

    def _let_go(self, state: LoadRequestState) -> None:
        self._cpu.unpin(state.transfer.cpu_block_ids)
        self._gpu.release(state.transfer.gpu_block_ids)
        if self._loading.get(state.request.req_id) is state:
            del self._loading[state.request.req_id]

    def finish(self, req_id: str) -> None:
        """Take note of a request's end: its promise is void, its load is of no interest.

        A load that workers know of keeps its blocks until it has ended.
        """
        self.withdraw(req_id)
        state = self._loading.pop(req_id, None)
        if state is None:
            return
        state.finished = True
        if state in self._not_begun:
            self._not_begun.remove(state)
            self._let_go(state)

    def reset(self) -> None:
        """Void every promise, and let every load in flight end as a failed one."""
        for req_id in tuple(self._promised):
            self.withdraw(req_id)
        for state in self._loading.values():
            state.is_outdated = True

    def are_in_flight(self, req_ids: Iterable[str]) -> bool:
        """Say whether one of these requests is being loaded."""
        return not self._loading.keys().isdisjoint(req_ids)

    def num_blocks_loading(self, req_id: str) -> int:
        """Return the blocks of a request's load; 0 without one."""
        state = self._loading.get(req_id)
        return 0 if state is None else len(state.transfer.gpu_block_ids)
