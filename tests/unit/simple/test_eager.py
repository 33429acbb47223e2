"""Eager stores: blocks go to CPU memory once they are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_core.connector import ScheduledRequest
from kv_core.engine import KVCacheGroupConfig

if TYPE_CHECKING:
    from collections.abc import Callable

Engine = Any
Request = Any


def test_a_block_is_stored_once_it_is_computed(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Chunk by chunk, full blocks only, each of them once."""
    engine = make_engine()
    request = make_request("r", "abc", 2)
    table = engine.allocate(request, 4)
    sizes, computed, stored = (6, 2, 3, 3), 0, []
    for size in sizes:
        metadata = engine.step(ScheduledRequest(request, computed, size, table))
        stored.append(metadata.store_gpu_blocks)
        engine.report(metadata)
        computed += size
    a, ab, abc, _ = table[0]
    assert stored == [(a,), (ab,), (), (abc,)]
    assert engine.finds("abc") == 3


def test_a_block_is_found_when_every_rank_has_stored_it(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """One of three reports is not enough; the last one gives both sides free."""
    engine = make_engine(world_size=3, gpu_blocks=4)
    request = make_request("r", "ab")
    metadata = engine.compute(request)
    engine.finish(request)
    for found, free in ((0, 1), (0, 1), (2, 3)):
        engine.report(metadata, ranks=1)
        assert engine.finds("ab") == found
        assert engine.pool.num_free == free


def test_a_block_being_stored_is_not_overwritten(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """A finished request's GPU blocks stay out of the free queue until they are copied."""
    engine = make_engine(gpu_blocks=4)
    request = make_request("r", "ab")
    metadata = engine.compute(request)
    assert not engine.scheduler.request_finished(request)
    engine.finish(request)
    assert engine.pool.allocate(2) is None
    assert engine.scheduler.num_requests == 1
    assert engine.scheduler.has_pending_work()
    engine.report(metadata)
    assert engine.pool.num_free == 3
    assert engine.scheduler.num_requests == 0
    assert not engine.scheduler.has_pending_work()


def test_nothing_is_stored_twice(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """A block that CPU memory has, or is getting in this very step, is skipped."""
    engine = make_engine()
    first, second, third = (make_request(name, "ab" + name) for name in "rst")
    tables = [engine.allocate(request, 4) for request in (first, second)]
    metadata = engine.step(
        ScheduledRequest(first, 0, 13, tables[0]), ScheduledRequest(second, 0, 13, tables[1])
    )
    assert metadata.store_gpu_blocks == (*tables[0][0][:3], tables[1][0][2])
    engine.report(metadata)
    metadata = engine.compute(third)
    assert len(metadata.store_gpu_blocks) == 1


def test_a_declined_block_is_offered_again(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Memory full of pinned blocks leaves no hole: the cursor stays (vllm#26329)."""
    engine = make_engine(cpu_blocks=4)
    engine.store("abc")
    holder, request = make_request("h", "abc"), make_request("r", "xyz")
    assert engine.matched(holder) == 12
    metadata = engine.compute(request)
    assert len(metadata.store_gpu_blocks) == 1
    engine.report(metadata)
    assert engine.stat("stores_declined") == 1
    assert engine.compute(request, computed=12).store_event == -1
    engine.scheduler.request_finished(holder)
    metadata = engine.compute(request, computed=12)
    assert metadata.store_gpu_blocks == tuple(engine.tables["r"][0][1:3])
    engine.report(metadata)
    assert engine.finds("xyz") == 3


def test_a_failed_store_is_offered_again(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Also by a request that was told that the block is on its way."""
    engine = make_engine()
    first, second = make_request("r", "ab"), make_request("s", "ab")
    failing = engine.compute(first)
    assert engine.compute(second).store_event == -1
    engine.finish(first)
    engine.report(failing, failed=True)
    assert engine.finds("ab") == 0
    assert engine.stat("blocks_free") == 16
    metadata = engine.compute(second, computed=8)
    assert metadata.store_gpu_blocks == tuple(engine.tables["s"][0][:2])
    engine.report(metadata)
    assert engine.finds("ab") == 2


def test_a_preempted_request_offers_again_what_was_evicted(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """It starts over, and CPU memory may not have its blocks any more."""
    engine = make_engine(cpu_blocks=2)
    request = make_request("r", "ab")
    engine.report(engine.compute(request))
    engine.store("xy")
    engine.pool.release(engine.tables.pop("r")[0])
    engine.step(preempted=frozenset({"r"}))
    assert len(engine.compute(request).store_gpu_blocks) == 2


def test_preemption_flushes_what_is_in_flight(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Only if the preempted request's own blocks are held by a transfer."""
    engine = make_engine()
    busy, idle = make_request("r", "ab"), make_request("s", "xy")
    engine.report(engine.compute(idle))
    metadata = engine.compute(busy)
    assert not engine.step(preempted=frozenset({"s"})).need_flush
    assert engine.step(preempted=frozenset({"r"})).need_flush
    engine.report(metadata)
    assert not engine.step(preempted=frozenset({"r"})).need_flush


def test_preemption_flushes_a_load_in_flight(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """It writes to blocks that the engine wants back."""
    engine = make_engine()
    engine.store("ab")
    request = make_request("r", "ab")
    engine.begin_load(request)
    metadata = engine.step()
    assert engine.step(preempted=frozenset({"r"})).need_flush
    engine.report(metadata)
    assert not engine.step(preempted=frozenset({"r"})).need_flush


def test_tokens_that_left_a_window_are_not_stored(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """A group has a cursor of its own; the null block stands for nothing."""
    full = KVCacheGroupConfig(tokens_per_block=4, layer_names=("full",))
    window = KVCacheGroupConfig(tokens_per_block=8, layer_names=("window",), sliding_window=8)
    engine = make_engine(groups=(full, window))
    request = make_request("r", "abcd")
    table = [[1, 2, 3, 4], [0, 5]]
    engine.pool.allocate(5)
    metadata = engine.step(ScheduledRequest(request, 0, 16, table))
    assert metadata.store_gpu_blocks == (1, 2, 3, 4, 5)
    engine.report(metadata)
    assert engine.finds("abcd") == 4


def test_the_prefix_outlives_its_end(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Memory gives up the tail of what was used longest ago, and not the head of what goes on."""
    engine = make_engine(cpu_blocks=4)
    engine.store("ab")
    engine.store("xy")
    request = make_request("r", "abc")
    engine.report(engine.compute(request))
    assert engine.finds("abc") == 3
    assert engine.finds("xy") == 1
    assert engine.freed == [3]


def test_events_tell_what_is_there(
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    key: Callable[..., Any],
) -> None:
    """Replaying them gives the listing."""
    engine = make_engine(cpu_blocks=2, record_events=True)
    engine.store("ab")
    engine.store("x")
    events = engine.scheduler.take_events()
    assert [(event.keys, event.removed) for event in events] == [
        ((key("a"), key("ab")), False),
        ((key("ab"),), True),
        ((key("x"),), False),
    ]
    assert {event.medium for event in events} == {"CPU"}
    assert engine.scheduler.take_events() == []


def test_what_is_computed_again_counts_as_used(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """A request that found its blocks on the GPU needs them all the same when they are gone."""
    engine = make_engine(cpu_blocks=4)
    engine.store("ab")
    engine.store("cd")
    assert engine.compute(make_request("r", "ab")).store_event == -1
    engine.store("xy")
    assert (engine.finds("ab"), engine.finds("cd")) == (2, 0)
