"""The same tier in another process, over the same storage.

A fresh interpreter, never a fork: a fork would inherit the threads' locks of whatever is open here.
The process talks over a socket pair; its error output goes to a file, to be shown when it dies. The
suite's thread owns everything in this module.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, Final, final

from kv_conformance.harness import HarnessError
from kv_conformance.rig._budget import OutOfTime
from kv_conformance.rig._findings import Broken

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kv_conformance.rig._budget import Budget
    from kv_conformance.rig._findings import Findings
    from kv_core.contract import JobError, OffloadKey

__all__ = ["Peer", "PeerOrder", "PeerProblem"]

# For a new interpreter and its imports, on top of what the tier declares.
_START_S: Final = 30.0
_ERROR_OUTPUT_CHARACTERS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOrder:
    """What a peer opens.

    Attributes:
        reference: How the declaration is found, see
            :attr:`~kv_conformance.rig._rigs.SubjectType.reference`.
        workdir: Folder of the tier in this run.
        scale: Of the budget.
        options: Arguments of :meth:`~kv_conformance.rig._rigs.Rigs.open`.
    """

    reference: str
    workdir: Path
    scale: float
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PeerProblem:
    """An exception, as it goes over the pipe.

    Attributes:
        kind: ``"broken"``, ``"late"`` or ``"harness"``.
        message: Its text.
        clause: Whose promise was broken, for the first two.
    """

    kind: str
    message: str
    clause: str | None = None


def _other_hash_seed() -> str:
    """Return another seed of Python's ``hash()`` than the one that is set here, if one is."""
    return "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"


