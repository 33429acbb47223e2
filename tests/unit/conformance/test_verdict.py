"""From the journal to a verdict: what is missing is never taken for passed."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kv_conformance.clauses import CLAUSES, Clause
from kv_conformance.run import _verdict
from kv_conformance.run._case import Case
from kv_conformance.run._deviations import Deviation
from kv_conformance.run._verdict import ClauseOutcome, TierVerdict, Verdict, judge
from kv_core.contract import Capability

if TYPE_CHECKING:
    from collections.abc import Iterable

Event = dict[str, Any]

BOUNDED = frozenset({Capability.BOUNDED})


@pytest.fixture(autouse=True)
def cases(monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """Return a suite of one test for each clause, in the place of the real one."""
    made = {case_name(clause): Case(case_name(clause), clause, 60.0) for clause in CLAUSES}
    monkeypatch.setattr(_verdict, "CASES", made)
    return made


def case_name(clause: Clause) -> str:
    """Return the name of the one test of a clause."""
    return f"test_all::test_{clause.id}"


def subject(
    tier: str = "acme",
    capabilities: Iterable[str] = ("bounded",),
    faults: Iterable[str] = ("error", "stall"),
) -> Event:
    """Return the event of a tier that was found."""
    return {
        "event": "subject",
        "tier": tier,
        "origin": "acme 1.0",
        "capabilities": [*capabilities],
        "faults": [*faults],
    }


def outcome(clause_id: str, result: str, message: str = "", tier: str = "acme") -> list[Event]:
    """Return the events of one test."""
    common = {"tier": tier, "case": f"test_all::test_{clause_id}"}
    return [
        {"event": "begin", "clause": clause_id, **common},
        {"event": "end", "outcome": result, "message": message, "seconds": 0.5, **common},
    ]


def good_run(tier: str = "acme", leaving_out: str = "") -> list[Event]:
    """Return the journal of a run in which every test passed."""
    events = [subject(tier)]
    for clause in CLAUSES:
        if clause.applies_to(BOUNDED) and clause.id != leaving_out:
            events += outcome(clause.id, "passed", tier=tier)
    return events


def violation(clause_id: str, seen_by: str = "JOB-1") -> Event:
    """Return the event of a broken promise that the test of another clause saw."""
    return {
        "event": "violation",
        "tier": "acme",
        "case": f"test_all::test_{seen_by}",
        "clause": clause_id,
        "message": "the wrong bytes",
    }


def deviation(clause_id: str, tier: str | None = None) -> Deviation:
    """Return a known deviation."""
    return Deviation(
        clause=clause_id, reason="later", issue="#1", expiry=dt.date(2999, 1, 1), tier=tier
    )


def only(events: list[Event], *deviations: Deviation) -> TierVerdict:
    """Judge a run of one tier."""
    (verdict,) = judge(events, deviations)
    return verdict


def outcome_of(verdict: TierVerdict, clause_id: str) -> ClauseOutcome:
    """Return what became of a clause."""
    (result,) = (result for result in verdict.results if result.clause.id == clause_id)
    return result.outcome


def test_all_that_is_owed_has_passed() -> None:
    """A tier is conformant when every clause it owes ran to its end and held."""
    verdict = only(good_run())
    assert verdict.verdict is Verdict.CONFORMANT
    assert [result.clause.id for result in verdict.results] == [clause.id for clause in CLAUSES]
    assert outcome_of(verdict, "CAP-1") is ClauseOutcome.PASSED
    assert outcome_of(verdict, "PERS-1") is ClauseOutcome.UNDECLARED


@pytest.mark.parametrize(
    "clause_id", [clause.id for clause in CLAUSES if clause.applies_to(BOUNDED)]
)
def test_no_clause_can_be_left_out(clause_id: str) -> None:
    """Whichever clause is missing, the run is partial."""
    verdict = only(good_run(leaving_out=clause_id))
    assert verdict.verdict is Verdict.PARTIAL
    assert outcome_of(verdict, clause_id) is ClauseOutcome.NOT_RUN


def test_nothing_ran() -> None:
    """A run that only collected is partial."""
    assert only([subject()]).verdict is Verdict.PARTIAL


def test_began_and_never_ended() -> None:
    """A test without an end has not passed."""
    events = good_run()
    assert events[-1]["event"] == "end"
    verdict = only(events[:-1])
    assert verdict.verdict is Verdict.PARTIAL


def test_one_of_several_tests_is_missing(cases: dict[str, Case]) -> None:
    """A clause has passed when all of its tests have."""
    clause = cases["test_all::test_JOB-1"].clause
    cases["test_more::test_job"] = Case("test_more::test_job", clause, 60.0)
    verdict = only(good_run())
    assert verdict.verdict is Verdict.PARTIAL
    assert outcome_of(verdict, "JOB-1") is ClauseOutcome.NOT_RUN


def test_a_clause_without_a_test(cases: dict[str, Case]) -> None:
    """What nobody asked has not been answered."""
    del cases["test_all::test_JOB-1"]
    verdict = only(good_run(leaving_out="JOB-1"))
    assert verdict.verdict is Verdict.PARTIAL
    assert outcome_of(verdict, "JOB-1") is ClauseOutcome.NOT_RUN


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("failed", Verdict.NON_CONFORMANT),
        ("error", Verdict.ERROR),
        ("skipped", Verdict.PARTIAL),
        ("blocked", Verdict.PARTIAL),
    ],
)
def test_whatever_is_not_passed(result: str, expected: Verdict) -> None:
    """One test that did not pass decides the run."""
    events = good_run(leaving_out="LOOK-3") + outcome("LOOK-3", result, "found this")
    assert only(events).verdict is expected


@pytest.mark.parametrize("results", [("failed", "passed"), ("passed", "failed")])
def test_a_repeated_test(results: tuple[str, str]) -> None:
    """A test that passes when it is repeated has failed."""
    events = good_run(leaving_out="LOOK-3")
    for result in results:
        events += outcome("LOOK-3", result)
    assert outcome_of(only(events), "LOOK-3") is ClauseOutcome.FAILED
    assert only(events).verdict is Verdict.NON_CONFORMANT


def test_seen_by_the_test_of_another_clause() -> None:
    """A broken promise counts, although the clause's own tests have passed."""
    verdict = only([*good_run(), violation("DATA-1")])
    assert verdict.verdict is Verdict.NON_CONFORMANT
    (result,) = (result for result in verdict.results if result.clause.id == "DATA-1")
    assert result.outcome is ClauseOutcome.FAILED
    assert result.messages == ("the wrong bytes (seen by test_all::test_JOB-1)",)


