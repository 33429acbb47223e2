"""Our engine under vLLM's connector: blocks, requests, resets, and what is seen of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm_env.engine_mode.conftest import ROW_BYTES, content
from vllm.v1.kv_offload import base

from kv_core.contract import OffloadPolicy
from kv_core.vllm import _compat, _spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm_env.conftest import Script
    from tests.vllm_env.engine_mode.conftest import Engine

    from kv_core.contract import OffloadKey


SCRIPTED: dict[str, Any] = {"secondary_tiers": [{"type": "scripted"}]}


# -- blocks -------------------------------------------------------------------------------------


def test_blocks_come_back_from_cpu_memory(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Byte for byte, into other GPU blocks."""
    engine = start()
    engine.store("a", *keys[:4])
    assert engine.ask("b", *keys[:5]) == ["HIT"] * 4 + ["MISS"]
    assert engine.load("b", *keys[:4]) == [[content(key, 0) for key in keys[:4]]]


@pytest.mark.parametrize("kind", ["example", "fs"])
def test_blocks_come_back_from_a_tier(
    start: Callable[..., Engine], keys: list[OffloadKey], tmp_path: Path, kind: str
) -> None:
    """After vLLM's reset, which empties CPU memory only."""
    folder = {"root_dir": str(tmp_path / "store"), "min_free_bytes": 1}
    engine = start(secondary_tiers=[{"type": kind, **(folder if kind == "fs" else {})}])
    engine.store("a", *keys[:4])
    engine.manager.reset_cache()
    assert engine.until_known("b", *keys[:5]) == ["HIT"] * 4 + ["MISS"]
    assert engine.load("b", *keys[:4]) == [[content(key, 0) for key in keys[:4]]]


