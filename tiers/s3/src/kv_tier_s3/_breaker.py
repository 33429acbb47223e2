"""Stops asking a store that answers nothing but errors, and finds out when it does again.

Without it every request of the engine would wait for its own lookup to time out, for as long as the
store is gone. Jobs are none of its business: the engine has a breaker for those.

**Who owns what.** Everything here runs on the tier's loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, final

from kv_tier_s3._errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeVar

    from kv_core.contract import Clock

    ResultT = TypeVar("ResultT")

__all__ = ["Breaker"]

_FAILURES_IN_A_ROW: Final = 8

_WAIT_FOR_PROBE_S: Final = 0.25
"""How long others wait for the one that finds out. A store that is back answers in less, and one
that is not holds nobody up for long."""


@final
class Breaker:
    """Lets questions through, unless many in a row have failed.

    Then it is open: questions fail at once with the last error. After the back-off one question is
    let through; others that come meanwhile wait a moment for what becomes of it.

    Args:
        clock: Monotonic seconds.
        backoff_s: Seconds from a failure to the next question while it is open.
        note_refusal: Called for each question that is not asked.
    """

    def __init__(self, clock: Clock, backoff_s: float, note_refusal: Callable[[], object]) -> None:
        self._clock = clock
        self._backoff_s = backoff_s
        self._in_a_row = 0
        self._last: S3Error | None = None
        self._retry_at = 0.0
        self._probe: asyncio.Future[None] | None = None
        self._note_refusal = note_refusal

    @property
    def is_open(self) -> bool:
        """Whether questions are refused."""
        return self._in_a_row >= _FAILURES_IN_A_ROW

    async def call(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Ask, if that makes sense.

        Raises:
            S3Error: The question failed, or was not asked.
        """
        if not self.is_open:
            return await self._ask(ask)
        if self._probe is not None:
            await asyncio.wait((self._probe,), timeout=_WAIT_FOR_PROBE_S)
            return await self._ask_unless_open(ask)
        if self._clock() < self._retry_at:
            raise self._refusal()
        probe = self._probe = asyncio.get_running_loop().create_future()
        try:
            return await self._ask(ask)
        finally:
            self._probe = None
            probe.set_result(None)

    async def _ask_unless_open(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        if self.is_open:
            raise self._refusal()
        return await self._ask(ask)

    async def _ask(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        try:
            result = await ask()
        except S3Error as error:
            self._in_a_row += 1
            self._last = error
            self._retry_at = self._clock() + self._backoff_s
            raise
        except FileNotFoundError:
            # The store has answered, and that is what this is about.
            self._in_a_row = 0
            raise
        self._in_a_row = 0
        return result

    def _refusal(self) -> S3Error:
        if self._last is None:
            raise AssertionError("only errors open the breaker")
        self._note_refusal()
        last = self._last
        return S3Error(
            last.kind,
            last.operation,
            last.name,
            last.status,
            last.s3_code,
            f"not asked again, after {self._in_a_row} failures in a row: {last.detail}",
        )
