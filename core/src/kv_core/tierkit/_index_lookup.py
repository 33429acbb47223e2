"""Answers the lookups of a tier that knows in memory what it holds.

**Who owns what.** Everything here belongs to the calling thread (the engine's, one at a time).
What the tier holds changes on that thread only, so an answer is as true as the index: a block is
absent while its only store is in flight, and present from the report of that store on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from typing_extensions import override

from kv_core.tierkit._base import Lookups
from kv_core.tierkit._errors import RETIRING_KINDS
from kv_core.tierkit._lookup import ERROR, HIT, MISS, HitClaim, LookupRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from kv_core.contract import Clock, LookupAnswer, OffloadKey
    from kv_core.tierkit._errors import BlockFailure

__all__ = ["IndexLookup"]


@final
class IndexLookup(Lookups):
    """Lookups that are answered in the same call, and never unknown.

    The twin of :class:`AsyncLookup`; what it keeps per request and key is what has been counted.

    Args:
        exists: Says whether the tier holds a block. Neither blocks nor raises.
        clock: Monotonic seconds.
        error_backoff_s: For how long a block that could not be read is not offered to anybody.
    """

    def __init__(
        self, exists: Callable[[OffloadKey], bool], *, clock: Clock, error_backoff_s: float
    ) -> None:
        self._exists = exists
        self._clock = clock
        self._error_backoff_s = error_backoff_s
        self._requests: dict[str, LookupRequest] = {}
        # Keys whose load failed in passing: the youngest request that must not be told
        # "present" again, and the end of the back-off. Oldest failure first.
        self._failed: dict[OffloadKey, tuple[int, float]] = {}
        self._sequence = 0
        self._hits = self._misses = self._errors = 0

    # -- requests and questions -----------------------------------------------------------------

    @override
    def request_started(self, req_id: str) -> None:
        """Note a request. A request that asks without this is noted at its first question."""
        if req_id not in self._requests:
            self._start(req_id)

    @override
    def request_finished(self, req_id: str) -> None:
        """Forget a request. Unknown requests are fine."""
        if self._requests.pop(req_id, None) is not None and self._failed:
            self._purge_failures()

    def _start(self, req_id: str) -> LookupRequest:
        self._sequence += 1
        request = self._requests[req_id] = LookupRequest(self._sequence)
        return request

    @override
    def ask(self, key: OffloadKey, req_id: str) -> LookupAnswer:
        """Answer one lookup."""
        if self._failed:
            return self._ask_in_doubt(key, req_id)
        # Everything here is part of what a lookup costs the engine's thread.
        try:
            verdicts = self._requests[req_id].verdicts
        except KeyError:
            verdicts = self._start(req_id).verdicts
        present = self._exists(key)
        if key not in verdicts:
            if present:
                verdicts[key] = HIT
                self._hits += 1
            else:
                verdicts[key] = MISS
                self._misses += 1
        return present

    def _ask_in_doubt(self, key: OffloadKey, req_id: str) -> LookupAnswer:
        """Answer while there are blocks that could not be read."""
        request = self._requests.get(req_id) or self._start(req_id)
        avoided = self._is_avoided(key, request)
        present = not avoided and self._exists(key)
        if key not in request.verdicts:
            request.verdicts[key] = ERROR if avoided else HIT if present else MISS
            self._errors += avoided
            self._hits += present
            self._misses += not (avoided or present)
        return present

    @override
    def ask_many(self, keys: Sequence[OffloadKey], req_id: str) -> list[LookupAnswer]:
        """Answer several lookups, in order."""
        if self._failed:
            return [self.ask(key, req_id) for key in keys]
        request = self._requests.get(req_id) or self._start(req_id)
        verdicts, exists = request.verdicts, self._exists
        answers: list[LookupAnswer] = []
        for key in keys:
            present = exists(key)
            answers.append(present)
            if key not in verdicts:
                verdicts[key] = HIT if present else MISS
                self._hits += present
                self._misses += not present
        return answers

    def _is_avoided(self, key: OffloadKey, request: LookupRequest) -> bool:
        failure = self._failed.get(key)
        return failure is not None and (
            request.sequence <= failure[0] or self._clock() < failure[1]
        )

    @override
    def end_step(self) -> None:
        """Forget failures that nobody needs any more."""
        if self._failed:
            self._purge_failures()

    @override
    def has_open_questions(self) -> bool:
        """Return ``False``: every question is answered at once."""
        return False

    @override
    def removed(self, key: OffloadKey, ticket: int) -> None:
        """Do nothing: the index knows."""

    @override
    def read_news(self) -> None:
        """Do nothing: there are no other threads."""

    # -- jobs -----------------------------------------------------------------------------------

    @override
    def store_submitted(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing: the index changes when the store is reported."""

    @override
    def store_finished(
        self, keys: Sequence[OffloadKey], failed: Container[int], tickets: Sequence[int]
    ) -> None:
        """Trust the blocks again that a store has replaced."""
        if self._failed:
            for index, key in enumerate(keys):
                if index not in failed:
                    self._failed.pop(key, None)

    @override
    def load_submitted(self, keys: Sequence[OffloadKey], req_id: str) -> HitClaim:
        """Note whose hits a load is to make good."""
        return HitClaim(self._requests.get(req_id))

    @override
    def load_finished(
        self, keys: Sequence[OffloadKey], failures: Mapping[int, BlockFailure], claim: HitClaim
    ) -> None:
        """Take back the hits of blocks that failed to load, and avoid those for a while."""
        for index, failure in failures.items():
            key = keys[index]
            if failure.kind not in RETIRING_KINDS:
                self._failed.pop(key, None)
                self._failed[key] = (self._sequence, self._clock() + self._error_backoff_s)
            request = claim.request
            if request is not None and request.verdicts.get(key) == HIT:
                request.verdicts[key] = MISS
                self._hits -= 1
                self._misses += 1

    def _purge_failures(self) -> None:
        now = self._clock()
        oldest = next(iter(self._requests.values()), None)
        while self._failed:
            key, (through, retry_at) = next(iter(self._failed.items()))
            if now < retry_at or (oldest is not None and oldest.sequence <= through):
                return
            del self._failed[key]

    # -- observation ----------------------------------------------------------------------------

    @override
    def stats(self) -> dict[str, float]:
        """Return the shared lookup measurements."""
        return {
            "lookup_queries": float(self._hits + self._misses + self._errors),
            "lookup_hits": float(self._hits),
            "lookup_misses": float(self._misses),
            "lookup_errors": float(self._errors),
        }
