"""Uses a tier in a forked child, which can hang, crash or be told that this is not possible.

**Who owns what.** The child has one thread, writes what it is about to call into a pipe, and ends
without ever returning to the suite. An alarm that no Python code can hold up ends it when it hangs.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import TYPE_CHECKING, Final

import numpy as np

from kv_conformance.rig._findings import Broken
from kv_core.contract import JobId, JobMetadata, ReqContext, ScheduleEndContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

    from kv_conformance.rig._rig import Rig
    from kv_core.contract import OffloadKey

__all__ = ["use_in_fork"]

_DONE: Final = "done"
_REFUSED: Final = "refused"
_POLL_S: Final = 0.002
_GRACE_S: Final = 5.0

# No job of the suite gets as far.
_JOB_ID: Final = JobId(1 << 40)


def use_in_fork(rig: Rig, stored: OffloadKey, new: OffloadKey, *, idle: bool) -> bool:
    """Call the methods of a tier in a fork; each must raise or answer.

    Args:
        rig: The tier.
        stored: A key that is there.
        new: A key that is not.
        idle: Whether the storage answers: then what does not raise must also work.

    Returns:
        Whether the tier refused to do something there.

    Raises:
        Broken: The child hung, crashed or was refused without a word (LIFE-6).
    """
    limits = rig.limits
    # A drain and a shutdown may each take as long as a job.
    limit_s = 3 * limits.job_deadline_s + limits.lookup_deadline_s + _GRACE_S * rig.budget.scale
    (slot,) = rig.take_slots(1)
    rig.region.fill(slot, new)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forks with threads: that is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _child(rig, stored, new, slot, writing, limit_s, idle=idle)
    os.close(writing)
    try:
        log, status = _follow(pid, reading)
    finally:
        os.close(reading)
    if log and log[-1] == _DONE:
        silent = [line for line in log if line.endswith("!")]
        if silent:
            raise Broken(f"in a fork, {silent[0][:-1]} without a message", "LIFE-6")
        return _REFUSED in log
    calls = [line for line in log if line != _REFUSED]
    method = calls[-1] if calls else "the first call"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGALRM:
            raise Broken(f"in a fork, {method} did not come back within {limit_s:g} s", "LIFE-6")
        how = signal.Signals(number).name
        raise Broken(f"in a fork, {method} ended the process by {how}", "LIFE-6")
    raise Broken(f"in a fork, {method} ended the process", "LIFE-6")


def _follow(pid: int, reading: int) -> tuple[list[str], int]:
    """Read what the child writes until it is done or dead."""
    os.set_blocking(reading, False)
    text, status = b"", 0
    try:
        while True:
            # In this order: what it wrote before it died is read.
            ended, status = os.waitpid(pid, os.WNOHANG)
            try:
                while part := os.read(reading, 4096):
                    text += part
            except BlockingIOError:
                pass
            log = text.decode(errors="replace").splitlines()
            if ended or (log and log[-1] == _DONE):
                return log, status
            time.sleep(_POLL_S)
    finally:
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _child(
    rig: Rig,
    stored: OffloadKey,
    new: OffloadKey,
    slot: int,
    writing: int,
    limit_s: float,
    *,
    idle: bool,
) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        for name, call in _calls(rig, stored, new, slot, idle=idle):
            os.write(writing, f"{name}\n".encode())
            try:
                call()
            except Exception as error:  # noqa: BLE001 - any clear error will do
                os.write(writing, f"{_REFUSED}\n".encode())
                if not str(error).strip():
                    os.write(writing, f"{name} raised {type(error).__name__}!\n".encode())
        os.write(writing, f"{_DONE}\n".encode())
    finally:
        # Whatever happens, this process has no business in the suite.
        os._exit(0)


def _calls(
    rig: Rig, stored: OffloadKey, new: OffloadKey, slot: int, *, idle: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    tier, request = rig.tier, ReqContext("request-of-the-fork")
    block_ids = np.array([slot], dtype=np.int32)
    job = JobMetadata(_JOB_ID, (new,), block_ids, False, request, time.monotonic())

    def step() -> set[JobId]:
        tier.on_schedule_end(ScheduleEndContext())
        return {result.job_id for result in tier.get_finished_jobs()}

    def look_up() -> None:
        while tier.lookup(stored, request) is None and idle:
            step()
            time.sleep(_POLL_S)

    def store() -> None:
        tier.submit_store(job)
        while _JOB_ID not in step() and idle:
            time.sleep(_POLL_S)

    yield "on_new_request", lambda: tier.on_new_request(request)
    yield "lookup", look_up
    yield "submit_store", store
    yield "get_finished_jobs", step
    yield "on_request_finished", lambda: tier.on_request_finished(request)
    yield "get_stats", tier.get_stats
    yield "drain_jobs", tier.drain_jobs
    yield "shutdown", tier.shutdown
