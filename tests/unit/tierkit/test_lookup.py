"""Asynchronous lookups: batches, sharing, deadlines, and what is remembered."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.contract import JobErrorKind
from kv_core.tierkit import AsyncLookup, BlockFailure, Question
from kv_core.tierkit.testing import ManualClock, example_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.contract import OffloadKey

K0, K1, K2 = (example_key(number) for number in range(3))
DEADLINE_S = 5.0
BACKOFF_S = 2.0


class Prober:
    """Keeps questions until the test answers them."""

    def __init__(self) -> None:
        self.batches: list[list[Question]] = []
        self.withdrawn: list[OffloadKey] = []

    def post(self, questions: Sequence[Question]) -> None:
        """Keep a batch."""
        self.batches.append(list(questions))

    def withdraw(self, key: OffloadKey) -> None:
        """Note a withdrawal."""
        self.withdrawn.append(key)


class Lab:
    """A lookup whose prober and clock belong to the test."""

    def __init__(self) -> None:
        self.prober = Prober()
        self.clock = ManualClock()
        self.lookup = AsyncLookup(
            self.prober,
            clock=self.clock,
            lookup_deadline_s=DEADLINE_S,
            error_backoff_s=BACKOFF_S,
            tier_name="disk",
        )

    def ask(self, key: OffloadKey, req_id: str = "a") -> bool | None:
        """Ask for a request."""
        return self.lookup.ask(key, req_id)

    def answer(self, *answers: bool | Exception) -> None:
        """End the step and answer the questions it posted, in order."""
        before = len(self.prober.batches)
        self.lookup.end_step()
        (batch,) = self.prober.batches[before:]
        for question, answer in zip(batch, answers, strict=True):
            self.lookup.answer(question, answer)

    def know(self, key: OffloadKey, answer: bool | Exception, req_id: str = "a") -> None:
        """Ask and answer."""
        assert self.ask(key, req_id) is None
        self.answer(answer)
        self.ask(key, req_id)

    def store(self, key: OffloadKey, *, stored: bool = True, ticket: int = 1) -> None:
        """Store a key from submit to result."""
        self.lookup.store_submitted([key])
        self.lookup.store_finished([key], () if stored else (0,), [ticket])

    def fail_load(
        self,
        key: OffloadKey,
        kind: JobErrorKind,
        *,
        retired: bool = False,
        req_id: str = "a",
        ticket: int = 1,
    ) -> None:
        """Fail a load from submit to result."""
        claim = self.lookup.load_submitted([key], req_id)
        failure = BlockFailure(kind, "injected", ticket, retired=retired)
        self.lookup.load_finished([key], {0: failure}, claim)

    def counts(self) -> tuple[int, int, int, int]:
        """Return queries, hits, misses and errors."""
        stats = self.lookup.stats()
        return (
            int(stats["lookup_queries"]),
            int(stats["lookup_hits"]),
            int(stats["lookup_misses"]),
            int(stats["lookup_errors"]),
        )


@pytest.fixture
def lab() -> Lab:
    """Return a fresh lab."""
    return Lab()


# -- questions and answers ------------------------------------------------------------------------


def test_questions_of_a_step_are_one_batch(lab: Lab) -> None:
    """First questions are unknown, asked twice they are posted once, all in one batch."""
    assert [lab.ask(K0), lab.ask(K1), lab.ask(K0, "b")] == [None, None, None]
    assert lab.prober.batches == []
    lab.lookup.end_step()
    assert [[key for key, _ in batch] for batch in lab.prober.batches] == [[K0, K1]]


def test_answers_are_applied_at_the_next_call(lab: Lab) -> None:
    """Each key gets its own answer."""
    lab.ask(K0)
    lab.ask(K1)
    lab.answer(True, False)
    assert lab.lookup.ask_many([K0, K1], "a") == [True, False]


def test_an_open_question_is_not_posted_again(lab: Lab) -> None:
    """Asking again in later steps waits for the answer on its way."""
    lab.ask(K0)
    lab.lookup.end_step()
    assert lab.ask(K0) is None
    lab.lookup.end_step()
    assert len(lab.prober.batches) == 1


def test_requests_share_a_probe_in_flight(lab: Lab) -> None:
    """A second request waits for the first one's probe and takes its yes."""
    lab.ask(K0, "a")
    lab.lookup.end_step()
    assert lab.ask(K0, "b") is None
    lab.lookup.answer(lab.prober.batches[0][0], True)
    assert (lab.ask(K0, "a"), lab.ask(K0, "b")) == (True, True)


