"""Whatever a tier does to its process, there is a report that names a clause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from kv_conformance.mutants import MUTANTS
from kv_conformance.run._stacks import standing, timed_out

# Their limits are seconds then, not minutes.
SCALE: Final = "0.1"
LIMIT_S: Final = 100.0

CRASH: Final = """Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 327 in wait
  File "/lib/threading.py", line 982 in run

Current thread 0x00007f02 (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "/acme/tier.py", line 33 in read_block
  File "<string>", line 1 in <module>
"""
HANG: Final = """Timeout (0:00:20)!
Thread 0x00007f02 (most recent call first):
  File "/lib/threading.py", line 327 in wait

Thread 0x00007f01 (most recent call first):
  File "/acme/tier.py", line 12 in shutdown
  File "/suite/_rig.py", line 168 in call
"""


def suite(name: str, clause: str, *options: str) -> list[str]:
    """Return the command that runs the tests of one clause on a mutant."""
    command = [sys.executable, "-m", "pytest", "--conformance", "--conformance-clause", clause]
    return [*command, "--conformance-harness", f"kv_conformance.mutants:{name}", *options]


def report(folder: Path) -> dict[str, Any]:
    """Read the report, of one tier."""
    found: dict[str, Any] = json.loads((folder / "conformance-report.json").read_text())
    return found


def outcome(folder: Path, clause: str) -> tuple[str, list[str]]:
    """Return outcome and messages of a clause."""
    (tier,) = report(folder)["tiers"]
    (entry,) = [entry for entry in tier["clauses"] if entry["id"] == clause]
    return entry["outcome"], entry["messages"]


def survive(name: str, folder: Path, *, scale: str = SCALE) -> str:
    """Run a mutant on its clause, expect that it is named, and return what was found."""
    clause = MUTANTS[name].clause
    command = suite(name, clause, "--conformance-time-scale", scale)
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    result, messages = outcome(folder, clause)
    assert result == "failed", ended.stdout + ended.stderr
    assert f"{clause} failed" in ended.stdout
    return "\n".join(messages)


def test_the_frames_of_a_crash_are_those_of_its_thread() -> None:
    """The one that the fault handler calls current; frames without a file are left out."""
    assert standing(CRASH) == "string_at (__init__.py:519), called by read_block (tier.py:33)"
    assert not timed_out(CRASH)


def test_the_frames_of_a_hang_are_those_of_the_main_thread() -> None:
    """It is the last one in the list."""
    assert standing(HANG) == "shutdown (tier.py:12), called by call (_rig.py:168)"
    assert timed_out(HANG)


def test_nothing_is_made_up_about_a_process_that_left_no_frames() -> None:
    """Of os._exit there is nothing to say."""
    assert standing("") == ""
    assert not timed_out("")


@pytest.mark.slow
def test_a_crash_on_the_calling_thread_is_named(tmp_path: Path) -> None:
    """With the frame that crashed (nixl#1605); the other tests of the clause run all the same."""
    found = survive("crashes_on_the_caller", tmp_path)
    assert "was ended by SIGSEGV (a crash in native code), in string_at" in found


@pytest.mark.slow
def test_a_crash_on_a_worker_is_named(tmp_path: Path) -> None:
    """It is put down to the test that was running."""
    assert "SIGSEGV" in survive("crashes_on_a_worker", tmp_path)


@pytest.mark.slow
def test_an_exit_with_status_zero_is_no_success(tmp_path: Path) -> None:
    """Not even when all that ran until then had passed (sglang#38428)."""
    assert "ended with exit status 0" in survive("exits_in_a_worker", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["deadlocks_with_the_interpreter", "disarms_the_alarm", "catches_everything"]
)
def test_a_hang_that_no_alarm_ends_is_named(name: str, tmp_path: Path) -> None:
    """Native code holds the interpreter's lock (LMCache#4676), or the alarm comes to nothing."""
    found = survive(name, tmp_path)
    assert "hung until it was ended from outside" in found
    assert "called by shutdown (_worst.py:" in found


@pytest.mark.slow
def test_a_process_that_is_stopped_is_ended_by_the_supervisor(tmp_path: Path) -> None:
    """No thread of it runs any more, the watchdog's neither."""
    assert "hung until it was ended from outside" in survive("stops_the_process", tmp_path)


@pytest.mark.slow
def test_an_endless_thread_does_not_keep_the_run_from_ending(tmp_path: Path) -> None:
    """The interpreter would wait for it at its end (LMCache#265)."""
    assert "(endless)" in survive("has_an_endless_thread", tmp_path, scale="1")


@pytest.mark.slow
def test_a_submit_that_never_returns_is_named_with_its_place(tmp_path: Path) -> None:
    """The alarm says in which method of the tier the suite stands (llm-d-kv-cache#457)."""
    assert "it stands in submit_store (_worst.py:" in survive("never_returns", tmp_path)


@pytest.mark.slow
def test_an_exit_that_a_tier_raises_is_a_broken_promise(tmp_path: Path) -> None:
    """SystemExit and KeyboardInterrupt are exceptions like any other when a tier raises them."""
    assert "submit_load raised SystemExit" in survive("exits_in_submit", tmp_path, scale="1")


@pytest.mark.slow
def test_an_interrupt_from_within_is_the_tiers(tmp_path: Path) -> None:
    """The user has not interrupted anything, so the rest of the clause's tests still run."""
    found = survive("interrupts_the_main_thread", tmp_path, scale="1")
    assert "the process was interrupted from within" in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eats_all_memory", "closes_all_descriptors"])
def test_a_process_without_resources_still_has_a_report(name: str, tmp_path: Path) -> None:
    """It is written by another process."""
    assert survive(name, tmp_path)


def begun(tmp_path: Path) -> int | None:
    """Return how many tests have begun, once the journal is there."""
    for journal in tmp_path.glob("notes/kv-conformance-*/journal.jsonl"):
        return journal.read_text().count('"begin"')
    return None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_has_a_report_and_no_orphans(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Also when the signal reaches the supervisor alone, as from a service manager."""
    options = ("--conformance-workdir", "work")
    (tmp_path / "notes").mkdir()
    process = subprocess.Popen(
        suite("disarms_the_alarm", "LIFE-1", *options),
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "notes")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + LIMIT_S
        while not begun(tmp_path) and time.monotonic() < end:
            os.sched_yield()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode not in (0, -number), output
    assert "the run was interrupted" in report(tmp_path)["problems"]
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert not list((tmp_path / "work").iterdir())
    assert not list((tmp_path / "notes").iterdir())
