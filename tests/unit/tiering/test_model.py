"""Random steps against a model: whatever tiers do, the books balance and requests end."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
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

from kv_core.contract import (
    JobErrorKind,
    JobId,
    JobResult,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from kv_core.tiering import TierMode, TierOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, ScriptedTier

    from kv_core.contract import JobMetadata, OffloadKey
    from kv_core.tiering._guard import GuardedTier

NUM_BLOCKS = 8
NUM_KEYS = 10
REQUEST_DEADLINE_S = 30.0
OPTIONS = {
    "tier0": TierOptions(fill_on_promotion=True),
    "tier1": TierOptions(),
    "tier2": TierOptions(TierMode.READ_ONLY),
}
SETTINGS = {
    "request_lookup_deadline_s": REQUEST_DEADLINE_S,
    "promotion_deadline_s": 5.0,
    "store_deadline_s": 8.0,
    "lease_deadline_s": 20.0,
    "quarantine_grace_s": 2.0,
    "degraded_backoff_max_s": 4.0,
    "max_inflight_store_bytes": 5 * 32,
}
METHODS = [
    "lookup",
    "submit_load",
    "submit_store",
    "get_finished_jobs",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "touch",
    "drain_jobs",
    "shutdown",
    "take_events",
]

KEYS = st.integers(0, NUM_KEYS - 1)
BATCHES = st.lists(KEYS, min_size=1, max_size=5, unique=True)
REQUESTS = st.sampled_from(["a", "b", "c"])
TIERS = st.integers(0, 2)


@dataclass
class Copy:
    """A copy between the GPU and the primary tier that has not ended.

    Attributes:
        req_id: The request.
        keys: Its blocks.
        slots: Their slots.
        content: What the slots hold, or are to hold.
        is_stale: Whether a reset came since: the manager has forgotten it.
    """

    req_id: str
    keys: list[OffloadKey]
    slots: list[int]
    content: list[bytes]
    is_stale: bool = False


@dataclass
class Request:
    """A request as the model sees it.

    Attributes:
        serial: Tells it from others of its name.
        may_load: Whether its client lets it load.
        may_store: Whether its client lets it store.
        waits_since: When it was first left without a final answer.
    """

    serial: int
    may_load: bool = True
    may_store: bool = True
    waits_since: float | None = None


@dataclass
class Model:
    """What the manager must agree with.

    Attributes:
        epoch: Weight updates so far.
        stores: Copies to the primary.
        loads: Copies to the GPU.
        unflushed: Slots of copies from before a reset that was not flushed yet.
        is_resetting: Whether a reset was not flushed yet.
        hits: What this step was told is loadable, by request.
        requests: Live requests.
        num_requests: All requests so far.
        asked: By tier: which request asked for which key, under which epoch.
        loaders: Which request each load is for.
        failed: Which request's load of which key failed, at which tier.
        given_up: Jobs that a reset did not wait for.
        listing: What the events say is ready.
    """

    epoch: int = 0
    stores: list[Copy] = field(default_factory=list)
    loads: list[Copy] = field(default_factory=list)
    unflushed: set[int] = field(default_factory=set)
    is_resetting: bool = False
    hits: dict[str, set[OffloadKey]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    num_requests: int = 0
    asked: list[set[tuple[int, int, OffloadKey]]] = field(default_factory=list)
    listing: set[OffloadKey] = field(default_factory=set)
    loaders: dict[JobId, int] = field(default_factory=dict)
    failed: set[tuple[int, int, OffloadKey]] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)


class TieringMachine(RuleBasedStateMachine):
    """A scheduler, a GPU and three tiers that do anything the contract allows, and worse."""

    def __init__(self, start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
        super().__init__()
        self.keys = keys[:NUM_KEYS]
        self.engine = start(
            num_blocks=NUM_BLOCKS,
            num_tiers=3,
            max_job_keys=3,
            enable_events=True,
            lookup_deadline_s=12.0,
            options=OPTIONS,
            **SETTINGS,
        )
        self.model = Model(asked=[set() for _ in self.engine.tiers])
        # Tiers of earlier epochs; not all of their jobs have been reported.
        self.former: list[ScriptedTier] = []
        for index, tier in enumerate(self.engine.tiers):
            for key in self.keys[3 * index : 3 * index + 4]:
                tier.answers[key] = True
                tier.blocks[key] = self.data(key)

    def data(self, key: OffloadKey, epoch: int | None = None) -> bytes:
        """Return the bytes of a block under the weights of an epoch."""
        number = self.model.epoch if epoch is None else epoch
        return hashlib.sha256(b"%d" % number + key).digest()

    def request(self, req_id: str) -> Request:
        """Return the live request of this name, which any call makes known."""
        model = self.model
        if req_id not in model.requests:
            model.num_requests += 1
            model.requests[req_id] = Request(model.num_requests)
        return model.requests[req_id]

    def settle(self, req_id: str) -> None:
        """Note that a request does not wait any more."""
        if req_id in self.model.requests:
            self.model.requests[req_id].waits_since = None

    # -- the scheduler --------------------------------------------------------------------------

    @rule(req_id=REQUESTS, wishes=st.sampled_from([{}, {}, {"load": False}, {"store": False}]))
    def begin_request(self, req_id: str, wishes: dict[str, bool]) -> None:
        """A request begins, with what its client wishes."""
        if req_id in self.model.requests:
            return
        self.engine.begin(req_id, **wishes)
        request = self.request(req_id)
        request.may_load = wishes.get("load", True)
        request.may_store = wishes.get("store", True)

    @rule(req_id=REQUESTS, batch=BATCHES)
    def look_up(self, req_id: str, batch: list[int]) -> None:
        """Ask for a prefix, to the first miss."""
        for index in batch:
            if self._ask(req_id, self.keys[index]) == "miss":
                break

    def _ask(self, req_id: str, key: OffloadKey) -> str:
        request, model = self.request(req_id), self.model
        marks = [len(tier.lookups) for tier in self.engine.tiers]
        (answer,) = self.engine.ask(req_id, key)
        for index, tier in enumerate(self.engine.tiers):
            if len(tier.lookups) > marks[index]:
                model.asked[index].add((request.serial, model.epoch, key))
        if answer == "hit":
            model.hits.setdefault(req_id, set()).add(key)
        if not request.may_load:
            assert answer == "miss"
        now = self.engine.clock.now
        if answer in ("pending", "retry"):
            if request.waits_since is None:
                request.waits_since = now
            assert now - request.waits_since <= REQUEST_DEADLINE_S, "it waits past its deadline"
        return answer

    @rule(req_id=REQUESTS, batch=BATCHES, data=st.data())
    def serve(self, req_id: str, batch: list[int], data: st.DataObject) -> None:
        """A request asks, a step ends, tiers carry out some of their jobs, and it asks again."""
        self.look_up(req_id, batch)
        self.end_step(set())
        for tier in self.engine.tiers:
            for job_id in tuple(tier.open_jobs):
                if data.draw(st.booleans()):
                    self._finish(tier, tier.jobs[job_id], tier.jobs[job_id].keys)
        self.look_up(req_id, batch)

    @rule(req_id=REQUESTS)
    def load_hits(self, req_id: str) -> None:
        """Load what this step answered as hits: it must still be there, with its bytes."""
        keys = sorted(self.model.hits.get(req_id, ()))
        if not keys:
            return
        spec = self.engine.manager.prepare_load(keys, ReqContext(req_id))
        slots: list[int] = spec.block_ids.tolist()  # type: ignore[attr-defined]
        content = [self.data(key) for key in keys]
        assert [self.engine.read(slot) for slot in slots] == content
        self.model.loads.append(Copy(req_id, keys, slots, content))
        self.settle(req_id)

    @rule(req_id=REQUESTS, batch=BATCHES)
    def offer(self, req_id: str, batch: list[int]) -> None:
        """Offer blocks and, when there is room, begin to copy the new ones."""
        keys = [self.keys[index] for index in batch]
        request = self.request(req_id)
        output = self.engine.manager.prepare_store(keys, ReqContext(req_id))
        self.settle(req_id)
        if output is None:
            return
        if not request.may_store:
            assert output.keys_to_store == output.evicted_keys == output.declined_keys == ()
            return
        slots: list[int] = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
        assert not self._held_slots() & set(slots), "a slot that somebody holds was handed out"
        content = [self.data(key) for key in output.keys_to_store]
        for slot, data in zip(slots, content, strict=True):
            self.engine.write(slot, data)
        if slots:
            self.model.stores.append(Copy(req_id, list(output.keys_to_store), slots, content))

    @precondition(lambda self: self.model.stores)
    @rule(data=st.data(), success=st.booleans())
    def end_store(self, data: st.DataObject, success: bool) -> None:
        """A copy to the CPU ends; nobody tells the manager about one from before a reset."""
        copy = self.model.stores.pop(data.draw(st.integers(0, len(self.model.stores) - 1)))
        if not copy.is_stale:
            self.engine.manager.complete_store(copy.keys, ReqContext(copy.req_id), success=success)
            assert {self.engine.primary.is_ready(key) for key in copy.keys} == {success}
        self._flush()

    @precondition(lambda self: self.model.loads)
    @rule(data=st.data(), success=st.booleans())
    def end_load(self, data: st.DataObject, success: bool) -> None:
        """A copy to the GPU ends: its source was not touched meanwhile."""
        copy = self.model.loads.pop(data.draw(st.integers(0, len(self.model.loads) - 1)))
        assert [self.engine.read(slot) for slot in copy.slots] == copy.content
        if not copy.is_stale:
            self.engine.manager.complete_load(copy.keys, ReqContext(copy.req_id), success=success)
        self._flush()

    @rule(scheduled=st.sets(REQUESTS))
    def end_step(self, scheduled: set[str]) -> None:
        """End the step, with some requests scheduled for the first time."""
        self.engine.end_step(*scheduled)
        for req_id in scheduled:
            self.settle(req_id)
        self.model.hits.clear()
        for tier in self.engine.tiers:
            for job in tier.loads:
                if job.job_id not in self.model.loaders:
                    serial = self.request(job.req_context.req_id).serial
                    self.model.loaders[job.job_id] = serial
                    failed = {
                        key for key in job.keys if (serial, id(tier), key) in self.model.failed
                    }
                    assert not failed, "what failed is not tried again for the same request"

    @rule(req_id=REQUESTS, batch=BATCHES, what=st.sampled_from(["release", "finish", "touch"]))
    def say_something(self, req_id: str, batch: list[int], what: str) -> None:
        """A request runs without what it was promised, ends, or uses blocks on the GPU."""
        context = ReqContext(req_id)
        if what == "release":
            self.engine.manager.release(context)
            self.settle(req_id)
        elif what == "finish":
            self.finish_request(req_id)
        else:
            self.engine.manager.touch([self.keys[index] for index in batch], context)

    def finish_request(self, req_id: str) -> None:
        """A request ends; a new one may take its name."""
        self.engine.finish(req_id)
        self.model.requests.pop(req_id, None)
        self.model.hits.pop(req_id, None)
        assert set(self.engine.manager.take_lost_keys()) <= set(self.keys)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.1, 13.0, REQUEST_DEADLINE_S + 1]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.engine.clock.advance(seconds)

    @precondition(lambda self: not self.model.hits)
    @rule(data=st.data(), is_epoch=st.booleans())
    def reset(self, data: st.DataObject, is_epoch: bool) -> None:
        """Empty the primary tier, or forget everything, between two steps."""
        engine, model = self.engine, self.model
        for tier in engine.tiers:
            tier.stuck = tuple(job_id for job_id in tier.open_jobs if data.draw(st.booleans()))
        before = list(engine.tiers)
        if is_epoch:
            model.epoch += 1
            engine.manager.reset(model.epoch)
            self.former += before
        else:
            engine.manager.reset_cache()
        for tier in before:
            tier.stuck = ()
            model.given_up.update(tier.open_jobs)
        for copy in (*model.stores, *model.loads):
            copy.is_stale = True
            model.unflushed.update(copy.slots)
        for req_id in model.requests:
            self.settle(req_id)
        model.is_resetting = True
        self._flush()

    def _flush(self) -> None:
        model = self.model
        if model.is_resetting and not any(c.is_stale for c in (*model.stores, *model.loads)):
            self.engine.manager.on_reset_flushed()
            model.is_resetting = False
            model.unflushed.clear()

    # -- the tiers ------------------------------------------------------------------------------

    @rule(index=TIERS, key=KEYS, answer=st.sampled_from([True, True, False, None]))
    def set_answer(self, index: int, key: int, answer: bool | None) -> None:
        """A tier comes to know something, or to forget it."""
        tier = self.engine.tiers[index]
        tier.answers[self.keys[key]] = answer
        tier.blocks.setdefault(self.keys[key], self.data(self.keys[key]))

    @rule(index=TIERS, data=st.data(), kind=st.sampled_from(JobErrorKind), all_good=st.booleans())
    def finish_job(
        self, index: int, data: st.DataObject, kind: JobErrorKind, all_good: bool
    ) -> None:
        """A job ends, in any order, at any time, well, in part or badly."""
        tier = self.engine.tiers[index]
        if tier.open_jobs:
            job = tier.jobs[data.draw(st.sampled_from(tier.open_jobs))]
            good = job.keys
            if not all_good:
                good = tuple(data.draw(st.lists(st.sampled_from(job.keys), unique=True)))
            self._finish(tier, job, good, kind)

    @precondition(lambda self: self.former)
    @rule(data=st.data())
    def finish_former_job(self, data: st.DataObject) -> None:
        """A job of an earlier epoch ends at last."""
        tier = data.draw(st.sampled_from(self.former))
        if tier.open_jobs:
            job = tier.jobs[data.draw(st.sampled_from(tier.open_jobs))]
            self._finish(tier, job, job.keys)

    def _finish(
        self,
        tier: ScriptedTier,
        job: JobMetadata,
        good: tuple[OffloadKey, ...],
        kind: JobErrorKind = JobErrorKind.FAILED,
    ) -> None:
        tier.finish(job, good, kind)
        if job.is_promotion:
            serial = self.model.loaders[job.job_id]
            # What becomes of a load that a reset gave up is nobody's failure: the request may have
            # asked again since.
            if job.job_id not in self.model.given_up:
                self.model.failed.update(
                    (serial, id(tier), key) for key in job.keys if key not in good
                )
        else:
            # Whatever happened above since: the slots were not touched.
            assert all(tier.blocks[key] == self.data(key, tier.epoch) for key in good)

    @rule(
        index=TIERS,
        data=st.data(),
        how=st.sampled_from(["raise", "stop raising", "nonsense", "rubbish", "lie", "policy"]),
    )
    def misbehave(self, index: int, data: st.DataObject, how: str) -> None:
        """A tier does what it must not, or stops doing so."""
        tier = self.engine.tiers[index]
        if how == "raise":
            tier.raising = {data.draw(st.sampled_from(METHODS))}
        elif how == "stop raising":
            tier.raising = set()
        elif how == "nonsense":
            tier.results.append(JobResult(self._strange_id(tier, data), success=True))
        elif how == "rubbish":
            rubbish: list[Any] = [None, "done", JobResult([], True), OSError("poll")]  # type: ignore[arg-type]
            tier.results.append(data.draw(st.sampled_from(rubbish)))
        elif how == "lie":
            self._claim_too_much(tier)
        else:
            tier.policy = RequestOffloadingContext(data.draw(st.sampled_from(OffloadPolicy)))

    def _strange_id(self, tier: ScriptedTier, data: st.DataObject) -> JobId:
        """Draw a job that was reported already, one of another tier, or one that nobody had."""
        known = {job_id for other in self.engine.tiers for job_id in other.jobs}
        # A true result that is on its way comes first.
        strange = [*sorted(known.difference(tier.open_jobs)), 10**6]
        return JobId(data.draw(st.sampled_from(strange)))

    def _claim_too_much(self, tier: ScriptedTier) -> None:
        """Let a load fail, with a report that names all keys that were not in it."""
        for job_id in tier.open_jobs:
            job = tier.jobs[job_id]
            if job.is_promotion:
                self._finish(tier, job, ())
                others = tuple(key for key in self.keys if key not in job.keys)
                tier.results[-1] = JobResult(job_id, False, others)
                break

    # -- the model ------------------------------------------------------------------------------

    @property
    def guards(self) -> list[GuardedTier]:
        """All tiers with jobs, as the manager holds them."""
        manager = self.engine.manager
        return [*manager._tiers, *manager._former_tiers]

    def _queued_slots(self) -> list[int]:
        queued = self.engine.manager._promotions._queued.values()
        return [slot for promotion in queued for slot in promotion.block_ids]

    def _job_slots(self, *, overdue: bool) -> list[int]:
        """Return the slots of loads that were not reported."""
        return [
            slot
            for guard in self.guards
            for job in guard.jobs.values()
            if job.metadata.is_promotion and job.is_overdue is overdue
            for slot in job.block_ids
        ]

    def _held_slots(self) -> set[int]:
        """Return every slot that somebody reads or writes, or that is promised."""
        held = set(self._queued_slots())
        for copy in (*self.model.stores, *self.model.loads):
            held.update(copy.slots)
        for guard in self.guards:
            for job in guard.jobs.values():
                held.update(job.block_ids)
        for state in self.engine.manager._requests:
            held.update(state.leases.values())
        return held

    @invariant()
    def slots_add_up(self) -> None:
        """Free + evictable + pinned + writing + orphaned is all, and held is what is held."""
        stats = self.engine.primary.get_stats()
        states = ("free", "evictable", "pinned", "writing", "orphaned")
        counts = [stats[f"blocks_{state}"] for state in states]
        assert min(counts) >= 0
        assert sum(counts) == NUM_BLOCKS
        assert sum(counts[2:]) == len(self._held_slots() | self.model.unflushed)

    @invariant()
    def counts_are_never_below_their_least(self) -> None:
        """-1 is being written; each hold by slot is one of a job, a lease or a reservation."""
        table = self.engine.primary._table
        assert min(table.ref_counts) >= -1
        holds: Counter[int] = Counter(self._queued_slots())
        for guard in self.guards:
            for job in guard.jobs.values():
                holds.update(job.block_ids)
        for state in self.engine.manager._requests:
            holds.update(state.leases.values())
        assert table.slot_holds == [holds[slot] for slot in range(NUM_BLOCKS)]

    @invariant()
    def the_share_is_what_it_pays_for(self) -> None:
        """Reserved, leased and quarantined slots: each of them once, and no more than the limit."""
        share = self.engine.manager._share
        queued = self._queued_slots()
        assert share.reserved == len(queued) + len(self._job_slots(overdue=False))
        assert share.quarantined == len(self._job_slots(overdue=True))
        leased = [set(state.leases.values()) for state in self.engine.manager._requests]
        assert share.leased == len(set().union(*leased))
        assert share.used == share.reserved + share.leased + share.quarantined <= NUM_BLOCKS // 2
        reserved = [state.reserved for state in self.engine.manager._requests]
        assert min(reserved, default=0) >= 0

    @invariant()
    def who_writes_is_alone(self) -> None:
        """A slot that a tier, or the GPU, writes has no other holder."""
        holders: Counter[int] = Counter(self._queued_slots())
        writers: list[int] = []
        for copy in self.model.loads:
            holders.update(copy.slots)
        for copy in self.model.stores:
            holders.update(copy.slots)
            writers += copy.slots
        for guard in self.guards:
            for job in guard.jobs.values():
                holders.update(job.block_ids)
                writers += job.block_ids if job.metadata.is_promotion else ()
        assert all(holders[slot] == 1 for slot in writers)

    @invariant()
    def promises_are_kept(self) -> None:
        """Hits of this step, leased blocks and blocks under way to the GPU are not evicted."""
        primary = self.engine.primary
        for hits in self.model.hits.values():
            assert all(primary.is_ready(key) for key in hits)
        for state in self.engine.manager._requests:
            for key, slot in state.leases.items():
                assert primary.is_ready(key)
                assert primary.block_id_of(key) == slot
        for copy in self.model.loads:
            if not copy.is_stale:
                assert [primary.block_id_of(key) for key in copy.keys] == copy.slots

    @invariant()
    def ready_blocks_have_their_bytes(self) -> None:
        """And events give the listing."""
        for event in self.engine.primary.take_events():
            if event.removed:
                self.model.listing -= set(event.keys)
            else:
                self.model.listing |= set(event.keys)
        primary = self.engine.primary
        ready = {key for key in self.keys if primary.is_ready(key)}
        assert self.model.listing == ready
        for key in ready:
            slot = primary.block_id_of(key)
            assert slot is not None
            assert self.engine.read(slot) == self.data(key)

    @invariant()
    def lookups_are_counted_once(self) -> None:
        """Queries = hits + misses + errors, of no more than was asked."""
        for index, guard in enumerate(self.engine.manager._tiers):
            resolved = sum(guard.counts[name] for name in ("hits", "misses", "errors"))
            assert resolved <= len(self.model.asked[index])

    @invariant()
    def work_is_not_denied(self) -> None:
        """While a job is in flight and not overdue the engine keeps stepping."""
        live = any(not job.is_overdue for guard in self.guards for job in guard.jobs.values())
        if live or self._queued_slots():
            assert self.engine.manager.has_pending_work()

    # -- the end --------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Let everything end: every request has its answers, and nothing is held."""
        engine, model = self.engine, self.model
        for tier in (*engine.tiers, *self.former):
            tier.raising = set()
        self.end_step(set())
        for copy in model.stores:
            if not copy.is_stale:
                engine.manager.complete_store(copy.keys, ReqContext(copy.req_id))
        for copy in model.loads:
            if not copy.is_stale:
                engine.manager.complete_load(copy.keys, ReqContext(copy.req_id))
        model.stores, model.loads = [], []
        self._flush()
        # Tiers do not lift a finger: all the same each request has final answers in time.
        unanswered = {"a", "b", "c"}
        for _ in range(int(REQUEST_DEADLINE_S) + 2):
            for req_id in sorted(unanswered):
                answers = {self._ask(req_id, key) for key in self.keys}
                if answers <= {"hit", "miss"}:
                    self.finish_request(req_id)
                    unanswered.remove(req_id)
            self.end_step(set())
            engine.clock.advance(1.0)
        assert not unanswered
        for _ in range(3):
            for tier in (*engine.tiers, *self.former):
                tier.finish_all()
            self.end_step(set())
        self.end_step(set())
        self._nothing_is_left()
        engine.manager.shutdown()

    def _nothing_is_left(self) -> None:
        manager, stats = self.engine.manager, self.engine.stats
        assert stats["share_blocks_used"] == stats["requests_waiting"] == 0
        assert stats["blocks_pinned"] == stats["blocks_writing"] == stats["blocks_orphaned"] == 0
        assert manager.num_jobs_in_flight == 0
        assert not manager.has_pending_work()
        assert len(manager._requests) == len(manager._parking) == len(manager._told_known) == 0
        assert manager._former_tiers == []
        assert not manager._promotions._under_way
        assert not manager._cascades._under_way
        assert not manager._share._holders
        assert all(guard.inflight_store_bytes == 0 for guard in manager._tiers)
        assert stats["blocks_missed_by_tiers"] <= stats["blocks_cached"]


# A failure is shrunk for up to five minutes before it is shown.
@pytest.mark.timeout(400)
def test_random_steps_keep_the_books_balanced(
    start: Callable[..., Engine], keys: list[OffloadKey], caplog: pytest.LogCaptureFixture
) -> None:
    """Slots add up, nothing in use is reused, promises are kept, everything ends."""
    caplog.set_level(logging.CRITICAL)

    class Machine(TieringMachine):
        def __init__(self) -> None:
            super().__init__(start, keys)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
