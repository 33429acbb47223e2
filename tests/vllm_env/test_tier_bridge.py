"""Our tiers under vLLM's own tiering manager: its contract, its assertions, and ours between."""

from __future__ import annotations

import gc
import hashlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import JobErrorKind, JobId, JobResult, OffloadingEvent, OffloadPolicy
from kv_core.errors import (
    ConfigError,
    EngineStateError,
    KVCoreError,
    NamespaceError,
    TierOpenError,
    UnknownTierError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm_env.conftest import Rig, Script

    from kv_core.contract import OffloadKey

BYTES = 5000


def _content(key: OffloadKey) -> bytes:
    return hashlib.shake_128(key).digest(BYTES)


def _tier(path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "kv:fs", "root_dir": str(path), "min_free_bytes": 1, **more}


# -- real tiers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [{"type": "kv:example"}, {"type": "kv:fs"}], ids=str)
def test_blocks_come_back(
    make_rig: Callable[..., Rig],
    keys: list[OffloadKey],
    tmp_path: Path,
    entry: dict[str, Any],
) -> None:
    """What cascaded to a tier is promoted from it after a reset, byte for byte."""
    if entry["type"] == "kv:fs":
        entry = _tier(tmp_path / "store")
    rig = make_rig(entry)
    rig.store("a", *keys[:4])
    rig.settle()
    rig.manager.reset_cache()
    _flush_reset(rig)
    assert rig.until_known("b", *keys[:5]) == ["HIT"] * 4 + ["MISS"]
    assert rig.load("b", *keys[:4]) == [_content(key) for key in keys[:4]]


def _flush_reset(rig: Rig) -> None:
    # From 0.33 on the workers confirm a reset, and nothing is promoted before that.
    getattr(rig.manager, "on_reset_flushed", lambda: None)()


def test_another_process_finds_the_blocks(
    make_rig: Callable[..., Rig], keys: list[OffloadKey], tmp_path: Path
) -> None:
    """A persistent tier outlives its engine."""
    first = make_rig(_tier(tmp_path / "store"))
    first.store("a", *keys[:3])
    first.settle()
    first.close()
    second = make_rig(_tier(tmp_path / "store"))
    assert second.until_known("a", *keys[:3]) == ["HIT"] * 3
    assert second.load("a", *keys[:3]) == [_content(key) for key in keys[:3]]


def test_two_models_never_share(
    make_rig: Callable[..., Rig], keys: list[OffloadKey], tmp_path: Path, model: Path
) -> None:
    """Other weights under the same path are another model (llm-d and vLLM collapse them)."""
    first = make_rig(_tier(tmp_path / "store"))
    first.store("a", keys[0])
    first.settle()
    first.close()
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    second = make_rig(_tier(tmp_path / "store"))
    assert second.until_known("a", keys[0]) == ["MISS"]


def test_evictions_make_room_for_promotions(
    make_rig: Callable[..., Rig], keys: list[OffloadKey]
) -> None:
    """Eight slots serve thirty-two blocks, each with its own bytes."""
    rig = make_rig({"type": "kv:example", "max_blocks": 100})
    for number, key in enumerate(keys):
        rig.store(f"s{number}", key)
        rig.settle()
        rig.end_request(f"s{number}")
    for number, key in enumerate(keys):
        assert rig.until_known(f"l{number}", key) == ["HIT"]
        assert rig.load(f"l{number}", key) == [_content(key)]
        rig.end_request(f"l{number}")


# -- answers and jobs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "word"), [(True, "HIT_PENDING"), (False, "MISS"), (None, "RETRY")]
)
def test_three_answers(
    scripted: Callable[..., tuple[Rig, Script]],
    keys: list[OffloadKey],
    answer: bool | None,
    word: str,
) -> None:
    """Present is promoted, absent is a miss, unknown is asked again."""
    rig, tier = scripted()
    tier.answers[keys[0]] = answer
    assert rig.ask("a", keys[0]) == [word]
    rig.end_step()
    tier.finish()


def test_keys_and_slots_are_aligned(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """vLLM hands stores a set; its order is that of the slots."""  # noqa: D403 - a name
    rig, tier = scripted()
    rig.store("a", *keys[:6])
    [job] = tier.jobs.values()
    for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True):
        with tier.context.primary.block(slot) as block:
            assert bytes(block) == _content(key)
    tier.finish()
    rig.settle()


