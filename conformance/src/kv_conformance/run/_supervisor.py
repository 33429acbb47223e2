"""The process that the user started: it runs the tests in another one, and survives it.

A tier can take its process down: a segfault in native code, a deadlock that holds the
interpreter's lock, ``os._exit``. So the suite runs in a child that writes a journal, and this
process reads it. When the child dies in the middle of a test, that test has failed, its clause is
named, and the rest runs in a new child.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kv_conformance.run._journal import JOURNAL_VARIABLE, SUPERVISED, Journal, read_journal
from kv_conformance.run._options import INI_OVERRIDES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_conformance.run._options import Options

__all__ = ["WORKDIR_VARIABLE", "supervise"]

WORKDIR_VARIABLE: Final = "KV_CONFORMANCE_WORKDIR"
"""Names the folder for storages in the environment of the process that runs the tests."""

_MOST_CHILDREN: Final = 12

# No test takes this long without an event: an alarm and a watchdog end it before.
_SILENCE_S: Final = 600.0

# Started without the working directory in the path: a file there named like a module of the
# suite must not replace it.
# It ends without waiting for threads that a tier may have left running.
_START: Final = (
    "import os, sys, types; sys.path[:] = [entry for entry in sys.path if entry]; "
    f"import pytest; plugins = [types.ModuleType({SUPERVISED!r})]; "
    "status = int(pytest.main(sys.argv[1:], plugins=plugins)); "
    "sys.stdout.flush(); sys.stderr.flush(); os._exit(status)"
)
_USAGE_ERROR: Final = 4
_PR_SET_CHILD_SUBREAPER: Final = 36


def supervise(options: Options, arguments: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """Run the suite to its end, in as many processes as that takes.

    Args:
        options: What the user asked for.
        arguments: pytest's command line, as the user wrote it.

    Returns:
        Exit status of the last process, and all events.
    """
    scratch = Path(tempfile.mkdtemp(prefix="kv-conformance-", dir=options.workdir))
    journal = scratch / "journal.jsonl"
    journal.touch(mode=0o600)
    _adopt_orphans()
    try:
        for number in range(_MOST_CHILDREN):
            begun = sum(event["event"] == "begin" for event in read_journal(journal))
            status = _run_child(arguments, journal, scratch / str(number), options.time_scale)
            _end_orphans()
            if not _close_open_test(journal, status, begun):
                break
        return status, list(read_journal(journal))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_child(arguments: Sequence[str], journal: Path, workdir: Path, time_scale: float) -> int:
    workdir.mkdir()
    overrides = [part for setting in INI_OVERRIDES for part in ("-o", setting)]
    optimized = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    command = [sys.executable, *optimized, "-c", _START, *overrides, *arguments]
    environment = {
        **os.environ,
        JOURNAL_VARIABLE: str(journal),
        WORKDIR_VARIABLE: str(workdir),
    }
    sys.stdout.flush()
    child = subprocess.Popen(command, env=environment)  # noqa: S603 - our own interpreter
    ended = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(child, journal, ended, _SILENCE_S * time_scale), daemon=True
    )
    watch.start()
    try:
        return _wait(child)
    finally:
        ended.set()
        watch.join()


def _wait(child: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            # The terminal has told the child as well; it ends in its own way.
            with contextlib.suppress(KeyboardInterrupt):
                return child.wait(timeout=30)
            child.kill()


def _watch(
    child: subprocess.Popen[bytes], journal: Path, ended: threading.Event, silence_s: float
) -> None:
    """End a child whose journal has not grown for long: even its watchdog has failed."""
    size = -1
    while not ended.wait(silence_s):
        if (now := journal.stat().st_size) == size:
            child.kill()
            return
        size = now


def _close_open_test(journal: Path, status: int, begun: int) -> bool:
    """Write down which test the child died in.

    Returns:
        Whether the rest should be run by another child.
    """
    running: dict[str, Any] | None = None
    finished, count = False, 0
    for event in read_journal(journal):
        if event["event"] == "begin":
            running, count = event, count + 1
        elif event["event"] == "end":
            running = None
        elif event["event"] in ("finished", "interrupted"):
            finished = True
        elif event["event"] == "start":
            finished = False
    if finished:
        return False
    if status == _USAGE_ERROR and not begun:
        return False
    notes = Journal(journal)
    if running is None:
        how = _how(status)
        notes.write("problem", message=f"the process that runs the tests {how} outside of a test")
        return False
    where = {"tier": running["tier"], "case": running["case"]}
    message = f"the process {_how(status)} during {running['case']}"
    notes.write("died", **where, clause=running["clause"], message=message)
    notes.write("end", **where, outcome="failed", message=message, seconds=0.0)
    return count > begun


def _how(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        return f"was ended by {name}" + (
            " (a crash in native code)" if name in ("SIGSEGV", "SIGBUS", "SIGABRT") else ""
        )
    return f"ended with exit status {status}"


def _adopt_orphans() -> None:
    """Become the parent of what a dead child leaves behind, so that it can be ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_orphans() -> None:
    """End the processes that a child started and left behind."""
    children = Path("/proc/self/task")
    if not children.exists():
        return
    for task in children.iterdir():
        with contextlib.suppress(OSError):
            for word in (task / "children").read_text().split():
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(int(word), signal.SIGKILL)
                    os.waitpid(int(word), 0)
