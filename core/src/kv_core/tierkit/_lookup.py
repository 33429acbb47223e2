"""Answers lookups from memory and finds the missing answers out in the background.

**Who owns what.** Everything here belongs to the calling thread (the engine's, one at a time),
except ``_inbox`` and ``_removals``: deques that any thread appends to and only the calling
thread empties. A :class:`Prober` runs the questions elsewhere and calls :meth:`AsyncLookup.answer`.

**Generations.** A question carries the generation of its entry; whatever makes an answer in
flight worthless (a store, a failed load, a deadline, the end of the last interested request)
gives the entry a new one, so a stale answer never lands on a newer question.

**Tickets.** Threads draw a ticket from one counter before they touch an object, so that of two
outcomes of one key that are reported in another order than they happened, the older one loses.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from kv_core.contract import ABSENT, PRESENT, UNKNOWN
from kv_core.tierkit._errors import RETIRING_KINDS, Occasionally, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kv_core.contract import Clock, LookupAnswer, OffloadKey
    from kv_core.tierkit._errors import BlockFailure

__all__ = ["AsyncLookup", "Prober", "Question"]

logger = logging.getLogger(__name__)

# Keys whose bad object could not be removed. A bound, for a storage that is all bad.
_MOST_LOST_KEYS = 1 << 17


class Question(NamedTuple):
    """One probe: is this key present?

    Attributes:
        key: The key.
        generation: Hand it back with the answer.
    """

    key: OffloadKey
    generation: int


class Prober(Protocol):
    """Whoever asks the backend. Both methods return at once."""

    def post(self, questions: Sequence[Question]) -> None:
        """Queue questions; each is answered through :meth:`AsyncLookup.answer`, or never."""

    def withdraw(self, key: OffloadKey) -> None:
        """Drop the question about a key when it has not been taken up yet."""


class _Verdict(enum.Enum):
    """What one (request, key) came to, and where its one count is."""

    OPEN = enum.auto()
    HIT = enum.auto()
    LOADING = enum.auto()
    MISS = enum.auto()
    ERROR = enum.auto()


class _Entry:
    """What is known of a key that some request has asked about.

    Attributes:
        present: The last answer; ``None`` when there is none.
        through: A remembered absence holds for requests up to this sequence number: a later
            request may know of a store, by another instance, that the answer does not.
        retry_at: Until then an error stands in for an answer.
        generation: Generation of the latest question.
        probing: Whether that question is open.
        requests: Requests that hold the entry.
    """

    __slots__ = ("generation", "present", "probing", "requests", "retry_at", "through")

    def __init__(self) -> None:
        self.present: bool | None = None
        self.through = 0
        self.retry_at = float("-inf")
        self.generation = 0
        self.probing = False
        self.requests = 0


class _Flight:
    """Jobs that are moving one key.

    Attributes:
        stores: Stores in flight.
        loads: Loads in flight.
        unproven: The key was not known to be present before its stores were submitted.
        stored_at: Ticket of the last successful store, while the flight lasts.
        removed_at: Ticket of the last removal, while the flight lasts.
    """

    __slots__ = ("loads", "removed_at", "stored_at", "stores", "unproven")

    def __init__(self) -> None:
        self.stores = 0
        self.loads = 0
        self.unproven = False
        self.stored_at = -1
        self.removed_at = -1


class _Request:
    """One live request.

    Attributes:
        sequence: Order of arrival.
        verdicts: Every key the request has asked about.
        waiting: When the question that is open now was asked first, on the clock.
    """

    __slots__ = ("sequence", "verdicts", "waiting")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.verdicts: dict[OffloadKey, _Verdict] = {}
        self.waiting: dict[OffloadKey, float] = {}


@final
class AsyncLookup:
    """Lookups of a tier that has to ask its backend.

    The first question about a key is answered unknown and goes into the batch of the step;
    :meth:`end_step` posts the batch; answers are applied at the next call. Requests share
    entries, and an entry without requests is dropped.

    Args:
        prober: Asks the backend.
        clock: Monotonic seconds.
        lookup_deadline_s: A question open for longer is answered absent and counted as an error.
        error_backoff_s: How long an error is remembered.
        probe_now: Answers at once and never blocks; with it the prober is not used.
    """

    def __init__(
        self,
        prober: Prober,
        *,
        clock: Clock,
        lookup_deadline_s: float,
        error_backoff_s: float,
        probe_now: Callable[[OffloadKey], bool] | None = None,
    ) -> None:
        self._prober = prober
        self._clock = clock
        self._lookup_deadline_s = lookup_deadline_s
        self._error_backoff_s = error_backoff_s
        self._probe_now = probe_now
        self._requests: dict[str, _Request] = {}
        self._entries: dict[OffloadKey, _Entry] = {}
        self._flights: dict[OffloadKey, _Flight] = {}
        # Keys whose load failed in passing: the youngest request that must not be told
        # "present" again, and the end of the back-off. Oldest failure first.
        self._failed: dict[OffloadKey, tuple[int, float]] = {}
        # Keys whose bad object is still there. Absent until stored again. Oldest first.
        self._lost: dict[OffloadKey, None] = {}
        self._batch: dict[OffloadKey, _Entry] = {}
        self._posted: deque[tuple[float, list[Question]]] = deque()
        self._inbox: deque[tuple[Question, bool | BaseException]] = deque()
        self._removals: deque[tuple[OffloadKey, int]] = deque()
        self._sequence = 0
        self._generation = 0
        self._open = 0
        self._counts = dict.fromkeys((_Verdict.HIT, _Verdict.MISS, _Verdict.ERROR), 0)
        self._warn = Occasionally(clock)

    # -- requests -------------------------------------------------------------------------------

    def request_started(self, req_id: str) -> None:
        """Note a request. A request that asks without this is noted at its first question."""
        if req_id not in self._requests:
            self._start(req_id)

    def request_finished(self, req_id: str) -> None:
        """Forget a request, and every entry that only it held. Unknown requests are fine."""
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        for key in request.verdicts:
            entry = self._entries[key]
            entry.requests -= 1
            if not entry.requests:
                self._withdraw(key, entry)
                del self._entries[key]
        self._purge_failures()

    def _start(self, req_id: str) -> _Request:
        self._sequence += 1
        request = self._requests[req_id] = _Request(self._sequence)
        return request

    # -- questions ------------------------------------------------------------------------------

    def ask(self, key: OffloadKey, req_id: str) -> LookupAnswer:
        """Answer one lookup."""
        self.read_news()
        request = self._requests.get(req_id) or self._start(req_id)
        return self._ask(key, request, self._clock())

    def ask_many(self, keys: Iterable[OffloadKey], req_id: str) -> list[LookupAnswer]:
        """Answer several lookups, in order."""
        self.read_news()
        request = self._requests.get(req_id) or self._start(req_id)
        now = self._clock()
        return [self._ask(key, request, now) for key in keys]

    def _ask(self, key: OffloadKey, request: _Request, now: float) -> LookupAnswer:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry()
        counted = request.verdicts.get(key)
        if counted is None:
            entry.requests += 1
            counted = request.verdicts[key] = _Verdict.OPEN
        verdict = self._judge(key, entry, request, now)
        if verdict is _Verdict.OPEN:
            if now - request.waiting.setdefault(key, now) < self._lookup_deadline_s:
                return UNKNOWN
            self._give_up(key, entry, now)
            verdict = _Verdict.ERROR
        if request.waiting:
            request.waiting.pop(key, None)
        if counted is _Verdict.OPEN:
            request.verdicts[key] = verdict
            self._counts[verdict] += 1
        return PRESENT if verdict is _Verdict.HIT else ABSENT

    def _judge(self, key: OffloadKey, entry: _Entry, request: _Request, now: float) -> _Verdict:
        if self._failed:
            failure = self._failed.get(key)
            if failure is not None and (request.sequence <= failure[0] or now < failure[1]):
                return _Verdict.ERROR
        if self._lost and key in self._lost:
            return _Verdict.MISS
        if now < entry.retry_at:
            return _Verdict.ERROR
        if self._flights:
            flight = self._flights.get(key)
            if flight is not None and flight.unproven:
                # The object may appear before its store is reported: no probe, no answer yet.
                return _Verdict.OPEN
        if self._probe_now is not None:
            return self._judge_now(key, entry, now)
        if entry.present:
            return _Verdict.HIT
        if entry.present is False and request.sequence <= entry.through:
            return _Verdict.MISS
        if not entry.probing:
            self._generation += 1
            entry.generation = self._generation
            entry.probing = True
            self._open += 1
            self._batch[key] = entry
        return _Verdict.OPEN

    def _judge_now(self, key: OffloadKey, entry: _Entry, now: float) -> _Verdict:
        if self._probe_now is None:
            raise AssertionError("only called with a probe")
        try:
            entry.present = self._probe_now(key)
        except Exception as error:  # noqa: BLE001 - whatever the tier raises is an error, no miss
            self._note_error(entry, error, now)
            return _Verdict.ERROR
        return _Verdict.HIT if entry.present else _Verdict.MISS

    def end_step(self) -> None:
        """Post the questions of the step, and give up those that are overdue."""
        self.read_news()
        now = self._clock()
        while self._posted and now - self._posted[0][0] >= self._lookup_deadline_s:
            for key, generation in self._posted.popleft()[1]:
                entry = self._entries.get(key)
                if entry is not None and entry.probing and entry.generation == generation:
                    self._give_up(key, entry, now)
        if self._failed:
            self._purge_failures()
        if self._batch:
            questions = []
            for key, entry in self._batch.items():
                entry.through = self._sequence
                questions.append(Question(key, entry.generation))
            self._batch.clear()
            self._posted.append((now, questions))
            self._prober.post(questions)

    def has_open_questions(self) -> bool:
        """Say whether further steps are needed to resolve what was asked."""
        self.read_news()
        return self._open > 0

    # -- news from other threads ----------------------------------------------------------------

    def answer(self, question: Question, answer: bool | BaseException) -> None:
        """Hand in the answer to a question, or the error that came instead. Thread-safe."""
        self._inbox.append((question, answer))

    def removed(self, key: OffloadKey, ticket: int) -> None:
        """Hand in that a block left the tier. Thread-safe."""
        self._removals.append((key, ticket))

    def read_news(self) -> None:
        """Apply what other threads have handed in so far."""
        while self._inbox:
            (key, generation), answer = self._inbox.popleft()
            entry = self._entries.get(key)
            if entry is None or not entry.probing or entry.generation != generation:
                continue
            entry.probing = False
            self._open -= 1
            if isinstance(answer, BaseException):
                self._note_error(entry, answer, self._clock())
            else:
                entry.present = answer
        while self._removals:
            key, ticket = self._removals.popleft()
            flight = self._flights.get(key)
            if flight is not None:
                flight.removed_at = max(flight.removed_at, ticket)
            entry = self._entries.get(key)
            if entry is not None:
                self._withdraw(key, entry)
                entry.present = None

    def _note_error(self, entry: _Entry, error: BaseException, now: float) -> None:
        entry.present = None
        entry.retry_at = now + self._error_backoff_s
        if self._warn.due():
            logger.warning("a lookup failed, answering absent: %s", describe_error(error))

    def _give_up(self, key: OffloadKey, entry: _Entry, now: float) -> None:
        self._withdraw(key, entry)
        entry.present = None
        entry.retry_at = now + self._error_backoff_s

    def _withdraw(self, key: OffloadKey, entry: _Entry) -> None:
        """Make an open question worthless."""
        if entry.probing:
            entry.probing = False
            self._open -= 1
            if self._batch.pop(key, None) is None:
                self._prober.withdraw(key)

    # -- jobs -----------------------------------------------------------------------------------

    def store_submitted(self, keys: Iterable[OffloadKey]) -> None:
        """Note a store before its transfer can begin."""
        for key in keys:
            flight = self._flights.get(key)
            if flight is None:
                flight = self._flights[key] = _Flight()
            flight.stores += 1
            entry = self._entries.get(key)
            if entry is None:
                flight.unproven = True
            elif entry.present is not True:
                flight.unproven = True
                self._withdraw(key, entry)

    def store_finished(self, key: OffloadKey, *, stored: bool, ticket: int) -> None:
        """Note the outcome of the store of one key.

        Args:
            key: The key.
            stored: Whether the block is present now.
            ticket: Drawn before the store began; ignored when it failed.
        """
        flight = self._flights[key]
        entry = self._entries.get(key)
        if stored:
            flight.unproven = False
            flight.stored_at = max(flight.stored_at, ticket)
            self._lost.pop(key, None)
            self._failed.pop(key, None)
        if entry is not None:
            self._withdraw(key, entry)
            if stored and flight.removed_at <= ticket:
                entry.present = PRESENT
                entry.retry_at = float("-inf")
            else:
                entry.present = None
        flight.stores -= 1
        self._land(key, flight)

    def load_submitted(self, keys: Iterable[OffloadKey], req_id: str) -> tuple[OffloadKey, ...]:
        """Note a load.

        Returns:
            The keys whose hits, counted for this request, this load is to make good.
        """
        request = self._requests.get(req_id)
        claimed = []
        for key in keys:
            flight = self._flights.get(key)
            if flight is None:
                flight = self._flights[key] = _Flight()
            flight.loads += 1
            if request is not None and request.verdicts.get(key) is _Verdict.HIT:
                request.verdicts[key] = _Verdict.LOADING
                claimed.append(key)
        return tuple(claimed)

    def load_finished(self, key: OffloadKey, failure: BlockFailure | None) -> None:
        """Note the outcome of the load of one key."""
        flight = self._flights[key]
        # A store that began after the failed read has put a good object there since.
        if failure is not None and failure.ticket >= flight.stored_at:
            entry = self._entries.get(key)
            if entry is not None:
                self._withdraw(key, entry)
            if failure.kind in RETIRING_KINDS:
                if entry is not None:
                    entry.present = ABSENT
                    entry.through = self._sequence
                if not failure.retired:
                    self._remember_lost(key)
            else:
                if entry is not None:
                    entry.present = None
                self._failed.pop(key, None)
                self._failed[key] = (self._sequence, self._clock() + self._error_backoff_s)
        flight.loads -= 1
        self._land(key, flight)

    def settle_hits(
        self, claimed: Iterable[OffloadKey], failed: set[OffloadKey], req_id: str
    ) -> None:
        """Keep the claimed hits of a load, or move those that failed to the misses."""
        request = self._requests.get(req_id)
        for key in claimed:
            verdict = _Verdict.HIT
            if key in failed:
                verdict = _Verdict.MISS
                self._counts[_Verdict.HIT] -= 1
                self._counts[_Verdict.MISS] += 1
            if request is not None and request.verdicts.get(key) is _Verdict.LOADING:
                request.verdicts[key] = verdict

    def _land(self, key: OffloadKey, flight: _Flight) -> None:
        if not flight.stores:
            flight.unproven = False
            if not flight.loads:
                del self._flights[key]

    def _remember_lost(self, key: OffloadKey) -> None:
        self._lost[key] = None
        if len(self._lost) > _MOST_LOST_KEYS:
            del self._lost[next(iter(self._lost))]

    def _purge_failures(self) -> None:
        """Forget failures that no live request and no back-off needs any more."""
        now = self._clock()
        oldest = next(iter(self._requests.values()), None)
        while self._failed:
            key, (through, retry_at) = next(iter(self._failed.items()))
            if now < retry_at or (oldest is not None and oldest.sequence <= through):
                return
            del self._failed[key]

    # -- observation ----------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Return the shared lookup measurements."""
        hits = self._counts[_Verdict.HIT]
        misses = self._counts[_Verdict.MISS]
        errors = self._counts[_Verdict.ERROR]
        return {
            "lookup_queries": float(hits + misses + errors),
            "lookup_hits": float(hits),
            "lookup_misses": float(misses),
            "lookup_errors": float(errors),
        }
