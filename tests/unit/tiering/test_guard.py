"""The fence around a tier: blocking calls, nonsense in results, closed tiers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

from kv_core.contract import JobError, JobErrorKind, JobResult, ReqContext
from kv_core.errors import TierClosedError
from kv_core.tiering import TierOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey


class _Raising:
    """Raises at every use."""

    def __iter__(self) -> Any:
        raise OSError("no keys")

    def __bool__(self) -> bool:
        raise OSError("neither true nor false")

    def __float__(self) -> float:
        raise OSError("no number")


def _load(engine: Engine, key: OffloadKey) -> Any:
    engine.tier.has(key)
    assert engine.ask("a", key) == ["pending"]
    engine.end_step()
    return engine.tier.loads[-1]


@pytest.mark.parametrize(
    "fields",
    [
        {"success": _Raising()},
        {"success": False, "successful_keys": _Raising()},
        {"success": True, "transfer_time_s": _Raising()},
        {"success": True, "transfer_time_s": "soon"},
    ],
)
def test_a_result_that_cannot_be_read_is_a_failed_job(
    engine: Engine, keys: list[OffloadKey], fields: dict[str, Any]
) -> None:
    """JOB-1: it has ended all the same, so its slot is free and its request sees a miss."""
    job = _load(engine, keys[0])
    engine.tier.results.append(JobResult(job.job_id, **fields))
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.stats["blocks_free"] == 8
    assert engine.stats["share_blocks_used"] == engine.manager.num_jobs_in_flight == 0
    assert engine.tier_stat("contained_exceptions") == 1


@pytest.mark.parametrize(
    "error",
    ["ENOSPC", 5, _Raising(), JobError("failed", "a kind of its own"), JobError([], "unhashable")],  # type: ignore[arg-type]
)
def test_an_error_that_is_none_is_no_reason_to_raise(
    engine: Engine, keys: list[OffloadKey], error: Any
) -> None:
    """llm-d-kv-cache#514: nothing gets out of the poll loop; the job has failed."""
    job = _load(engine, keys[0])
    engine.tier.results.append(JobResult(job.job_id, success=False, error=error))
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.reports[0].error is None


def test_a_closed_tier_is_detached(
    engine: Engine, keys: list[OffloadKey], caplog: pytest.LogCaptureFixture
) -> None:
    """Trying again is in vain; it is not even told of requests and steps any more."""
    engine.tier.answers[keys[0]] = True
    engine.tier.raising_error = TierClosedError("the tier was closed")
    engine.tier.raising.add("lookup")
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.health() == "detached"
    engine.log.clear()
    engine.begin("b")
    engine.ask("b", keys[0])
    engine.store("b", keys[1])
    engine.finish("b")
    engine.end_step()
    assert engine.log == []
    assert engine.tier_stat("health") == 2


