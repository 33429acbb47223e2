"""What is remembered of a request: its age, its wait, and what its client wishes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import ReqContext
from kv_core.tiering import PARAMS_KEY
from kv_core.tiering._requests import RequestTable

if TYPE_CHECKING:
    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey


def _wishes(params: Any) -> tuple[bool, bool]:
    state = RequestTable().state(ReqContext("a", {PARAMS_KEY: params}))
    return state.may_load, state.may_store


@pytest.mark.parametrize(
    ("params", "may"),
    [
        ({}, (True, True)),
        ({"load": False}, (False, True)),
        ({"store": False}, (True, False)),
        ({"load": False, "store": False}, (False, False)),
        ({"load": True, "store": True}, (True, True)),
    ],
)
def test_a_client_may_opt_out(params: Any, may: tuple[bool, bool]) -> None:
    """Of loads, of stores, or of both; what is not named stays on."""
    assert _wishes(params) == may


@pytest.mark.parametrize(
    "params",
    [[], "no", 0, {"load": "false"}, {"load": 0}, {"loads": False}, {"store": None}, {1: 2}],
)
def test_what_is_not_understood_keeps_the_request_out(params: Any) -> None:
    """A typing error of one client fails nothing, and keeps nothing that must not be kept."""
    assert _wishes(params) == (False, False)


def test_tiers_can_be_left_out() -> None:
    """A client that must not wait for storage still gets what is in CPU memory."""
    state = RequestTable().state(ReqContext("a", {PARAMS_KEY: {"tiers": False}}))
    assert (state.may_load, state.may_store, state.may_promote) == (True, True, False)


def test_no_wish_is_no_wish() -> None:
    """A client may leave the entry empty."""
    assert _wishes(None) == (True, True)


def test_parameters_of_others_are_none_of_ours() -> None:
    """Other connectors use the same mapping."""
    state = RequestTable().state(ReqContext("a", {"load": False, "do_remote_decode": True}))
    assert state.may_load


def test_misunderstandings_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One warning names the request and the form that is expected."""
    table = RequestTable()
    for index in range(5):
        table.state(ReqContext(f"r{index}", {PARAMS_KEY: "off"}))
    (record,) = caplog.records
    assert "r0" in record.getMessage()
    assert '{"load": true|false' in record.getMessage()


def test_age_is_the_order_of_the_first_call() -> None:
    """Waiting has no part in it."""
    table = RequestTable()
    first, second = (table.state(ReqContext(name)) for name in ("first", "second"))
    table.wait(second, 0.0)
    table.wait(first, 1.0)
    assert first.sequence < second.sequence
    assert table.is_oldest_waiting(first)
    assert not table.is_oldest_waiting(second)
    table.stop_waiting(first)
    assert table.is_oldest_waiting(second)
    assert table.num_waiting == 1


def test_the_wait_is_timed_from_its_beginning() -> None:
    """Further unknown answers do not move it; the next wait starts anew."""
    table = RequestTable()
    state = table.state(ReqContext("a"))
    table.wait(state, 5.0)
    table.wait(state, 9.0)
    assert state.first_unknown_at == 5.0
    table.stop_waiting(state)
    table.wait(state, 20.0)
    assert state.first_unknown_at == 20.0


def test_a_job_belongs_to_the_request_and_not_to_its_namesake(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Ids may come back: the load of the first is neither leased to the second nor its failure."""
    engine.promote("a", keys[0])
    engine.finish("a")
    engine.tier.answers[keys[1]] = None
    assert engine.ask("a", keys[1]) == ["retry"]
    engine.end_step()
    assert engine.stats["promotions"] == 1
    assert engine.stats["share_blocks_used"] == 0
    assert engine.manager.hit_level(keys[0], ReqContext("a")) == "cpu"


def test_answered_requests_are_handed_out_once_oldest_first(keys: list[OffloadKey]) -> None:
    """Whatever the order of the hits."""
    table = RequestTable()
    old, young = (table.state(ReqContext(name)) for name in ("old", "young"))
    table.note_hit(young, keys[0])
    table.note_hit(old, keys[1])
    table.note_hit(young, keys[2])
    assert table.take_answered() == [old, young]
    assert young.step_hits == [keys[0], keys[2]]
    assert table.take_answered() == []


def test_a_request_is_forgotten_as_a_whole() -> None:
    """Also when it waits; unknown ones are fine."""
    table = RequestTable()
    table.wait(table.state(ReqContext("a")), 0.0)
    table.remove("a")
    table.remove("a")
    assert (len(table), table.num_waiting) == (0, 0)


# -- through the manager ------------------------------------------------------------------------


def test_without_loads_everything_is_a_miss(engine: Engine, keys: list[OffloadKey]) -> None:
    """Hits, blocks below and blocks being written; no tier is asked, nobody waits."""
    engine.store("x", keys[0])
    engine.offer("x", keys[1])
    engine.tier.has(keys[2])
    engine.begin("a", load=False)
    assert engine.ask("a", *keys[:3]) == ["miss"] * 3
    assert engine.tier.lookups == []
    assert engine.stats["requests_waiting"] == 0


def test_without_stores_nothing_is_stored(engine: Engine, keys: list[OffloadKey]) -> None:
    """The offer is answered as known, so that nobody offers it again; loads work."""
    engine.begin("a", store=False)
    output = engine.manager.prepare_store(keys[:3], ReqContext("a"))
    assert output is not None
    assert (output.keys_to_store, output.declined_keys, output.evicted_keys) == ((), (), ())
    assert engine.stats["blocks_writing"] == 0
    assert engine.ask("b", keys[0]) == ["miss"]
    engine.store("b", keys[0])
    assert engine.ask("a", keys[0]) == ["hit"]
