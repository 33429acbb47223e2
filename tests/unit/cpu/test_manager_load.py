"""Loads from the CPU ledger, and what counts as a use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import OffloadKey, ReqContext, ScheduleEndContext
from kv_core.cpu import CPUOffloadingManager
from kv_core.engine import LookupResult
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Store = Callable[[CPUOffloadingManager, Sequence[OffloadKey], str], list[int]]


def _evicted(manager: CPUOffloadingManager, key: OffloadKey) -> tuple[OffloadKey, ...]:
    output = manager.prepare_store([key], ReqContext(f"evictor-{key.hex()}"))
    assert output is not None
    return output.evicted_keys


def test_a_load_names_the_slots_in_order(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """``block_ids[i]`` is the slot of ``keys[i]``."""
    manager = CPUOffloadingManager(4)
    slots = store(manager, keys[:4], "a")
    spec = manager.prepare_load([keys[2], keys[0]], request_b)
    assert spec.block_ids.tolist() == [slots[2], slots[0]]


def test_a_block_that_is_loaded_is_not_evicted(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """A pin holds until the load completes (sglang#28468)."""
    manager = CPUOffloadingManager(1)
    store(manager, keys[:1], "a")
    manager.prepare_load(keys[:1], request_b)
    assert manager.prepare_store(keys[1:2], request_b) is None
    manager.complete_load(keys[:1], request_b)
    assert _evicted(manager, keys[1]) == (keys[0],)


def test_two_loads_are_two_pins(
    keys: list[OffloadKey], request_a: ReqContext, request_b: ReqContext, store: Store
) -> None:
    """The block is evictable only after both have completed, also of one request."""
    manager = CPUOffloadingManager(1)
    store(manager, keys[:1], "w")
    for context in (request_a, request_b, request_b):
        manager.prepare_load(keys[:1], context)
    for context in (request_b, request_a, request_b):
        assert manager.get_stats()["blocks_pinned"] == 1
        manager.complete_load(keys[:1], context)
    assert manager.get_stats()["blocks_pinned"] == 0


@pytest.mark.parametrize(("bad", "state"), [(1, "still being written"), (2, "not present")])
def test_a_load_checks_all_keys_before_it_pins_any(
    bad: int, state: str, keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """A key that is not ready is named in hex, and nothing is pinned."""
    manager = CPUOffloadingManager(4)
    store(manager, keys[:1], "a")
    manager.prepare_store(keys[1:2], request_a)
    with pytest.raises(EngineStateError, match=f"{keys[bad].hex()} is {state}"):
        manager.prepare_load([keys[0], keys[bad]], request_a)
    assert manager.get_stats()["blocks_pinned"] == 0


def test_a_completion_that_matches_no_load_is_ignored(
    keys: list[OffloadKey], request_a: ReqContext, request_b: ReqContext, store: Store
) -> None:
    """A second completion takes no pin of somebody else."""
    manager = CPUOffloadingManager(2)
    store(manager, keys[:1], "w")
    manager.prepare_load(keys[:1], request_a)
    manager.prepare_load(keys[:1], request_b)
    manager.complete_load(keys[:1], request_a)
    manager.complete_load(keys[:1], request_a)
    assert manager.get_stats()["blocks_pinned"] == 1


def test_a_load_may_follow_the_end_of_its_request(
    keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """Completions may come after ``on_request_finished`` and still unpin."""
    manager = CPUOffloadingManager(2)
    store(manager, keys[:1], "w")
    manager.prepare_load(keys[:1], request_a)
    manager.on_request_finished(request_a)
    manager.complete_load(keys[:1], request_a)
    assert manager.get_stats()["blocks_pinned"] == 0


# -- recency ------------------------------------------------------------------------------------


def test_a_load_is_a_use(keys: list[OffloadKey], request_b: ReqContext, store: Store) -> None:
    """Loaded blocks outlive others, the head of the prefix longest."""
    manager = CPUOffloadingManager(3)
    store(manager, keys[:3], "a")
    manager.prepare_load(keys[1:3], request_b)
    manager.complete_load(keys[1:3], request_b)
    assert [_evicted(manager, key) for key in keys[3:6]] == [(keys[0],), (keys[2],), (keys[1],)]


def test_an_offer_of_a_known_block_is_a_use(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """A request that computed a block again has used it."""
    manager = CPUOffloadingManager(2)
    store(manager, keys[:2], "a")
    manager.prepare_store(keys[1:2], request_b)
    assert _evicted(manager, keys[2]) == (keys[0],)


def test_a_lookup_is_no_use(keys: list[OffloadKey], request_b: ReqContext, store: Store) -> None:
    """Asking says nothing about using: a waiting request asks in every step."""
    manager = CPUOffloadingManager(2)
    store(manager, keys[:2], "a")
    manager.lookup(keys[1], request_b)
    manager.on_schedule_end(ScheduleEndContext())
    assert _evicted(manager, keys[2]) == (keys[1],)


def test_a_use_counts_once_for_each_request(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """Load, offer and touch by one request are one use together."""
    manager = CPUOffloadingManager(2)
    store(manager, keys[:2], "a")
    manager.touch(keys[1:2], request_b)
    manager.touch(keys[:1], ReqContext("c"))
    manager.touch(keys[1:2], request_b)
    manager.prepare_load(keys[1:2], request_b)
    manager.complete_load(keys[1:2], request_b)
    manager.prepare_store(keys[1:2], request_b)
    assert _evicted(manager, keys[2]) == (keys[1],)


def test_an_insertion_is_the_use_of_its_request(
    keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """Touching what it stored itself adds nothing; another request's touch does."""
    manager = CPUOffloadingManager(3, "arc")
    store(manager, keys[:3], "a")
    manager.touch(keys[:3], request_a)
    manager.touch(keys[2:3], ReqContext("b"))
    assert [_evicted(manager, key) for key in keys[3:5]] == [(keys[1],), (keys[0],)]


def test_the_memory_of_uses_ends_with_the_request(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """A later request of the same name counts anew, and nothing leaks."""
    manager = CPUOffloadingManager(2)
    store(manager, keys[:2], "a")
    manager.touch(keys[1:2], request_b)
    manager.on_request_finished(request_b)
    manager.touch(keys[:1], ReqContext("c"))
    manager.touch(keys[1:2], request_b)
    assert _evicted(manager, keys[2]) == (keys[0],)


def test_duplicates_in_one_touch_are_one_use(
    keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """A ghost named twice in one call teaches the policy once."""
    manager = CPUOffloadingManager(2, "arc")
    store(manager, keys[:2], "w")
    assert _evicted(manager, keys[2]) == (keys[1],)
    manager.touch([keys[1], keys[1]], request_a)
    assert manager._policy.target_t1_size == 1  # type: ignore[attr-defined]


def test_ghosts_learn_once_from_an_offer_before_it_is_inserted(
    keys: list[OffloadKey], request_b: ReqContext, store: Store
) -> None:
    """An evicted key that is offered again teaches the policy before its ghost goes."""
    manager = CPUOffloadingManager(2, "arc")
    store(manager, keys[:2], "a")
    store(manager, keys[2:3], "c")
    manager.touch(keys[1:2], request_b)
    assert manager.prepare_store(keys[1:2], request_b) is not None
    assert manager._policy.target_t1_size == 1  # type: ignore[attr-defined]
    assert manager.lookup(keys[1], request_b) is LookupResult.PENDING


def test_a_declined_offer_teaches_nothing(keys: list[OffloadKey], store: Store) -> None:
    """Nothing has changed also means: no ghost was hit."""
    manager = CPUOffloadingManager(1, "arc")
    store(manager, keys[:1], "a")
    store(manager, keys[1:2], "b")
    manager.prepare_load(keys[1:2], ReqContext("c"))
    assert manager.prepare_store(keys[:1], ReqContext("d")) is None
    assert manager._policy.target_t1_size == 0  # type: ignore[attr-defined]
    manager.complete_load(keys[1:2], ReqContext("c"))
    assert manager.prepare_store(keys[:1], ReqContext("d")) is not None
    assert manager._policy.target_t1_size == 1  # type: ignore[attr-defined]