def test_a_request_remembers_absence(lab: Lab) -> None:
    """An absence holds for the request that was told (LOOK-9)."""
    lab.know(K0, answer=False)
    assert lab.ask(K0) is False
    lab.lookup.end_step()
    assert len(lab.prober.batches) == 1


def test_a_later_request_asks_again_after_an_absence(lab: Lab) -> None:
    """Another instance may have stored the block since: younger requests probe anew (SHARE-1)."""
    lab.know(K0, answer=False, req_id="a")
    assert lab.ask(K0, "b") is None
    lab.answer(True)
    assert lab.ask(K0, "b") is True


def test_an_old_absence_is_no_answer_to_a_question_in_flight(lab: Lab) -> None:
    """While a younger request's probe is out, the older answer is not passed off as its own."""
    lab.know(K0, answer=False, req_id="a")
    lab.ask(K0, "b")
    lab.lookup.end_step()
    assert (lab.ask(K0, "a"), lab.ask(K0, "b")) == (False, None)


def test_an_absence_from_before_a_request_does_not_bind_it(lab: Lab) -> None:
    """A request that joined a probe in flight does not take its no."""
    lab.ask(K0, "a")
    lab.lookup.end_step()
    lab.ask(K0, "b")
    lab.lookup.answer(lab.prober.batches[0][0], False)
    assert (lab.ask(K0, "a"), lab.ask(K0, "b")) == (False, None)


def test_entries_end_with_their_last_request(lab: Lab) -> None:
    """Nothing is kept of requests that are over: the next one asks the backend."""
    lab.know(K0, answer=True, req_id="a")
    lab.ask(K0, "b")
    lab.lookup.request_finished("a")
    assert lab.ask(K0, "b") is True
    lab.lookup.request_finished("b")
    assert lab.ask(K0, "c") is None


def test_answered_questions_are_not_kept(lab: Lab) -> None:
    """Not even until the deadline, which may be minutes away."""
    key = example_key(77)
    before = sys.getrefcount(key)
    lab.know(key, True)
    lab.lookup.request_finished("a")
    lab.prober.batches.clear()
    lab.lookup.end_step()
    assert sys.getrefcount(key) == before


def test_a_question_nobody_waits_for_is_withdrawn(lab: Lab) -> None:
    """The end of the last request takes its open question back, so queues cannot grow."""
    lab.ask(K0)
    lab.lookup.end_step()
    lab.lookup.request_finished("a")
    assert lab.prober.withdrawn == [K0]
    assert not lab.lookup.has_open_questions()


def test_a_question_not_posted_yet_is_dropped(lab: Lab) -> None:
    """A request that ends in the step of its question costs no probe."""
    lab.ask(K0)
    lab.lookup.request_finished("a")
    lab.lookup.end_step()
    assert (lab.prober.batches, lab.prober.withdrawn) == ([], [])


def test_a_stale_answer_does_not_land_on_a_newer_question(lab: Lab) -> None:
    """The answer to a dropped question is ignored by the next question about the key."""
    lab.ask(K0, "a")
    lab.lookup.end_step()
    stale = lab.prober.batches[0][0]
    lab.lookup.request_finished("a")
    lab.ask(K0, "b")
    lab.lookup.answer(stale, True)
    assert lab.ask(K0, "b") is None
    lab.answer(False)
    assert lab.ask(K0, "b") is False


def test_finishing_is_idempotent_and_tolerates_unknown_requests(lab: Lab) -> None:
    """Requests end as often as the engine says (REQ-2)."""
    lab.know(K0, answer=True)
    lab.lookup.request_finished("a")
    lab.lookup.request_finished("a")
    lab.lookup.request_finished("never seen")
    assert lab.counts() == (1, 1, 0, 0)


def test_open_questions_need_further_steps(lab: Lab) -> None:
    """From the question to its answer the tier has pending work."""
    assert not lab.lookup.has_open_questions()
    lab.ask(K0)
    assert lab.lookup.has_open_questions()
    lab.answer(True)
    assert not lab.lookup.has_open_questions()


# -- deadlines and errors -------------------------------------------------------------------------


