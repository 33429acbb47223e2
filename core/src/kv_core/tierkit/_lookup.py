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

import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, final

from kv_core.contract import ABSENT, PRESENT, UNKNOWN
from kv_core.tierkit._errors import RETIRING_KINDS, Occasionally, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from kv_core.contract import Clock, LookupAnswer, OffloadKey
    from kv_core.tierkit._errors import BlockFailure

__all__ = [
    "ERROR",
    "HIT",
    "MISS",
    "OPEN",
    "AsyncLookup",
    "HitClaim",
    "LookupRequest",
    "Prober",
    "Question",
    "Verdict",
]

logger = logging.getLogger(__name__)

_LONG_AGO: Final = float("-inf")

# Keys whose bad object could not be removed. A bound, for a storage that is all bad.
_MOST_LOST_KEYS: Final = 1 << 17


Question: TypeAlias = "tuple[OffloadKey, int]"
"""One probe: a key, and a generation to hand back with the answer. A plain tuple, because the
engine's thread makes one for every block it has not heard of."""


def _definite(answer: object) -> bool:
    """Return an answer as a truth value.

    Clients answer with numbers, too, and a 0 is as definite as a False.

    Raises:
        TypeError: It is ``None``: what a function returns that has forgotten to.
    """
    if answer is None:
        raise TypeError("exists returned None, expected True or False: is a 'return' missing?")
    return bool(answer)


class Prober(Protocol):
    """Whoever asks the backend. Both methods return at once."""

    def post(self, questions: Sequence[Question]) -> None:
        """Queue questions; each is answered through :meth:`AsyncLookup.answer`, or never."""

    def withdraw(self, key: OffloadKey) -> None:
        """Drop the question about a key when it has not been taken up yet."""


# What one (request, key) came to, and where its one count is. Plain numbers: members of an enum
# cost the engine's thread a third of every lookup.
Verdict: TypeAlias = int
OPEN: Final = 0
HIT: Final = 1
MISS: Final = 2
ERROR: Final = 3


class _Entry:
    """What is known of a key that some request has asked about.

    Attributes:
        present: The last answer; ``None`` when there is none.
        through: A remembered absence holds for requests up to this sequence number: a later
            request may know of a store, by another instance, that the answer does not.
        asked_through: The youngest request when the open question was posted.
        retry_at: Until then an error stands in for an answer.
        generation: Generation of the latest question.
        probing: Whether that question is open.
        requests: Requests that hold the entry.
    """

    __slots__ = (
        "asked_through",
        "generation",
        "present",
        "probing",
        "requests",
        "retry_at",
        "through",
    )

    def __init__(self) -> None:
        self.present: bool | None = None
        self.through = 0
        self.asked_through = 0
        self.retry_at = _LONG_AGO
        self.generation = 0
        self.probing = False
        self.requests = 0


class LookupRequest:
    """One live request.

    Attributes:
        sequence: Order of arrival.
        verdicts: Every key the request has asked about.
        waiting: When the question that is open now was asked first, on the clock.
    """

    __slots__ = ("sequence", "verdicts", "waiting")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.verdicts: dict[OffloadKey, Verdict] = {}
        self.waiting: dict[OffloadKey, float] = {}


