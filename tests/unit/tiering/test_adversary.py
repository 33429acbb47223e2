"""What a random search for weak spots of the manager has found."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kv_core.contract import OffloadKey
from kv_core.cpu.policies import LRUCachePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine


class Panic(BaseException):
    """What extensions written in Rust raise: no ``Exception``."""


@pytest.mark.parametrize("error", [Panic("the backend panicked"), asyncio.CancelledError()])
@pytest.mark.parametrize(
    "method", ["lookup", "submit_store", "get_finished_jobs", "on_schedule_end"]
)
def test_what_is_no_exception_is_contained_as_well(
    engine: Engine, keys: list[OffloadKey], error: BaseException, method: str
) -> None:
    """Panics of native code and cancelled tasks cost a recompute, never the engine."""
    engine.tier.raising, engine.tier.raising_error = {method}, error  # type: ignore[assignment]
    engine.store("a", keys[0])
    assert engine.ask("b", keys[1]) == ["miss"]
    engine.end_step()
    assert engine.tier_stat("contained_exceptions") >= 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_signal_that_comes_inside_a_tier_is_not_swallowed(
    engine: Engine, keys: list[OffloadKey], error: type[BaseException]
) -> None:
    """Handlers of signals run wherever the process is, and end it by raising."""
    engine.tier.raising, engine.tier.raising_error = {"lookup"}, error()  # type: ignore[assignment]
    with pytest.raises(error):
        engine.ask("a", keys[0])


@pytest.mark.parametrize("told_s", [math.inf, math.nan, 1e12, -1.0])
def test_a_tier_cannot_talk_its_own_stores_away(
    start: Callable[..., Engine], keys: list[OffloadKey], told_s: float
) -> None:
    """A transfer takes no longer than from its submission to its report, whatever is told."""
    engine = start(num_blocks=32)
    for key in keys[:12]:
        engine.store("a", key)
        result = engine.tier.finish(engine.tier.stores[-1])
        engine.tier.results[-1] = replace(result, transfer_time_s=told_s)
        engine.end_step()
    assert engine.tier_stat("store_drop_rate") == 0.0
    assert engine.tier_stat("engine_blocks_stored") == 12


def test_an_interrupted_wait_leaves_no_second_thread_in_the_tier(
    engine: Engine, keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the wait, not the call: until that is back nothing else is called (G-1)."""
    engine.store("a", keys[0])
    gate = engine.tier.drain_gate = threading.Event()

    class Interrupted:
        def put(self, outcome: object) -> None:
            """Nobody waits for it any more."""

        def get(self, timeout: float) -> object:
            raise KeyboardInterrupt

    monkeypatch.setattr("kv_core.tiering._guard.queue.SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.manager.shutdown()
    monkeypatch.undo()
    calls = list(engine.log)
    engine.end_step()
    assert engine.log == calls
    engine.manager.shutdown()
    assert "primary.shutdown" not in engine.log, "pages that a tier reads were unmapped"
    gate.set()


def test_leased_blocks_are_not_in_the_way_of_evictions(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A lease counts as a use: held blocks do not gather where evictions begin to look."""
    engine = start(num_blocks=8, lease_share=0.5)
    engine.store("a", *keys[:4])
    engine.tier.has(keys[10])
    assert engine.ask("b", keys[0], keys[1], keys[10]) == ["hit", "hit", "pending"]
    engine.end_step()
    order = [key for key, _ in engine.primary._policy.items()]
    assert set(order[:2]) == {keys[2], keys[3]}


def test_blocks_that_a_stalled_tier_reads_are_not_in_the_way_of_evictions() -> None:
    """Many blocks in use at the cold end are passed once, not by every eviction; few stay."""
    ref_counts = [1] * 200 + [0] * 10
    policy = LRUCachePolicy(len(ref_counts), ref_counts)
    keys = [OffloadKey(index.to_bytes(36, "big")) for index in range(len(ref_counts))]
    for index, key in enumerate(keys):
        policy.insert(key, index)
    assert policy.evict(1, ()) == [(keys[200], 200)]
    assert [slot for _, slot in policy.items()] == [*range(201, 210), *range(200)]
    ref_counts[201] = 1
    assert policy.evict(1, ()) == [(keys[202], 202)]
    assert next(policy.items()) == (keys[201], 201)


def test_a_lost_store_is_worth_stepping_for_only_until_its_grace_ends(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """However many jobs were lost before, and whichever deadline is the longer one."""
    engine = start(store_deadline_s=8.0, promotion_deadline_s=5.0, quarantine_grace_s=2.0)
    engine.store("a", keys[0])
    engine.tier.has(keys[1])
    engine.ask("b", keys[1])
    engine.end_step()
    pending = []
    for _ in range(6):
        engine.clock.advance(2.1)
        engine.end_step()
        pending.append(engine.manager.has_pending_work())
    assert pending == [True, True, True, True, False, False]


def test_a_tier_that_never_answers_is_degraded_whatever_deadline_it_declares(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Or every request would wait to its own deadline, for ever."""
    engine = start(lookup_deadline_s=1e6, request_lookup_deadline_s=30.0)
    engine.tier.answers = dict.fromkeys(keys)
    for req_id in ("a", "b", "c"):
        assert engine.health() == "healthy"
        assert engine.ask(req_id, *keys[:5]) == ["retry"] * 5
        engine.end_step()
        engine.clock.advance(30.1)
        assert engine.ask(req_id, keys[0]) == ["miss"]
        engine.finish(req_id)
    assert engine.health() == "degraded"
    assert engine.ask("d", keys[0]) == ["miss"]
    assert engine.tier_stat("engine_errors") == 15


def test_a_tier_that_answered_is_not_blamed_for_a_lack_of_room(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The request waited for a slot, not for the tier."""
    engine = start(num_blocks=2, lookup_deadline_s=1e6, degrade_after_failures=1)
    engine.offer("o", keys[8], keys[9])
    engine.tier.answers = {keys[0]: None, keys[1]: None}
    assert engine.ask("older", keys[1]) == ["retry"]
    assert engine.ask("a", keys[0]) == ["retry"]
    engine.end_step()
    engine.tier.has(keys[0], keys[1])
    assert engine.ask("a", keys[0]) == ["retry"]
    engine.clock.advance(30.1)
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.health() == "healthy"
