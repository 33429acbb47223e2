"""The health of one tier: when to leave it alone, and when to try again.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from kv_core.contract import Clock, JobId
    from kv_core.tiering._config import TieringConfig

__all__ = ["Activity", "HealthState", "TierHealth"]

_LOGGER: Final = logging.getLogger(__name__)


class HealthState(enum.Enum):
    """How far the engine trusts a tier."""

    HEALTHY = "healthy"
    """In use."""
    DEGRADED = "degraded"
    """Skipped after repeated failures, and probed with one small job now and then."""
    DETACHED = "detached"
    """Out of use until the engine is restarted or reset to a new epoch."""


class Activity(enum.Enum):
    """What a tier can fail at. Each has failures in a row of its own.

    A tier whose stores all succeed and whose loads all stall is not healthy.
    """

    LOAD = "load"
    STORE = "store"
    CALL = "call"
    """Lookups, and whatever else is a call without a job."""


@final
class TierHealth:
    """Counts failures in a row and answers whether the tier may be used now.

    A degraded tier is left alone until its back-off has passed. Then it is *on probation*: it may
    be asked, and may get one job at a time, of one block. Once it succeeds at what it was
    degraded for it is healthy; a failure of any kind starts the next, longer back-off.

    Attributes:
        state: How far the engine trusts the tier.
        reason: Why it is not healthy; empty when it is.
        failures: All failures so far.
        changes: How often the state changed.
        has_failed_calls: Whether the last call failed; a good one is to be noted only then.
    """

    __slots__ = (
        "_backoff_s",
        "_cause",
        "_clock",
        "_config",
        "_in_a_row",
        "_name",
        "_probe",
        "_retry_at",
        "changes",
        "failures",
        "has_failed_calls",
        "reason",
        "state",
    )

    def __init__(self, name: str, config: TieringConfig, clock: Clock) -> None:
        self.state = HealthState.HEALTHY
        self.reason = ""
        self.failures = 0
        self.changes = 0
        self.has_failed_calls = False
        self._name = name
        self._config = config
        self._clock = clock
        self._in_a_row = dict.fromkeys(Activity, 0)
        self._cause = Activity.CALL
        self._backoff_s = config.degraded_backoff_s
        self._retry_at = 0.0
        # The job that is to show whether a degraded tier works again.
        self._probe: JobId | None = None

    def follow(self, former: TierHealth) -> None:
        """Go on counting where the same tier, opened anew now, has stopped."""
        self.failures, self.changes = former.failures, former.changes
        if former.state is not self.state:
            self.state = former.state
            self._change(HealthState.HEALTHY, "opened anew")

    def may_use(self) -> bool:
        """Say whether the tier may be asked, or given a job, now."""
        if self.state is HealthState.HEALTHY:
            return True
        return self._is_on_probation() and self._probe is None

    def submitted(self, job_id: JobId) -> None:
        """Note that a job goes to the tier, after :meth:`may_use` said that it may."""
        if self.state is HealthState.DEGRADED:
            self._probe = job_id

    def settled(self, job_id: JobId) -> None:
        """Note the end of a job, whatever came of it."""
        if self._probe == job_id:
            self._probe = None

    def succeeded(self, activity: Activity) -> None:
        """Note that the tier carried something out in time."""
        self._in_a_row[activity] = 0
        if activity is Activity.CALL:
            self.has_failed_calls = False
        if activity is self._cause and self._is_on_probation():
            self._backoff_s = self._config.degraded_backoff_s
            self._change(HealthState.HEALTHY, "")

    def failed(self, activity: Activity, reason: str) -> None:
        """Note a failure of the tier.

        Args:
            activity: What it failed at.
            reason: What happened, for the log and the metrics. No secrets.
        """
        self.failures += 1
        in_a_row = self._in_a_row[activity] = self._in_a_row[activity] + 1
        if activity is Activity.CALL:
            self.has_failed_calls = True
        if self.state is HealthState.HEALTHY:
            if in_a_row >= self._config.degrade_after_failures:
                self._cause = activity
                self._retry_at = self._clock() + self._backoff_s
                self._change(HealthState.DEGRADED, f"{in_a_row} failures in a row: {reason}")
        elif self._is_on_probation():
            self._backoff_s = min(self._backoff_s * 2, self._config.degraded_backoff_max_s)
            self._retry_at = self._clock() + self._backoff_s
            self._probe = None
            self.reason = f"still failing: {reason}"

    def detach(self, reason: str) -> None:
        """Take the tier out of use."""
        if self.state is not HealthState.DETACHED:
            self._change(HealthState.DETACHED, reason)

    def _is_on_probation(self) -> bool:
        return self.state is HealthState.DEGRADED and self._clock() >= self._retry_at

    def _change(self, state: HealthState, reason: str) -> None:
        before, self.state, self.reason = self.state, state, reason
        self.changes += 1
        self._probe = None
        level = logging.INFO if state is HealthState.HEALTHY else logging.WARNING
        because = f": {reason}" if reason else ""
        _LOGGER.log(level, "tier %r: %s, was %s%s", self._name, state.value, before.value, because)
