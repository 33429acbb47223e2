"""The ledger against a model that is too simple to be wrong, under every interleaving."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_core.contract import OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from kv_core.cpu import CPUPrimaryTierOffloadingManager
from kv_core.engine import CPULoadStoreSpec, LookupResult
from kv_core.errors import EngineStateError

NUM_BLOCKS = 5
ALL_KEYS = [make_offload_key(bytes([i]) * 4, 0) for i in range(9)]
REQUESTS = [ReqContext(req_id) for req_id in "abc"]

a_key = st.sampled_from(ALL_KEYS)
some_keys = st.lists(a_key, max_size=7)
distinct_keys = st.lists(a_key, max_size=3, unique=True)
a_request = st.sampled_from(REQUESTS)


@dataclass
class Slot:
    """What the model knows of a slot in use.

    Attributes:
        key: Its key, or ``None`` after a reset or an abandoned promotion took it away.
        writer: ``"gpu"`` or ``"tier"`` while it is written.
        loads: Copies to the GPU that read it.
        reads: Cascades that read it.
        was_abandoned: Whether a late success may still bring its key back.
    """

    key: OffloadKey | None
    writer: str | None = None
    loads: int = 0
    reads: int = 0
    was_abandoned: bool = False

    @property
    def is_held(self) -> bool:
        """Whether somebody touches the bytes."""
        return self.writer is not None or self.loads > 0 or self.reads > 0

    @property
    def is_ready(self) -> bool:
        """Whether the bytes may be read under the key."""
        return self.key is not None and self.writer is None


@dataclass
class Load:
    """A load in flight."""

    keys: list[OffloadKey]
    context: ReqContext
    block_ids: list[int]
    is_stale: bool = False


@dataclass
class Promotion:
    """A reservation in flight."""

    key: OffloadKey
    block_id: int
    generation: int


@dataclass
class Cascade:
    """A read in flight."""

    block_ids: list[int] = field(default_factory=list)


class LedgerMachine(RuleBasedStateMachine):
    """Drives the primary tier's ledger with every call of its interface."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        view = memoryview(bytearray(NUM_BLOCKS * 8)).cast("B", (NUM_BLOCKS, 8))
        self.ledger = CPUPrimaryTierOffloadingManager(
            NUM_BLOCKS, view, 8, self.policy, enable_events=True, slot_freed=self.on_slot_freed
        )
        self.slots: dict[int, Slot] = {}
        self.step_hits: set[OffloadKey] = set()
        self.unflushed_keys: set[OffloadKey] = set()
        self.listing: set[OffloadKey] = set()
        self.loads: list[Load] = []
        self.cascades: list[Cascade] = []
        self.promotions: list[Promotion] = []

    # -- the model ------------------------------------------------------------------------------

    def on_slot_freed(self, block_id: int) -> None:
        """A slot is given up only while nobody touches it, and then is out of the model."""
        assert not self.slots[block_id].is_held
        del self.slots[block_id]

    def slot_of(self, key: OffloadKey) -> Slot | None:
        """Return the slot that has a key."""
        return next((slot for slot in self.slots.values() if slot.key == key), None)

    def mostly_ready_keys(self) -> st.SearchStrategy[list[OffloadKey]]:
        """Return lists of distinct keys that can be read, and now and then of any."""
        ready = [slot.key for slot in self.slots.values() if slot.key and slot.is_ready]
        if not ready:
            return distinct_keys
        readable = st.lists(st.sampled_from(ready), min_size=1, max_size=3, unique=True)
        return st.one_of(readable, readable, distinct_keys)

    def expects_room(self, new: list[OffloadKey], spared: set[OffloadKey]) -> bool:
        """Say whether the new keys can be inserted."""
        candidates = [
            slot
            for slot in self.slots.values()
            if slot.is_ready and not slot.is_held and slot.key not in spared
        ]
        shortage = len(new) - (NUM_BLOCKS - len(self.slots))
        return self.unflushed_keys.isdisjoint(new) and shortage <= len(candidates)

    def take_slots(self, keys: list[OffloadKey], block_ids: list[int], writer: str) -> None:
        """Note reservations; no slot may be handed out while the model has it in use."""
        assert len(set(block_ids)) == len(keys)
        for key, block_id in zip(keys, block_ids, strict=True):
            assert block_id not in self.slots
            self.slots[block_id] = Slot(key, writer)

    # -- the GPU's side -------------------------------------------------------------------------

    @rule(key=a_key, context=a_request)
    def look_up(self, key: OffloadKey, context: ReqContext) -> None:
        """A lookup answers what the model knows, and a hit is a promise for this step."""
        slot = self.slot_of(key)
        if slot is None:
            expected = LookupResult.MISS
        elif slot.is_ready:
            expected = LookupResult.HIT
            self.step_hits.add(key)
        else:
            expected = LookupResult.PENDING
        assert self.ledger.lookup(key, context) is expected

    @rule(keys=some_keys, context=a_request, protected=st.sets(a_key, max_size=2))
    def prepare_store(
        self, keys: list[OffloadKey], context: ReqContext, protected: set[OffloadKey]
    ) -> None:
        """Stores take what is new, all or nothing, and spare what is protected."""
        distinct = list(dict.fromkeys(keys))
        known = [key for key in distinct if self.slot_of(key) is not None]
        new = [key for key in distinct if key not in known]
        taken, declined = new[: NUM_BLOCKS - len(known)], new[NUM_BLOCKS - len(known) :]
        spared = {*known, *protected, *self.step_hits}
        has_room = self.expects_room(taken, spared)
        output = self.ledger.prepare_store(keys, context, protected=protected)
        assert (output is not None) == has_room
        if output is not None:
            assert output.keys_to_store == tuple(taken)
            assert output.declined_keys == tuple(declined)
            assert spared.isdisjoint(output.evicted_keys)
            assert isinstance(output.store_spec, CPULoadStoreSpec)
            self.take_slots(taken, output.store_spec.block_ids.tolist(), "gpu")

    @rule(context=a_request)
    def complete_all_stores(self, context: ReqContext) -> None:
        """Most stores succeed."""
        self.complete_store(ALL_KEYS, context, success=True)

    @rule(keys=some_keys, context=a_request, success=st.booleans())
    def complete_store(self, keys: list[OffloadKey], context: ReqContext, success: bool) -> None:
        """A completion by key ends exactly the GPU writes of present keys."""
        for slot in self.slots.values():
            if slot.key in keys and slot.writer == "gpu":
                slot.writer = None
        self.ledger.complete_store(keys, context, success=success)

    @rule(data=st.data(), context=a_request)
    def prepare_load(self, data: st.DataObject, context: ReqContext) -> None:
        """A load pins all of its keys or none."""
        keys = data.draw(self.mostly_ready_keys())
        slots = [self.slot_of(key) for key in keys]
        if not all(slot is not None and slot.is_ready for slot in slots):
            with pytest.raises(EngineStateError):
                self.ledger.prepare_load(keys, context)
            return
        block_ids = self.ledger.prepare_load(keys, context).block_ids.tolist()
        for key, block_id in zip(keys, block_ids, strict=True):
            assert self.slots[block_id].key == key
            self.slots[block_id].loads += 1
        self.loads.append(Load(keys, context, block_ids))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        """A completion ends its load; one from before a reset ends nothing."""
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        if load.is_stale and any(
            other.keys == load.keys and other.context == load.context for other in self.loads
        ):
            # Only a flush separates equal loads of one request; the connector reports in order.
            return
        if not load.is_stale:
            for block_id in load.block_ids:
                self.slots[block_id].loads -= 1
        self.ledger.complete_load(load.keys, load.context)

    @rule(keys=some_keys, context=a_request)
    def touch(self, keys: list[OffloadKey], context: ReqContext) -> None:
        """A use changes nothing that the model sees."""
        self.ledger.touch(keys, context)

    # -- the tiers' side ------------------------------------------------------------------------

    @rule(data=st.data())
    def prepare_read(self, data: st.DataObject) -> None:
        """A cascade pins all of its keys or none."""
        keys = data.draw(self.mostly_ready_keys())
        slots = [self.slot_of(key) for key in keys]
        if not all(slot is not None and slot.is_ready for slot in slots):
            with pytest.raises(EngineStateError):
                self.ledger.prepare_read(keys)
            return
        block_ids = self.ledger.prepare_read(keys).tolist()
        for block_id in block_ids:
            self.slots[block_id].reads += 1
        self.cascades.append(Cascade(block_ids))

    @precondition(lambda self: self.cascades)
    @rule(data=st.data())
    def complete_read(self, data: st.DataObject) -> None:
        """The end of a cascade unpins by slot, whatever became of the keys."""
        cascade = self.cascades.pop(data.draw(st.integers(0, len(self.cascades) - 1)))
        for block_id in cascade.block_ids:
            self.slots[block_id].reads -= 1
        self.ledger.complete_read(cascade.block_ids)

    @rule(keys=distinct_keys, protected=st.sets(a_key, max_size=2))
    def prepare_write(self, keys: list[OffloadKey], protected: set[OffloadKey]) -> None:
        """A promotion reserves absent keys, all or nothing."""
        if any(self.slot_of(key) is not None for key in keys):
            with pytest.raises(EngineStateError):
                self.ledger.prepare_write(keys, protected)
            return
        spared = {*protected, *self.step_hits}
        has_room = self.expects_room(keys, spared)
        prepared = self.ledger.prepare_write(keys, protected)
        assert (prepared is not None) == has_room
        if prepared is not None:
            assert spared.isdisjoint(prepared.evicted_keys)
            self.take_slots(keys, list(prepared.block_ids), "tier")
            self.promotions += map(Promotion, keys, prepared.block_ids, prepared.generations)

    @precondition(lambda self: self.promotions)
    @rule(data=st.data(), success=st.booleans(), is_last=st.booleans())
    def complete_write(self, data: st.DataObject, success: bool, is_last: bool) -> None:
        """A completion acts once, on its own slot and generation, and never raises."""
        index = data.draw(st.integers(0, len(self.promotions) - 1))
        promotion = self.promotions[index]
        slot = self.slots.get(promotion.block_id)
        is_current = self.ledger.generation_of(promotion.block_id) == promotion.generation
        becomes_ready = False
        if slot is not None and is_current and slot.writer == "tier":
            slot.writer = None
            if slot.was_abandoned and self.slot_of(promotion.key) is None:
                slot.key = promotion.key if success else None
            becomes_ready = success and slot.key is not None
        # Kept now and then, to be reported a second time.
        if is_last:
            del self.promotions[index]
        assert (
            self.ledger.complete_write(
                promotion.key, promotion.block_id, promotion.generation, success
            )
            is becomes_ready
        )

    @precondition(lambda self: self.promotions)
    @rule(data=st.data())
    def abandon_write(self, data: st.DataObject) -> None:
        """A promotion that is given up loses its key and keeps its slot."""
        promotion = data.draw(st.sampled_from(self.promotions))
        slot = self.slots.get(promotion.block_id)
        is_current = self.ledger.generation_of(promotion.block_id) == promotion.generation
        can_abandon = (
            slot is not None and is_current and slot.writer == "tier" and slot.key == promotion.key
        )
        if slot is not None and can_abandon:
            slot.key = None
            slot.was_abandoned = True
        assert (
            self.ledger.abandon_write(promotion.key, promotion.block_id, promotion.generation)
            is can_abandon
        )

    # -- steps and resets -----------------------------------------------------------------------

    @rule()
    def end_step(self) -> None:
        """Promises of lookup end with the step."""
        self.step_hits.clear()
        self.ledger.on_schedule_end(ScheduleEndContext())

    @rule(context=a_request)
    def finish_request(self, context: ReqContext) -> None:
        """The end of a request changes nothing that the model sees."""
        self.ledger.on_request_finished(context)

    @rule()
    def reset(self) -> None:
        """All keys are gone; whoever holds a slot keeps it."""
        for slot in self.slots.values():
            if slot.key is not None and (slot.loads or slot.writer == "gpu"):
                self.unflushed_keys.add(slot.key)
            slot.key = None
            slot.was_abandoned = False
        self.loads = [dataclasses.replace(load, is_stale=True) for load in self.loads]
        self.step_hits.clear()
        self.ledger.reset_cache()

    @rule()
    def flush(self) -> None:
        """The GPU holds nothing any more that is from before a reset."""
        for slot in self.slots.values():
            if slot.key is None:
                slot.loads = 0
                if slot.writer == "gpu":
                    slot.writer = None
        self.unflushed_keys.clear()
        self.ledger.on_reset_flushed()

    # -- invariants -----------------------------------------------------------------------------

    @invariant()
    def counts_add_up(self) -> None:
        """Every slot is in exactly one state, and it is the model's."""
        stats = self.ledger.get_stats()
        ready = [slot for slot in self.slots.values() if slot.is_ready]
        expected = {
            "blocks_free": NUM_BLOCKS - len(self.slots),
            "blocks_evictable": sum(not slot.is_held for slot in ready),
            "blocks_pinned": sum(slot.is_held for slot in ready),
            "blocks_writing": sum(
                slot.key is not None and slot.writer is not None for slot in self.slots.values()
            ),
            "blocks_orphaned": sum(slot.key is None for slot in self.slots.values()),
        }
        assert {name: stats[name] for name in expected} == expected
        assert sum(expected.values()) == stats["blocks_total"] == NUM_BLOCKS
        assert stats["blocks_cached"] == len(ready)
        assert (
            self.ledger.num_free_or_evictable()
            == expected["blocks_free"] + expected["blocks_evictable"]
        )

    @invariant()
    def reference_counts_are_the_holds(self) -> None:
        """No count is below -1, and those of present blocks are their pins."""
        assert min(self.ledger._table.ref_counts) >= -1
        for block_id, slot in self.slots.items():
            if slot.key is not None:
                expected = -1 if slot.writer else slot.loads + slot.reads
                assert self.ledger._table.ref_counts[block_id] == expected

    @invariant()
    def the_index_is_the_model(self) -> None:
        """Every key is where the model has it."""
        index = {slot.key: block_id for block_id, slot in self.slots.items()}
        for key in ALL_KEYS:
            assert self.ledger.block_id_of(key) == index.get(key)

    @invariant()
    def events_replay_to_the_listing(self) -> None:
        """What came and what left adds up to what is there (vllm#47923)."""
        for event in self.ledger.take_events():
            for key in event.keys:
                assert (key in self.listing) is event.removed
            if event.removed:
                self.listing.difference_update(event.keys)
            else:
                self.listing.update(event.keys)
        assert self.listing == {slot.key for slot in self.slots.values() if slot.is_ready}


class ARCLedgerMachine(LedgerMachine):
    """The same with the adaptive policy."""

    policy = "arc"


SETTINGS = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

TestLRULedger = LedgerMachine.TestCase
TestLRULedger.settings = SETTINGS
TestARCLedger = ARCLedgerMachine.TestCase
TestARCLedger.settings = SETTINGS