def test_an_unanswered_question_ends_at_the_deadline(lab: Lab) -> None:
    """A backend that hangs is absent after the deadline, and an error (LOOK-2)."""
    lab.ask(K0)
    lab.lookup.end_step()
    lab.clock.turn(DEADLINE_S - 0.001)
    assert lab.ask(K0) is None
    lab.clock.turn(0.001)
    assert lab.ask(K0) is False
    assert lab.counts() == (1, 0, 0, 1)
    assert not lab.lookup.has_open_questions()


def test_a_question_nobody_repeats_ends_at_the_deadline_too(lab: Lab) -> None:
    """An abandoned question does not keep an idle engine stepping for ever."""
    lab.ask(K0)
    lab.lookup.end_step()
    lab.clock.turn(DEADLINE_S)
    lab.lookup.end_step()
    assert not lab.lookup.has_open_questions()
    assert lab.prober.withdrawn == [K0]


def test_a_late_answer_is_ignored(lab: Lab) -> None:
    """What arrives after the deadline answers nothing."""
    lab.ask(K0)
    lab.lookup.end_step()
    lab.clock.turn(DEADLINE_S)
    assert lab.ask(K0) is False
    lab.lookup.answer(lab.prober.batches[0][0], True)
    assert lab.ask(K0) is False


def test_a_hang_is_remembered_no_longer_than_the_back_off(lab: Lab) -> None:
    """After the back-off the backend is asked again, by the same request, too."""
    lab.ask(K0)
    lab.lookup.end_step()
    lab.clock.turn(DEADLINE_S)
    assert lab.ask(K0) is False
    lab.clock.turn(BACKOFF_S)
    assert lab.ask(K0) is None
    lab.answer(True)
    assert lab.ask(K0) is True


