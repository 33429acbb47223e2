"""Resets of the CPU ledger while blocks move (vllm#48102)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import OffloadingEvent, OffloadKey, ReqContext
from kv_core.cpu import CPUOffloadingManager, CPUPrimaryTierOffloadingManager
from kv_core.engine import LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Store = Callable[[CPUOffloadingManager, Sequence[OffloadKey], str], list[int]]


def test_a_reset_empties_an_idle_tier_at_once(
    keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """Every key is a miss, every slot free, every ready block reported as removed."""
    freed: list[int] = []
    manager = CPUOffloadingManager(3, enable_events=True, slot_freed=freed.append)
    store(manager, keys[:3], "a")
    list(manager.take_events())
    manager.reset_cache()
    assert [manager.lookup(key, request_a) for key in keys[:3]] == [LookupResult.MISS] * 3
    assert manager.get_stats()["blocks_free"] == 3
    assert sorted(freed) == [0, 1, 2]
    (event,) = manager.take_events()
    assert event.removed
    assert sorted(event.keys) == sorted(keys[:3])


def test_slots_that_are_copied_stay_out_of_use_until_the_flush(
    keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """One slot being loaded, one being stored: neither is handed out before the flush."""
    freed: list[int] = []
    manager = CPUOffloadingManager(3, enable_events=True, slot_freed=freed.append)
    store(manager, keys[:1], "w")
    list(manager.take_events())
    manager.prepare_load(keys[:1], request_a)
    manager.prepare_store(keys[1:2], request_a)
    manager.reset_cache()
    assert list(manager.take_events()) == [OffloadingEvent((keys[0],), "CPU", True)]
    stats = manager.get_stats()
    assert (stats["blocks_free"], stats["blocks_orphaned"]) == (1, 2)
    output = manager.prepare_store(keys[2:3], request_a)
    assert output is not None
    assert output.store_spec.block_ids.tolist() == [2]  # type: ignore[attr-defined]
    assert manager.prepare_store(keys[3:4], request_a) is None
    assert freed == []
    manager.on_reset_flushed()
    assert sorted(freed) == [0, 1]
    stats = manager.get_stats()
    assert (stats["blocks_free"], stats["blocks_orphaned"]) == (2, 0)


def test_completions_of_work_before_the_reset_are_ignored(
    keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """They come late, in any order, and change nothing."""
    manager = CPUOffloadingManager(3, enable_events=True)
    store(manager, keys[:1], "w")
    manager.prepare_load(keys[:1], request_a)
    manager.prepare_store(keys[1:3], request_a)
    manager.reset_cache()
    list(manager.take_events())
    manager.complete_store(keys[1:2], request_a)
    manager.complete_store(keys[2:3], request_a, success=False)
    manager.complete_load(keys[:1], request_a)
    assert list(manager.take_events()) == []
    stats = manager.get_stats()
    assert (stats["blocks_orphaned"], stats["blocks_pinned"]) == (3, 0)
    manager.on_reset_flushed()
    manager.complete_store(keys[1:3], request_a)
    manager.complete_load(keys[:1], request_a)
    assert manager.get_stats()["blocks_free"] == 3
    assert list(manager.take_events()) == []


@pytest.mark.parametrize("is_load", [False, True])
def test_a_key_in_flight_at_the_reset_is_not_stored_before_the_flush(
    is_load: bool, keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """Otherwise the old copy's completion would pass for the new one's."""
    manager = CPUOffloadingManager(4)
    if is_load:
        store(manager, keys[:1], "w")
        manager.prepare_load(keys[:1], request_a)
    else:
        manager.prepare_store(keys[:1], request_a)
    manager.reset_cache()
    assert manager.lookup(keys[0], request_a) is LookupResult.MISS
    assert manager.prepare_store(keys[:2], request_a) is None
    assert manager.prepare_store(keys[1:2], request_a) is not None
    manager.on_reset_flushed()
    assert manager.prepare_store(keys[:1], request_a) is not None
    assert manager.lookup(keys[0], request_a) is LookupResult.PENDING


def test_a_reset_is_no_use_and_forgets_uses(
    keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """After a reset a request's use of a block counts again."""
    manager = CPUOffloadingManager(2)
    store(manager, keys[:2], "a")
    manager.touch(keys[1:2], request_a)
    manager.reset_cache()
    manager.on_reset_flushed()
    store(manager, keys[:2], "w")
    manager.touch(keys[1:2], request_a)
    output = manager.prepare_store(keys[2:3], ReqContext("c"))
    assert output is not None
    assert output.evicted_keys == (keys[0],)