def test_a_drain_that_does_not_come_back_is_left_alone(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """vllm#45595: the engine goes on; no call follows while another thread is inside the tier."""
    engine = start(job_deadline_s=0.01, quarantine_grace_s=0.0)
    engine.store("x", keys[0])
    engine.tier.drain_gate = threading.Event()
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    assert engine.health() == "detached"
    assert "did not return" in engine.manager.tier_health()["tier0"][1]
    engine.log.clear()
    for _ in range(3):
        assert engine.ask("a", keys[0]) == ["miss"]
        engine.end_step()
        list(engine.manager.take_events())
    assert engine.stats["tier.tier0.jobs_in_flight"] == 1
    assert engine.log == []
    # Once it is back, what it held is given back.
    engine.tier.drain_gate.set()
    engine.until(lambda: engine.stats["blocks_free"] == 8)
    assert engine.manager.num_jobs_in_flight == 0
    assert engine.health() == "detached"
    engine.manager.shutdown()


def test_a_tier_that_is_stuck_for_good_keeps_its_slots(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """DATA-5: memory that it may still write to is neither reused nor unmapped."""
    engine = start(job_deadline_s=0.01, quarantine_grace_s=0.0)
    engine.store("x", keys[0])
    engine.tier.drain_gate = threading.Event()
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    engine.manager.shutdown()
    assert "tier0.shutdown" not in engine.log
    assert "primary.shutdown" not in engine.log
    assert engine.stats["blocks_orphaned"] == 1
    engine.tier.drain_gate.set()


def test_a_drain_that_raises_is_a_failure_like_any_other(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Counted on the engine's thread; all of its jobs may still be running."""
    engine.store("x", keys[0])
    engine.tier.raising.add("drain_jobs")
    engine.manager.reset_cache()
    assert engine.tier_stat("contained_exceptions") == 1
    assert engine.stats["blocks_orphaned"] == 1


def test_a_shutdown_without_patience_does_not_flush(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """``shutdown_flush_s: 0`` goes straight to the end, which still ends every job."""
    engine = start(shutdown_flush_s=0)
    engine.store("x", keys[0])
    engine.manager.shutdown()
    assert "tier0.drain_jobs" not in engine.log
    assert "tier0.shutdown" in engine.log
    assert engine.health() == "healthy"


def test_nothing_is_given_to_a_tier_that_is_about_to_close(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A load that the flush ends starts no copy to the tier above."""
    engine = start(num_tiers=2, options={"tier0": TierOptions(fill_on_promotion=True)})
    engine.tiers[1].has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    engine.manager.shutdown()
    assert engine.tiers[0].stores == []


def test_a_message_of_nonsense_does_not_repeat_it(
    engine: Engine, keys: list[OffloadKey], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a repr that raises nor a megabyte of text gets into the log."""

    class Unspeakable:
        @override
        def __repr__(self) -> str:
            raise OSError("no words")

    engine.store("x", keys[0])
    engine.tier.results.append(Unspeakable())
    engine.end_step()
    (record,) = caplog.records
    assert "reported a Unspeakable" in record.getMessage()


def test_requests_whose_end_a_tier_cannot_hear_are_forgotten_all_the_same(engine: Engine) -> None:
    """The state of the engine does not depend on it."""
    engine.tier.raising.add("on_request_finished")
    engine.begin("a")
    engine.manager.on_request_finished(ReqContext("a"))
    assert len(engine.manager._requests) == 0


def test_the_reason_of_a_failed_job_is_said(
    start: Callable[..., Engine], keys: list[OffloadKey], caplog: pytest.LogCaptureFixture
) -> None:
    """The tier's own words are in the log, on one line, and in the reason of its health."""
    engine = start(degrade_after_failures=1)
    engine.store("x", keys[0])
    (job,) = engine.tier.stores
    error = JobError(JobErrorKind.FAILED, "1 of 1 block(s):\n OSError: " + "far " * 1000)
    engine.tier.open_jobs.clear()
    engine.tier.results.append(JobResult(job.job_id, success=False, error=error))
    engine.end_step()
    said = "a store failed: 1 of 1 block(s): OSError: far far"
    degraded, failed = (record.getMessage() for record in caplog.records)
    assert degraded.startswith(f"tier 'tier0': degraded, was healthy: 1 failures in a row: {said}")
    assert failed.startswith(f"tier 'tier0': {said}")
    assert len(failed) < 500


def test_an_answer_that_a_block_is_gone_is_said_once(
    engine: Engine, keys: list[OffloadKey], caplog: pytest.LogCaptureFixture
) -> None:
    """It does not degrade the tier, so nothing else would tell; one line for a thousand jobs."""
    engine.tier.has(*keys[:2])
    for req_id, key in zip("ab", keys[:2], strict=True):
        engine.ask(req_id, key)
        engine.end_step()
        engine.tier.finish(engine.tier.loads[-1], good=(), kind=JobErrorKind.MISSING)
        engine.end_step()
    (record,) = caplog.records
    assert record.getMessage() == "tier 'tier0': a load failed (missing): as scripted"


def test_the_kinds_of_a_job_error_are_told_apart(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A full tier, and one that answers "not there" or "damaged", is healthy; others are not."""
    healths = {}
    for kind in JobErrorKind:
        engine = start(degrade_after_failures=1)
        engine.store("x", keys[0])
        engine.tier.finish(engine.tier.stores[0], good=(), kind=kind)
        engine.end_step()
        healths[kind.value] = engine.health()
    assert healths == {
        "declined": "healthy",
        "missing": "healthy",
        "damaged": "healthy",
        "failed": "degraded",
        "stalled": "degraded",
    }