def test_ranks_have_pages_of_their_own(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Two workers share each row, and load what they have stored."""
    engine = start(ranks=2)
    engine.store("a", *keys[:3])
    loaded = engine.load("b", *keys[:3])
    assert loaded == [[content(key, rank) for key in keys[:3]] for rank in (0, 1)]


def test_a_load_ends_whatever_the_order_of_its_keys(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Keys are in a set there; a load that never ended would pin its blocks for ever."""
    engine = start(slots=4)
    engine.store("a", *keys[:4])
    for request in range(5):
        engine.load(f"b{request}", *keys[:4])
    assert engine.store("c", *keys[4:8]) == keys[4:8]


def test_known_blocks_are_not_stored_again(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """What is offered and known is left out, and an offer of nothing new is no decline."""
    engine = start()
    engine.store("a", *keys[:3])
    assert engine.store("b", *keys[:5]) == keys[3:5]
    output = engine.manager.prepare_store(keys[:5], engine.request("c"))
    assert output is not None
    assert output.keys_to_store == []


def test_only_whole_batches_are_declined(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The cursor moves past anything else, and the blocks would never be offered again."""
    engine = start(slots=4)
    offered = engine.offer("a", keys[:3])
    assert offered is not None
    assert engine.offer("b", keys[3:5]) is None
    engine.finish_store("a", *offered)
    assert engine.store("b", *keys[3:5]) == keys[3:5]


def test_of_a_batch_that_never_fits_the_leading_part_is_stored(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Declined as a whole, a long prompt would never be stored at all."""
    engine = start(slots=4)
    assert engine.store("a", *keys[:7]) == keys[:4]


def test_the_least_recently_loaded_leaves(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Nobody calls ``touch``, so loads and offers of known blocks are what counts as use."""
    engine = start(slots=3)
    for index in range(3):
        engine.store(f"s{index}", keys[index])
    engine.load("b", keys[0])
    engine.manager.prepare_store([keys[1]], engine.request("c"))
    engine.end_step()
    engine.store("d", keys[3])
    assert engine.ask("e", *keys[:4]) == ["HIT", "HIT", "MISS", "HIT"]


# -- requests -----------------------------------------------------------------------------------


def test_a_tier_may_want_all_blocks_of_a_request(
    scripts: list[Script], start: Callable[..., Engine]
) -> None:
    """The policy is told in vLLM's words."""
    engine = start(**SCRIPTED)
    answer = engine.manager.on_new_request(base.ReqContext("a"))
    assert answer.policy is _compat.block_level_policy()
    scripts[0].policy = OffloadPolicy.REQUEST_LEVEL
    answer = engine.manager.on_new_request(base.ReqContext("b"))
    assert answer.policy is base.OffloadPolicy.REQUEST_LEVEL


def test_a_finished_request_is_forgotten(
    scripts: list[Script], start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Also when completions follow its end, as vLLM has them."""
    engine = start(**SCRIPTED)
    offered = engine.offer("a", keys[:1])
    assert offered is not None
    request = engine.request("a")
    engine.end_request("a")
    assert scripts[0].requests == set()
    engine.workers[0].wait({offered[0]})
    engine.manager.complete_store(set(keys[:1]), request)
    assert engine.manager._contexts == {}
    assert engine.ask("b", keys[0]) == ["HIT"]


def test_a_request_may_stay_away_from_storage(
    scripts: list[Script], start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The request's ``kv_load_tiers`` is heeded: CPU memory may be the only level that it names."""
    engine = start(**SCRIPTED)
    scripts[0].answers = dict.fromkeys(keys[:2], True)
    engine.store("a", keys[2])
    only_cpu = base.TierFilter((base.TierMatcher(medium=base.Medium.CPU),))
    for name, params in (("b", None), ("n", {"kv_core": None})):
        engine.request(name, params, load_tier_filter=only_cpu)
        assert engine.ask(name, *keys[:3]) == ["MISS", "MISS", "HIT"]
    engine.request("c", load_tier_filter=base.TierFilter((base.TierMatcher(),)))
    assert engine.ask("c", *keys[:3]) == ["HIT_PENDING", "HIT_PENDING", "HIT"]


def test_a_request_may_stay_out_of_the_cache(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Our own entry of its parameters arrives."""
    engine = start()
    engine.store("a", *keys[:2])
    engine.request("b", {"kv_core": {"load": False, "store": False}})
    assert engine.ask("b", *keys[:2]) == ["MISS", "MISS"]
    output = engine.manager.prepare_store(keys[2:4], engine.request("b"))
    assert output is not None
    assert output.keys_to_store == []


def test_hits_name_their_source(
    scripts: list[Script], start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Cached tokens are split by it."""
    if _compat.hit_source("cpu") is None:
        pytest.skip("before 0.32 vLLM does not ask where a hit came from")
    engine = start(**SCRIPTED)
    engine.store("a", keys[0])
    scripts[0].answers = {keys[1]: True}
    engine.ask("b", *keys[:2])
    engine.end_step()
    scripts[0].finish()
    assert engine.ask("b", *keys[:2]) == ["HIT", "HIT"]
    sources = [engine.manager.get_load_source(key, engine.request("b")) for key in keys[:2]]
    assert [source.value for source in sources] == ["host", "external_unspecified"]


# -- resets -------------------------------------------------------------------------------------


def test_a_reset_of_an_idle_engine_is_over_at_once(
    scripts: list[Script], start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """No copy can be on its way, and promotions begin with the next question."""
    engine = start(**SCRIPTED)
    engine.store("a", keys[0])
    scripts[0].finish()
    scripts[0].answers = {keys[0]: True}
    engine.manager.reset_cache()
    assert engine.ask("b", keys[0]) == ["HIT_PENDING"]


def test_a_reset_waits_for_copies_that_vllm_reports_no_more(
    scripts: list[Script], start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A late copy into a slot must not land on what a tier has written there since."""
    engine = start(slots=2, **SCRIPTED)
    offered = engine.offer("a", keys[:2])
    assert offered is not None
    scripts[0].answers = dict.fromkeys(keys[4:6], True)
    engine.manager.reset_cache()
    assert engine.ask("b", *keys[4:6]) == ["MISS", "MISS"]
    assert engine.manager.has_pending_work()
    for _ in range(10):
        engine.end_step()
    assert not engine.manager.has_pending_work()
    assert engine.ask("c", *keys[4:6]) == ["HIT_PENDING", "MISS"]


def test_a_later_job_ends_a_reset(
    scripts: list[Script], start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Workers finish everything older first, and report nothing of it."""
    engine = start(**SCRIPTED)
    stale = engine.offer("a", keys[:2])
    assert stale is not None
    engine.manager.reset_cache()
    scripts[0].answers = {keys[6]: True}
    assert engine.ask("b", keys[6]) == ["MISS"]
    fresh = engine.offer("c", keys[2:3])
    assert fresh is not None
    engine.workers[0].wait({stale[0], fresh[0]})
    engine.workers[0].get_finished()
    engine.manager.complete_store(set(fresh[1]), engine.request("c"))
    assert engine.ask("d", keys[6]) == ["HIT_PENDING"]


def test_vllm_may_say_itself_that_a_reset_is_over(
    scripts: list[Script], start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """From 0.33 on it does, once or more than once."""
    engine = start(**SCRIPTED)
    assert engine.offer("a", keys[:2]) is not None
    engine.manager.reset_cache()
    scripts[0].answers = {keys[6]: True}
    assert engine.ask("b", keys[6]) == ["MISS"]
    engine.manager.on_reset_flushed()
    engine.manager.on_reset_flushed()
    assert engine.ask("c", keys[6]) == ["HIT_PENDING"]


def test_a_reset_with_copies_on_their_way_leaves_no_pins(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Every slot is of use again once they have ended."""
    engine = start(slots=4)
    engine.store("a", *keys[:2])
    engine.manager.prepare_load(keys[:2], engine.request("b"))
    assert engine.offer("c", keys[2:4]) is not None
    engine.manager.reset_cache()
    for _ in range(10):
        engine.end_step()
    engine.workers[0].wait({1, 2})
    engine.workers[0].get_finished()
    assert engine.store("d", *keys[4:8]) == keys[4:8]


def test_new_weights_make_everything_unreachable(
    start: Callable[..., Engine], keys: list[OffloadKey], tmp_path: Path
) -> None:
    """By configuration, vLLM's reset opens every tier under another namespace."""
    tier = {"type": "fs", "root_dir": str(tmp_path / "store"), "min_free_bytes": 1}
    engine = start(secondary_tiers=[tier], engine_reset="epoch")
    for _ in range(2):
        engine.store("a", *keys[:2])
        engine.manager.reset_cache()
        assert engine.until_known("b", *keys[:2]) == ["MISS", "MISS"]
        engine.end_request("a")
        engine.end_request("b")


@pytest.mark.parametrize(
    ("settings", "stored"),
    [({}, True), ({"window": 64}, False), ({"engine_reset": "epoch"}, False)],
    ids=str,
)
def test_what_a_request_had_before_a_reset_is_not_stored_where_it_may_be_wrong(
    start: Callable[..., Engine], keys: list[OffloadKey], settings: dict[str, Any], stored: bool
) -> None:
    """VLLM offers all of it again: also what has left a window, and what is of old weights."""
    engine = start(**settings)
    engine.store("a", keys[0])
    engine.request("waits")
    engine.end_step("a")
    engine.manager.reset_cache()
    assert engine.store("a", *keys[:2]) == (keys[:2] if stored else [])
    assert engine.store("waits", keys[2]) == [keys[2]]
    engine.end_step(preempted=["a"])
    assert engine.store("a", keys[3]) == [keys[3]]


# -- observation --------------------------------------------------------------------------------


def test_everything_reported_is_declared(
    scripts: list[Script],
    start: Callable[..., Engine],
    keys: list[OffloadKey],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it is asserted there, with as many labels; counters add up to what happened."""
    monkeypatch.setattr("kv_core.vllm._metrics._PERIOD_S", 0.0)
    engine = start(**SCRIPTED)
    total: dict[str, float] = {}
    definitions = _spec.KVCoreOffloadingSpec.build_metric_definitions({})
    for step in range(3):
        engine.store(f"s{step}", *keys[2 * step : 2 * step + 2])
        scripts[0].finish()
        engine.load(f"l{step}", *keys[2 * step : 2 * step + 2])
        engine.end_step()
        stats = engine.manager.get_stats()
        for name, values in stats.data["data"].items():
            for labels, value in values.items():
                assert len(labels) == len(definitions[name].labelnames)
                if stats.data["types"][name] == "counter":
                    total[f"{name} {' '.join(labels)}"] = (
                        total.get(f"{name} {' '.join(labels)}", 0) + value
                    )
    assert total["vllm:kv_core_hit_blocks cpu"] == 6, total
    assert total.get("vllm:kv_core_tier_stored_blocks 1:scripted") == 6, total
    assert total["vllm:kv_offload_tiering_write_bytes 1:scripted"] == 6 * ROW_BYTES


def test_measurements_are_read_a_few_times_a_second(start: Callable[..., Engine]) -> None:
    """They are asked for in every step."""
    engine = start()
    assert [engine.manager.get_stats() for _ in range(50)].count(None) >= 49


def test_events_name_their_medium(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """In vLLM's words, and in the order in which things happened."""
    engine = start(slots=2, events=True)
    engine.store("a", *keys[:2])
    engine.end_step()
    engine.store("b", keys[2])
    events = list(engine.manager.take_events())
    assert [(event.medium, event.ownership, event.removed) for event in events] == [
        (base.Medium.CPU, None, False),
        (base.Medium.CPU, None, True),
        (base.Medium.CPU, None, False),
    ]
    assert [set(event.keys) for event in events] == [set(keys[:2]), {keys[1]}, {keys[2]}]
    assert list(engine.manager.take_events()) == []
