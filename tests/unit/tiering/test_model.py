"""Random steps against a simple model: whatever tiers do, the books balance."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from typing_extensions import override

from kv_core.contract import JobId, JobResult, ReqContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, ScriptedTier

    from kv_core.contract import JobMetadata, OffloadKey

NUM_BLOCKS = 6
DEADLINE_S = 10.0
KEYS = st.integers(0, 9)
BATCHES = st.lists(KEYS, min_size=1, max_size=4, unique=True)
REQUESTS = st.sampled_from(["a", "b", "c"])
TIERS = st.integers(0, 1)


class TieringMachine(RuleBasedStateMachine):
    """A scheduler, a GPU and two tiers that do anything the contract allows, and more.

    The model: which stores and loads of the GPU and which jobs of tiers hold which slots, and
    which keys were answered as hits in this step.
    """

    def __init__(
        self,
        start: Callable[..., Engine],
        keys: list[OffloadKey],
        expected: Callable[[OffloadKey], bytes],
    ) -> None:
        super().__init__()
        self.keys = keys
        self.expected = expected
        self.engine = start(
            num_blocks=NUM_BLOCKS,
            num_tiers=2,
            request_lookup_deadline_s=DEADLINE_S,
            max_job_keys=3,
            enable_events=True,
        )
        self.listing: set[OffloadKey] = set()
        # GPU stores and loads in flight: request, keys, slots, and whether a reset came since.
        self.stores: list[tuple[str, list[OffloadKey], list[int], bool]] = []
        self.loads: list[tuple[str, list[OffloadKey], list[int], bool]] = []
        self.hits: set[OffloadKey] = set()
        self.resetting = False

    # -- the scheduler --------------------------------------------------------------------------

    @rule(req_id=REQUESTS, batch=BATCHES)
    def look_up(self, req_id: str, batch: list[int]) -> None:
        """Ask for a prefix, to the first miss."""
        for index in batch:
            key = self.keys[index]
            (answer,) = self.engine.ask(req_id, key)
            if answer == "miss":
                break
            if answer == "hit":
                self.hits.add(key)

    @rule(req_id=REQUESTS)
    def load_hits(self, req_id: str) -> None:
        """Load what this step answered as hits: it must still be there, with its bytes."""
        keys = sorted(self.hits)
        if not keys:
            return
        spec = self.engine.manager.prepare_load(keys, ReqContext(req_id))
        slots: list[int] = spec.block_ids.tolist()  # type: ignore[attr-defined]
        for key, slot in zip(keys, slots, strict=True):
            assert self.engine.read(slot) == self.expected(key)
        self.loads.append((req_id, keys, slots, False))

    @rule(req_id=REQUESTS, batch=BATCHES)
    def offer(self, req_id: str, batch: list[int]) -> None:
        """Offer blocks and, when there is room, begin to copy the new ones."""
        keys = [self.keys[index] for index in batch]
        held = self._held()
        output = self.engine.manager.prepare_store(keys, ReqContext(req_id))
        if output is None:
            return
        assert not self.hits.intersection(output.evicted_keys)
        slots: list[int] = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
        assert not held.keys() & set(slots), "a slot that somebody holds was handed out"
        for key, slot in zip(output.keys_to_store, slots, strict=True):
            self.engine.write(slot, self.expected(key))
        if slots:
            self.stores.append((req_id, list(output.keys_to_store), slots, False))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.booleans())
    def end_store(self, data: st.DataObject, success: bool) -> None:
        """A copy to the CPU ends; nobody tells the manager about one from before a reset."""
        index = data.draw(st.integers(0, len(self.stores) - 1))
        req_id, keys, _, is_stale = self.stores.pop(index)
        if not is_stale:
            self.engine.manager.complete_store(keys, ReqContext(req_id), success=success)
        self._flush()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        """A copy to the GPU ends: its source was not touched meanwhile."""
        index = data.draw(st.integers(0, len(self.loads) - 1))
        req_id, keys, slots, is_stale = self.loads.pop(index)
        for key, slot in zip(keys, slots, strict=True):
            assert self.engine.read(slot) == self.expected(key)
        if not is_stale:
            self.engine.manager.complete_load(keys, ReqContext(req_id))
        self._flush()

    @rule(scheduled=st.sets(REQUESTS))
    def end_step(self, scheduled: set[str]) -> None:
        """End the step, with some requests scheduled for the first time."""
        self.engine.end_step(*scheduled)
        self.hits.clear()

    @rule(req_id=REQUESTS)
    def release(self, req_id: str) -> None:
        """A request runs without what it was promised."""
        self.engine.manager.release(ReqContext(req_id))

    @rule(req_id=REQUESTS)
    def finish_request(self, req_id: str) -> None:
        """A request ends; a new one may take its name."""
        self.engine.finish(req_id)

    @rule(seconds=st.sampled_from([0.1, DEADLINE_S + 1]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.engine.clock.advance(seconds)

    @precondition(lambda self: not self.hits)
    @rule()
    def reset(self) -> None:
        """Empty the primary tier, between two steps."""
        stuck = [job_id for tier in self.engine.tiers for job_id in tier.open_jobs[::2]]
        for tier in self.engine.tiers:
            tier.stuck = tuple(job_id for job_id in tier.open_jobs if job_id in stuck)
        self.engine.manager.reset_cache()
        for tier in self.engine.tiers:
            tier.stuck = ()
        self.stores = [(*entry[:3], True) for entry in self.stores]
        self.loads = [(*entry[:3], True) for entry in self.loads]
        self.resetting = True
        self._flush()

    def _flush(self) -> None:
        if self.resetting and not any(entry[3] for entry in (*self.stores, *self.loads)):
            self.engine.manager.on_reset_flushed()
            self.resetting = False

    # -- the tiers ------------------------------------------------------------------------------

    @rule(tier=TIERS, index=KEYS, answer=st.sampled_from([True, False, None]))
    def set_answer(self, tier: int, index: int, answer: bool | None) -> None:
        """A tier comes to know something, or to forget it."""
        self.engine.tiers[tier].answers[self.keys[index]] = answer

    @rule(tier=TIERS, method=st.sampled_from(["lookup", "submit_load", "submit_store", ""]))
    def set_raising(self, tier: int, method: str) -> None:
        """A tier begins to raise in one method, or stops."""
        self.engine.tiers[tier].raising = {method}

    @rule(tier=TIERS, data=st.data())
    def finish_job(self, tier: int, data: st.DataObject) -> None:
        """A job ends, in any order, well, in part or badly; its bytes were not touched."""
        scripted = self.engine.tiers[tier]
        if not scripted.open_jobs:
            return
        job = scripted.jobs[data.draw(st.sampled_from(scripted.open_jobs))]
        good = data.draw(st.lists(st.sampled_from(job.keys), unique=True))
        self._finish(scripted, job, good)

    def _finish(self, tier: ScriptedTier, job: JobMetadata, good: list[OffloadKey]) -> None:
        tier.finish(job, good)
        if not job.is_promotion:
            assert all(tier.blocks[key] == self.expected(key) for key in good)

    @rule(tier=TIERS, data=st.data())
    def report_nonsense(self, tier: int, data: st.DataObject) -> None:
        """A tier reports a job again, or one it never had."""
        scripted = self.engine.tiers[tier]
        ended = [job_id for job_id in scripted.jobs if job_id not in scripted.open_jobs]
        job_id = data.draw(st.sampled_from([*ended, JobId(10**6)]))
        scripted.results.append(JobResult(job_id, success=data.draw(st.booleans())))

    # -- the model ------------------------------------------------------------------------------

    def _held(self) -> Counter[int]:
        """Count how often each slot is held by copies, jobs and reports not yet polled."""
        held: Counter[int] = Counter()
        for _, _, slots, _ in (*self.stores, *self.loads):
            held.update(slots)
        for tier in self.engine.tiers:
            for job_id in tier.open_jobs:
                held.update(tier.jobs[job_id].block_ids.tolist())
        return held

    @invariant()
    def slots_add_up(self) -> None:
        """Every slot is in exactly one state."""
        stats = self.engine.stats
        states = ("free", "evictable", "pinned", "writing", "orphaned")
        assert sum(stats[f"blocks_{state}"] for state in states) == NUM_BLOCKS
        assert 0 <= stats["share_blocks_used"] <= NUM_BLOCKS // 2

    @invariant()
    def the_share_is_what_it_pays_for(self) -> None:
        """Reservations, queued or submitted, and leases: nothing else, and all of them."""
        manager = self.engine.manager
        queued = sum(len(queue.keys) for queue in manager._queued.values())
        submitted = sum(
            len(job.block_ids)
            for tier in manager._tiers
            for job in tier.jobs.values()
            if job.metadata.is_promotion
        )
        leased = sum(len(state.leases) for state in manager._requests.values())
        assert self.engine.stats["share_blocks_used"] == queued + submitted + leased

    @invariant()
    def held_slots_are_not_free(self) -> None:
        """Pinned, being written or out of use: a slot in use is none of the rest."""
        stats = self.engine.stats
        held = len(self._held())
        taken = stats["blocks_pinned"] + stats["blocks_writing"] + stats["blocks_orphaned"]
        assert held <= taken

    @invariant()
    def events_are_the_truth(self) -> None:
        """Architecture rule 10: the replay of all events gives what is ready."""
        for event in self.engine.manager.take_events():
            if event.removed:
                self.listing -= set(event.keys)
            else:
                self.listing |= set(event.keys)
        ready = {key for key in self.keys[:10] if self.engine.primary.is_ready(key)}
        assert self.listing == ready
        assert self.engine.stats["blocks_cached"] == len(ready)

    @override
    def teardown(self) -> None:
        """Let everything end: then nothing is held, and every request has its answers."""
        engine = self.engine
        engine.end_step()
        while self.stores or self.loads:
            for _, keys, _, is_stale in self.stores:
                if not is_stale:
                    engine.manager.complete_store(keys, ReqContext("a"))
            for req_id, keys, _, is_stale in self.loads:
                if not is_stale:
                    engine.manager.complete_load(keys, ReqContext(req_id))
            self.stores, self.loads = [], []
        self._flush()
        for tier in engine.tiers:
            tier.finish_all()
        engine.end_step()
        assert not engine.manager.has_pending_work()
        engine.clock.advance(DEADLINE_S + 1)
        for req_id in "abc":
            engine.ask(req_id, *self.keys[:10])
        engine.clock.advance(DEADLINE_S + 1)
        for req_id in "abc":
            assert set(engine.ask(req_id, *self.keys[:10])) <= {"hit", "miss"}
            engine.finish(req_id)
        engine.end_step()
        for tier in engine.tiers:
            tier.finish_all()
        engine.end_step()
        stats = engine.stats
        assert stats["share_blocks_used"] == stats["requests_waiting"] == 0
        assert stats["blocks_pinned"] == stats["blocks_writing"] == stats["blocks_orphaned"] == 0
        assert not engine.manager.has_pending_work()
        engine.manager.shutdown()


def test_random_steps_keep_the_books_balanced(
    start: Callable[..., Engine],
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """Slots add up, nothing in use is reused, hits stay loadable, everything ends."""

    class Machine(TieringMachine):
        def __init__(self) -> None:
            super().__init__(start, keys, expected)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=100,
            derandomize=True,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
