"""What a test of the suite writes down, whatever pytest makes of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from kv_conformance.harness import HarnessError
from kv_conformance.reference import DictHarness
from kv_conformance.rig import Broken, Budget, CannotOpenError, OutOfTime, Rigs, SubjectType, expect
from kv_conformance.run import _case
from kv_conformance.run._case import case
from kv_conformance.run._complete import find_untested
from kv_conformance.run._journal import Journal, read_journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kv_conformance.harness import Opening
    from kv_conformance.rig import Violation


class Notes:
    """A journal, and what stands in it."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path)

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events so far."""
        return list(read_journal(self.journal.path))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Notes]:
    """Return the journal of the tests that are run here, which join no suite."""
    made = Notes(tmp_path / "journal.jsonl")
    monkeypatch.setattr(_case, "CASES", {})
    monkeypatch.setattr(_case, "journal_of_this_process", lambda: made.journal)
    yield made
    os.close(made.journal.descriptor)


@pytest.fixture
def rigs(tmp_path: Path, notes: Notes) -> Rigs:
    """Return what tests of the suite get."""
    harness = DictHarness(tmp_path)
    subject = SubjectType("acme", "acme 1.0", harness.spec, harness, "acme", tmp_path)

    def report(violation: Violation) -> None:
        notes.journal.write(
            "violation",
            tier="acme",
            case="test",
            clause=violation.clause,
            message=violation.message,
        )

    return Rigs(subject, "test", Budget(), report)


def run(notes: Notes, rigs: Rigs, body: Callable[[Rigs], None], clause: str = "LOOK-1") -> str:
    """Run a test with a body; return its outcome."""

    def test_property(rigs: Rigs) -> None:
        body(rigs)

    case(clause)(test_property)(rigs)
    return str(notes.events[-1]["outcome"])


def outcome(notes: Notes) -> tuple[str, str]:
    """Return the outcome and the message of the one test that ended."""
    (ended,) = (event for event in notes.events if event["event"] == "end")
    return ended["outcome"], ended["message"]


def violations(notes: Notes) -> list[tuple[str, str]]:
    """Return the broken promises that were noted."""
    return [
        (event["clause"], event["message"])
        for event in notes.events
        if event["event"] == "violation"
    ]


def test_passed(notes: Notes, rigs: Rigs) -> None:
    """A test that comes to its end has passed, and says where it belongs."""
    assert run(notes, rigs, lambda _: None) == "passed"
    began, ended = notes.events
    assert (began["event"], began["clause"], began["tier"]) == ("begin", "LOOK-1", "acme")
    assert ended["case"] == began["case"] == "test_outcomes::test_property"


def test_the_beginning_is_written_first(notes: Notes, rigs: Rigs) -> None:
    """What brings the process down is known by the test that was begun."""
    seen: list[str] = []
    run(notes, rigs, lambda _: seen.extend(event["event"] for event in notes.events))
    assert seen == ["begin"]


def test_broken(notes: Notes, rigs: Rigs) -> None:
    """A promise of the test's own clause that is broken is a failure."""
    with pytest.raises(Broken):
        run(notes, rigs, lambda _: expect(False, "a hit for nothing"))
    assert outcome(notes) == ("failed", "a hit for nothing")
    assert violations(notes) == [("LOOK-1", "a hit for nothing")]


def test_another_clause_broken(notes: Notes, rigs: Rigs) -> None:
    """A broken promise of another clause blocks the test and is put down to that clause."""
    with pytest.raises(Broken):
        run(notes, rigs, lambda _: expect(False, "two results", clause="JOB-1"))
    assert outcome(notes) == ("blocked", "two results")
    assert violations(notes) == [("JOB-1", "two results")]


def test_out_of_time(notes: Notes, rigs: Rigs) -> None:
    """A wait in vain is a failure like any other."""

    def wait(_: Rigs) -> None:
        raise OutOfTime("no answer within 1 s")

    with pytest.raises(OutOfTime):
        run(notes, rigs, wait)
    assert outcome(notes) == ("failed", "no answer within 1 s")


