"""The process that the user started: it runs the tests in another one, and survives it.

A tier can take its process down: a segfault in native code, a deadlock that holds the
interpreter's lock, ``os._exit``. So the suite runs in a child that writes a journal, and this
process reads it. When the child dies in the middle of a test, that test has failed, its clause is
named, and the rest runs in a new child.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from kv_conformance.harness import HarnessError
from kv_conformance.rig._process import adopt_orphans, child_processes
from kv_conformance.run._journal import JOURNAL_VARIABLE, SUPERVISED, Journal, read_journal
from kv_conformance.run._options import INI_OVERRIDES
from kv_conformance.run._stacks import stacks_path, standing, timed_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from kv_conformance.run._options import Options

__all__ = ["WORKDIR_VARIABLE", "supervise"]

WORKDIR_VARIABLE: Final = "KV_CONFORMANCE_WORKDIR"
"""Names the folder for storages in the environment of the process that runs the tests."""

# A tier that crashes in every test has been judged long before the last one.
_MOST_CHILDREN: Final = 12
# One that hangs costs minutes each time.
_MOST_HANGS: Final = 2

# Outside of a test: to import, to start a server. In a test the alarm and the watchdog of the child
# come first; the test's own limit is in its event.
_SILENCE_S: Final = 300.0
_LOOK_S: Final = 0.25

# How long an interrupted child may take to put things away.
_PARTING_S: Final = 30.0
_ORPHANS_S: Final = 5.0

# Started without the working directory in the path: a file there named like a module of the
# suite must not replace it.
# It ends with its parent, and without waiting for threads that a tier may have left running.
_START: Final = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; "
    "import ctypes, os, types; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    f"import pytest; plugins = [types.ModuleType({SUPERVISED!r})]; "
    "status = int(pytest.main(sys.argv[1:], plugins=plugins)); "
    "[stream.flush() for stream in (sys.stdout, sys.stderr) if stream is not None]; "
    "os._exit(status)"
)
_USAGE_ERROR: Final = 4


def supervise(options: Options, arguments: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """Run the suite to its end, in as many processes as that takes.

    Args:
        options: What the user asked for.
        arguments: pytest's command line, as the user wrote it.

    Returns:
        Exit status of the last process, and all events.

    Raises:
        HarnessError: There is no place for storages.
    """
    scratch = _make_scratch(options.workdir)
    # Not below the folder of storages, which some harness may empty.
    notes = Path(tempfile.mkdtemp(prefix="kv-conformance-journal-"))
    journal = notes / "journal.jsonl"
    journal.touch(mode=0o600)
    adopt_orphans()
    spared = child_processes()
    hangs, status = 0, 0
    try:
        with _interrupted_by_sigterm():
            for number in range(_MOST_CHILDREN):
                seen = len(list(read_journal(journal)))
                stacks_path(journal).write_text("")
                ending = _run_child(arguments, journal, scratch / str(number), options.time_scale)
                status = ending.status
                _end_orphans(spared)
                hangs += ending.hung
                if not _close_open_test(journal, ending, seen) or hangs >= _MOST_HANGS:
                    break
        return status, list(read_journal(journal))
    except FileNotFoundError as error:
        _end_orphans(spared)
        message = f"the notes of the run were removed while it ran, so it is not judged ({error})"
        return status, [{"event": "problem", "message": message}]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(notes, ignore_errors=True)


def _make_scratch(workdir: Path | None) -> Path:
    try:
        if workdir is not None:
            workdir.mkdir(parents=True, exist_ok=True)
        # Absolute: a tier may change the working directory.
        return Path(tempfile.mkdtemp(prefix="kv-conformance-", dir=workdir)).absolute()
    except OSError as error:
        raise HarnessError(
            f"no folder for the storages of the run can be made: {error}. Name a place with "
            "--conformance-workdir DIR"
        ) from error


# -- one child ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a child has ended.

    Attributes:
        status: Its exit status, or the negative number of a signal.
        hung: Whether its watchdog or the supervisor had to end it.
        interrupted: Whether the user has interrupted the run.
        where: The frames in which it stood, if that is known.
    """

    status: int
    hung: bool
    interrupted: bool
    where: str

    @property
    def how(self) -> str:
        """What happened to it."""
        where = f", in {self.where}" if self.where else ""
        if self.hung:
            return f"hung until it was ended from outside{where}"
        if self.status >= 0:
            return f"ended with exit status {self.status}{where}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = f"signal {-self.status}"
        hint = {
            "SIGKILL": " (for lack of memory?)",
            **dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGABRT"), " (a crash in native code)"),
        }.get(name, "")
        return f"was ended by {name}{hint}{where}"


