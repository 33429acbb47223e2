"""Loads: what a lookup promised stays there, and what nobody wants any more is let go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.engine import KVCacheGroupConfig
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable

Engine = Any
Request = Any


def test_the_last_token_is_never_promised(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Of a prompt that is found whole, all but one token can be loaded."""
    engine = make_engine()
    engine.store("abc")
    assert engine.scheduler.get_num_new_matched_tokens(make_request("r", "abc", 0), 0) == (11, True)
    assert engine.scheduler.get_num_new_matched_tokens(make_request("s", "abc", 5), 0) == (12, True)
    assert engine.scheduler.get_num_new_matched_tokens(make_request("t", "xyz", 5), 0) == (0, False)


def test_a_promise_outlasts_an_eviction(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Found blocks are pinned until their load, at full memory (vllm#39702, #42289, #54914)."""
    engine = make_engine(cpu_blocks=4)
    engine.store("ab")
    request = make_request("r", "ab")
    assert engine.matched(request) == 8
    for word in ("cd", "ef", "gh"):
        engine.store(word)
    assert engine.stat("blocks_evicted") == 4
    table = engine.allocate(request, 3)
    engine.scheduler.update_state_after_alloc(request, table, 8)
    metadata = engine.step()
    assert metadata.load_gpu_blocks == tuple(table[0][:2])
    assert len(set(metadata.load_cpu_blocks)) == 2
    assert metadata.load_event_to_reqs == {0: ("r",)}
    assert engine.report(metadata).loaded_req_ids == {"r"}
    assert engine.stat("blocks_pinned") == 0


def test_a_promise_of_several_groups_outlasts_an_eviction(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Every group's blocks are held, those of a window only as far as it reaches (vllm#43884)."""
    full = KVCacheGroupConfig(tokens_per_block=4, layer_names=("full",))
    window = KVCacheGroupConfig(tokens_per_block=4, layer_names=("window",), sliding_window=5)
    engine = make_engine(groups=(full, window), cpu_blocks=6, gpu_blocks=64)
    engine.store("abc")
    request = make_request("r", "abc")
    assert engine.matched(request) == 12
    assert engine.stat("blocks_pinned") == 3 + 1
    for word in ("d", "e", "f"):
        engine.store(word)
    table = engine.allocate(request, 4)
    engine.scheduler.update_state_after_alloc(request, table, 12)
    metadata = engine.step()
    assert metadata.load_gpu_blocks == (*table[0][:3], table[1][2])
    assert engine.report(metadata).loaded_req_ids == {"r"}


@pytest.mark.parametrize("end", ["zero tokens", "abort", "asked again"])
def test_a_void_promise_lets_its_blocks_go(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request], end: str
) -> None:
    """No pin is left when the request is told of no tokens, ends, or asks and finds less."""
    engine = make_engine()
    engine.store("ab")
    request = make_request("r", "ab")
    for _ in range(3):
        assert engine.matched(request) == 8
    assert engine.stat("blocks_pinned") == 2
    if end == "zero tokens":
        engine.scheduler.update_state_after_alloc(request, [[]], 0)
    elif end == "abort":
        engine.scheduler.request_finished(request)
    else:
        assert engine.matched(request, computed=8) == 0
    assert engine.stat("blocks_pinned") == 0
    assert engine.scheduler.num_transfers_in_flight == 0


def test_fewer_tokens_than_promised_may_be_loaded(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """The engine may have less room; what it does not load is not held."""
    engine = make_engine()
    engine.store("abc")
    request = make_request("r", "abc")
    assert engine.matched(request) == 12
    engine.scheduler.update_state_after_alloc(request, engine.allocate(request, 1), 4)
    assert engine.stat("blocks_pinned") == 1
    assert len(engine.step().load_cpu_blocks) == 1


def test_more_tokens_than_promised_are_refused(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Nobody knows what those blocks hold."""
    engine = make_engine()
    engine.store("a")
    request = make_request("r", "ab")
    assert engine.matched(request) == 4
    with pytest.raises(EngineStateError, match=r"'r': 8 tokens .* 4 were promised"):
        engine.scheduler.update_state_after_alloc(request, engine.allocate(request, 2), 8)
    with pytest.raises(EngineStateError, match=r"0 were promised"):
        engine.scheduler.update_state_after_alloc(make_request("s", "a"), [[1]], 4)


def test_a_block_table_too_short_is_refused(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """The message names what is missing, and the promise still stands."""
    engine = make_engine()
    engine.store("abc")
    request = make_request("r", "abc")
    assert engine.matched(request) == 12
    with pytest.raises(EngineStateError, match=r"needs the blocks 0 to 2 of group 0; .* has 1"):
        engine.scheduler.update_state_after_alloc(request, [[7]], 12)
    engine.scheduler.request_finished(request)
    assert engine.stat("blocks_pinned") == 0


def test_an_aborted_load_keeps_its_blocks_until_it_has_ended(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Neither side is given to anybody while a worker may still copy; nobody is told of it."""
    engine = make_engine(gpu_blocks=6)
    engine.store("ab")
    request = make_request("r", "ab")
    table = engine.begin_load(request, 3)
    metadata = engine.step()
    engine.finish(request)
    assert engine.stat("blocks_pinned") == 2
    assert not any(engine.pool.is_free(block_id) for block_id in table[0][:2])
    assert engine.pool.is_free(table[0][2])
    report = engine.report(metadata)
    assert (report.loaded_req_ids, report.failed_req_ids) == (set(), set())
    assert engine.pool.num_free == 5
    assert engine.stat("blocks_pinned") == 0


def test_a_load_aborted_before_its_step_never_begins(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Workers are not told of it, and both sides are free at once."""
    engine = make_engine(gpu_blocks=6)
    engine.store("ab")
    request = make_request("r", "ab")
    engine.begin_load(request)
    assert engine.scheduler.has_pending_work()
    engine.finish(request)
    assert engine.pool.num_free == 5
    assert engine.stat("blocks_pinned") == 0
    assert engine.step().load_event == -1
    assert not engine.scheduler.has_pending_work()


def test_a_namesake_is_not_told_of_an_aborted_load(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """A new request of the same name waits for its own load."""
    engine = make_engine()
    engine.store("ab")
    first, second = make_request("r", "ab"), make_request("r", "ab")
    engine.begin_load(first)
    old = engine.step()
    engine.finish(first)
    engine.begin_load(second)
    new = engine.step()
    assert engine.report(old).loaded_req_ids == set()
    assert engine.report(new).loaded_req_ids == {"r"}


def test_a_load_has_ended_when_every_rank_says_so(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """One failed rank fails it for all."""
    engine = make_engine(world_size=3)
    engine.store("ab")
    request = make_request("r", "ab")
    engine.begin_load(request)
    metadata = engine.step()
    assert engine.report(metadata, ranks=1).loaded_req_ids == set()
    assert engine.report(metadata, ranks=1, failed=True).failed_req_ids == set()
    assert engine.stat("blocks_pinned") == 2
    report = engine.report(metadata, ranks=1)
    assert (report.loaded_req_ids, report.failed_req_ids) == (set(), {"r"})
    assert engine.stat("blocks_pinned") == 0


def test_loads_of_a_step_are_one_event(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Events of loads increase by one from step to step, and name who waits."""
    engine = make_engine()
    engine.store("ab")
    for step, names in enumerate((("r", "s"), ("t",))):
        for name in names:
            request = make_request(name, "ab")
            engine.begin_load(request)
        metadata = engine.step()
        assert metadata.load_event_to_reqs == {step: names}
        assert len(metadata.load_gpu_blocks) == len(metadata.load_cpu_blocks) == 2 * len(names)


def test_an_unknown_report_is_ignored(
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A repeated report changes nothing, and is logged."""
    engine = make_engine()
    request = make_request("r", "b")
    done = engine.compute(request)
    engine.report(done)
    engine.report(done)
    assert "store event 0, which is not in flight" in caplog.text
    assert engine.finds("b") == 1