def test_the_harness_fails(notes: Notes, rigs: Rigs) -> None:
    """A missing server says nothing on the tier."""

    def fail(_: Rigs) -> None:
        raise HarnessError("no server")

    with pytest.raises(HarnessError):
        run(notes, rigs, fail)
    assert outcome(notes) == ("error", "no server")
    assert violations(notes) == []


def test_a_tier_that_cannot_be_opened(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where nothing special was asked for, there is no hope for the other tests."""
    monkeypatch.setattr(rigs.harness, "settings", lambda _opening: {"foldr": "/"})
    with pytest.raises(CannotOpenError, match="'foldr' is not a setting"):
        rigs.open()
    with pytest.raises(HarnessError, match="block_bytes=512") as caught:
        rigs.open(block_bytes=512)
    assert not isinstance(caught.value, CannotOpenError)
    assert not rigs.has_opened


def test_a_harness_without_settings(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in the harness is told with the line it is in."""

    def settings(_opening: Opening) -> None:
        raise AttributeError("no attribute 'workdir'")

    monkeypatch.setattr(rigs.harness, "settings", settings)
    with pytest.raises(CannotOpenError, match=r"no attribute 'workdir' \(at .*test_outcomes.py:"):
        rigs.open()


def test_skipped(notes: Notes, rigs: Rigs) -> None:
    """A skip from within is written down as one, and not as passed."""

    def skip(_: Rigs) -> None:
        pytest.skip("no time")

    with pytest.raises(pytest.skip.Exception):
        run(notes, rigs, skip)
    assert outcome(notes)[0] == "skipped"


def test_expected_failures_do_not_count(notes: Notes, rigs: Rigs) -> None:
    """Neither does an xfail from within."""

    def expect_failure(_: Rigs) -> None:
        pytest.xfail("known")

    with pytest.raises(pytest.xfail.Exception):
        run(notes, rigs, expect_failure)
    assert outcome(notes)[0] == "skipped"


def test_a_mistake_of_the_suite(notes: Notes, rigs: Rigs) -> None:
    """Any other exception is an error, with its type."""

    def stumble(_: Rigs) -> None:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError):
        run(notes, rigs, stumble)
    assert outcome(notes) == ("error", "ZeroDivisionError: by zero")


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_the_tier_ends_the_process(notes: Notes, rigs: Rigs, raised: type[BaseException]) -> None:
    """A tier that raises what ends a process fails the test, and does not end the run."""

    def end(_: Rigs) -> None:
        raise raised

    with pytest.raises(Broken):
        run(notes, rigs, end)
    assert outcome(notes) == (
        "failed",
        f"the tier raised {raised.__name__} on the calling thread",
    )


def test_rigs_are_closed(notes: Notes, rigs: Rigs) -> None:
    """What a test has opened is closed before its outcome is written down."""
    opened = []

    def open_one(rigs: Rigs) -> None:
        opened.append(rigs.open(block_bytes=4096, num_blocks=4))

    assert run(notes, rigs, open_one) == "passed"
    (rig,) = opened
    with pytest.raises(ValueError, match="released"):
        len(rig.region.primary.view)


def test_every_untested_clause_is_found() -> None:
    """A clause without a test is an error of the suite."""
    from kv_conformance.clauses import CLAUSES, clause_of
    from kv_conformance.run._case import Case

    cases = [Case("a", clause_of("JOB-2"), 60.0), Case("b", clause_of("JOB-2"), 60.0)]
    untested = find_untested(CLAUSES, cases)
    assert untested == [clause.id for clause in CLAUSES if clause.id != "JOB-2"]


def test_what_others_write_into_the_journal(notes: Notes) -> None:
    """Lines that the suite has not written are left out; the next event is read all the same."""
    for line in ("5", "[]", '"end"', "{}", '{"event": "end"}', '{"event": []}', "\xff", "{"):
        os.write(notes.journal.descriptor, line.encode("latin-1") + b"\n")
    notes.journal.write("problem", message="none")
    assert notes.events == [{"event": "problem", "message": "none"}]