@final
class HitClaim:
    """The request whose hits a load is to make good, kept beyond the request's end.

    Attributes:
        request: The request, or ``None`` if it was unknown.
    """

    __slots__ = ("request",)

    def __init__(self, request: LookupRequest | None) -> None:
        self.request = request


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
        describe: Says in one line what went wrong.
        tier_name: Name of the tier, for the log.
    """

    def __init__(
        self,
        prober: Prober,
        *,
        clock: Clock,
        lookup_deadline_s: float,
        error_backoff_s: float,
        probe_now: Callable[[OffloadKey], bool] | None = None,
        describe: Callable[[BaseException], str] = describe_error,
        tier_name: str = "unnamed",
    ) -> None:
        self._tier_name = tier_name
        self._prober = prober
        self._clock = clock
        self._lookup_deadline_s = lookup_deadline_s
        self._error_backoff_s = error_backoff_s
        self._probe_now = probe_now
        self._describe = describe
        self._requests: dict[str, LookupRequest] = {}
        self._entries: dict[OffloadKey, _Entry] = {}
        # Per key that is moving: twice the stores in flight, plus one if the key was not known
        # to be present before; and the loads in flight. Numbers, for the price of an object.
        self._storing: dict[OffloadKey, int] = {}
        self._loading: dict[OffloadKey, int] = {}
        # The last removal of keys that are being stored, and the last store of keys that are
        # being loaded: tickets.
        self._removed_at: dict[OffloadKey, int] = {}
        self._stored_at: dict[OffloadKey, int] = {}
        # Keys whose load failed in passing: the youngest request that must not be told
        # "present" again, and the end of the back-off. Oldest failure first.
        self._failed: dict[OffloadKey, tuple[int, float]] = {}
        # Keys whose bad object is still there. Absent until stored again. Oldest first.
        self._lost: dict[OffloadKey, None] = {}
        self._batch: dict[OffloadKey, _Entry] = {}
        self._posted: deque[tuple[float, OffloadKey, int]] = deque()
        self._inbox: deque[tuple[Question, bool | BaseException]] = deque()
        self._removals: deque[tuple[OffloadKey, int]] = deque()
        self._sequence = 0
        self._generation = 0
        self._open = 0
        self._counts = [0, 0, 0, 0]
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

    def _start(self, req_id: str) -> LookupRequest:
        self._sequence += 1
        request = self._requests[req_id] = LookupRequest(self._sequence)
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
        if self._failed or request.waiting or self._probe_now is not None:
            return [self._ask(key, request, now) for key in keys]
        entries, verdicts = self._entries, request.verdicts
        answers: list[LookupAnswer] = []
        for key in keys:
            entry = entries.get(key)
            # What has been counted and is known to be present needs no thought.
            if entry is not None and entry.present and verdicts.get(key):
                answers.append(PRESENT)
            else:
                answers.append(self._ask(key, request, now))
        return answers

    def _ask(self, key: OffloadKey, request: LookupRequest, now: float) -> LookupAnswer:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry()
        counted = request.verdicts.get(key)
        if counted is None:
            entry.requests += 1
            counted = request.verdicts[key] = OPEN
        verdict = self._judge(key, entry, request, now)
        if verdict == OPEN:
            if now - request.waiting.setdefault(key, now) < self._lookup_deadline_s:
                return UNKNOWN
            self._give_up(key, entry, now)
            verdict = ERROR
        if request.waiting:
            request.waiting.pop(key, None)
        if counted == OPEN:
            request.verdicts[key] = verdict
            self._counts[verdict] += 1
        return PRESENT if verdict == HIT else ABSENT

    def _judge(self, key: OffloadKey, entry: _Entry, request: LookupRequest, now: float) -> Verdict:
        if self._failed:
            failure = self._failed.get(key)
            if failure is not None and (request.sequence <= failure[0] or now < failure[1]):
                return ERROR
        if self._lost and key in self._lost:
            return MISS
        if now < entry.retry_at:
            return ERROR
        if self._storing and self._storing.get(key, 0) & 1:
            # The object may appear before its store is reported: no probe, no answer yet.
            return OPEN
        if self._probe_now is not None:
            return self._judge_now(key, entry, now)
        if entry.present:
            return HIT
        if entry.present is False and request.sequence <= entry.through:
            return MISS
        if not entry.probing:
            self._generation += 1
            entry.generation = self._generation
            entry.probing = True
            self._open += 1
            self._batch[key] = entry
        return OPEN

    def _judge_now(self, key: OffloadKey, entry: _Entry, now: float) -> Verdict:
        if self._probe_now is None:
            raise AssertionError("only called with a probe")
        try:
            entry.present = _definite(self._probe_now(key))
        except Exception as error:  # noqa: BLE001 - whatever the tier raises is an error, no miss
            self._note_error(entry, error, now)
            return ERROR
        return HIT if entry.present else MISS

    def end_step(self) -> None:
        """Post the questions of the step, and give up those that are overdue."""
        self.read_news()
        now = self._clock()
        self._give_up_overdue(now)
        if self._failed:
            self._purge_failures()
        if self._batch:
            questions = []
            for key, entry in self._batch.items():
                entry.asked_through = self._sequence
                questions.append((key, entry.generation))
                self._posted.append((now, key, entry.generation))
            self._batch.clear()
            self._prober.post(questions)

    def _give_up_overdue(self, now: float) -> None:
        while self._posted:
            posted_at, key, generation = self._posted[0]
            entry = self._entries.get(key)
            if entry is not None and entry.probing and entry.generation == generation:
                if now - posted_at < self._lookup_deadline_s:
                    return
                self._give_up(key, entry, now)
            # Answered ones are not kept until their deadline, which may be minutes away.
            self._posted.popleft()

    def has_open_questions(self) -> bool:
        """Say whether further steps are needed to resolve what was asked."""
        self.read_news()
        return self._open > 0

    # -- news from other threads ----------------------------------------------------------------

    def answer(self, question: Question, answer: bool | BaseException | None) -> None:
        """Hand in the answer to a question, or the error that came instead. Thread-safe.

        ``None`` is what a function returns that has forgotten its answer, and counts as an error.
        """
        known: bool | BaseException
        if isinstance(answer, BaseException):
            known = answer
        else:
            try:
                known = _definite(answer)
            except TypeError as error:
                known = error.with_traceback(None)
        self._inbox.append((question, known))

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
                entry.through = entry.asked_through
        while self._removals:
            key, ticket = self._removals.popleft()
            if key in self._storing:
                self._removed_at[key] = max(ticket, self._removed_at.get(key, -1))
            entry = self._entries.get(key)
            if entry is not None:
                self._withdraw(key, entry)
                entry.present = None

    def _note_error(self, entry: _Entry, error: BaseException, now: float) -> None:
        entry.present = None
        entry.retry_at = now + self._error_backoff_s
        if self._warn.due():
            logger.warning(
                "tier %r: a lookup failed, answering absent: %s",
                self._tier_name,
                self._describe(error),
            )

    def _give_up(self, key: OffloadKey, entry: _Entry, now: float) -> None:
        self._withdraw(key, entry)
        entry.present = None
        entry.retry_at = now + self._error_backoff_s
        if self._warn.due():
            logger.warning(
                "tier %r: a lookup was not answered within %g s (lookup_deadline_s), answering "
                "absent",
                self._tier_name,
                self._lookup_deadline_s,
            )

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
        storing, entries = self._storing, self._entries
        for key in keys:
            entry = entries.get(key)
            unproven = 1
            if entry is not None:
                if entry.present:
                    unproven = 0
                elif entry.probing:
                    self._withdraw(key, entry)
            storing[key] = (storing.get(key, 0) + 2) | unproven

    def store_finished(
        self, keys: Sequence[OffloadKey], failed: Container[int], tickets: Sequence[int]
    ) -> None:
        """Note the outcome of a store.

        Args:
            keys: Its keys.
            failed: Indices of the keys that were not stored.
            tickets: Per key, drawn before its transfer began.
        """
        entries, storing = self._entries, self._storing
        for index, key in enumerate(keys):
            stored = index not in failed
            left = storing.pop(key) - 2
            if left > 1:
                # Another store of the key is in flight; it proves nothing that is not known.
                storing[key] = left & ~1 if stored else left
            removed_at = self._removed_at.get(key, -1) if self._removed_at else -1
            if left <= 1 and removed_at >= 0:
                del self._removed_at[key]
            if stored:
                if self._loading and key in self._loading:
                    self._stored_at[key] = max(tickets[index], self._stored_at.get(key, -1))
                self._lost.pop(key, None)
                self._failed.pop(key, None)
            entry = entries.get(key)
            if entry is not None:
                if entry.probing:
                    self._withdraw(key, entry)
                if stored and removed_at <= tickets[index]:
                    entry.present = PRESENT
                    entry.retry_at = _LONG_AGO
                else:
                    entry.present = None

    def load_submitted(self, keys: Iterable[OffloadKey], req_id: str) -> HitClaim:
        """Note a load before its transfer can begin.

        Returns:
            To be handed to :meth:`load_finished`.
        """
        loading = self._loading
        for key in keys:
            loading[key] = loading.get(key, 0) + 1
        return HitClaim(self._requests.get(req_id))

    def load_finished(
        self, keys: Sequence[OffloadKey], failures: Mapping[int, BlockFailure], claim: HitClaim
    ) -> None:
        """Note the outcome of a load.

        Args:
            keys: Its keys.
            failures: How keys failed, by index.
            claim: What :meth:`load_submitted` returned.
        """
        loading = self._loading
        for index, key in enumerate(keys):
            if failures and index in failures:
                self._note_failed_load(key, failures[index])
                self._revoke_hit(key, claim)
            left = loading.pop(key) - 1
            if left:
                loading[key] = left
            elif self._stored_at:
                self._stored_at.pop(key, None)

    def _note_failed_load(self, key: OffloadKey, failure: BlockFailure) -> None:
        if 0 < failure.ticket < self._stored_at.get(key, -1):
            # A store that began after the failed read has put a good object there since.
            return
        entry = self._entries.get(key)
        if entry is not None:
            self._withdraw(key, entry)
            entry.present = None
        if failure.kind not in RETIRING_KINDS:
            self._failed.pop(key, None)
            self._failed[key] = (self._sequence, self._clock() + self._error_backoff_s)
            return
        if entry is not None:
            entry.present = ABSENT
            entry.through = self._sequence
        if not failure.retired:
            self._remember_lost(key)

    def _revoke_hit(self, key: OffloadKey, claim: HitClaim) -> None:
        """Move the hit of a key that failed to load to the misses, wherever its request is."""
        request = claim.request
        if request is not None and request.verdicts.get(key) == HIT:
            request.verdicts[key] = MISS
            self._counts[HIT] -= 1
            self._counts[MISS] += 1

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
        hits = self._counts[HIT]
        misses = self._counts[MISS]
        errors = self._counts[ERROR]
        return {
            "lookup_queries": float(hits + misses + errors),
            "lookup_hits": float(hits),
            "lookup_misses": float(misses),
            "lookup_errors": float(errors),
        }
