"""The health of one tier: when to leave it alone, and when to try again.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from kv_core.contract import Clock
    from kv_core.tiering._config import TieringConfig

__all__ = ["HealthState", "TierHealth"]

_LOGGER: Final = logging.getLogger(__name__)


class HealthState(enum.Enum):
    """How far the engine trusts a tier."""

    HEALTHY = "healthy"
    """In use."""
    DEGRADED = "degraded"
    """Skipped after repeated failures, and probed with one job at a time now and then."""
    DETACHED = "detached"
    """Out of use until the engine is restarted or reset to a new epoch."""


@final
class TierHealth:
    """Counts failures in a row and answers whether the tier may be used now.

    A degraded tier is left alone until its back-off has passed. Then it is *on probation*: it may
    be asked, and may get one job at a time. A job that succeeds makes it healthy; a failure
    starts the next, longer back-off.

    Attributes:
        state: How far the engine trusts the tier.
        reason: Why it is not healthy; empty when it is.
        failures: All failures so far.
        changes: How often the state changed.
    """

    __slots__ = (
        "_backoff_s",
        "_clock",
        "_config",
        "_failures_in_a_row",
        "_name",
        "_probe_in_flight",
        "_retry_at",
        "changes",
        "failures",
        "reason",
        "state",
    )

    def __init__(self, name: str, config: TieringConfig, clock: Clock) -> None:
        self.state = HealthState.HEALTHY
        self.reason = ""
        self.failures = 0
        self.changes = 0
        self._name = name
        self._config = config
        self._clock = clock
        self._failures_in_a_row = 0
        self._backoff_s = config.degraded_backoff_s
        self._retry_at = 0.0
        self._probe_in_flight = False

    def may_ask(self) -> bool:
        """Say whether lookups may go to the tier."""
        if self.state is HealthState.HEALTHY:
            return True
        return self._is_on_probation() and not self._probe_in_flight

    def may_submit(self) -> bool:
        """Say whether a job may go to the tier; call :meth:`submitted` when one does."""
        return self.may_ask()

    def submitted(self) -> None:
        """Note that a job went to the tier."""
        if self.state is HealthState.DEGRADED:
            self._probe_in_flight = True

    def succeeded(self) -> None:
        """Note that the tier carried out a job."""
        self._failures_in_a_row = 0
        if self.state is HealthState.DEGRADED and self._is_on_probation():
            self._backoff_s = self._config.degraded_backoff_s
            self._change(HealthState.HEALTHY, "")

    def settled(self) -> None:
        """Note the end of a job that says nothing of the tier's health, a declined store say."""
        self._probe_in_flight = False

    def failed(self, reason: str) -> None:
        """Note a failure of the tier.

        Args:
            reason: What happened, for the log and the metrics. No secrets.
        """
        self.failures += 1
        self._failures_in_a_row += 1
        if self.state is HealthState.HEALTHY:
            if self._failures_in_a_row >= self._config.degrade_after_failures:
                self._retry_at = self._clock() + self._backoff_s
                self._change(
                    HealthState.DEGRADED, f"{self._failures_in_a_row} failures in a row: {reason}"
                )
        elif self.state is HealthState.DEGRADED and self._is_on_probation():
            self._backoff_s = min(self._backoff_s * 2, self._config.degraded_backoff_max_s)
            self._retry_at = self._clock() + self._backoff_s
            self._probe_in_flight = False
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
        self._probe_in_flight = False
        level = logging.INFO if state is HealthState.HEALTHY else logging.WARNING
        because = f": {reason}" if reason else ""
        _LOGGER.log(level, "tier %r: %s, was %s%s", self._name, state.value, before.value, because)
