"""Stores into the CPU ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import OffloadingEvent, OffloadKey, ReqContext, ScheduleEndContext
from kv_core.cpu import CPUOffloadingManager
from kv_core.engine import CPULoadStoreSpec, LookupResult
from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Store = Callable[[CPUOffloadingManager, Sequence[OffloadKey], str], list[int]]

STEP_END = ScheduleEndContext()


def test_slots_are_given_in_the_order_of_the_keys(
    keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """``keys_to_store[i]`` goes to ``block_ids[i]``."""
    output = CPUOffloadingManager(4).prepare_store(keys[:3], request_a)
    assert output is not None
    assert output.keys_to_store == tuple(keys[:3])
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    assert output.store_spec.block_ids.tolist() == [0, 1, 2]
    assert (output.evicted_keys, output.declined_keys) == ((), ())


def test_a_block_is_pending_until_its_store_completes(
    keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """MISS, then PENDING while it is written, then HIT."""
    manager = CPUOffloadingManager(4)
    assert manager.lookup(keys[0], request_a) is LookupResult.MISS
    manager.prepare_store(keys[:1], request_a)
    assert manager.lookup(keys[0], request_a) is LookupResult.PENDING
    manager.complete_store(keys[:1], request_a)
    assert manager.lookup(keys[0], request_a) is LookupResult.HIT


def test_known_keys_are_dropped_also_while_they_are_written(
    keys: list[OffloadKey], request_a: ReqContext, request_b: ReqContext, store: Store
) -> None:
    """Two requests with one prefix write it once."""
    manager = CPUOffloadingManager(4)
    store(manager, keys[:1], "a")
    manager.prepare_store(keys[1:2], request_a)
    output = manager.prepare_store(keys[:3], request_b)
    assert output is not None
    assert output.keys_to_store == (keys[2],)


def test_an_offer_of_known_keys_only_is_an_empty_output(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """Nothing to do is not a refusal: the output is empty, not None."""
    manager = CPUOffloadingManager(2)
    store(manager, keys[:2], "a")
    for offered in (keys[:2], []):
        output = manager.prepare_store(offered, request_b)
        assert output is not None
        assert output.keys_to_store == ()
        assert output.declined_keys == ()


def test_duplicate_keys_take_one_slot(keys: list[OffloadKey], request_a: ReqContext) -> None:
    """A key given twice in one call is one block."""
    manager = CPUOffloadingManager(4, enable_events=True)
    output = manager.prepare_store([keys[0], keys[1], keys[0]], request_a)
    assert output is not None
    assert output.keys_to_store == (keys[0], keys[1])
    manager.complete_store([keys[0], keys[0], keys[1]], request_a)
    assert list(manager.take_events()) == [OffloadingEvent((keys[0], keys[1]), "CPU", False)]
    stats = manager.get_stats()
    assert (stats["blocks_free"], stats["blocks_evictable"]) == (2, 2)


def test_a_full_tier_evicts_and_says_what(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """The coldest block leaves, and its slot is reused."""
    manager = CPUOffloadingManager(3)
    store(manager, keys[:3], "a")
    output = manager.prepare_store(keys[3:4], request_b)
    assert output is not None
    assert output.evicted_keys == (keys[2],)
    assert output.store_spec.block_ids.tolist() == [2]  # type: ignore[attr-defined]
    assert manager.lookup(keys[2], request_b) is LookupResult.MISS
    assert manager.get_stats()["blocks_evicted"] == 1


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_too_little_room_declines_and_changes_nothing(
    policy: str, keys: list[OffloadKey], request_a: ReqContext, request_b: ReqContext, store: Store
) -> None:
    """All or nothing; after the pressure is gone the same offer works (vllm#26329)."""
    manager = CPUOffloadingManager(3, policy, enable_events=True)
    store(manager, keys[:3], "a")
    manager.prepare_load(keys[:2], request_a)
    before = {**manager.get_stats(), "stores_declined": 1}
    list(manager.take_events())
    assert manager.prepare_store(keys[3:5], request_b) is None
    assert manager.get_stats() == before
    assert list(manager.take_events()) == []
    manager.complete_load(keys[:2], request_a)
    output = manager.prepare_store(keys[3:5], request_b)
    assert output is not None
    assert output.keys_to_store == tuple(keys[3:5])


def test_keys_of_the_call_are_not_evicted_for_it(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """A batch never makes room by dropping its own known head."""
    manager = CPUOffloadingManager(3)
    store(manager, keys[:3], "a")
    output = manager.prepare_store([keys[2], keys[3]], request_b)
    assert output is not None
    assert output.evicted_keys == (keys[1],)


def test_further_keys_can_be_protected(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """A caller with promises of its own names what must stay."""
    manager = CPUOffloadingManager(3)
    store(manager, keys[:3], "a")
    output = manager.prepare_store([keys[3]], request_b, protected=[keys[2], keys[1]])
    assert output is not None
    assert output.evicted_keys == (keys[0],)
    assert manager.prepare_store([keys[4]], request_b, protected=keys[:3]) is None


def test_of_a_batch_larger_than_the_tier_the_leading_part_is_taken(
    keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """What can never fit whole is not declined for ever."""
    output = CPUOffloadingManager(3).prepare_store(keys[:5], request_a)
    assert output is not None
    assert output.keys_to_store == tuple(keys[:3])
    assert output.declined_keys == tuple(keys[3:5])


def test_known_keys_count_when_a_batch_is_larger_than_the_tier(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """The known head is protected, so only what fits beside it is taken."""
    manager = CPUOffloadingManager(3)
    store(manager, keys[:1], "a")
    output = manager.prepare_store(keys[:5], request_b)
    assert output is not None
    assert output.keys_to_store == tuple(keys[1:3])
    assert output.declined_keys == tuple(keys[3:5])
    manager.complete_store(keys[1:3], request_b)
    rest = manager.prepare_store(keys[:5], request_b)
    assert rest is not None
    assert (rest.keys_to_store, rest.declined_keys) == ((), tuple(keys[3:5]))


def test_a_new_prefix_dies_from_its_tail(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """A batch is inserted from its end: the head outlives the tail."""
    manager = CPUOffloadingManager(4)
    store(manager, keys[:4], "a")
    output = manager.prepare_store(keys[4:7], request_b)
    assert output is not None
    assert output.evicted_keys == (keys[3], keys[2], keys[1])


def test_a_known_head_outlives_the_new_tail_of_its_prefix(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """A shared head that a request extends is more recent than the extension."""
    manager = CPUOffloadingManager(4)
    store(manager, keys[:2], "a")
    store(manager, keys[:4], "b")
    output = manager.prepare_store(keys[4:8], ReqContext("c"))
    assert output is not None
    assert output.evicted_keys == (keys[3], keys[2], keys[1], keys[0])


def test_a_failed_store_frees_its_slot_without_an_event(
    keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """Nothing became present, so nothing is told; the key may be offered again."""
    manager = CPUOffloadingManager(2, enable_events=True)
    manager.prepare_store(keys[:2], request_a)
    manager.complete_store(keys[:1], request_a, success=False)
    assert list(manager.take_events()) == []
    assert manager.lookup(keys[0], request_a) is LookupResult.MISS
    assert manager.lookup(keys[1], request_a) is LookupResult.PENDING
    again = manager.prepare_store(keys[:1], request_a)
    assert again is not None
    assert again.keys_to_store == (keys[0],)


def test_a_repeated_completion_is_harmless(
    keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """Completion acts only on keys that are present and not ready."""
    manager = CPUOffloadingManager(2, enable_events=True)
    store(manager, keys[:1], "a")
    list(manager.take_events())
    manager.complete_store(keys[:2], request_a)
    manager.complete_store(keys[:2], request_a, success=False)
    assert list(manager.take_events()) == []
    assert manager.lookup(keys[0], request_a) is LookupResult.HIT


def test_events_tell_what_came_and_what_left(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """Stored on completion, removed on eviction, once each (LMCache#3532)."""
    manager = CPUOffloadingManager(2, enable_events=True, medium="DRAM")
    store(manager, keys[:2], "a")
    manager.prepare_store(keys[2:3], request_b)
    assert list(manager.take_events()) == [
        OffloadingEvent((keys[0], keys[1]), "DRAM", False),
        OffloadingEvent((keys[1],), "DRAM", True),
    ]
    assert list(manager.take_events()) == []


def test_events_are_off_by_default(keys: list[OffloadKey], store: Store) -> None:
    """Nobody reads them, so none pile up."""
    manager = CPUOffloadingManager(2)
    store(manager, keys[:2], "a")
    assert list(manager.take_events()) == []


def test_slots_are_reported_before_they_can_be_reused(
    keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """Eviction and failure name the slot whose bytes mean nothing any more."""
    freed: list[int] = []
    manager = CPUOffloadingManager(2, slot_freed=freed.append)
    manager.prepare_store(keys[:2], request_a)
    manager.complete_store(keys[1:2], request_a, success=False)
    manager.complete_store(keys[:1], request_a)
    assert freed == [1]
    manager.prepare_store(keys[2:4], request_a)
    assert freed == [1, 0]


def test_a_hit_of_this_step_is_not_evicted(
    keys: list[OffloadKey], request_a: ReqContext, request_b: ReqContext, store: Store
) -> None:
    """What lookup promised stays loadable until the step ends (vllm#39702)."""
    manager = CPUOffloadingManager(2)
    store(manager, keys[:2], "w")
    assert manager.lookup(keys[1], request_a) is LookupResult.HIT
    output = manager.prepare_store(keys[2:3], request_b)
    assert output is not None
    assert output.evicted_keys == (keys[0],)
    assert manager.prepare_store(keys[3:4], request_b) is None
    manager.prepare_load(keys[1:2], request_a)
    manager.complete_load(keys[1:2], request_a)
    manager.on_schedule_end(STEP_END)
    later = manager.prepare_store(keys[3:4], request_b)
    assert later is not None
    assert later.evicted_keys == (keys[1],)


def test_a_tier_without_slots_is_refused() -> None:
    """A ledger of nothing is a configuration error."""
    with pytest.raises(ConfigError, match="at least one block"):
        CPUOffloadingManager(0)


def test_an_unknown_policy_is_refused() -> None:
    """The name is checked at construction."""
    with pytest.raises(ConfigError, match="unknown eviction policy 'mru'"):
        CPUOffloadingManager(1, "mru")


def test_the_worked_example_stores_seven_of_eleven_blocks(keys: list[OffloadKey]) -> None:
    """Four requests with shared prefixes: 7 unique blocks in the slots 0 to 6."""
    p = [keys[0], *keys[1:8]]
    manager = CPUOffloadingManager(16)
    offers = {
        "r1": ([p[1], p[2], p[3]], [0, 1, 2]),
        "r2": ([p[1], p[2], p[4]], [3]),
        "r3": ([p[5], p[6]], [4, 5]),
        "r4": ([p[1], p[2], p[7]], [6]),
    }
    for req_id, (offered, slots) in offers.items():
        output = manager.prepare_store(offered, ReqContext(req_id))
        assert output is not None
        assert output.store_spec.block_ids.tolist() == slots  # type: ignore[attr-defined]
    assert manager.get_stats()["blocks_writing"] == 7
    assert manager.lookup(p[7], ReqContext("r5")) is LookupResult.PENDING


def test_the_worked_example_with_six_slots(keys: list[OffloadKey]) -> None:
    """The last batch is declined, and its re-offer evicts P3 and takes slot 2."""
    p = [keys[0], *keys[1:8]]
    manager = CPUOffloadingManager(6)
    offers = {"r1": [p[1], p[2], p[3]], "r2": [p[1], p[2], p[4]], "r3": [p[5], p[6]]}
    for req_id, offered in offers.items():
        assert manager.prepare_store(offered, ReqContext(req_id)) is not None
    last = [p[1], p[2], p[7]]
    assert manager.prepare_store(last, ReqContext("r4")) is None
    for req_id, offered in offers.items():
        manager.complete_store(offered, ReqContext(req_id))
    output = manager.prepare_store(last, ReqContext("r4"))
    assert output is not None
    assert output.evicted_keys == (p[3],)
    assert output.store_spec.block_ids.tolist() == [2]  # type: ignore[attr-defined]


def test_the_worked_example_with_five_slots(keys: list[OffloadKey]) -> None:
    """R3 needs two slots with one free and is declined; R4 then gets slot 4."""
    p = [keys[0], *keys[1:8]]
    manager = CPUOffloadingManager(5)
    manager.prepare_store([p[1], p[2], p[3]], ReqContext("r1"))
    manager.prepare_store([p[1], p[2], p[4]], ReqContext("r2"))
    assert manager.prepare_store([p[5], p[6]], ReqContext("r3")) is None
    output = manager.prepare_store([p[1], p[2], p[7]], ReqContext("r4"))
    assert output is not None
    assert output.store_spec.block_ids.tolist() == [4]  # type: ignore[attr-defined]
