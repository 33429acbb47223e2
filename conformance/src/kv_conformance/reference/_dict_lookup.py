"""The answers of the dict tier: three of them, counted once, and never True after a failed load.

No thread: everything belongs to the engine's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from kv_core.contract import ABSENT, PRESENT, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from kv_core.contract import Clock, LookupAnswer, OffloadKey

__all__ = ["DictLookup"]


class _Count(enum.Enum):
    HIT = "lookup_hits"
    MISS = "lookup_misses"
    ERROR = "lookup_errors"


@dataclass(slots=True)
class _Request:
    """One live request.

    Attributes:
        number: Order of arrival.
        counted: How each key was counted.
        asked_at: When a question that is open was asked first.
    """

    number: int
    counted: dict[OffloadKey, _Count] = field(default_factory=dict)
    asked_at: dict[OffloadKey, float] = field(default_factory=dict)


@final
class DictLookup:
    """Asks the store anew each time: nothing is remembered but failures.

    Args:
        exists: Says whether there is an object; BlockingIOError for "not now".
        storing: Keys that a store in flight may make present at any moment.
        clock: Monotonic seconds.
        deadline_s: A question that is open for so long is an error.
        backoff_s: For so long an error stands in for an answer.
    """

    def __init__(
        self,
        exists: Callable[[OffloadKey], bool],
        storing: Container[OffloadKey],
        clock: Clock,
        *,
        deadline_s: float,
        backoff_s: float,
    ) -> None:
        self._exists = exists
        self._storing = storing
        self._clock = clock
        self._deadline_s = deadline_s
        self._backoff_s = backoff_s
        self._requests: dict[str, _Request] = {}
        self._started = 0
        # Keys that failed: the youngest request alive then, and the end of the back-off.
        self._failed: dict[OffloadKey, tuple[int, float]] = {}
        # Keys whose bad object could not be removed.
        self._bad: set[OffloadKey] = set()
        self._counts = dict.fromkeys(_Count, 0)

    # -- requests -------------------------------------------------------------------------------

    def begin(self, req_id: str) -> None:
        """Note a new request."""
        self._request(req_id)

    def _request(self, req_id: str) -> _Request:
        request = self._requests.get(req_id)
        if request is None:
            self._started += 1
            request = self._requests[req_id] = _Request(self._started)
        return request

    def end(self, req_id: str) -> None:
        """Forget a request."""
        self._requests.pop(req_id, None)

    # -- questions ------------------------------------------------------------------------------

    def ask(self, key: OffloadKey, req_id: str) -> LookupAnswer:
        """Answer a lookup."""
        request, now = self._request(req_id), self._clock()
        try:
            answer = self._judge(key, request, now)
        except BlockingIOError:
            if now - request.asked_at.setdefault(key, now) < self._deadline_s:
                return UNKNOWN
            self._failed[key] = (0, now + self._backoff_s)
            answer = _Count.ERROR
        except OSError:
            answer = _Count.ERROR
        request.asked_at.pop(key, None)
        if key not in request.counted:
            request.counted[key] = answer
            self._counts[answer] += 1
        return PRESENT if answer is _Count.HIT else ABSENT

    def _judge(self, key: OffloadKey, request: _Request, now: float) -> _Count:
        through, retry_at = self._failed.get(key, (0, now))
        if request.number <= through or now < retry_at:
            return _Count.ERROR
        if key in self._bad:
            return _Count.MISS
        if key in self._storing:
            raise BlockingIOError
        return _Count.HIT if self._exists(key) else _Count.MISS

    def end_step(self) -> None:
        """Forget failures that no live request and no back-off needs any more."""
        now = self._clock()
        oldest = min((request.number for request in self._requests.values()), default=None)
        self._failed = {
            key: (through, retry_at)
            for key, (through, retry_at) in self._failed.items()
            if now < retry_at or (oldest is not None and oldest <= through)
        }

    # -- what jobs teach ------------------------------------------------------------------------

    def stored(self, key: OffloadKey) -> None:
        """Note a successful store: whatever was remembered is over."""
        self._failed.pop(key, None)
        self._bad.discard(key)

    def load_failed(self, key: OffloadKey, req_id: str, *, transient: bool, retired: bool) -> None:
        """Note a failed load; a hit that led to it was none."""
        if transient:
            self._failed[key] = (self._started, self._clock() + self._backoff_s)
        elif not retired:
            self._bad.add(key)
        request = self._requests.get(req_id)
        if request is not None and request.counted.get(key) is _Count.HIT:
            request.counted[key] = _Count.MISS
            self._counts[_Count.HIT] -= 1
            self._counts[_Count.MISS] += 1

    def stats(self) -> dict[str, float]:
        """Return the shared measurements of lookups."""
        counts = {count.value: float(number) for count, number in self._counts.items()}
        return {"lookup_queries": sum(counts.values()), **counts}
