"""Back-pressure: how many of a slow tier's stores to drop.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from kv_core.contract import Clock

__all__ = ["StorePressure"]

_ALPHA: Final = 0.15
_WARM_UP_JOBS: Final = 10
_IDLE_HALF_LIFE_S: Final = 2.0
_FAILURES: Final = 3
_FULL_AT: Final = 3.0
_MIB: Final = 2**20


@final
class StorePressure:
    """Watches how long a tier's stores take, per MiB, and drops a share of new ones.

    The average is a moving one over jobs, from submission to result, so queueing shows in it. It
    halves with every two seconds in which no job ends: a tier that gets nothing to do is tried
    again. Up to the mark nothing is dropped, at three times the mark everything is, with a straight
    line in between; three failures in a row count as three times the mark.

    The first ten jobs only warm up the average: they pay for connections and cold caches.
    """

    __slots__ = (
        "_average",
        "_clock",
        "_debt",
        "_failures_in_a_row",
        "_jobs",
        "_last_result_at",
        "_mark",
    )

    def __init__(self, seconds_per_mib: float, clock: Clock) -> None:
        """Start without pressure.

        Args:
            seconds_per_mib: The mark.
            clock: Monotonic seconds.
        """
        self._mark = seconds_per_mib
        self._clock = clock
        self._average = 0.0
        self._jobs = 0
        self._failures_in_a_row = 0
        self._last_result_at = clock()
        # The part of a dropped block that was not dropped yet: rates without dice.
        self._debt = 0.0

    def store_ended(self, seconds: float, num_bytes: int) -> None:
        """Note a store that succeeded.

        Args:
            seconds: From its submission to its result.
            num_bytes: What it stored, at least 1.
        """
        # What a small job takes is latency, not throughput: it counts as one MiB.
        sample = seconds * _MIB / max(num_bytes, _MIB)
        now = self._clock()
        before = self._average_at(now) if self._jobs else sample
        self._average = before + _ALPHA * (sample - before)
        self._jobs += 1
        self._failures_in_a_row = 0
        self._last_result_at = now

    def store_failed(self) -> None:
        """Note a store that failed or was declined."""
        self._average = self.seconds_per_mib()
        self._failures_in_a_row += 1
        self._last_result_at = self._clock()
        if self._failures_in_a_row >= _FAILURES:
            self._average = max(self._average, _FULL_AT * self._mark)
            self._jobs = max(self._jobs, _WARM_UP_JOBS)

    def seconds_per_mib(self) -> float:
        """Return the moving average now."""
        return self._average_at(self._clock())

    def _average_at(self, now: float) -> float:
        decay: float = 0.5 ** ((now - self._last_result_at) / _IDLE_HALF_LIFE_S)
        return self._average * decay

    def drop_rate(self) -> float:
        """Return the share of stores to drop now, 0 to 1."""
        # The average only falls by itself: below the mark it needs no clock.
        if self._jobs < _WARM_UP_JOBS or self._average <= self._mark:
            return 0.0
        over = self.seconds_per_mib() / self._mark - 1.0
        return min(1.0, max(0.0, over / (_FULL_AT - 1.0)))

    def admits(self) -> bool:
        """Decide over one store; over many, the share that is refused is the drop rate."""
        self._debt += self.drop_rate()
        if self._debt < 1.0:
            return True
        self._debt -= 1.0
        return False