def test_an_error_is_no_miss_and_is_asked_again(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """An error answers absent, counts as an error, and lasts for the back-off (LOOK-6)."""
    lab.know(K0, OSError("injected"))
    assert lab.ask(K0) is False
    assert lab.counts() == (1, 0, 0, 1)
    (record,) = caplog.records
    assert record.getMessage() == (
        "tier 'disk': a lookup failed, answering absent: OSError: injected"
    )
    lab.clock.turn(BACKOFF_S - 0.001)
    assert lab.ask(K0, "b") is False
    lab.clock.turn(0.001)
    assert lab.ask(K0) is None


def test_errors_of_one_key_do_not_touch_the_batch(lab: Lab) -> None:
    """One key that cannot be asked loses only itself."""
    for key in (K0, K1, K2):
        lab.ask(key)
    lab.answer(True, OSError("injected"), False)
    assert lab.lookup.ask_many([K0, K1, K2], "a") == [True, False, False]
    assert lab.counts() == (3, 1, 1, 1)


# -- stores ---------------------------------------------------------------------------------------


def test_a_store_turns_a_remembered_absence(lab: Lab) -> None:
    """A successful store is seen by running requests at once (LOOK-7)."""
    lab.know(K0, answer=False)
    lab.store(K0)
    assert lab.ask(K0) is True


def test_a_store_beats_a_probe_in_flight(lab: Lab) -> None:
    """A probe from before the store does not undo it (LOOK-7)."""
    lab.ask(K0)
    lab.lookup.end_step()
    lab.store(K0)
    lab.lookup.answer(lab.prober.batches[0][0], False)
    assert lab.ask(K0) is True


def test_no_yes_while_the_only_store_is_in_flight(lab: Lab) -> None:
    """What a probe would see before the store is reported does not count (LOOK-8)."""
    lab.ask(K0)
    lab.lookup.end_step()
    lab.lookup.store_submitted([K0])
    lab.lookup.answer(lab.prober.batches[0][0], True)
    assert lab.ask(K0) is None
    lab.lookup.store_finished([K0], (), [1])
    assert lab.ask(K0) is True


def test_a_lookup_behind_a_store_ends_at_the_deadline(lab: Lab) -> None:
    """A store that hangs does not hold its key's lookups (LOOK-2)."""
    lab.lookup.store_submitted([K0])
    assert lab.ask(K0) is None
    lab.clock.turn(DEADLINE_S)
    assert lab.ask(K0) is False


def test_storing_a_present_key_again_keeps_it_present(lab: Lab) -> None:
    """A key that was known before the store stays known during it."""
    lab.know(K0, answer=True)
    lab.lookup.store_submitted([K0])
    assert lab.ask(K0) is True


def test_a_failed_store_is_followed_by_a_probe(lab: Lab) -> None:
    """After a failed store only the backend knows what is there."""
    lab.know(K0, answer=True)
    lab.store(K0, stored=False)
    assert lab.ask(K0) is None


def test_two_stores_of_one_key(lab: Lab) -> None:
    """The first success makes the key known, although another store is in flight."""
    lab.lookup.store_submitted([K0])
    lab.lookup.store_submitted([K0])
    assert lab.ask(K0) is None
    lab.lookup.store_finished([K0], (), [1])
    assert lab.ask(K0) is True
    lab.lookup.store_finished([K0], (), [2])
    assert lab.ask(K0) is True


def test_a_block_evicted_during_its_store_is_not_promised(lab: Lab) -> None:
    """A removal after the store began wins over the report of the store."""
    lab.ask(K0)
    lab.lookup.store_submitted([K0])
    lab.lookup.removed(K0, ticket=2)
    lab.lookup.read_news()
    lab.lookup.store_finished([K0], (), [1])
    assert lab.ask(K0) is None


def test_a_removal_from_before_the_store_is_history(lab: Lab) -> None:
    """A key that was evicted and then stored again is present."""
    lab.ask(K0)
    lab.lookup.store_submitted([K0])
    lab.lookup.removed(K0, ticket=1)
    lab.lookup.read_news()
    lab.lookup.store_finished([K0], (), [2])
    assert lab.ask(K0) is True


def test_a_removed_block_is_probed_again(lab: Lab) -> None:
    """Eviction makes the tier forget what it knew."""
    lab.know(K0, answer=True)
    lab.lookup.removed(K0, ticket=1)
    assert lab.ask(K0) is None


# -- failed loads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [JobErrorKind.MISSING, JobErrorKind.DAMAGED])
def test_a_bad_object_stays_absent_until_stored(lab: Lab, kind: JobErrorKind) -> None:
    """No lookup finds an object that could not be retired, before a new store (vllm#49176)."""
    lab.know(K0, answer=True)
    lab.fail_load(K0, kind)
    lab.clock.turn(1e6)
    assert (lab.ask(K0, "a"), lab.ask(K0, "b")) == (False, False)
    lab.store(K0)
    assert (lab.ask(K0, "a"), lab.ask(K0, "c")) == (True, True)


def test_a_retired_object_is_probed_by_later_requests(lab: Lab) -> None:
    """With the bad object gone, a probe tells the truth; the request that failed stays off."""
    lab.know(K0, answer=True, req_id="a")
    lab.fail_load(K0, JobErrorKind.DAMAGED, retired=True)
    assert lab.ask(K0, "a") is False
    assert lab.ask(K0, "b") is None
    lab.answer(True)
    assert lab.ask(K0, "b") is True


@pytest.mark.parametrize("kind", [JobErrorKind.FAILED, JobErrorKind.STALLED])
def test_a_transient_failure_binds_the_living(lab: Lab, kind: JobErrorKind) -> None:
    """Requests alive then never get a yes; later ones do after the back-off (sglang#31315)."""
    lab.lookup.request_started("waiting")
    lab.know(K0, answer=True, req_id="a")
    lab.fail_load(K0, kind)
    assert (lab.ask(K0, "a"), lab.ask(K0, "later")) == (False, False)
    lab.clock.turn(BACKOFF_S)
    assert lab.ask(K0, "later") is None
    lab.answer(True)
    assert lab.ask(K0, "later") is True
    assert (lab.ask(K0, "a"), lab.ask(K0, "waiting")) == (False, False)


def test_a_transient_failure_is_forgotten_with_its_requests(lab: Lab) -> None:
    """One outage does not empty a persistent tier: a request of the same name starts anew."""
    lab.know(K0, answer=True)
    lab.fail_load(K0, JobErrorKind.FAILED)
    lab.clock.turn(BACKOFF_S)
    lab.lookup.request_finished("a")
    assert lab.ask(K0, "a") is None


def test_a_store_ends_a_transient_failure(lab: Lab) -> None:
    """A successful store is good for running requests, too (LOOK-7)."""
    lab.know(K0, answer=True)
    lab.fail_load(K0, JobErrorKind.FAILED)
    lab.store(K0)
    assert lab.ask(K0) is True


def test_a_failed_load_from_before_a_store_is_history(lab: Lab) -> None:
    """A failure that is reported after a later store does not hide what was stored."""
    lab.know(K0, answer=True)
    claim = lab.lookup.load_submitted([K0], "a")
    lab.store(K0, ticket=2)
    lab.lookup.load_finished([K0], {0: BlockFailure(JobErrorKind.DAMAGED, "injected", 1)}, claim)
    assert lab.ask(K0) is True


def test_a_load_that_read_nothing_is_not_excused_by_an_older_store(lab: Lab) -> None:
    """A store from before a load says nothing about it, although another load was in flight."""
    lab.lookup.load_submitted([K0], "a")
    lab.store(K0, ticket=5)
    lab.know(K0, answer=True)
    lab.fail_load(K0, JobErrorKind.STALLED, ticket=0)
    assert lab.ask(K0) is False


# -- statistics -----------------------------------------------------------------------------------


def test_each_request_and_key_counts_once(lab: Lab) -> None:
    """Unknown answers and repeats count nothing (MET-1, vllm#30522)."""
    lab.know(K0, answer=True)
    lab.know(K1, answer=False)
    for _ in range(3):
        lab.lookup.ask_many([K0, K1], "a")
    assert lab.counts() == (2, 1, 1, 0)
    lab.ask(K0, "b")
    assert lab.counts() == (3, 2, 1, 0)


def test_a_hit_that_fails_to_load_becomes_a_miss(lab: Lab) -> None:
    """Queries stay hits plus misses plus errors after a failed load (MET-1)."""
    lab.know(K0, answer=True)
    lab.fail_load(K0, JobErrorKind.MISSING)
    assert lab.counts() == (1, 0, 1, 0)
    lab.fail_load(K0, JobErrorKind.MISSING)
    assert lab.counts() == (1, 0, 1, 0)


def test_a_hit_moves_although_its_request_is_over(lab: Lab) -> None:
    """The end of the request does not make the statistics wrong (JOB-6)."""
    lab.know(K0, answer=True)
    claim = lab.lookup.load_submitted([K0], "a")
    lab.lookup.request_finished("a")
    lab.lookup.load_finished([K0], {0: BlockFailure(JobErrorKind.FAILED, "injected", 1)}, claim)
    assert lab.counts() == (1, 0, 1, 0)


@pytest.mark.parametrize(("answer", "expected"), [(0, False), (1, True), (np.False_, False)])
def test_truth_is_enough_of_an_answer(lab: Lab, answer: Any, expected: bool) -> None:
    """A client that answers with numbers is understood; a 0 is no question left open (LOOK-2)."""
    assert lab.ask(K0) is None
    lab.answer(answer)
    assert lab.ask(K0) is expected
    assert lab.counts() == (1, int(expected), int(not expected), 0)


def test_a_forgotten_return_is_an_error(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """``None`` is no miss that would hide the mistake: it is counted, and the log says it."""
    lab.ask(K0)
    nothing: Any = None
    lab.answer(nothing)
    assert lab.ask(K0) is False
    assert lab.counts() == (1, 0, 0, 1)
    assert "exists returned None, expected True or False" in caplog.text


# -- answers at once ------------------------------------------------------------------------------


def test_a_tier_that_answers_at_once_is_never_unknown() -> None:
    """With a probe that does not block, every answer is fresh and none is unknown."""
    present: set[OffloadKey] = set()
    lookup = AsyncLookup(
        Prober(),
        clock=ManualClock(),
        lookup_deadline_s=DEADLINE_S,
        error_backoff_s=BACKOFF_S,
        probe_now=lambda key: key in present,
    )
    assert lookup.ask(K0, "a") is False
    present.add(K0)
    assert lookup.ask(K0, "a") is True
    present.clear()
    assert lookup.ask(K0, "a") is False


def test_a_probe_that_raises_at_once_is_an_error() -> None:
    """An error of an immediate probe is contained, counted, and backed off."""
    calls = []

    def probe(key: OffloadKey) -> bool:
        calls.append(key)
        raise OSError("injected")

    lookup = AsyncLookup(
        Prober(),
        clock=ManualClock(),
        lookup_deadline_s=DEADLINE_S,
        error_backoff_s=BACKOFF_S,
        probe_now=probe,
    )
    assert [lookup.ask(K0, "a"), lookup.ask(K0, "a")] == [False, False]
    assert lookup.stats()["lookup_errors"] == 1
    assert calls == [K0]
