"""The replay engine: schedules, computes by writing, loads, checks.

All state belongs to the thread that calls :meth:`ReplayEngine.run`. Tier I/O happens on threads of
the tiers, and copies on threads of the worker; several workers are processes of their own, which
follow step by step.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, final

from kv_core.connector import ScheduledRequest, StepSchedule
from kv_core.errors import RequestTooLargeError
from kv_core.keys import make_offload_key
from kv_core.workload.replay._measurements import Measurements
from kv_core.workload.replay._memory import open_gpu_memory
from kv_core.workload.replay._pool import GpuBlockPool
from kv_core.workload.replay._report import ReplayReport, WorkerSummary
from kv_core.workload.replay._request import ReplayRequest, Status
from kv_core.workload.replay._simple import SimpleLevels
from kv_core.workload.replay._tiered import TieredLevels, let_go

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_core.plugins import TierRegistry
    from kv_core.workload._trace import Trace
    from kv_core.workload.replay._config import ReplayConfig
    from kv_core.workload.replay._levels import LowerLevels, StepEnd
    from kv_core.workload.replay._memory import GpuMemory

__all__ = ["ReplayEngine", "replay_trace"]

_SHORTEST_NAP_S: Final = 20e-6
_LONGEST_NAP_S: Final = 1e-3


def replay_trace(
    trace: Trace,
    config: ReplayConfig,
    *,
    registry: TierRegistry | None = None,
    progress: Callable[[int], None] | None = None,
    between_steps: Callable[[], None] | None = None,
) -> ReplayReport:
    """Replay a trace and release everything again.

    Args:
        trace: The requests.
        config: Sizes and limits.
        registry: Where tier types are looked up; by default what is installed.
        progress: Called with the number of finished requests, now and then.
        between_steps: Called before every step. What it raises ends the replay.

    Raises:
        RequestTooLargeError: A request does not fit the GPU pool.
        WorkerError: A worker process could not start, died or does not answer.
        KVCoreError: A tier cannot be opened, or memory is lacking.
    """
    engine = ReplayEngine(trace, config, registry=registry)
    try:
        return engine.run(progress, between_steps)
    except BaseException as error:
        let_go(error)
        raise
    finally:
        engine.shutdown()


@final
class _Step:
    """What is being decided for one step."""

    def __init__(self, tokens: int) -> None:
        self.budget = tokens
        self.scheduled: list[tuple[ReplayRequest, int]] = []
        self.new_req_ids: set[str] = set()
        self.preempted_req_ids: set[str] = set()
        self.allocated: set[int] = set()

    def schedule(self, request: ReplayRequest, tokens: int) -> None:
        self.scheduled.append((request, tokens))
        self.budget -= tokens


@final
class ReplayEngine:
    """An inference engine that computes nothing, over the real offloading engine."""

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        *,
        registry: TierRegistry | None = None,
        memory: GpuMemory | None = None,
    ) -> None:
        """Build the whole engine: pool, region, tiers, connector, workers.

        Args:
            trace: The requests.
            config: Sizes and limits.
            registry: Where tier types are looked up; by default what is installed.
            memory: Pages of the GPU pool of a single worker, as many and as large as the config
                says; by default on a CUDA device if there is one, else in host memory.

        Raises:
            RequestTooLargeError: A request does not fit the GPU pool.
            ConfigError: The GPU pool does not fit into memory, or a setting is wrong.
            WorkerError: A worker process could not start.
            ValueError: There is memory for one worker, and the config has several.
            KVCoreError: A tier cannot be opened, or memory is lacking.
        """
        self._trace = trace
        self._config = config
        self._tokens_per_block = trace.block_tokens
        self._refuse_requests_too_large()
        self._measurements = Measurements(config.row_bytes)
        self._stopwatch = self._measurements.stopwatch
        if config.workers > 1 and memory is not None:
            raise ValueError(f"memory for one worker was given, and there are {config.workers}")
        if config.workers == 1 and memory is None:
            # Before the pool's books, which grow with the number of blocks as well.
            memory = open_gpu_memory(config.gpu_blocks, config.block_bytes)
        self._pool = GpuBlockPool(config.gpu_blocks)
        self._levels: LowerLevels
        if config.is_simple:
            self._levels = SimpleLevels(trace, config, memory, self._pool, self._measurements)
        else:
            self._levels = TieredLevels(trace, config, memory, self._measurements, registry)
        tier_names = (tier.get("name", tier["type"]) for tier in config.secondary_tiers)
        self._report = ReplayReport(
            trace=trace.name,
            requests=len(trace.requests),
            hits=dict.fromkeys(("gpu", "cpu", *tier_names), 0),
            workers=[WorkerSummary(device) for device in self._levels.devices],
        )
        self._source: Iterator[ReplayRequest] = (
            ReplayRequest(request, trace.block_tokens, config.max_output_tokens)
            for request in trace.requests
        )
        self._waiting: deque[ReplayRequest] = deque()
        self._running: list[ReplayRequest] = []
        self._loading: dict[str, tuple[ReplayRequest, int, list[str]]] = {}

    def _refuse_requests_too_large(self) -> None:
        """Refuse a pool that the largest request, alone, does not fit."""
        most_output = self._config.max_output_tokens
        needed, largest = 0, None
        for request in self._trace.requests:
            tokens = request.prompt_tokens + min(request.output_tokens, most_output)
            blocks = -(-tokens // self._tokens_per_block)
            if blocks > needed:
                needed, largest = blocks, request
        # One block of every pool is the null block.
        usable = self._config.gpu_blocks - 1
        if largest is None or needed <= usable:
            return
        output = min(largest.output_tokens, most_output)
        raise RequestTooLargeError(
            f"the largest request, {largest.req_id!r}, needs {needed} GPU blocks "
            f"({largest.prompt_tokens} prompt and {output} output tokens, "
            f"{self._tokens_per_block} tokens per block), but a pool of "
            f"{self._config.gpu_blocks} has {usable} for requests. Give the pool at least "
            f"{needed + 1} blocks (--gpu-blocks {needed + 1})",
            req_id=largest.req_id,
            needed_blocks=needed,
            pool_blocks=usable,
        )

    # -- the loop -------------------------------------------------------------------------------

    def run(
        self,
        progress: Callable[[int], None] | None = None,
        between_steps: Callable[[], None] | None = None,
    ) -> ReplayReport:
        """Run until every request has finished and every transfer has ended.

        Args:
            progress: Called with the number of finished requests after steps that finished one.
            between_steps: Called before every step. What it raises ends the replay.

        Returns:
            The report. ``is_sound`` tells whether all went well; a replay that made no progress
            for ``stall_deadline_s`` ends early and says so.
        """
        started = time.perf_counter()
        last_progress = started
        nap_s = _SHORTEST_NAP_S
        finished = 0
        while self._has_work():
            if between_steps is not None:
                between_steps()
            if self._run_step():
                last_progress, nap_s = time.perf_counter(), _SHORTEST_NAP_S
            else:
                if time.perf_counter() - last_progress > self._config.stall_deadline_s:
                    self._report.stalled = True
                    break
                with self._stopwatch.measure("waiting for transfers"):
                    time.sleep(nap_s)
                nap_s = min(nap_s * 2, _LONGEST_NAP_S)
            if progress is not None and self._report.requests_finished > finished:
                finished = self._report.requests_finished
                progress(finished)
        self._report.wall_seconds = time.perf_counter() - started
        self._report.jobs_unfinished = (
            self._levels.num_transfers_in_flight + self._levels.num_jobs_in_flight
        )
        self._count_unfinished()
        self._measurements.complete(self._report)
        self._report.stores_declined = self._levels.stores_declined
        self._report.stats = dict(self._levels.get_stats())
        return self._report

    def _has_work(self) -> bool:
        self._fill_queue()
        return bool(
            self._waiting or self._running or self._loading or self._levels.has_pending_work()
        )

    def _fill_queue(self) -> None:
        missing = self._config.max_seqs - len(self._waiting)
        if missing > 0:
            self._waiting.extend(islice(self._source, missing))

    def _count_unfinished(self) -> None:
        """Account for the blocks of requests that a stalled replay never admitted."""
        loading = [request for request, _, _ in self._loading.values()]
        for request in (*loading, *self._waiting, *self._source):
            if not request.was_admitted:
                self._report.blocks_requested += request.num_blocks
                self._report.misses += request.num_blocks

    def _run_step(self) -> bool:
        """Run one step.

        Returns:
            Whether anything moved: a request computed, or a transfer or a tier's job ended.
        """
        jobs_before = self._measurements.jobs_finished
        step = _Step(self._config.tokens_per_step)
        with self._stopwatch.measure("scheduling"):
            self._schedule_running(step)
            self._schedule_waiting(step)
            if not step.scheduled and not self._loading and not self._running:
                self._break_deadlock(step)
            self._levels.end_scheduling(self._schedule_of(step))
            fill = [
                block
                for request, tokens in step.scheduled
                for block in self._complete_blocks(request, tokens)
            ]
        end = self._levels.run_step(tuple(step.allocated), fill)
        self._finish_loads(end)
        self._finish_requests(step)
        self._note_peaks()
        self._report.steps += 1
        return bool(
            step.scheduled or end.any_finished or self._measurements.jobs_finished > jobs_before
        )

    @staticmethod
    def _schedule_of(step: _Step) -> StepSchedule:
        return StepSchedule(
            scheduled=tuple(
                ScheduledRequest(request, request.computed_tokens, tokens, (request.block_ids,))
                for request, tokens in step.scheduled
            ),
            new_req_ids=frozenset(step.new_req_ids),
            preempted_req_ids=frozenset(step.preempted_req_ids),
            allocated_block_ids=frozenset(step.allocated),
        )

    # -- scheduling -----------------------------------------------------------------------------

    def _schedule_running(self, step: _Step) -> None:
        """Go on with running requests, oldest first; the youngest makes room if need be."""
        for request in tuple(self._running):
            if step.budget <= 0:
                break
            if request.status is Status.RUNNING:
                tokens = self._next_tokens(request, step.budget)
                if self._make_room(step, request, tokens):
                    step.schedule(request, tokens)

    def _next_tokens(self, request: ReplayRequest, budget: int) -> int:
        known = request.num_tokens - request.computed_tokens
        if known > 0:
            return min(known, budget)
        left = request.num_output_tokens - request.output_tokens
        return min(left, self._config.decode_tokens_per_step, budget)

    def _make_room(self, step: _Step, request: ReplayRequest, tokens: int) -> bool:
        """Allocate for a running request, at the cost of others if need be."""
        while not self._allocate(step, request, request.computed_tokens + tokens):
            holders = self._idle_holders()
            if holders:
                self._preempt(step, holders[-1])
                continue
            victim = self._running[-1]
            if victim is request and len(self._running) == 1:
                # Loads in flight hold the rest of the pool; they end by themselves.
                return False
            self._running.remove(victim)
            self._preempt(step, victim)
            self._waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _idle_holders(self) -> list[ReplayRequest]:
        """Return requests that hold a loaded prefix but do not run yet."""
        return [request for request in self._waiting if request.status is Status.LOADED]

    def _allocate(self, step: _Step, request: ReplayRequest, tokens: int) -> bool:
        """Extend a block table to hold so many tokens."""
        missing = -(-tokens // self._tokens_per_block) - len(request.block_ids)
        if missing <= 0:
            return True
        block_ids = self._pool.allocate(missing)
        if block_ids is None:
            return False
        request.block_ids.extend(block_ids)
        step.allocated.update(block_ids)
        return True

    def _preempt(self, step: _Step, victim: ReplayRequest) -> None:
        """Take a request's blocks away; it starts over, with what it finds in the caches.

        Requests are scheduled oldest first and preempted youngest first, so the victim has no
        part in this step yet.
        """
        step.preempted_req_ids.add(victim.req_id)
        self._pool.release(victim.block_ids)
        victim.block_ids = []
        victim.computed_tokens = 0
        victim.status = Status.WAITING
        self._report.preemptions += 1

    def _schedule_waiting(self, step: _Step) -> None:
        """Admit waiting requests in order, as far as seats, tokens and blocks go."""
        if step.preempted_req_ids:
            return
        for request in tuple(self._waiting):
            seats = self._config.max_seqs - len(self._running) - len(self._loading)
            if step.budget <= 0 or seats <= 0:
                break
            if request.status is Status.WAITING:
                found = self._find_prefix(request)
                if found is None:
                    continue
                if not self._take_prefix(step, request, *found):
                    break
            if request.req_id in self._loading:
                self._waiting.remove(request)
                continue
            tokens = self._next_tokens(request, step.budget)
            if not self._allocate(step, request, request.computed_tokens + tokens):
                break
            self._waiting.remove(request)
            self._running.append(request)
            request.status = Status.RUNNING
            step.new_req_ids.add(request.req_id)
            step.schedule(request, tokens)

    def _find_prefix(self, request: ReplayRequest) -> tuple[list[int], int] | None:
        """Ask for the longest prefix: GPU blocks, and tokens that can be loaded after them.

        Returns:
            ``None`` to ask again in a later step.
        """
        # At least one token is computed, to have something to sample from.
        usable = (request.num_tokens - 1) // self._tokens_per_block
        gpu_block_ids = self._pool.match_prefix(request.block_hashes[:usable])
        computed = len(gpu_block_ids) * self._tokens_per_block
        loadable, _ = self._levels.get_num_new_matched_tokens(request, computed)
        return None if loadable is None else (gpu_block_ids, loadable)

    def _take_prefix(
        self, step: _Step, request: ReplayRequest, gpu_block_ids: list[int], loadable: int
    ) -> bool:
        """Use the GPU blocks and begin the load.

        Returns:
            ``False`` when the pool has no room for the load.
        """
        self._pool.acquire(gpu_block_ids)
        request.block_ids = list(gpu_block_ids)
        request.computed_tokens = len(gpu_block_ids) * self._tokens_per_block
        if not self._allocate(step, request, request.computed_tokens + loadable):
            self._give_up_prefix(request)
            return False
        self._levels.update_state_after_alloc(request, (request.block_ids,), loadable)
        if loadable:
            levels = self._levels.hit_levels(request)
            self._loading[request.req_id] = (request, loadable, levels)
            request.status = Status.LOADING
        else:
            request.status = Status.LOADED
            self._count_admission(request, len(gpu_block_ids), [])
        return True

    def _give_up_prefix(self, request: ReplayRequest) -> None:
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.computed_tokens = 0

    def _break_deadlock(self, step: _Step) -> None:
        """Let go of blocks when requests with loaded prefixes keep each other from running."""
        holders = self._idle_holders()
        if holders:
            self._preempt(step, holders[-1])

    # -- the forward pass -----------------------------------------------------------------------

    def _complete_blocks(self, request: ReplayRequest, tokens: int) -> Iterator[tuple[int, bytes]]:
        """Take note of what this step computes, and yield the prompt blocks it is to write."""
        before = request.computed_tokens
        after = before + tokens
        size = self._tokens_per_block
        for index in range(before // size, min(after // size, len(request.block_hashes))):
            block_hash, block_id = request.block_hashes[index], request.block_ids[index]
            yield block_id, make_offload_key(block_hash, 0)
            self._pool.register(block_id, block_hash)
        request.computed_tokens = after
        request.output_tokens = max(request.output_tokens, after - request.num_prompt_tokens)

    def _finish_loads(self, loads: StepEnd) -> None:
        ended = loads.loaded_req_ids | loads.failed_req_ids
        # The load that was begun first ends up at the head of the queue.
        for req_id in [req_id for req_id in reversed(self._loading) if req_id in ended]:
            request, tokens, levels = self._loading.pop(req_id)
            gpu_blocks = request.computed_tokens // self._tokens_per_block
            if req_id in loads.failed_req_ids:
                self._report.loads_failed += 1
                self._pool.release(request.block_ids[gpu_blocks:])
                del request.block_ids[gpu_blocks:]
                levels = []
            else:
                with self._stopwatch.measure("verifying loads"):
                    # The last block is loaded whole although its last token is computed again.
                    end = -(-(request.computed_tokens + tokens) // self._tokens_per_block)
                    levels = self._level_per_block(levels, gpu_blocks, end)
                    self._verify(request, gpu_blocks, levels)
                request.computed_tokens += tokens
            self._count_admission(request, gpu_blocks, levels)
            request.status = Status.LOADED
            self._waiting.appendleft(request)

    def _level_per_block(self, levels: list[str], start: int, stop: int) -> list[str]:
        """Spread the levels of offloaded blocks over the GPU blocks they filled."""
        factor = self._config.block_size_factor
        first = start // factor
        return [levels[index // factor - first] for index in range(start, stop)]

    def _verify(self, request: ReplayRequest, start: int, levels: list[str]) -> None:
        blocks = [
            (request.block_ids[index], make_offload_key(request.block_hashes[index], 0))
            for index in range(start, start + len(levels))
        ]
        wrong_by_worker = self._levels.count_wrong_bytes(blocks)
        self._report.blocks_verified += len(blocks)
        for worker, counts in zip(self._report.workers, wrong_by_worker, strict=True):
            worker.blocks_verified += len(counts)
            worker.bytes_wrong += sum(counts)
        wrong_by_block = [sum(counts) for counts in zip(*wrong_by_worker, strict=True)]
        for index, (level, wrong) in enumerate(zip(levels, wrong_by_block, strict=True), start):
            if not wrong:
                self._pool.register(request.block_ids[index], request.block_hashes[index])
                continue
            self._report.bytes_wrong += wrong
            by_level = self._report.bytes_wrong_by_level
            by_level[level] = by_level.get(level, 0) + wrong

    def _count_admission(self, request: ReplayRequest, gpu_blocks: int, levels: list[str]) -> None:
        """Account for a request's prompt blocks, once: when it gets its first blocks."""
        if request.was_admitted:
            self._report.blocks_reloaded += len(levels)
            return
        request.was_admitted = True
        hits = self._report.hits
        for level in ("gpu",) * gpu_blocks + tuple(levels):
            hits[level] = hits.get(level, 0) + 1
        found = gpu_blocks + len(levels)
        self._report.blocks_requested += request.num_blocks
        self._report.misses += request.num_blocks - found
        # Of a prompt that was found whole, the last token is computed all the same.
        most = request.num_prompt_tokens - 1
        self._report.tokens_saved += min(found * self._tokens_per_block, most)

    def _finish_requests(self, step: _Step) -> None:
        for request, _ in step.scheduled:
            if request.is_complete:
                self._running.remove(request)
                request.status = Status.FINISHED
                self._pool.release(request.block_ids)
                self._levels.request_finished(request)
                self._report.requests_finished += 1

    def _note_peaks(self) -> None:
        note = self._measurements.note_peak
        note("running", len(self._running))
        note("waiting", len(self._waiting))
        note("loading", len(self._loading))
        note("transfers_in_flight", self._levels.num_transfers_in_flight)
        note("jobs_in_flight", self._levels.num_jobs_in_flight)

    # -- the end --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Release workers, tiers and memory. Idempotent."""
        self._levels.shutdown()
