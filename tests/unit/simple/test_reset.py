"""A reset: what was computed with other weights is never found again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.connector import ScheduledRequest
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable


def test_nothing_from_before_is_found(make_engine: Callable[..., Any]) -> None:
    """All blocks are free again, and the events say so."""
    engine = make_engine(record_events=True)
    engine.store("abc")
    (stored,) = engine.scheduler.take_events()
    engine.scheduler.reset_cache()
    assert engine.finds("abc") == 0
    assert engine.stat("blocks_free") == engine.stat("blocks_total")
    assert len(engine.freed) == 3
    (removed,) = engine.scheduler.take_events()
    assert (removed.removed, set(removed.keys)) == (True, set(stored.keys))
    engine.store("abc")
    assert engine.finds("abc") == 3


def test_a_store_in_flight_is_dropped(
    make_engine: Callable[..., Any], make_request: Callable[..., Any]
) -> None:
    """Its blocks are in use until the last rank has reported, and free then."""
    engine = make_engine(world_size=2)
    request = make_request("r", "ab")
    metadata = engine.compute(request)
    engine.scheduler.reset_cache()
    engine.finish(request)
    engine.report(metadata, ranks=1)
    assert (engine.stat("blocks_writing"), engine.freed) == (2, [])
    engine.report(metadata, ranks=1)
    assert engine.stat("blocks_free") == engine.stat("blocks_total")
    assert sorted(engine.freed) == sorted(metadata.store_cpu_blocks)
    assert engine.finds("ab") == 0


def test_a_store_that_fails_after_a_reset_leaves_the_new_one(
    make_engine: Callable[..., Any], make_request: Callable[..., Any]
) -> None:
    """The same key may be in flight twice, from before and from after."""
    engine = make_engine()
    old, new = make_request("old", "ab"), make_request("new", "ab")
    before = engine.compute(old)
    engine.scheduler.reset_cache()
    after = engine.compute(new)
    engine.report(before, failed=True)
    engine.report(after)
    assert engine.finds("ab") == 2
    assert engine.stat("blocks_writing") == 0


def test_a_load_in_flight_is_reported_as_failed(
    make_engine: Callable[..., Any], make_request: Callable[..., Any]
) -> None:
    """What it brings is of other weights; its CPU blocks are kept until it has ended."""
    engine = make_engine()
    engine.store("ab")
    request = make_request("r", "ab")
    engine.begin_load(request)
    metadata = engine.step()
    engine.scheduler.reset_cache()
    assert engine.stat("blocks_pinned") == 2
    report = engine.report(metadata)
    assert (report.loaded_req_ids, report.failed_req_ids) == (set(), {"r"})
    assert engine.stat("blocks_free") == engine.stat("blocks_total")


def test_a_promise_is_void(
    make_engine: Callable[..., Any], make_request: Callable[..., Any]
) -> None:
    """A request that was told of tokens must ask again."""
    engine = make_engine()
    engine.store("ab")
    request = make_request("r", "ab")
    tokens = engine.matched(request)
    engine.scheduler.reset_cache()
    with pytest.raises(EngineStateError, match="ask get_num_new_matched_tokens again"):
        engine.scheduler.update_state_after_alloc(request, engine.allocate(request, 3), tokens)
    assert engine.stat("blocks_free") == engine.stat("blocks_total")


def test_a_running_request_keeps_its_blocks_to_itself(
    make_engine: Callable[..., Any], make_request: Callable[..., Any]
) -> None:
    """Until it starts over: what it computes is built on KV of other weights."""
    engine = make_engine()
    request = make_request("r", "abcd")
    table = engine.allocate(request, 5)
    engine.report(engine.step(ScheduledRequest(request, 0, 8, table)))
    engine.scheduler.reset_cache()
    assert engine.step(ScheduledRequest(request, 8, 4, table)).store_gpu_blocks == ()
    again = engine.step(ScheduledRequest(request, 0, 8, table), preempted=frozenset({"r"}))
    assert again.store_gpu_blocks == tuple(table[0][:2])


def test_lazy_stores_begin_at_the_head_again(
    make_engine: Callable[..., Any], make_request: Callable[..., Any]
) -> None:
    """Blocks that CPU memory had are to be stored again, as far as the GPU names them."""
    engine = make_engine(gpu_blocks=5, lazy=True)
    request = make_request("r", "abc")
    engine.compute(request)
    engine.finish(request)
    engine.report(first := engine.step())
    assert first.store_gpu_blocks != ()
    engine.scheduler.reset_cache()
    assert engine.step().store_gpu_blocks == first.store_gpu_blocks
