"""Rule 6: a partial failure loses only the keys that failed, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_core.contract import JobError, JobErrorKind, JobResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, RealEngine

    from kv_core.contract import OffloadKey


def test_a_load_keeps_what_arrived(
    engine: Engine,
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """vllm#50321: two of four; their bytes are right, the other two are recomputed."""
    engine.tier.has(*keys[:4])
    engine.ask("a", *keys[:4])
    engine.end_step()
    engine.tier.finish(engine.tier.loads[0], good=[keys[0], keys[2]])
    assert engine.ask("a", *keys[:4]) == ["hit", "miss", "hit", "miss"]
    assert engine.load("a", keys[0], keys[2]) == [expected(keys[0]), expected(keys[2])]


def test_a_store_keeps_what_arrived(engine: Engine, keys: list[OffloadKey]) -> None:
    """One of three; the tier misses the other two, and the primary has all."""
    engine.store("x", *keys[:3])
    engine.tier.finish(engine.tier.stores[0], good=[keys[1]])
    engine.end_step()
    assert engine.tier_stat("engine_blocks_stored") == 1
    assert engine.tier_stat("engine_blocks_failed") == 2
    assert engine.stats["blocks_missed_by_tiers"] == 2
    assert engine.ask("a", *keys[:3]) == ["hit"] * 3


def test_success_means_all_whatever_else_is_said(engine: Engine, keys: list[OffloadKey]) -> None:
    """Keys of a success are ignored, and an error beside it does no harm."""
    engine.tier.has(*keys[:2])
    engine.ask("a", *keys[:2])
    engine.end_step()
    job = engine.tier.loads[0]
    engine.tier.finish(job)
    engine.tier.results[-1] = JobResult(
        job.job_id, True, (keys[0],), JobError(JobErrorKind.FAILED, "and yet")
    )
    assert engine.ask("a", *keys[:2]) == ["hit", "hit"]
    assert engine.tier_stat("engine_hits") == 2


def test_a_job_whose_keys_all_succeeded_is_a_success(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """Also when it says that it is none."""
    engine.store("x", *keys[:2])
    engine.tier.results.append(JobResult(engine.tier.stores[0].job_id, False, tuple(keys[:2])))
    engine.end_step()
    assert engine.tier_stat("engine_blocks_stored") == 2
    assert engine.stats["blocks_missed_by_tiers"] == 0


def test_a_real_load_with_a_missing_object(
    start_real: Callable[..., RealEngine],
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """LMCache#2420: deleted behind the tier's back between the lookup and the load."""
    engine = start_real()
    engine.has(*keys[:3])
    assert engine.ask("a", *keys[:3]) == ["pending"] * 3
    del engine.gated.objects[keys[1]]
    engine.until(lambda: engine.manager.num_jobs_in_flight == 0)
    assert engine.ask("a", *keys[:3]) == ["hit", "miss", "hit"]
    assert engine.load("a", keys[0], keys[2]) == [expected(keys[0]), expected(keys[2])]
    assert engine.health() == "healthy"