def test_the_process_died() -> None:
    """The test during which the process died has failed, and its clause is named."""
    events = good_run(leaving_out="LIFE-2")
    began, ended = outcome("LIFE-2", "failed", "was ended by SIGSEGV")
    died = {**began, "event": "died", "message": "the process was ended by SIGSEGV"}
    verdict = only([*events, began, died, ended])
    assert verdict.verdict is Verdict.NON_CONFORMANT
    (result,) = (result for result in verdict.results if result.clause.id == "LIFE-2")
    assert result.messages == ("the process was ended by SIGSEGV",)


def test_a_problem_of_the_run() -> None:
    """What kept the suite from judging is an error, even when every test passed."""
    verdict = only([*good_run(), {"event": "problem", "message": "no server"}])
    assert verdict.verdict is Verdict.ERROR
    assert verdict.problems == ("no server",)


def test_broken_and_a_problem() -> None:
    """A broken promise is the stronger news."""
    events = [*good_run(), violation("DATA-1"), {"event": "problem", "message": "no server"}]
    assert only(events).verdict is Verdict.NON_CONFORMANT


def test_an_end_without_a_beginning() -> None:
    """A result that the suite did not begin comes from somebody else."""
    events = good_run(leaving_out="LOOK-3") + outcome("LOOK-3", "passed")[1:]
    verdict = only(events)
    assert verdict.verdict is Verdict.ERROR
    assert outcome_of(verdict, "LOOK-3") is ClauseOutcome.NOT_RUN
    assert "test_all::test_LOOK-3" in verdict.problems[0]


def test_a_test_that_the_suite_does_not_have() -> None:
    """A result of an unknown test comes from somebody else."""
    verdict = only(good_run() + outcome("LOOK-99", "passed"))
    assert verdict.verdict is Verdict.ERROR
    assert "test_all::test_LOOK-99" in verdict.problems[0]


@pytest.mark.parametrize("faults", [(), ("error",), ("full", "stall")])
def test_a_harness_that_spares_its_storage(faults: tuple[str, ...]) -> None:
    """Without errors and stalls several clauses would pass untested: there is no verdict."""
    verdict = only([subject(faults=faults), *good_run()[1:]])
    assert verdict.verdict is Verdict.ERROR
    assert verdict.faults == faults
    (problem,) = verdict.problems
    lacking = ", ".join(sorted({"error", "stall"} - set(faults)))
    assert f"does not make the fault(s) {lacking}, without which" in problem


def test_a_broken_clause_is_told_even_so() -> None:
    """What failed has failed, whatever else was not tested."""
    verdict = only([subject(faults=()), *good_run()[1:], violation("LOOK-3")])
    assert verdict.verdict is Verdict.NON_CONFORMANT


