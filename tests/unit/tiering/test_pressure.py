"""Back-pressure of one tier, in exact numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.tiering._pressure import StorePressure

if TYPE_CHECKING:
    from tests.unit.tiering.conftest import FakeClock

MIB = 2**20
MARK = 2.0


@pytest.fixture
def pressure(clock: FakeClock) -> StorePressure:
    """Return the pressure of a tier whose mark is 2 s per MiB."""
    return StorePressure(MARK, clock)


def _end(pressure: StorePressure, *seconds: float) -> None:
    for each in seconds:
        pressure.store_ended(each, MIB)


def test_the_average_moves_by_15_percent(pressure: StorePressure) -> None:
    """The first job is the average; each later one moves it by 0.15 of the distance."""
    _end(pressure, 1.0)
    assert pressure.seconds_per_mib() == 1.0
    _end(pressure, 2.0)
    assert pressure.seconds_per_mib() == pytest.approx(1.15)
    _end(pressure, 0.0)
    assert pressure.seconds_per_mib() == pytest.approx(1.15 * 0.85)


def test_it_is_per_mib(pressure: StorePressure) -> None:
    """Eight seconds for four MiB are two per MiB."""
    pressure.store_ended(8.0, 4 * MIB)
    assert pressure.seconds_per_mib() == 2.0


def test_a_small_job_counts_as_a_mib(pressure: StorePressure) -> None:
    """30 ms for 32 KiB are latency, not 0.96 s per MiB of bandwidth."""
    pressure.store_ended(0.03, 32 * 1024)
    assert pressure.seconds_per_mib() == 0.03


def test_ten_jobs_only_warm_up(pressure: StorePressure) -> None:
    """Nine slow jobs drop nothing; the tenth ends the warm-up."""
    _end(pressure, *[3 * MARK] * 9)
    assert pressure.drop_rate() == 0.0
    _end(pressure, 3 * MARK)
    assert pressure.drop_rate() == 1.0


@pytest.mark.parametrize(
    ("times_the_mark", "rate"),
    [(0.0, 0.0), (0.99, 0.0), (1.0, 0.0), (1.5, 0.25), (2.0, 0.5), (2.5, 0.75), (3.0, 1.0), (9, 1)],
)
def test_the_drop_rate_rises_between_the_mark_and_three_times_it(
    pressure: StorePressure, times_the_mark: float, rate: float
) -> None:
    """A straight line from 0 at 1x over 50 % at 2x to 100 % at 3x."""
    _end(pressure, *[times_the_mark * MARK] * 10)
    assert pressure.drop_rate() == pytest.approx(rate, abs=1e-9)


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_share_that_is_refused_is_the_drop_rate(pressure: StorePressure, rate: float) -> None:
    """Of a hundred stores exactly as many percent, evenly spread."""
    _end(pressure, *[(1 + 2 * rate) * MARK] * 10)
    admitted = [pressure.admits() for _ in range(100)]
    assert admitted.count(False) == 100 * rate
    assert admitted[:50].count(False) == pytest.approx(50 * rate, abs=1)


def test_an_idle_tier_is_forgiven_with_a_half_life_of_two_seconds(
    pressure: StorePressure, clock: FakeClock
) -> None:
    """3x the mark is 1.5x after two seconds and 0.75x after four."""
    _end(pressure, *[3 * MARK] * 10)
    clock.advance(2.0)
    assert pressure.seconds_per_mib() == pytest.approx(1.5 * MARK)
    assert pressure.drop_rate() == pytest.approx(0.25)
    clock.advance(2.0)
    assert pressure.seconds_per_mib() == pytest.approx(0.75 * MARK)
    assert pressure.drop_rate() == 0.0


def test_the_next_job_builds_on_what_is_left(pressure: StorePressure, clock: FakeClock) -> None:
    """The decay is not undone by a result."""
    _end(pressure, 4.0)
    clock.advance(2.0)
    _end(pressure, 2.0)
    assert pressure.seconds_per_mib() == pytest.approx(2.0)


def test_three_failures_in_a_row_are_pressure(pressure: StorePressure) -> None:
    """Two are not, and no warm-up delays it."""
    pressure.store_failed()
    pressure.store_failed()
    assert pressure.drop_rate() == 0.0
    pressure.store_failed()
    assert pressure.drop_rate() == 1.0
    assert not pressure.admits()


def test_a_success_ends_the_row_of_failures(pressure: StorePressure) -> None:
    """Failures here and there are no pressure."""
    for _ in range(10):
        pressure.store_failed()
        pressure.store_failed()
        _end(pressure, 0.1)
    assert pressure.drop_rate() == 0.0


def test_after_failures_the_tier_is_tried_again(pressure: StorePressure, clock: FakeClock) -> None:
    """The same half-life: everything passes after four seconds; one more failure stops it."""
    for _ in range(3):
        pressure.store_failed()
    clock.advance(4.0)
    assert pressure.admits()
    pressure.store_failed()
    assert pressure.drop_rate() == 1.0


def test_failures_do_not_lower_a_higher_average(pressure: StorePressure) -> None:
    """9x the mark stays 9x the mark."""
    _end(pressure, *[9 * MARK] * 10)
    for _ in range(3):
        pressure.store_failed()
    assert pressure.seconds_per_mib() == pytest.approx(9 * MARK)
