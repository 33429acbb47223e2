"""Asynchronous lookups against a model, under random interleavings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_core.contract import JobErrorKind
from kv_core.tierkit import AsyncLookup, BlockFailure
from kv_core.tierkit.testing import ManualClock, example_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.contract import OffloadKey
    from kv_core.tierkit import Question

KEYS = [example_key(number) for number in range(3)]
REQUESTS = ["a", "b"]


class LookupMachine(RuleBasedStateMachine):
    """Stores, losses, probes and loads in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.lookup = AsyncLookup(
            self, clock=self.clock, lookup_deadline_s=3.0, error_backoff_s=1.0
        )
        self.posted: list[Question] = []
        self.backend: set[OffloadKey] = set()
        self.ever_stored: set[OffloadKey] = set()
        self.storing: list[OffloadKey] = []
        self.ticket = 0
        self.waiting: dict[tuple[str, OffloadKey], float] = {}
        self.lost_for: set[tuple[str, OffloadKey]] = set()

    def post(self, questions: Sequence[Question]) -> None:
        """Queue questions for the rule that answers."""
        self.posted.extend(questions)

    def withdraw(self, key: OffloadKey) -> None:
        """Drop a question."""
        self.posted = [question for question in self.posted if question[0] != key]

    @rule(key=st.sampled_from(KEYS), req_id=st.sampled_from(REQUESTS))
    def ask(self, key: OffloadKey, req_id: str) -> None:
        """Look a key up."""
        answer = self.lookup.ask(key, req_id)
        if answer is None:
            since = self.waiting.setdefault((req_id, key), self.clock.now)
            # LOOK-2
            assert self.clock.now - since < 3.0
            return
        self.waiting.pop((req_id, key), None)
        if answer:
            # LOOK-1, LOOK-8: never without a store that was reported.
            assert key in self.ever_stored
            # LOOK-4
            assert (req_id, key) not in self.lost_for

    @rule()
    def end_step(self) -> None:
        """End a step."""
        self.lookup.end_step()

    @rule(seconds=st.sampled_from([0.4, 1.0, 3.0]))
    def turn(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.turn(seconds)

    @rule(data=st.data(), fails=st.booleans())
    def answer(self, data: st.DataObject, fails: bool) -> None:
        """Answer any open question, truthfully or with an error."""
        if self.posted:
            question = self.posted.pop(data.draw(st.integers(0, len(self.posted) - 1)))
            there = question[0] in self.backend
            self.lookup.answer(question, OSError("injected") if fails else there)

    @rule(key=st.sampled_from(KEYS))
    def submit_store(self, key: OffloadKey) -> None:
        """Begin a store."""
        self.lookup.store_submitted([key])
        self.storing.append(key)

    @rule(data=st.data(), stored=st.booleans())
    def finish_store(self, data: st.DataObject, stored: bool) -> None:
        """End any store."""
        if self.storing:
            key = self.storing.pop(data.draw(st.integers(0, len(self.storing) - 1)))
            self.ticket += 1
            if stored:
                self.backend.add(key)
                self.ever_stored.add(key)
                self.lost_for = {pair for pair in self.lost_for if pair[1] != key}
            self.lookup.store_finished([key], () if stored else (0,), [self.ticket])
            if stored:
                # LOOK-3 and LOOK-7: present, or asked afresh when nobody remembered anything.
                answer = self.lookup.ask(key, "a")
                assert answer is not False
                if answer is None:
                    self.waiting.setdefault(("a", key), self.clock.now)
                else:
                    self.waiting.pop(("a", key), None)

    @rule(
        key=st.sampled_from(KEYS),
        kind=st.sampled_from([JobErrorKind.MISSING, JobErrorKind.FAILED, JobErrorKind.STALLED]),
        req_id=st.sampled_from(REQUESTS),
    )
    def fail_load(self, key: OffloadKey, kind: JobErrorKind, req_id: str) -> None:
        """Fail a load."""
        claim = self.lookup.load_submitted([key], req_id)
        self.ticket += 1
        self.lookup.request_started("a")
        self.lookup.request_started("b")
        failure = BlockFailure(kind, "injected", self.ticket)
        self.lookup.load_finished([key], {0: failure}, claim)
        self.lost_for |= {(living, key) for living in REQUESTS}

    @rule(req_id=st.sampled_from(REQUESTS))
    def finish_request(self, req_id: str) -> None:
        """End a request."""
        self.lookup.request_finished(req_id)
        self.waiting = {pair: t for pair, t in self.waiting.items() if pair[0] != req_id}
        self.lost_for = {pair for pair in self.lost_for if pair[0] != req_id}

    @invariant()
    def queries_add_up(self) -> None:
        """Queries are hits plus misses plus errors (MET-1)."""
        stats = self.lookup.stats()
        parts = stats["lookup_hits"] + stats["lookup_misses"] + stats["lookup_errors"]
        assert stats["lookup_queries"] == parts
        assert stats["lookup_hits"] >= 0


LookupMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLookups = LookupMachine.TestCase