def _run_child(
    arguments: Sequence[str], journal: Path, workdir: Path, time_scale: float
) -> _Ending:
    workdir.mkdir(parents=True)
    notes = journal.with_name("hypothesis")
    overrides = [part for setting in INI_OVERRIDES for part in ("-o", setting)]
    optimized = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    command = [sys.executable, *optimized, "-c", _START, *overrides, *arguments]
    environment = {
        **os.environ,
        JOURNAL_VARIABLE: str(journal),
        WORKDIR_VARIABLE: str(workdir),
        # Hypothesis would leave a folder where the user stands.
        "HYPOTHESIS_STORAGE_DIRECTORY": str(notes),
    }
    if sys.stdout is not None:
        sys.stdout.flush()
    child = subprocess.Popen(command, env=environment)  # noqa: S603 - our own interpreter
    watch = _Watch(child, journal, max(1.0, time_scale) * _SILENCE_S)
    watch.start()
    try:
        status, interrupted = _wait(child)
    finally:
        watch.stop()
    stacks = stacks_path(journal).read_text(errors="replace")
    if sys.stderr is not None:
        sys.stderr.write(stacks)
    return _Ending(
        status,
        hung=watch.has_ended_it or timed_out(stacks),
        interrupted=interrupted,
        where=standing(stacks),
    )


def _wait(child: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Wait for a child, and see to it that an interrupt ends it, too.

    Returns:
        Its status, and whether there was an interrupt.
    """
    try:
        return child.wait(), False
    except KeyboardInterrupt:
        pass
    # A terminal has told the child as well; whoever sent the signal to this process alone has not.
    for parting_s, how in ((_PARTING_S / 10, signal.SIGINT), (_PARTING_S, signal.SIGKILL)):
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            return child.wait(timeout=parting_s), True
        child.send_signal(how)
    return child.wait(), True


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Treat the signal of a service manager as Ctrl-C: there is a report in any case."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@final
class _Watch:
    """Ends a child whose journal does not grow any more: even its watchdog has failed.

    **Who owns what.** Its own thread looks at the journal; ``has_ended_it`` is read after that
    thread has been joined.
    """

    def __init__(self, child: subprocess.Popen[bytes], journal: Path, silence_s: float) -> None:
        self.has_ended_it = False
        self._child = child
        self._journal = journal
        self._silence_s = silence_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        """Start to look."""
        self._thread.start()

    def stop(self) -> None:
        """The child has ended."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        size, since, allowed_s = -1, 0.0, 0.0
        while not self._ended.wait(_LOOK_S):
            try:
                now = self._journal.stat().st_size
            except FileNotFoundError:
                # Nobody can judge it any more.
                self._child.kill()
                return
            if now != size:
                size, since, allowed_s = now, time.monotonic(), self._allowed_s()
            elif time.monotonic() - since > allowed_s:
                self.has_ended_it = True
                self._child.kill()
                return

    def _allowed_s(self) -> float:
        running = _running(list(read_journal(self._journal)))
        # The watchdog, which says where the process stands, comes first.
        return self._silence_s if running is None else running["silence_s"] + 2.0


# -- after it -------------------------------------------------------------------------------


def _running(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the event of the test that has begun and not ended."""
    last = next((event for event in reversed(events) if event["event"] in _OF_A_TEST), None)
    return last if last is not None and last["event"] == "begin" else None


_OF_A_TEST: Final = ("start", "begin", "end", "stopping")


def _close_open_test(journal: Path, ending: _Ending, seen: int) -> bool:
    """Write down which test a child died in.

    Args:
        journal: The journal.
        ending: How the child has ended.
        seen: Events that were there before this child.

    Returns:
        Whether the rest should be run by another child.
    """
    events = list(read_journal(journal))[seen:]
    names = [event["event"] for event in events]
    if ending.interrupted:
        Journal(journal).write("problem", message="the run was interrupted")
        return False
    # An interrupt that reached the child alone is the tier's.
    if "finished" in names and "interrupted" not in names:
        return False
    begun = [event for event in events if event["event"] == "begin"]
    if ending.status == _USAGE_ERROR and not begun:
        return False
    notes = Journal(journal)
    how = "was interrupted from within" if "interrupted" in names else ending.how
    if not begun or ("stopping" in names and "interrupted" not in names):
        notes.write("problem", message=f"the process that runs the tests {how} outside of a test")
        return False
    # Between two tests, a thread of the first one is the likely cause.
    blamed, when = begun[-1], "during" if _running(events) or "interrupted" in names else "after"
    where = {"tier": blamed["tier"], "case": blamed["case"]}
    message = f"the process {how}, {when} {blamed['case']}"
    notes.write("died", **where, clause=blamed["clause"], message=message)
    notes.write("end", **where, outcome="failed", message=message, seconds=0.0)
    return True


def _end_orphans(spared: frozenset[int]) -> None:
    """End the processes that a child has left behind, and what they leave behind in turn."""
    end = time.monotonic() + _ORPHANS_S
    pause = threading.Event()
    while (orphans := child_processes() - spared) and time.monotonic() < end:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                # Not for ever: a process inside the kernel cannot even be killed.
                os.waitpid(pid, os.WNOHANG)
        pause.wait(0.01)
