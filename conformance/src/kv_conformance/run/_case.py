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
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kv_conformance.clauses import clause_of
from kv_conformance.harness import HarnessError
from kv_conformance.rig import Broken, OutOfTime
from kv_conformance.run._journal import journal_of_this_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from kv_conformance.clauses import Clause
    from kv_conformance.rig import Rigs

__all__ = ["CASES", "Case", "case"]

TestFunction: TypeAlias = "Callable[..., None]"

# Between the alarm, which dumps all threads and fails the test, and the end of the process.
_HARD_LIMIT_S: Final = 15.0


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
        journal.write("begin", tier=tier, case=found.name, clause=found.clause.id)
    try:
        try:
            with _alarm(found, rigs):
                function(rigs, **fixtures)
        finally:
            with _alarm(found, rigs):
                rigs.close()
    except (Broken, OutOfTime) as error:
        clause_id = error.clause or found.clause.id
        rigs.findings.add(clause_id, error.message)
        # Seen while another clause was tested: that one could not be judged.
        end("failed" if clause_id == found.clause.id else "blocked", error.message)
        raise
    except HarnessError as error:
        end("error", str(error))
        raise
    except BaseException as error:
        skipped = type(error).__module__.startswith("_pytest.outcomes")
        end("skipped" if skipped else "error", f"{type(error).__name__}: {error}")
        raise
    end("passed")


@contextmanager
def _alarm(found: Case, rigs: Rigs) -> Iterator[None]:
    """Break a test off that takes too long.

    First an alarm: it fails the test and dumps all threads. Where the interpreter cannot even run
    a signal handler, because native code holds its lock, a watchdog in C ends the process.
    """
    limit_s = found.limit_s * rigs.budget.scale

    def ring(_signal: int, _frame: FrameType | None) -> None:
        faulthandler.dump_traceback(all_threads=True)
        raise OutOfTime(f"the test did not end within {limit_s:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + _HARD_LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
