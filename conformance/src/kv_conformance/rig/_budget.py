"""Waiting without sleeping for longer than needed, and giving up in time.

No clause is tested with a fixed sleep. A wait ends as soon as its condition holds; how long it may
take follows from the limits that the tier declares, plus a grace for a busy machine.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Budget", "Interrupted", "OutOfTime"]

_POLL_S: Final = 0.0005
_SLOWEST_POLL_S: Final = 0.01


class Interrupted(KeyboardInterrupt):
    """The user has interrupted the run. Any other KeyboardInterrupt comes from the tier."""


class OutOfTime(BaseException):
    """A wait was given up.

    No Exception: Hypothesis would take it for a failing example and wait again and again to
    find a smaller one.

    Attributes:
        clause: Whose promise is broken; ``None`` for that of the running test.
        message: What did not happen.
    """

    def __init__(self, message: str, clause: str | None = None) -> None:
        super().__init__(message if clause is None else f"{clause}: {message}")
        self.clause = clause
        self.message = message


@final
class Budget:
    """The time that a run spends on waiting for what does not come.

    A tier that hangs would make each test wait in full. After ``patience`` waits in vain the
    verdict is settled, and later waits get the least grace.

    Args:
        scale: Multiplies every grace: for slow or busy machines.
        grace_s: What a wait gets on top of the declared limit.
        patience: Waits in vain before the grace shrinks.
    """

    def __init__(self, *, scale: float = 1.0, grace_s: float = 10.0, patience: int = 3) -> None:
        self.scale = scale
        self._grace_s = grace_s
        self._patience = patience
        self._in_vain = 0

    @property
    def is_patient(self) -> bool:
        """Whether waits still get their full time."""
        return self._in_vain < self._patience

    def give_up(self) -> None:
        """Note a wait in vain."""
        self._in_vain += 1

    @property
    def grace_s(self) -> float:
        """Seconds that a wait gets on top of the limit."""
        grace_s = self._grace_s if self.is_patient else self._grace_s / 10
        return grace_s * self.scale

    def until(
        self,
        condition: Callable[[], bool],
        what: str,
        limit_s: float,
        *,
        clause: str | None = None,
        grace_s: float | None = None,
        at_least_s: float = 0.0,
    ) -> float:
        """Poll a condition until it holds.

        Args:
            condition: Called again and again; goes through a step of the tier, say.
            what: What should happen, for the message.
            limit_s: The limit that the tier declares, seconds.
            clause: Whose promise it is.
            grace_s: On top of the limit, instead of the default; it is scaled, too.
            at_least_s: What the wait gets even when many have been in vain: for the start of a
                process, which says nothing about the tier.

        Returns:
            Seconds until it held.

        Raises:
            OutOfTime: It did not in time.
        """
        patient = self.is_patient
        if grace_s is None or not patient:
            grace_s = self.grace_s
        else:
            grace_s *= self.scale
        # A healthy tier needs a fraction of a long limit; once settled, nobody waits for more.
        allowed_s = (limit_s if patient else min(limit_s, grace_s)) + grace_s
        allowed_s = max(allowed_s, at_least_s * self.scale)
        pause, poll_s = threading.Event(), _POLL_S
        start = time.monotonic()
        while not condition():
            waited_s = time.monotonic() - start
            if waited_s > allowed_s:
                self.give_up()
                raise OutOfTime(
                    f"{what} within {limit_s:g} s (nor within {grace_s:g} s of grace)", clause
                )
            pause.wait(poll_s)
            poll_s = min(poll_s * 1.2, _SLOWEST_POLL_S)
        return time.monotonic() - start