def test_a_partial_load_keeps_what_came(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """Only the failed keys are recomputed."""
    rig, tier = scripted()
    tier.answers.update(dict.fromkeys(keys[:3], True))
    rig.ask("a", *keys[:3])
    rig.end_step()
    tier.finish(good=[keys[0], keys[2]], kind=JobErrorKind.DAMAGED)
    assert rig.ask("a", *keys[:3]) == ["HIT", "MISS", "HIT"]
    assert rig.load("a", keys[0], keys[2]) == [_content(keys[0]), _content(keys[2])]


def test_nonsense_is_no_assertion(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """Repeated and unknown results end nothing; vLLM would stop at either."""
    rig, tier = scripted()
    rig.store("a", keys[0])
    tier.finish()
    tier.results += [tier.results[0], JobResult(JobId(777), success=True), "nothing"]
    rig.settle()
    assert not rig.manager.has_pending_work()


@pytest.mark.parametrize(
    "method",
    [
        "lookup",
        "submit_store",
        "submit_load",
        "get_finished_jobs",
        "on_new_request",
        "on_request_finished",
    ],
)
def test_exceptions_stay_below(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey], method: str
) -> None:
    """Whatever a tier raises, vLLM's scheduler goes on, and its requests are answered."""
    rig, tier = scripted()
    tier.answers[keys[0]] = True
    tier.raising = {method}
    rig.ask("a", keys[0])
    rig.end_step("a")
    rig.store("b", keys[1])
    rig.end_step("b")
    tier.raising = set()
    tier.finish()
    rig.settle()
    assert rig.ask("c", keys[1]) == ["HIT"]
    for req_id in ("a", "b", "c"):
        rig.end_request(req_id)


def test_requests_end_below(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """A tier hears of the begin and the end of each request."""
    rig, tier = scripted()
    rig.store("a", keys[0])
    assert tier.requests == {"a"}
    tier.finish()
    rig.settle()
    rig.end_request("a")
    assert tier.requests == set()


def test_the_policy_of_a_tier_counts(scripted: Callable[..., tuple[Rig, Script]]) -> None:
    """A tier that wants whole requests is offered them by vLLM."""
    from vllm.v1.kv_offload.base import ReqContext

    rig, tier = scripted()
    tier.policy = OffloadPolicy.REQUEST_LEVEL
    assert rig.manager.on_new_request(ReqContext("a")).policy.name == "REQUEST_LEVEL"
    tier.policy = OffloadPolicy.BLOCK_LEVEL
    assert rig.manager.on_new_request(ReqContext("b")).policy.name in {
        "CHUNK_LEVEL",
        "BLOCK_LEVEL",
    }


# -- a tier that stalls -------------------------------------------------------------------------


def test_a_stalled_load_does_not_hold_its_request(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """After the deadline the request recomputes, and nobody gets the slots until they are free."""
    rig, tier = scripted(num_slots=8, lease_share=1.0, promotion_deadline_s=0.01)
    tier.answers.update(dict.fromkeys(keys[:2], True))
    assert rig.ask("a", *keys[:2]) == ["HIT_PENDING", "HIT_PENDING"]
    rig.end_step()
    [job] = tier.jobs.values()
    threading.Event().wait(0.02)
    assert rig.ask("a", *keys[:2]) == ["MISS", "MISS"]
    rig.end_step("a")
    # The six other slots are all there is.
    rig.store("b", *keys[4:10])
    [store] = [other for other in tier.jobs.values() if other is not job]
    assert set(store.block_ids.tolist()).isdisjoint(job.block_ids.tolist())
    assert rig.manager.prepare_store(keys[10:11], rig.request("c")) is None
    tier.finish()
    rig.settle()
    rig.store("d", *keys[10:18])
    tier.finish()
    rig.settle()
    assert rig.ask("e", *keys[10:18]) == ["HIT"] * 8


def test_a_dead_tier_is_left_alone(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """After repeated failures it is neither asked nor given anything: vLLM runs as without it."""
    rig, tier = scripted(degrade_after_failures=3)
    tier.raising = {"lookup"}
    for number in range(3):
        rig.ask(f"r{number}", keys[number])
    tier.raising = set()
    tier.answers[keys[9]] = True
    assert rig.ask("s", keys[9]) == ["MISS"]
    rig.store("s", keys[10])
    rig.settle()
    assert tier.jobs == {}
    assert rig.stats()["vllm:kv_core_tier_health:('1:kv:scripted',)"] == 1


def test_a_reset_waits_for_the_tier(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """vLLM asserts that no job is left, and reuses every slot at once."""  # noqa: D403 - a name
    rig, tier = scripted()
    tier.answers[keys[0]] = True
    rig.ask("a", keys[0])
    rig.end_step()
    rig.store("b", *keys[1:4])
    rig.manager.reset_cache()
    assert not rig.manager.has_pending_work()
    assert tier.jobs == {}


def test_a_reset_waits_for_io_that_cannot_be_stopped(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """What a drain names as running is waited for, also when it was given up before."""
    rig, tier = scripted(promotion_deadline_s=0.01)
    tier.answers[keys[0]] = True
    rig.ask("a", keys[0])
    rig.end_step()
    tier.stuck = list(tier.jobs)
    threading.Event().wait(0.02)
    assert rig.ask("a", keys[0]) == ["MISS"]
    over = threading.Event()

    def reset() -> None:
        rig.manager.reset_cache()
        over.set()

    thread = threading.Thread(target=reset)
    thread.start()
    assert not over.wait(0.1)
    tier.finish()
    tier.stuck = []
    assert over.wait(20)
    thread.join()
    _flush_reset(rig)
    # Every slot is there, and there once.
    rig.store("b", *keys[8:16])
    [job] = tier.jobs.values()
    assert sorted(job.block_ids.tolist()) == list(range(8))
    tier.finish()
    rig.settle()


def test_a_lost_job_does_not_hold_a_reset(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """A tier that drains without a result breaks its contract; vLLM goes on."""
    rig, tier = scripted()
    rig.store("a", keys[0])
    tier.lost = True
    rig.manager.reset_cache()
    assert not rig.manager.has_pending_work()


# -- observation --------------------------------------------------------------------------------


def test_metrics_are_declared_and_true(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """Every name that is reported was declared with as many labels, and the numbers are right."""
    rig, tier = scripted()
    rig.store("a", *keys[:3])
    tier.finish(good=keys[:2])
    rig.settle()
    reduced = rig.stats()
    assert reduced["vllm:kv_core_tier_stored_blocks:('1:kv:scripted',)"] == 2
    assert reduced["vllm:kv_core_tier_failed_blocks:('1:kv:scripted',)"] == 1
    declared = type(rig.spec).build_metric_definitions(rig.spec.extra_config)
    ours = [name for name in reduced if name.startswith("vllm:kv_core")]
    assert len(ours) > 5
    for name in ours:
        base, _, labels = name.removeprefix("vllm:").partition(":(")
        assert labels.count("'") == 2 * len(declared[f"vllm:{base}"].labelnames)


@pytest.mark.parametrize("enabled", [True, False])
def test_events_are_those_of_the_tier(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey], enabled: bool
) -> None:
    """What the tier says became present or left is published, when vLLM publishes at all."""
    rig, tier = scripted(events=enabled)
    tier.events = [
        OffloadingEvent((keys[0],), "scripted", removed=False),
        OffloadingEvent((keys[1],), "scripted", removed=True),
    ]
    events = [(event.keys, event.medium.name, event.removed) for event in rig.manager.take_events()]
    expected = [([keys[0]], "STORAGE", False), ([keys[1]], "STORAGE", True)]
    assert events == (expected if enabled else [])


@pytest.mark.parametrize(
    ("entry", "source"),
    [({"type": "kv:example"}, "external_unspecified"), ({"type": "kv:fs"}, "disk")],
)
def test_hits_name_their_source(
    make_rig: Callable[..., Rig],
    keys: list[OffloadKey],
    tmp_path: Path,
    entry: dict[str, Any],
    source: str,
) -> None:
    """Cached tokens are split by it, and only a disk is called one."""
    from kv_core.vllm import _compat

    if _compat.hit_source("cpu") is None:
        pytest.skip("before 0.32 vLLM does not ask where a hit came from")
    rig = make_rig(entry if entry["type"] == "kv:example" else _tier(tmp_path / "store"))
    rig.store("a", keys[0])
    rig.settle()
    rig.manager.reset_cache()
    _flush_reset(rig)
    assert rig.until_known("b", keys[0]) == ["HIT"]
    assert rig.manager.get_load_source(keys[0], rig.request("b")).value == source


def test_vllms_own_counts_are_fed(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """vLLM counts bytes, failures, queries and hits of our tiers as of its own."""  # noqa: D403
    rig, tier = scripted()
    rig.store("a", *keys[:2])
    tier.finish()
    rig.settle()
    rig.store("b", keys[2])
    tier.finish(good=[])
    rig.settle()
    label = "('1:kv:scripted',)"
    reduced = rig.stats()
    assert reduced[f"vllm:kv_offload_tiering_write_bytes:{label}"] == 2 * 8192
    assert reduced[f"vllm:kv_offload_tiering_cascade_job_failures:{label}"] == 1


# -- settings -----------------------------------------------------------------------------------


def test_a_read_only_tier_is_given_no_store(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """``mode`` means the same as under our own engine."""
    rig, tier = scripted(entry={"mode": "read_only"})
    rig.store("a", keys[0])
    rig.settle()
    assert tier.jobs == {}


def test_vllms_back_pressure_decides_as_well(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """A detector that the user configured is asked besides ours."""
    from kv_core.vllm import _compat

    if _compat.BackpressureDetector is None:
        pytest.skip("this version of vLLM has none")
    rig, tier = scripted(
        entry={
            "backpressure": {
                "backpressure_cls": "EMABackpressureDetector",
                "high_water_s": 1e-12,
                "low_water_s": 1e-13,
            }
        }
    )
    for number in range(14):
        rig.store(f"r{number}", keys[number])
        threading.Event().wait(0.002)
        tier.finish()
        rig.settle()
    assert rig.bridges[0].bp_detector.is_under_pressure()
    rig.store("z", *keys[20:22])
    assert tier.jobs == {}


@pytest.mark.parametrize(
    ("entry", "extra", "error", "words"),
    [
        ({"type": "kv:fs"}, {}, ConfigError, "'root_dir' is required"),
        ({"type": "kv:fs", "root": "x"}, {}, ConfigError, "'root' is not a setting"),
        ({"type": "kv:fs", "root_dir": 3}, {}, ConfigError, "root_dir"),
        ({"type": "kv:example", "mode": "rw"}, {}, ConfigError, "mode"),
        ({"type": "kv:example", "locality": "MOON"}, {}, ConfigError, "'locality'"),
        (
            {"type": "kv:example", "fill_on_promotion": True},
            {},
            ConfigError,
            "'fill_on_promotion' needs",
        ),
        ({"type": "kv:example"}, {"promotion_deadline_s": -1}, ConfigError, "promotion_deadline_s"),
        ({"type": "kv:example"}, {"engine_reset": "epoch"}, ConfigError, "'engine_reset'"),
        ({"type": "kv:example"}, {"model_id": 7}, None, ""),
        ({"type": "kv:fs", "root_dir": "/proc/nowhere"}, {}, TierOpenError, "/proc/nowhere"),
    ],
)
def test_wrong_settings_are_named(
    make_rig: Callable[..., Rig],
    entry: dict[str, Any],
    extra: dict[str, Any],
    error: type[KVCoreError] | None,
    words: str,
) -> None:
    """The engine does not start, and the message says which key and what to do."""
    if error is None:
        with pytest.raises(ConfigError, match="'model_id' must be a text"):
            make_rig(entry, **extra)
        return
    with pytest.raises(error) as raised:
        make_rig(entry, **extra)
    assert words in str(raised.value)
    # Its traceback holds the view of the region, which vLLM has closed.
    del raised
    gc.collect()


def test_our_sizes_have_units(scripted: Callable[..., tuple[Rig, Script]]) -> None:
    """VLLM's own ``cpu_bytes_to_use`` takes bytes only; what is ours is read as everywhere."""
    rig, _ = scripted(max_inflight_store_bytes="64MiB")
    assert rig.bridges[0]._tier._config.max_inflight_store_bytes == 64 * 2**20


def test_an_unknown_type_is_named() -> None:
    """A tier that is not installed is said to be none, with the command that installs it."""
    from kv_core.vllm._tier_settings import read_settings

    with pytest.raises(UnknownTierError, match="pip install kv-tier-nowhere"):
        read_settings("kv:nowhere", {}, {})


def test_a_tier_without_a_connector_is_refused(make_rig: Callable[..., Rig]) -> None:
    """Where vLLM's whole configuration is not to be found, nobody knows whose bytes these are."""
    rig = make_rig({"type": "kv:example"})
    bridge = type(rig.bridges[0])
    view = rig.manager.primary_tier.get_kv_memoryview()
    with pytest.raises(EngineStateError, match="whose bytes"):
        bridge(rig.spec, view, "kv:example")
    gc.collect()


def test_an_unidentified_model_is_refused(
    make_rig: Callable[..., Rig], tmp_path: Path, model: Path
) -> None:
    """A persistent tier needs to know the weights; the message says what to set."""
    (model / "model.safetensors").unlink()
    with pytest.raises(NamespaceError, match="model_id"):
        make_rig(_tier(tmp_path / "store"))
    gc.collect()
    make_rig(_tier(tmp_path / "store"), model_id="mine")


# -- end ----------------------------------------------------------------------------------------


def test_shutdown_closes_the_tier(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """Stores under way reach the tier, and the memory can be unmapped."""
    rig, tier = scripted()
    rig.store("a", keys[0])
    rig.close()
    assert tier.is_shut_down
    assert tier.jobs == {}


def test_memory_stays_mapped_under_stuck_io(
    scripted: Callable[..., tuple[Rig, Script]], keys: list[OffloadKey]
) -> None:
    """A job that cannot be stopped keeps vLLM from unmapping what it may still write to."""
    rig, tier = scripted(shutdown_flush_s=0)
    rig.store("a", keys[0])
    tier.stuck = list(tier.jobs)
    with pytest.raises(EngineStateError, match="could not be stopped"):
        rig.manager.shutdown()
    tier.context.primary.block(0).release()
    rig.close()
