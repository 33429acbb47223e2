"""The scheduler's half of the connector.

All state belongs to the scheduler's thread. Within a step the engine calls
``get_num_new_matched_tokens`` and ``update_state_after_alloc`` for requests it considers, and
then ``build_connector_meta`` once; ``update_connector_output`` and ``request_finished`` come
between steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from kv_core.connector._matching import RequestBlocks, match_prefix, window_blocks
from kv_core.connector._protocol import ConnectorMetadata, Transfer
from kv_core.contract import OffloadPolicy, ScheduleEndContext
from kv_core.engine import GPULoadStoreSpec
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_core.connector._protocol import (
        ConnectorOutput,
        KVRequest,
        ScheduledRequest,
        StepSchedule,
    )
    from kv_core.contract import OffloadingEvent
    from kv_core.engine import OffloadingConfig, OffloadingManager
    from kv_core.keys import OffloadKey

__all__ = ["LoadReport", "OffloadingConnectorScheduler"]

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """A live request.

    Attributes:
        blocks: Its offloaded blocks.
        cursors: Per group, the first block that was not taken yet.
        block_ids: The block table as last seen.
        computed_tokens: Tokens whose KV exists once the steps so far have run.
        matched_after: Tokens that the GPU had when loadable ones were last counted.
        touched: Whether its use of blocks was reported.
        offers_all: Whether a tier wants every block of the request, known ones too.
        is_outdated: Whether it may hold KV of weights from before a reset to a new epoch.
    """

    blocks: RequestBlocks
    cursors: list[int]
    block_ids: Sequence[Sequence[int]] = ()
    computed_tokens: int = 0
    matched_after: int = 0
    touched: bool = False
    offers_all: bool = False
    is_outdated: bool = False


@dataclass(slots=True)
class _Job:
    """A transfer that workers have been or will be told of.

    Attributes:
        request: The request.
        keys: The blocks, offloaded.
        gpu_block_ids: GPU blocks that it reads or writes.
        is_load: The direction.
        reports_due: Workers that have not reported yet.
        failed: Whether a worker reported failure.
        stale: Whether the cache was reset since; the manager has forgotten the blocks.
    """

    request: _Request
    keys: tuple[OffloadKey, ...]
    gpu_block_ids: frozenset[int]
    is_load: bool
    reports_due: int
    failed: bool = False
    stale: bool = False


@dataclass(slots=True)
class LoadReport:
    """Loads that ended.

    Attributes:
        loaded_req_ids: Requests whose blocks are all in place.
        failed_req_ids: Requests whose load failed; their blocks must be computed.
    """

    loaded_req_ids: set[str] = field(default_factory=set)
    failed_req_ids: set[str] = field(default_factory=set)


@final
class OffloadingConnectorScheduler:
    """Turns the engine's schedule into transfers, and completions into bookkeeping."""

    def __init__(self, config: OffloadingConfig, manager: OffloadingManager) -> None:
        """Take the manager over.

        Args:
            config: The configuration.
            manager: The ledger of offloaded blocks.
        """
        self._config = config
        self._manager = manager
        self._factor = config.block_size_factor
        self._prompt_only = config.offload_prompt_only
        self._requests: dict[str, _Request] = {}
        self._finished: list[_Request] = []
        self._jobs: dict[int, _Job] = {}
        self._loads: list[Transfer] = []
        self._next_job_id = 0
        self._resetting = False
        self._epoch = config.namespace.epoch
        self.stores_declined = 0
        """Offers that found no room so far."""

    # -- loading --------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens beyond those on the GPU can be loaded.

        Args:
            request: A request that is not running.
            num_computed_tokens: Leading tokens whose KV is on the GPU.

        Returns:
            The number of tokens, or ``None`` to ask again in a later step; and whether the load
            is asynchronous (always, when there is one). The request's last token is never
            counted, so the number ends within a block when every block was found.
        """
        state = self._state(request)
        if not state.touched:
            self._touch(state)
        state.matched_after = num_computed_tokens
        matched = match_prefix(state.blocks, num_computed_tokens, self._config, self._manager)
        if matched is None:
            return None, False
        # The engine must compute at least one token to sample from. The block that holds the
        # last one is loaded whole all the same.
        new_tokens = min(matched, request.num_tokens - 1) - num_computed_tokens
        return max(new_tokens, 0), new_tokens > 0

    def _touch(self, state: _Request) -> None:
        """Report the use of all full blocks, those on the GPU included, once per request."""
        state.touched = True
        for group_idx in range(len(self._config.groups)):
            tokens = self._config.tokens_per_offloaded_block(group_idx)
            num_blocks = state.blocks.num_hashed_tokens // tokens
            keys = state.blocks.keys(group_idx, num_blocks)
            self._manager.touch(keys[:num_blocks], state.blocks.context)

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Begin the load of tokens that were promised, now that GPU blocks are allocated.

        Args:
            request: The request.
            block_ids: Its block table, per group: blocks that were computed and new ones.
            num_external_tokens: Tokens to load, at most as many as
                :meth:`get_num_new_matched_tokens` answered in this step; 0 for none.

        Raises:
            EngineStateError: The block table is too short.
        """
        state = self._state(request)
        if num_external_tokens == 0:
            self._manager.release(state.blocks.context)
            return
        start_token = state.matched_after
        stop_token = start_token + num_external_tokens
        keys: list[OffloadKey] = []
        gpu_block_ids: list[int] = []
        group_sizes: list[int] = []
        first_indices: list[int] = []
        cursors = list(state.cursors)
        for group_idx in range(len(self._config.groups)):
            start, stop = self._blocks_to_load(group_idx, start_token, stop_token)
            table = block_ids[group_idx]
            if len(table) < stop:
                raise EngineStateError(
                    f"request {request.req_id!r}: loading up to token {stop_token} needs {stop} "
                    f"GPU blocks of group {group_idx}, its block table has {len(table)}"
                )
            first, last = start // self._factor, -(-stop // self._factor)
            keys.extend(state.blocks.keys(group_idx, last)[first:last])
            gpu_block_ids.extend(table[start:stop])
            group_sizes.append(stop - start)
            first_indices.append(start)
            if first <= cursors[group_idx] and not state.offers_all:
                # What is loaded is known below; there is no need to offer it again. Blocks
                # before it that only the GPU has still are to be offered.
                cursors[group_idx] = max(cursors[group_idx], stop // self._factor)
        source = self._manager.prepare_load(keys, state.blocks.context)
        state.cursors = cursors
        destination = GPULoadStoreSpec(gpu_block_ids, group_sizes, first_indices)
        job_id = self._new_job(state, tuple(keys), frozenset(gpu_block_ids), is_load=True)
        self._loads.append(Transfer(job_id, request.req_id, (source, destination)))

    def _blocks_to_load(self, group_idx: int, start_token: int, stop_token: int) -> tuple[int, int]:
        """Return the range of GPU blocks of a group that a load fills."""
        group = self._config.groups[group_idx]
        tokens = group.tokens_per_block
        start, stop = start_token // tokens, -(-stop_token // tokens)
        if group.sliding_window is not None:
            offloaded_tokens = self._config.tokens_per_offloaded_block(group_idx)
            reach = window_blocks(group.sliding_window, offloaded_tokens) * self._factor
            start = max(start, stop - reach)
        return start, stop

    # -- storing --------------------------------------------------------------------------------

    def build_connector_meta(self, schedule: StepSchedule) -> ConnectorMetadata:
        """End the scheduling of a step: offer new blocks and collect the workers' orders.

        Args:
            schedule: What the engine decided. Empty when it only lets transfers finish.
        """
        self._offer_again(self._manager.take_lost_keys())
        flush = self._jobs_to_flush(schedule)
        for req_id in schedule.preempted_req_ids:
            state = self._requests.get(req_id)
            if state is not None:
                state.block_ids, state.computed_tokens = (), 0
        stores: list[Transfer] = []
        for scheduled in schedule.scheduled:
            self._offer_scheduled(scheduled, stores)
        finished, self._finished = self._finished, []
        for state in finished:
            transfer = self._offer(state)
            if transfer is not None:
                # Its GPU blocks are free already: copy before this step overwrites them.
                stores.append(transfer)
                flush.add(transfer.job_id)
        for state in finished:
            self._manager.on_request_finished(state.blocks.context)
        self._manager.on_schedule_end(
            ScheduleEndContext(schedule.new_req_ids, schedule.preempted_req_ids)
        )
        loads, self._loads = tuple(self._loads), []
        return ConnectorMetadata(loads, tuple(stores), frozenset(flush))

    def _jobs_to_flush(self, schedule: StepSchedule) -> set[int]:
        """Find transfers of earlier steps in whose GPU blocks this step writes something else.

        Stores of preempted requests count in any case. A load is among them when its request
        was aborted: its blocks are free while it still writes to them.
        """
        begins_now = {load.job_id for load in self._loads}
        return {
            job_id
            for job_id, job in self._jobs.items()
            if job_id not in begins_now
            and (
                job.request.blocks.context.req_id in schedule.preempted_req_ids
                or not job.gpu_block_ids.isdisjoint(schedule.allocated_block_ids)
            )
        }

    def _offer_scheduled(self, scheduled: ScheduledRequest, stores: list[Transfer]) -> None:
        state = self._state(scheduled.request)
        if scheduled.num_computed_tokens == 0:
            # It starts from nothing, so nothing of it is of other weights.
            state.is_outdated = False
        state.block_ids = scheduled.block_ids
        state.computed_tokens = min(
            scheduled.num_computed_tokens + scheduled.num_scheduled_tokens,
            scheduled.request.num_tokens,
        )
        transfer = self._offer(state)
        if transfer is not None:
            stores.append(transfer)

    def _offer(self, state: _Request) -> Transfer | None:
        """Offer the full blocks between the cursors and the computed tokens."""
        if state.is_outdated:
            return None
        tokens = min(state.computed_tokens, state.blocks.num_hashed_tokens)
        if self._prompt_only:
            tokens = min(tokens, state.blocks.request.num_prompt_tokens)
        offered: dict[OffloadKey, tuple[int, int]] = {}
        ends = []
        for group_idx, table in enumerate(state.block_ids):
            end = tokens // self._config.tokens_per_offloaded_block(group_idx)
            ends.append(end)
            if end <= state.cursors[group_idx]:
                continue
            keys = state.blocks.keys(group_idx, end)
            for index in range(state.cursors[group_idx], end):
                # The null block stands for tokens that left a sliding window.
                if 0 not in table[index * self._factor : (index + 1) * self._factor]:
                    offered[keys[index]] = (group_idx, index)
        if not offered:
            self._advance(state, ends, {})
            return None
        output = self._manager.prepare_store(tuple(offered), state.blocks.context)
        if output is None:
            self.stores_declined += 1
            return None
        if output.declined_keys:
            self.stores_declined += 1
        self._advance(state, ends, {key: offered[key] for key in output.declined_keys})
        if not output.keys_to_store:
            return None
        gpu_block_ids: list[int] = []
        group_sizes = [0] * len(ends)
        first_indices = [0] * len(ends)
        for key in output.keys_to_store:
            group_idx, index = offered[key]
            start = index * self._factor
            if group_sizes[group_idx] == 0:
                first_indices[group_idx] = start
            gpu_block_ids.extend(state.block_ids[group_idx][start : start + self._factor])
            group_sizes[group_idx] += self._factor
        source = GPULoadStoreSpec(gpu_block_ids, group_sizes, first_indices)
        job_id = self._new_job(state, output.keys_to_store, frozenset(gpu_block_ids), is_load=False)
        return Transfer(job_id, state.blocks.context.req_id, (source, output.store_spec))

    @staticmethod
    def _advance(
        state: _Request, ends: list[int], declined: dict[OffloadKey, tuple[int, int]]
    ) -> None:
        """Move the cursors over everything but declined blocks: no hole in a prefix."""
        stops = list(ends)
        for group_idx, index in declined.values():
            stops[group_idx] = min(stops[group_idx], index)
        for group_idx, stop in enumerate(stops):
            state.cursors[group_idx] = max(state.cursors[group_idx], stop)

    # -- completions ----------------------------------------------------------------------------

    def update_connector_output(self, output: ConnectorOutput) -> LoadReport:
        """Take in what workers report; a job counts once every worker reported it.

        Returns:
            The loads that ended.
        """
        report = LoadReport()
        for job_id, count in output.finished.items():
            job = self._jobs.get(job_id)
            if job is None:
                _LOGGER.warning("a worker reported transfer %d, which is not in flight", job_id)
                continue
            job.reports_due -= count
            job.failed |= job_id in output.failed
            if job.reports_due > 0:
                continue
            del self._jobs[job_id]
            self._complete(job, report)
        # Jobs begun since the reset must not delay its end: there is always one in flight.
        if self._resetting and not any(job.stale for job in self._jobs.values()):
            self._resetting = False
            self._manager.on_reset_flushed()
        return report

    def _complete(self, job: _Job, report: LoadReport) -> None:
        context = job.request.blocks.context
        if job.is_load:
            if not job.stale:
                self._manager.complete_load(job.keys, context, success=not job.failed)
            if self._requests.get(context.req_id) is not job.request:
                return
            if job.failed:
                # The blocks are computed instead, and then offered like any other.
                job.request.cursors = [0] * len(job.request.cursors)
                report.failed_req_ids.add(context.req_id)
            else:
                report.loaded_req_ids.add(context.req_id)
        elif not job.stale:
            self._manager.complete_store(job.keys, context, success=not job.failed)
            if job.failed:
                self._offer_again(job.keys)

    def _offer_again(self, keys: Iterable[OffloadKey]) -> None:
        """Move cursors back to blocks that were not stored after all.

        Not only those of the request that tried: others were told that the blocks are known.
        """
        failed = frozenset(keys)
        if not failed:
            return
        for state in (*self._requests.values(), *self._finished):
            for group_idx, cursor in enumerate(state.cursors):
                taken = state.blocks.keys(group_idx, cursor)[:cursor]
                state.cursors[group_idx] = next(
                    (index for index, key in enumerate(taken) if key in failed), cursor
                )

    def request_finished(self, request: KVRequest) -> bool:
        """Note the end of a request, finished or aborted. Unknown requests are fine.

        Its last full blocks are offered in the next step.

        Returns:
            ``False``: the engine may free the GPU blocks now. Stores that still read them are
            flushed before the blocks are overwritten.
        """
        state = self._requests.pop(request.req_id, None)
        if state is not None:
            self._finished.append(state)
        return False

    # -- the rest -------------------------------------------------------------------------------

    def hit_levels(self, request: KVRequest) -> list[str]:
        """Name the level of each block of the request's load in flight, in load order.

        Returns:
            ``"cpu"`` or the name of a tier per offloaded block; empty without a load.
        """
        return [
            self._manager.hit_level(key, job.request.blocks.context)
            for job in self._jobs.values()
            if job.is_load and job.request.blocks.context.req_id == request.req_id
            for key in job.keys
        ]

    def reset_cache(self) -> None:
        """Do what the engine's reset call means by the setting ``engine_reset``.

        ``cache`` empties the primary tier; tiers keep their blocks. ``epoch`` also makes
        everything that was stored so far unreachable. Running requests go on; their blocks are
        offered again.
        """
        if self._config.extra_config.get("engine_reset") == "epoch":
            self.reset(self._epoch + 1)
        else:
            self._manager.reset_cache()
            self._note_reset()

    def reset(self, epoch: int) -> None:
        """Forget everything that was stored before, because the weights have changed.

        Loads in flight bring KV of other weights and are reported as failed. Requests that go on
        with what they have computed keep it to themselves: it is not stored under the new epoch,
        and neither is what they compute on top of it.

        Args:
            epoch: Counts the weight updates; the same in all processes that share a tier.

        Raises:
            EngineStateError: The epoch is not larger than the one before.
        """
        if epoch <= self._epoch:
            raise EngineStateError(
                f"epoch {epoch} does not follow epoch {self._epoch}: each reset needs a larger "
                "one, or blocks of other weights would be found again"
            )
        self._epoch = epoch
        self._manager.reset(epoch)
        for job in self._jobs.values():
            job.failed |= job.is_load
        for state in self._requests.values():
            state.is_outdated = True
        self._note_reset()

    def _note_reset(self) -> None:
        for job in self._jobs.values():
            job.stale = True
        for state in self._requests.values():
            state.cursors = [0] * len(state.cursors)
        for state in self._finished:
            # Whatever a reset is to get rid of must not come back in their last blocks.
            state.block_ids = ()
        self._resetting = bool(self._jobs)
        if not self._resetting:
            self._manager.on_reset_flushed()

    @property
    def num_jobs_in_flight(self) -> int:
        """Transfers between the GPU and the primary tier that have not been reported."""
        return len(self._jobs)

    def has_pending_work(self) -> bool:
        """Say whether the engine must keep stepping although no request can run."""
        return bool(self._finished or self._jobs) or self._manager.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events of all tiers since the last call."""
        return self._manager.take_events()

    def shutdown(self) -> None:
        """Release the manager. Idempotent."""
        self._manager.shutdown()

    def _state(self, request: KVRequest) -> _Request:
        state = self._requests.get(request.req_id)
        if state is None:
            self._end_namesake(request.req_id)
            blocks = RequestBlocks(request, self._config)
            state = _Request(blocks, [0] * len(self._config.groups))
            self._requests[request.req_id] = state
            policy = self._manager.on_new_request(blocks.context).policy
            state.offers_all = policy is OffloadPolicy.REQUEST_LEVEL
        return state

    def _end_namesake(self, req_id: str) -> None:
        """End a finished request whose name a new one takes within the step.

        Its last blocks are not offered: it would end, for the manager, after the new one began.
        """
        for state in [s for s in self._finished if s.blocks.context.req_id == req_id]:
            self._finished.remove(state)
            self._manager.on_request_finished(state.blocks.context)

    def _new_job(
        self,
        state: _Request,
        keys: tuple[OffloadKey, ...],
        gpu_block_ids: frozenset[int],
        *,
        is_load: bool,
    ) -> int:
        job_id = self._next_job_id
        self._next_job_id += 1
        self._jobs[job_id] = _Job(state, keys, gpu_block_ids, is_load, self._config.num_workers)
        return job_id
