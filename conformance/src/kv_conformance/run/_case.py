"""One test of the suite, and how it is run.

``@case("LOOK-1")`` makes a function a test of a clause. Whatever pytest and its plugins do around
it, the journal says what happened inside: that it began, what it found, and that it ended.
"""

from __future__ import annotations

import faulthandler
import functools
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pytest

from kv_conformance.clauses import clause_of
from kv_conformance.harness import HarnessError
from kv_conformance.rig import Broken, Interrupted, OutOfTime
from kv_conformance.run._journal import journal_of_this_process
from kv_conformance.run._stacks import arm_watchdog, disarm_watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from kv_conformance.clauses import Clause
    from kv_conformance.rig import Rigs
    from kv_conformance.run._journal import Journal

__all__ = ["CASES", "Case", "case"]

TestFunction: TypeAlias = "Callable[..., None]"

# Between the alarm, which dumps all threads and fails the test, and the end of the process. Scaled
# as the limit is, but never so short that a busy machine has no time to unwind.
_HARD_LIMIT_S: Final = 15.0
_LEAST_HARD_LIMIT_S: Final = 2.0

# By how much the limit of a test shrinks when waits have been in vain so often already.
_IMPATIENCE: Final = 6.0

# Frames in these folders are the suite's, all others the tier's.
_SUITE: Final = tuple(str(Path(__file__).parents[1] / name) for name in ("rig", "run", "suite"))


@dataclass(frozen=True, slots=True)
class Case:
    """One test.

    Attributes:
        name: ``module::function``.
        clause: The clause it tests.
        limit_s: Seconds after which it is broken off, before scaling.
    """

    name: str
    clause: Clause
    limit_s: float


CASES: Final[dict[str, Case]] = {}
"""All tests of the suite by name. Filled when the suite is imported."""


def case(clause_id: str, *, limit_s: float = 60.0) -> Callable[[TestFunction], TestFunction]:
    """Make a function a test of a clause.

    Args:
        clause_id: The clause.
        limit_s: Seconds after which the test is broken off.

    Raises:
        UnknownClauseError: There is no such clause.
    """
    clause = clause_of(clause_id)

    def decorate(function: TestFunction) -> TestFunction:
        name = f"{function.__module__.rpartition('.')[2]}::{function.__name__}"
        found = Case(name, clause, limit_s)
        CASES[name] = found

        @functools.wraps(function)
        def run(rigs: Rigs, **fixtures: Any) -> None:
            _run(found, function, rigs, fixtures)

        run.conformance_case = found  # type: ignore[attr-defined]  # read by the plugin
        return run

    return decorate


def _run(found: Case, function: TestFunction, rigs: Rigs, fixtures: dict[str, Any]) -> None:
    """Run a test and write its outcome down."""
    journal = journal_of_this_process()
    tier = rigs.subject_type.name
    start = time.monotonic()

    def end(outcome: str, message: str = "") -> None:
        if journal is not None:
            journal.write(
                "end",
                tier=tier,
                case=found.name,
                outcome=outcome,
                message=message,
                seconds=round(time.monotonic() - start, 4),
            )

    if journal is not None:
        # Twice: for the test, and for closing what it has opened.
        silence_s = 2 * (_alarm_s(found, rigs) + _hard_limit_s(rigs))
        journal.write(
            "begin", tier=tier, case=found.name, clause=found.clause.id, silence_s=silence_s
        )
    try:
        try:
            with _limited(found, rigs, journal):
                function(rigs, **fixtures)
        finally:
            with _limited(found, rigs, journal):
                rigs.close()
    except Interrupted:
        # No end: the test has not been run.
        if journal is not None:
            journal.write("interrupted")
        raise
    except (Broken, OutOfTime) as error:
        clause_id = error.clause or found.clause.id
        rigs.findings.add(clause_id, error.message)
        # Seen while another clause was tested: that one could not be judged.
        end("failed" if clause_id == found.clause.id else "blocked", error.message)
        raise
    except HarnessError as error:
        end("error", str(error))
        raise
    except (KeyboardInterrupt, SystemExit) as error:
        # Not the user's, so the tier's: it must not end the run of all other tests.
        message = f"the tier raised {type(error).__name__} on the calling thread"
        rigs.findings.add(found.clause.id, message)
        end("failed", message)
        raise Broken(message) from error
    except BaseException as error:
        skipped = isinstance(error, (pytest.skip.Exception, pytest.xfail.Exception))
        end("skipped" if skipped else "error", f"{type(error).__name__}: {error}")
        raise
    end("passed")


def _alarm_s(found: Case, rigs: Rigs) -> float:
    limit_s = found.limit_s * rigs.budget.scale
    # A tier that hangs in many tests has been judged by the first of them.
    return limit_s if rigs.budget.is_patient else limit_s / _IMPATIENCE


def _hard_limit_s(rigs: Rigs) -> float:
    return max(_HARD_LIMIT_S * rigs.budget.scale, _LEAST_HARD_LIMIT_S)


@contextmanager
def _limited(found: Case, rigs: Rigs, journal: Journal | None) -> Iterator[None]:
    """Break a test off that takes too long, or that the user interrupts.

    First an alarm: it fails the test and dumps all threads. Where that comes to nothing, because
    native code holds the interpreter's lock or somebody catches everything, a watchdog in C ends
    the process. Where even that fails, the supervisor does.
    """
    limit_s = _alarm_s(found, rigs)

    def ring(_signal: int, frame: FrameType | None) -> None:
        rigs.budget.give_up()
        faulthandler.dump_traceback(all_threads=True)
        raise OutOfTime(f"the test did not end within {limit_s:g} s{_standing(frame)}")

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise Interrupted

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        signal.SIGALRM: signal.signal(signal.SIGALRM, ring),
        signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
    }
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    arm_watchdog(journal, limit_s + _hard_limit_s(rigs))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        disarm_watchdog()
        for number, handler in before.items():
            signal.signal(number, handler)


def _standing(frame: FrameType | None) -> str:
    """Say in which call of the tier the suite stands, or nothing when it stands in none."""
    called: FrameType | None = None
    while frame is not None and not frame.f_code.co_filename.startswith(_SUITE):
        called, frame = frame, frame.f_back
    if called is None or frame is None or called.f_code.co_filename == threading.__file__:
        return ""
    place = f"{Path(called.f_code.co_filename).name}:{called.f_lineno}"
    return f": it stands in {called.f_code.co_name} ({place})"