def test_an_unknown_capability() -> None:
    """A capability that the contract does not know is an error."""
    events = [subject(capabilities=("bounded", "teleport")), *good_run()[1:]]
    verdict = only(events)
    assert verdict.verdict is Verdict.ERROR
    assert "teleport" in verdict.problems[0]


def test_an_undeclared_clause_that_is_broken() -> None:
    """What is seen to be broken is told, owed or not."""
    verdict = only([*good_run(), violation("PERS-1")])
    assert outcome_of(verdict, "PERS-1") is ClauseOutcome.FAILED


def test_a_clause_on_the_lack_of_a_capability() -> None:
    """A tier that declares the capability does not owe the clause on its lack."""
    lacking = next(clause for clause in CLAUSES if clause.absent)
    assert lacking.capability is not None
    declared = only([subject(capabilities=(lacking.capability.value,))])
    assert outcome_of(declared, lacking.id) is ClauseOutcome.DECLARED
    assert outcome_of(only([subject(capabilities=())]), lacking.id) is ClauseOutcome.NOT_RUN


def test_a_provisional_clause_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clause that is new in a minor version is reported and changes no verdict."""
    clauses = tuple(
        replace(clause, provisional=True) if clause.id == "LOOK-3" else clause for clause in CLAUSES
    )
    monkeypatch.setattr(_verdict, "CLAUSES", clauses)
    verdict = only(good_run(leaving_out="LOOK-3") + outcome("LOOK-3", "failed"))
    assert verdict.verdict is Verdict.CONFORMANT
    assert outcome_of(verdict, "LOOK-3") is ClauseOutcome.FAILED


def test_tiers_of_one_run_are_apart() -> None:
    """What one tier breaks is not held against another."""
    good, bad = judge([*good_run("good"), *good_run("acme"), violation("DATA-1")], [])
    assert (good.tier, good.verdict) == ("good", Verdict.CONFORMANT)
    assert (bad.tier, bad.verdict) == ("acme", Verdict.NON_CONFORMANT)


def test_no_tier_was_found() -> None:
    """Without a tier there is no verdict to be had."""
    assert judge([{"event": "start"}, {"event": "finished"}], []) == []


def test_a_known_deviation() -> None:
    """A listed failure makes the run partial, never conformant."""
    events = good_run(leaving_out="LOOK-3") + outcome("LOOK-3", "failed")
    verdict = only(events, deviation("LOOK-3"))
    assert verdict.verdict is Verdict.PARTIAL
    assert outcome_of(verdict, "LOOK-3") is ClauseOutcome.DEVIATION


def test_a_deviation_excuses_no_other_clause() -> None:
    """Only the listed clause is known."""
    events = [*good_run(leaving_out="LOOK-3"), *outcome("LOOK-3", "failed"), violation("DATA-1")]
    assert only(events, deviation("LOOK-3")).verdict is Verdict.NON_CONFORMANT


def test_a_deviation_that_passes() -> None:
    """A clause that holds must be taken off the list."""
    verdict = only(good_run(), deviation("LOOK-3"))
    assert verdict.verdict is Verdict.NON_CONFORMANT
    assert outcome_of(verdict, "LOOK-3") is ClauseOutcome.UNEXPECTED_PASS


def test_a_deviation_of_another_tier() -> None:
    """An entry for one tier says nothing on another."""
    events = good_run(leaving_out="LOOK-3") + outcome("LOOK-3", "failed")
    verdict = only(events, deviation("LOOK-3", tier="other"))
    assert verdict.verdict is Verdict.NON_CONFORMANT


def test_a_deviation_from_what_is_not_owed() -> None:
    """An entry that no tier of the run can match is an error."""
    verdict = only(good_run(), deviation("PERS-1"))
    assert verdict.verdict is Verdict.ERROR
    assert "PERS-1 matches nothing" in verdict.problems[0]


def test_a_deviation_that_another_tier_owes() -> None:
    """An entry for every tier is of use when one of them owes the clause."""
    events = [*good_run(), subject("disk", ("persistent",)), *outcome("PERS-1", "failed")]
    events[-2:] = outcome("PERS-1", "failed", tier="disk")
    first, second = judge(events, [deviation("PERS-1")])
    assert first.verdict is Verdict.CONFORMANT
    assert outcome_of(second, "PERS-1") is ClauseOutcome.DEVIATION


def test_a_deviation_does_not_excuse_an_error() -> None:
    """A test that could not be carried out has shown no known failure."""
    events = good_run(leaving_out="LOOK-3") + outcome("LOOK-3", "error", "no server")
    assert only(events, deviation("LOOK-3")).verdict is Verdict.ERROR