@final
class Peer:
    """An open tier in another process.

    The process is started at once, and what it opens is waited for in the first call. Violations
    that it sees are put down as if they were seen here. Faults cannot be injected into peers.

    Args:
        order: What it opens.
        findings: Receives violations.
        budget: The time for waits.
        limit_s: The longest that one call of the tier may take, by what it declares.

    Attributes:
        failures: Errors of stores that :meth:`begin_storing` tried again.
    """

    def __init__(
        self, order: PeerOrder, *, findings: Findings, budget: Budget, limit_s: float
    ) -> None:
        self.failures: list[JobError | None] = []
        self._findings = findings
        self._budget = budget
        self._limit_s = limit_s
        self._reported: list[OffloadKey] = []
        self._answers: list[Any] = []
        self._problem: PeerProblem | None = None
        self._is_open = False
        self._is_gone = False
        self._has_ended = False
        self._errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed in _end
        self._pipe, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from kv_conformance.rig._peer_main import run_peer; "
            f"run_peer({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, no shell
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONHASHSEED": _other_hash_seed()},
            )
        self._pipe.send(order)

    # -- calls ----------------------------------------------------------------------------------

    def opened(self) -> None:
        """Wait until the tier is open.

        Raises:
            HarnessError: It cannot be opened.
        """
        if not self._is_open:
            self._until(
                lambda: bool(self._answers), "a peer did not open its tier", at_least_s=_START_S
            )
            self._answers.pop(0)
            self._is_open = True

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Store keys and expect success, with some patience; see :meth:`Rig.stored`."""
        self._call("stored", list(keys))

    def store(self, keys: Sequence[OffloadKey]) -> tuple[OffloadKey, ...]:
        """Store keys once and return those that are reported as stored."""
        stored: tuple[OffloadKey, ...] = self._call("store", list(keys))
        return stored

    def load(self, keys: Sequence[OffloadKey]) -> tuple[OffloadKey, ...]:
        """Load keys and return those that are reported as loaded; their bytes are checked."""
        loaded: tuple[OffloadKey, ...] = self._call("load", list(keys))
        return loaded

    def resolve(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Look keys up on behalf of a new request until every answer is known."""
        answers: list[bool] = self._call("resolve", list(keys))
        return answers

    def begin_storing(self, keys: Sequence[OffloadKey], *, at_once: int = 1) -> None:
        """Store keys in the background, each in a job of its own.

        Args:
            keys: In this order; the same key may occur again.
            at_once: How many jobs are in flight at a time.
        """
        self._reported.clear()
        self.failures.clear()
        self._call("begin_storing", list(keys), at_once)

    def reported(self) -> tuple[OffloadKey, ...]:
        """Return the keys reported as stored since :meth:`begin_storing`."""
        self._receive()
        return tuple(self._reported)

    def until_reported(self, count: int, *, clause: str = "JOB-1") -> None:
        """Wait until so many keys have been reported as stored.

        Raises:
            OutOfTime: They were not, within the time that so many jobs may take.
        """

        def enough() -> bool:
            self._receive()
            self._raise_problem()
            return len(self._reported) >= count

        self._budget.until(
            enough, f"{count} stores of a peer did not succeed", self._limit_s, clause=clause
        )

    # -- end ------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process the hard way (``kill -9``) and wait until it is gone. Idempotent."""
        self._process.kill()
        self._process.wait()
        # What it said in its last moments.
        self._receive()
        self._end()

    def close(self) -> None:
        """Shut the tier down and wait for the end of the process. Idempotent.

        Raises:
            OutOfTime: The process does not end: something of the tier is left in it (LIFE-2).
        """
        if self._has_ended:
            return
        try:
            if not self._is_gone:
                self.opened()
                self._send("close", ())
                self._until(lambda: self._is_gone, "the tier of a peer was not shut down")
            self._budget.until(
                lambda: self._process.poll() is not None,
                "the process of a peer did not end after the shutdown of its tier",
                0.0,
                clause="LIFE-2",
            )
            self._raise_problem()
        finally:
            self.kill()

    def _end(self) -> None:
        self._is_gone = True
        self._has_ended = True
        self._pipe.close()
        self._errors.close()

    # -- the pipe -------------------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any) -> Any:
        self.opened()
        self._send(method, arguments)
        return self._answer(f"{method!r} of a peer did not return", self._limit_s)

    def _send(self, method: str, arguments: tuple[Any, ...]) -> None:
        self._receive()
        self._raise_problem()
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise Broken(self._last_words()) from error

    def _answer(self, what: str, limit_s: float) -> Any:
        self._until(lambda: bool(self._answers), what, limit_s)
        return self._answers.pop(0)

    def _until(
        self,
        condition: Callable[[], bool],
        what: str,
        limit_s: float | None = None,
        *,
        at_least_s: float = 0.0,
    ) -> None:
        def arrived() -> bool:
            self._receive()
            self._raise_problem()
            if condition():
                return True
            if self._is_gone:
                raise Broken(self._last_words())
            return False

        limit_s = self._limit_s if limit_s is None else limit_s
        self._budget.until(arrived, what, limit_s, at_least_s=at_least_s)

    def _receive(self) -> None:
        """Take in what the peer has sent, without waiting."""
        if self._has_ended:
            return
        try:
            while self._pipe.poll():
                self._take(*self._pipe.recv())
        except (EOFError, OSError):
            self._is_gone = True

    def _take(self, kind: str, content: Any) -> None:
        if kind == "answer":
            self._answers.append(content)
        elif kind == "reported":
            self._reported.append(content)
        elif kind == "failed":
            self.failures.append(content)
        elif kind == "violation":
            self._findings.add(content.clause, content.message)
        elif kind == "problem":
            self._problem = self._problem or content
        else:
            self._is_gone = True

    def _raise_problem(self) -> None:
        """Raise here what was raised there, once."""
        problem, self._problem = self._problem, None
        if problem is None:
            return
        if problem.kind == "broken":
            raise Broken(problem.message, problem.clause)
        if problem.kind == "late":
            raise OutOfTime(problem.message, problem.clause)
        raise HarnessError(f"a peer process cannot do its part: {problem.message}")

    def _last_words(self) -> str:
        """Say how the process died."""
        self._process.wait()
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace")[-_ERROR_OUTPUT_CHARACTERS:]
        return (
            f"the process of a peer died with status {self._process.returncode}; "
            f"its last output: {output.strip() or 'none'}"
        )
