"""One tier's health: degraded after failures in a row, probed with back-off, and said aloud."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import JobId
from kv_core.tiering import HealthState, TieringConfig
from kv_core.tiering._health import Activity, TierHealth

if TYPE_CHECKING:
    from tests.unit.tiering.conftest import FakeClock

LOAD, STORE, CALL = Activity.LOAD, Activity.STORE, Activity.CALL


@pytest.fixture
def health(clock: FakeClock) -> TierHealth:
    """Return the health of a tier that is degraded after 3 failures, for 1, 2, 4, 4 ... s."""
    config = TieringConfig(
        degrade_after_failures=3, degraded_backoff_s=1.0, degraded_backoff_max_s=4.0
    )
    return TierHealth("disk", config, clock)


def _degrade(health: TierHealth, activity: Activity = LOAD) -> None:
    for _ in range(3):
        health.failed(activity, "EIO")
    assert health.state.value == "degraded"


def test_a_new_tier_is_healthy(health: TierHealth) -> None:
    """It may be used, and there is no reason to give."""
    assert (health.state, health.reason, health.changes) == (HealthState.HEALTHY, "", 0)
    assert health.may_use()


def test_failures_in_a_row_degrade(health: TierHealth) -> None:
    """Two do not, the third does, and the reason names the last."""
    health.failed(LOAD, "EIO")
    health.failed(LOAD, "EIO")
    assert health.may_use()
    health.failed(LOAD, "timeout")
    assert not health.may_use()
    assert health.reason == "3 failures in a row: timeout"


def test_a_success_ends_the_row(health: TierHealth) -> None:
    """Failures that are not in a row are only counted."""
    for _ in range(5):
        health.failed(LOAD, "EIO")
        health.failed(LOAD, "EIO")
        health.succeeded(LOAD)
    assert health.state.value == "healthy"
    assert health.failures == 10


def test_each_activity_has_its_own_row(health: TierHealth) -> None:
    """Stores that succeed do not excuse loads that all fail."""
    for _ in range(2):
        health.failed(LOAD, "EIO")
        health.succeeded(STORE)
        health.succeeded(CALL)
    assert health.state.value == "healthy"
    health.failed(LOAD, "EIO")
    assert health.state.value == "degraded"


def test_the_back_off_doubles_up_to_its_maximum(health: TierHealth, clock: FakeClock) -> None:
    """1, 2, 4 and again 4 seconds, each from the failed probe on."""
    _degrade(health)
    for seconds in (1.0, 2.0, 4.0, 4.0):
        clock.advance(seconds - 0.01)
        assert not health.may_use()
        clock.advance(0.01)
        assert health.may_use()
        health.failed(LOAD, "EIO")
    assert health.reason == "still failing: EIO"
    assert health.changes == 1


def test_failures_during_the_back_off_do_not_prolong_it(
    health: TierHealth, clock: FakeClock
) -> None:
    """They are of jobs that were under way: one outage is one outage."""
    _degrade(health)
    for _ in range(10):
        health.failed(LOAD, "EIO")
    clock.advance(1.0)
    assert health.may_use()


def test_there_is_one_probe_at_a_time(health: TierHealth, clock: FakeClock) -> None:
    """Nothing else goes to the tier until its end, which need not be a success or a failure."""
    _degrade(health)
    clock.advance(1.0)
    health.submitted(JobId(7))
    assert not health.may_use()
    health.settled(JobId(6))
    assert not health.may_use(), "the end of another job is not the end of the probe"
    health.settled(JobId(7))
    assert health.may_use()


def test_a_job_given_to_a_healthy_tier_is_no_probe(health: TierHealth, clock: FakeClock) -> None:
    """A job that is lost for good does not keep a tier degraded for good."""
    health.submitted(JobId(1))
    _degrade(health)
    clock.advance(1.0)
    assert health.may_use()


def test_a_lost_probe_is_followed_by_another(health: TierHealth, clock: FakeClock) -> None:
    """Its deadline is a failure like any other: longer back-off, then the next probe."""
    _degrade(health)
    clock.advance(1.0)
    health.submitted(JobId(7))
    health.failed(LOAD, "a load was not reported by its deadline")
    clock.advance(2.0)
    assert health.may_use()


def test_a_probe_that_succeeds_makes_it_healthy(health: TierHealth, clock: FakeClock) -> None:
    """And the next outage starts with the shortest back-off again."""
    _degrade(health)
    clock.advance(1.0)
    health.failed(LOAD, "EIO")
    clock.advance(2.0)
    health.succeeded(LOAD)
    assert (health.state, health.reason, health.changes) == (HealthState.HEALTHY, "", 2)
    _degrade(health)
    clock.advance(1.0)
    assert health.may_use()


def test_only_what_it_was_degraded_for_makes_it_healthy(
    health: TierHealth, clock: FakeClock
) -> None:
    """A store says nothing of loads: no flapping between the two."""
    _degrade(health, LOAD)
    clock.advance(1.0)
    health.succeeded(STORE)
    health.succeeded(CALL)
    assert health.state.value == "degraded"
    health.succeeded(LOAD)
    assert health.state.value == "healthy"


def test_a_success_before_the_back_off_is_over_changes_nothing(health: TierHealth) -> None:
    """It is of a job that was under way before."""
    _degrade(health)
    health.succeeded(LOAD)
    assert health.state.value == "degraded"


def test_detached_is_for_good(health: TierHealth, clock: FakeClock) -> None:
    """No time and no success brings it back."""
    health.detach("closed")
    clock.advance(1e6)
    health.succeeded(LOAD)
    health.failed(LOAD, "EIO")
    health.detach("again")
    assert not health.may_use()
    assert (health.state, health.reason, health.changes) == (HealthState.DETACHED, "closed", 1)


def test_every_change_is_one_line_in_the_log(
    health: TierHealth, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """With the tier, both states and the reason; nothing else is logged."""
    caplog.set_level("INFO")
    _degrade(health)
    for seconds in (1.0, 2.0):
        clock.advance(seconds)
        health.failed(LOAD, "EIO")
    clock.advance(4.0)
    health.succeeded(LOAD)
    health.detach("closed")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "tier 'disk': degraded, was healthy: 3 failures in a row: EIO"),
        ("INFO", "tier 'disk': healthy, was degraded"),
        ("WARNING", "tier 'disk': detached, was healthy: closed"),
    ]


def test_a_tier_opened_anew_goes_on_counting(
    health: TierHealth, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Counters do not go backwards, and the end of the degradation is a change like any other."""
    _degrade(health)
    caplog.set_level("INFO")
    caplog.clear()
    again = TierHealth("disk", TieringConfig(), clock)
    again.follow(health)
    assert (again.state, again.failures, again.changes) == (HealthState.HEALTHY, 3, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "tier 'disk': healthy, was degraded: opened anew"
    ]
