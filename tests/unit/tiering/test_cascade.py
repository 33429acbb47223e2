"""Confirmed blocks go down to every tier, pinned until the tier has reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_core.contract import JobError, JobErrorKind, JobId, JobResult, ReqContext
from kv_core.tiering import JobReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey


def test_nothing_is_cascaded_before_the_store_is_confirmed(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """A slot that is being written is no source."""
    engine.offer("a", *keys[:3])
    engine.end_step()
    assert engine.tier.jobs == {}


def test_every_tier_gets_one_store_of_what_was_confirmed(
    start: Callable[..., Engine],
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """Keys, slots, request, time and a new id each; the bytes are those of the slots."""
    engine = start(num_tiers=2)
    slots = engine.store("a", *keys[:3])
    first, second = (tier.stores[0] for tier in engine.tiers)
    for job in (first, second):
        assert job.keys == tuple(keys[:3])
        assert job.block_ids.tolist() == slots == [0, 1, 2]
        assert not job.is_promotion
        assert job.req_context == ReqContext("a")
        assert job.submit_time == engine.clock.now
    assert first.job_id != second.job_id
    engine.tiers[1].finish(second)
    assert engine.tiers[1].blocks == {key: expected(key) for key in keys[:3]}


def test_slots_are_pinned_until_every_tier_has_reported(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """G-2: one pin for each tier; a full primary declines until the last one is gone."""
    engine = start(num_blocks=2, num_tiers=2)
    engine.store("a", *keys[:2])
    engine.tiers[0].finish_all()
    assert engine.offer("b", keys[2]) is None
    assert engine.stats["blocks_pinned"] == 2
    engine.tiers[1].finish_all()
    assert engine.offer("b", keys[2]) == [1]


def test_prepare_store_sees_cascades_that_ended_within_the_step(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """It polls every time, not once per step: freed pins are room."""
    engine.store("a", *keys[:8])
    engine.end_step()
    assert engine.ask("b", keys[9]) == ["miss"]
    assert engine.offer("b", keys[9]) is None
    engine.tier.finish_all()
    assert engine.offer("b", keys[9]) is not None


def test_jobs_are_split_at_the_tiers_limit(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """No job is longer than ``max_job_keys``; together they hold every block once, in order."""
    engine = start(max_job_keys=3)
    engine.store("a", *keys[:7])
    jobs = engine.tier.stores
    assert [len(job.keys) for job in jobs] == [3, 3, 1]
    assert [key for job in jobs for key in job.keys] == keys[:7]
    assert [slot for job in jobs for slot in job.block_ids.tolist()] == list(range(7))
    engine.tier.finish(jobs[1])
    engine.end_step()
    assert engine.stats["blocks_pinned"] == 4


def test_known_blocks_are_not_cascaded_again(engine: Engine, keys: list[OffloadKey]) -> None:
    """A second request's job holds only what that request brought."""
    engine.store("a", *keys[:2])
    engine.store("b", keys[2])
    assert [job.keys for job in engine.tier.stores] == [(keys[0], keys[1]), (keys[2],)]


def test_a_failed_copy_is_not_cascaded(engine: Engine, keys: list[OffloadKey]) -> None:
    """LMCache#4991: what was not stored above is never stored below."""
    engine.offer("a", *keys[:2])
    engine.manager.complete_store(keys[:2], ReqContext("a"), success=False)
    assert engine.tier.jobs == {}
    assert engine.ask("b", keys[0]) == ["miss"]


def test_only_ready_blocks_of_a_completion_are_cascaded(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """A key that the primary does not hold is left out, and nothing is raised."""
    engine.offer("a", keys[0])
    engine.manager.complete_store([keys[0], keys[5]], ReqContext("a"))
    assert [job.keys for job in engine.tier.stores] == [(keys[0],)]
    engine.manager.complete_store([keys[6]], ReqContext("a"))
    assert len(engine.tier.jobs) == 1


def test_a_tier_that_refuses_a_job_costs_the_others_nothing(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A raise from ``submit_store`` unpins at once and is counted."""
    engine = start(num_tiers=2)
    engine.tiers[0].raising.add("submit_store")
    engine.store("a", *keys[:2])
    assert len(engine.tiers[1].stores) == 1
    engine.tiers[1].finish_all()
    engine.end_step()
    assert engine.stats["blocks_pinned"] == 0
    assert engine.stats["tier.tier0.contained_exceptions"] == 1
    assert not engine.manager.has_pending_work()


@pytest.mark.parametrize("good", [[], [0], [0, 1]])
def test_any_outcome_ends_the_pins(engine: Engine, keys: list[OffloadKey], good: list[int]) -> None:
    """Failed, partial and full stores alike; the block stays in the primary."""
    engine.store("a", *keys[:2])
    engine.tier.finish(engine.tier.stores[0], good=[keys[index] for index in good])
    engine.end_step()
    assert engine.stats["blocks_pinned"] == 0
    assert engine.ask("b", *keys[:2]) == ["hit", "hit"]


def test_the_end_of_the_request_does_not_end_its_jobs(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """JOB-6: pins last until the result, which comes when it comes."""
    engine.store("a", keys[0])
    engine.finish("a")
    assert engine.manager.has_pending_work()
    assert engine.stats["blocks_pinned"] == 1
    engine.tier.finish_all()
    engine.end_step()
    assert not engine.manager.has_pending_work()
    assert engine.stats["blocks_pinned"] == 0


def test_a_tier_may_keep_the_engine_stepping(engine: Engine) -> None:
    """``has_pending_work`` of a tier is the engine's, too."""
    engine.tier.pending = True
    assert engine.manager.has_pending_work()


def test_a_tier_that_sorts_its_slots_breaks_nothing(engine: Engine, keys: list[OffloadKey]) -> None:
    """Pins are given back by the engine's own copy of the slots."""
    engine.store("a", *keys[:3])
    job = engine.tier.stores[0]
    engine.tier.finish(job)
    job.block_ids[:] = np.array([7, 7, 7])
    engine.end_step()
    assert engine.stats["blocks_pinned"] == 0


def test_the_observer_hears_of_every_job(engine: Engine, keys: list[OffloadKey]) -> None:
    """Blocks that succeeded are counted out of those of the job, with time and error."""
    engine.store("a", *keys[:3])
    error = JobError(JobErrorKind.DECLINED, "full")
    engine.clock.advance(2.5)
    engine.tier.results.append(
        JobResult(engine.tier.stores[0].job_id, False, (keys[1], keys[30]), error)
    )
    engine.end_step()
    assert engine.reports == [
        JobReport(
            tier="tier0",
            is_promotion=False,
            blocks=3,
            blocks_succeeded=1,
            seconds=2.5,
            error=error,
        )
    ]


def test_jobs_in_flight_are_counted_over_all_tiers(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A job counts from its submission to its report."""
    engine = start(num_tiers=2)
    engine.store("a", keys[0])
    assert engine.manager.num_jobs_in_flight == 2
    engine.tiers[0].results.append(JobResult(JobId(0), success=True))
    engine.end_step()
    assert engine.manager.num_jobs_in_flight == 1