def test_two_resets_in_a_row_work(
    keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """The flush after them frees what either took away."""
    manager = CPUOffloadingManager(4)
    manager.prepare_store(keys[:1], request_a)
    manager.reset_cache()
    store(manager, keys[1:2], "w")
    manager.prepare_load(keys[1:2], request_a)
    manager.reset_cache()
    manager.reset_cache()
    assert manager.get_stats()["blocks_orphaned"] == 2
    manager.on_reset_flushed()
    manager.on_reset_flushed()
    assert manager.get_stats()["blocks_free"] == 4


def test_a_cascade_read_keeps_its_slot_beyond_the_flush(
    primary: CPUPrimaryTierOffloadingManager, keys: list[OffloadKey], store: Store
) -> None:
    """The tier still reads the page; only its completion frees the slot."""
    store(primary, keys[:1], "a")
    block_ids = primary.prepare_read(keys[:1])
    primary.reset_cache()
    primary.on_reset_flushed()
    assert primary.get_stats()["blocks_orphaned"] == 1
    primary.complete_read(block_ids)
    assert primary.get_stats()["blocks_free"] == 4


@pytest.mark.parametrize("is_flushed_first", [False, True])
def test_a_slot_held_by_gpu_and_tier_waits_for_both(
    is_flushed_first: bool,
    primary: CPUPrimaryTierOffloadingManager,
    keys: list[OffloadKey],
    store: Store,
) -> None:
    """Neither the flush nor the end of the read alone frees it, whichever comes first."""
    store(primary, keys[:1], "a")
    primary.prepare_load(keys[:1], ReqContext("a"))
    block_ids = primary.prepare_read(keys[:1])
    primary.reset_cache()
    if is_flushed_first:
        primary.on_reset_flushed()
    else:
        primary.complete_read(block_ids)
    assert primary.get_stats()["blocks_orphaned"] == 1
    if is_flushed_first:
        primary.complete_read(block_ids)
    else:
        primary.on_reset_flushed()
    assert primary.get_stats()["blocks_free"] == 4


def test_promises_of_lookup_end_with_a_reset(
    keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """A hit from before the reset protects no block stored after it."""
    manager = CPUOffloadingManager(1)
    store(manager, keys[:1], "w")
    assert manager.lookup(keys[0], request_a) is LookupResult.HIT
    manager.reset_cache()
    manager.on_reset_flushed()
    store(manager, keys[:1], "w")
    assert manager.prepare_store(keys[1:2], request_a) is not None


def test_a_promotion_keeps_its_slot_beyond_the_flush(
    primary: CPUPrimaryTierOffloadingManager, keys: list[OffloadKey]
) -> None:
    """A tier still writes to the page; its completion frees the slot and adds no block."""
    prepared = primary.prepare_write(keys[:1])
    assert prepared is not None
    primary.reset_cache()
    primary.on_reset_flushed()
    assert primary.get_stats()["blocks_orphaned"] == 1
    again = primary.prepare_write(keys[:1])
    assert again is not None
    assert again.block_ids != prepared.block_ids
    completion = (keys[0], prepared.block_ids[0], prepared.generations[0])
    assert primary.complete_write(*completion, success=True) is False
    assert not primary.is_ready(keys[0])
    assert primary.get_stats()["blocks_orphaned"] == 0
    assert list(primary.take_events()) == []
