"""Jobs: numbers, deadlines, and how many keys go into one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_core.contract import JobId, ReqContext
from kv_core.tiering import TieringConfig
from kv_core.tiering._health import Activity
from kv_core.tiering._jobs import JobFactory, job_ranges
from kv_core.tiering._requests import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, FakeClock

    from kv_core.contract import OffloadKey
    from kv_core.tiering._guard import GuardedTier

CONTEXT = ReqContext("a")
STATE = RequestState(CONTEXT, 0)


def test_jobs_are_numbered_without_repetition(clock: FakeClock, keys: list[OffloadKey]) -> None:
    """G-4: one row of numbers for loads and stores."""
    jobs = JobFactory(TieringConfig(), clock)
    made = [
        jobs.load((keys[0],), np.array([3], np.int32), (1,), STATE),
        jobs.store((keys[1],), np.array([4], np.int32), CONTEXT),
        jobs.load((keys[0],), np.array([3], np.int32), (2,), STATE),
    ]
    assert [job.metadata.job_id for job in made] == [0, 1, 2]
    assert [job.metadata.is_promotion for job in made] == [True, False, True]


def test_each_direction_has_its_deadline(clock: FakeClock, keys: list[OffloadKey]) -> None:
    """Counted from the submission."""
    config = TieringConfig(promotion_deadline_s=3.0, store_deadline_s=70.0)
    jobs = JobFactory(config, clock)
    load = jobs.load((keys[0],), np.array([3], np.int32), (1,), STATE)
    store = jobs.store((keys[0],), np.array([3], np.int32), CONTEXT)
    assert load.metadata.submit_time == store.metadata.submit_time == 1000.0
    assert (load.deadline, store.deadline) == (1003.0, 1070.0)
    assert not load.is_overdue


def test_a_job_keeps_its_own_list_of_slots(clock: FakeClock, keys: list[OffloadKey]) -> None:
    """The array is the tier's."""
    array = np.array([3, 5], np.int32)
    job = JobFactory(TieringConfig(), clock).load((*keys[:2],), array, (1, 7), STATE)
    array[:] = 0
    assert (job.block_ids, job.generations) == ([3, 5], (1, 7))
    assert job.metadata.req_context is CONTEXT


def _tier(engine: Engine) -> GuardedTier:
    return engine.manager._tiers[0]


@pytest.mark.parametrize(
    ("length", "limit", "sizes"),
    [(0, 3, []), (1, 3, [1]), (3, 3, [3]), (4, 3, [3, 1]), (7, None, [7]), (0, None, [])],
)
def test_keys_are_cut_at_the_tiers_limit(
    start: Callable[..., Engine], length: int, limit: int | None, sizes: list[int]
) -> None:
    """In order, without gap or overlap."""
    ranges = list(job_ranges(_tier(start(max_job_keys=limit)), length))
    assert [part.stop - part.start for part in ranges] == sizes
    assert [index for part in ranges for index in range(length)[part]] == list(range(length))


def test_a_tier_that_begins_to_fail_gets_no_more_jobs(start: Callable[..., Engine]) -> None:
    """The rest of the keys is not even tried."""
    tier = _tier(start(max_job_keys=1))
    given = 0
    for _ in job_ranges(tier, 10):
        given += 1
        tier.health.failed(Activity.LOAD, "refused")
    assert given == 3


def test_a_tier_on_probation_gets_one_job_of_one_block(start: Callable[..., Engine]) -> None:
    """If it stalls again, that is all it takes with it."""
    engine = start()
    tier = _tier(engine)
    for _ in range(3):
        tier.health.failed(Activity.LOAD, "EIO")
    assert list(job_ranges(tier, 10)) == []
    engine.clock.advance(1.0)
    given = []
    for part in job_ranges(tier, 10):
        given.append(part)
        tier.health.submitted(JobId(0))
    assert given == [slice(0, 1)]
