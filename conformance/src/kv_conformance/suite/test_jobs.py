"""JOB: what becomes of a submitted job."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kv_conformance.harness import SHORT_DEADLINES, Deadlines, Fault
from kv_conformance.rig import expect, watch_calls
from kv_conformance.run._case import case
from kv_core.contract import Capability, ReqContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import JobId, OffloadKey

# More jobs than any tier runs at the same time: whoever claims that more than half of them are
# running has no limit, and a limit is what a backlog needs.
_BACKLOG: Final = 512


def _parts(rig: Rig, keys: Sequence[OffloadKey]) -> list[list[OffloadKey]]:
    """Divide keys into jobs of one key, two keys, three, and so on."""
    parts, start, size = [], 0, 1
    while start < len(keys):
        part = list(keys[start : start + min(size, rig.job_keys)])
        parts.append(part)
        start, size = start + len(part), size + 1
    return parts


def _expect_silence(rig: Rig) -> None:
    """Go on for a while: the rig puts everything down that nobody waits for."""
    for _ in range(20):
        rig.step()
    rig.drain()
    for _ in range(5):
        rig.step()


# -- JOB-1 -----------------------------------------------------------------------------------------


@case("JOB-1")
def test_every_job_is_reported_exactly_once(rigs: Rigs) -> None:
    """Stores and loads of all sizes, side by side, and nothing more when all are reported."""
    rig = rigs.open(num_blocks=128, deadlines=SHORT_DEADLINES)
    keys = rigs.keys(21)
    rig.wait_all([rig.submit_store(part) for part in _parts(rig, keys)])
    jobs = [rig.submit_load(part) for part in _parts(rig, keys)]
    jobs += [rig.submit_store(part) for part in _parts(rig, rigs.keys(21))]
    jobs += [rig.submit_load(part) for part in _parts(rig, keys[::-1])]
    rig.wait_all(jobs)
    _expect_silence(rig)


@case("JOB-1")
def test_jobs_with_an_unusual_outcome_are_reported_exactly_once(rigs: Rigs) -> None:
    """A load that finds some of its blocks, or none; a store of what is there already."""
    rig = rigs.open(num_blocks=64, deadlines=SHORT_DEADLINES)
    stored = rigs.keys(3)
    rig.stored(stored)
    mixed = [key for pair in zip(stored, rigs.keys(3), strict=True) for key in pair]
    size = min(len(mixed), rig.job_keys)
    rig.wait_all([rig.submit_load(mixed[:size]), rig.submit_load(rigs.keys(size))])
    rig.wait_all([rig.submit_store(part) for part in _parts(rig, stored)])
    rig.wait_all([rig.submit_store(part) for part in _parts(rig, mixed)])
    _expect_silence(rig)


@case("JOB-1")
def test_a_drain_repeats_no_result_and_loses_none(rigs: Rigs) -> None:
    """Results that nobody had collected before a drain come once after it."""
    rig = rigs.open(num_blocks=64, deadlines=SHORT_DEADLINES)
    keys = rigs.keys(10)
    jobs = [rig.submit_store(part) for part in _parts(rig, keys)]
    jobs += [rig.submit_load(rigs.keys(1))]
    rig.drain()
    rig.wait_all(jobs)
    _expect_silence(rig)


# -- JOB-2 -----------------------------------------------------------------------------------------


def _expect_not_loaded(rig: Rig, keys: Sequence[OffloadKey], what: str) -> None:
    loaded = rig.load(keys)
    expect(
        loaded.result.success is False,
        f"a load of {len(keys)} {what} was reported with success={loaded.result.success!r}",
    )
    expect(not loaded.keys, f"a load of {what} named {len(loaded.keys)} of them as loaded")


@case("JOB-2")
def test_a_load_of_what_was_never_stored_fails(rigs: Rigs) -> None:
    """Without a lookup before, after one that said so, and of more than one block."""
    rig = rigs.open()
    rig.blame_bytes = "JOB-2"
    _expect_not_loaded(rig, rigs.keys(1), "keys that were never stored")
    _expect_not_loaded(rig, rigs.keys(min(4, rig.job_keys)), "keys that were never stored")
    asked = rigs.keys(min(3, rig.job_keys))
    rig.resolve(asked)
    _expect_not_loaded(rig, asked, "keys that a lookup found absent")


@case("JOB-2")
def test_a_load_that_finds_only_some_blocks_is_no_success(rigs: Rigs) -> None:
    """It may name the blocks it found, or none; it must not claim all."""
    rig = rigs.open()
    rig.blame_bytes = "JOB-2"
    if rig.job_keys < 2:
        return
    stored = rigs.key()
    rig.stored([stored])
    absent = rigs.key()
    loaded = rig.load([stored, absent])
    expect(
        loaded.result.success is False,
        "a load of a stored key and of one that was never stored was reported as a success",
    )
    expect(absent not in loaded.keys, "a key that was never stored was named as loaded")


def _expect_honest_stores(rig: Rig, rigs: Rigs, fault: Fault) -> None:
    """Store while the storage is out of order; what is called a success must be one."""
    rig.inject(fault)
    stored: list[OffloadKey] = []
    for _ in range(3):
        keys = rigs.keys(min(2, rig.job_keys))
        # One after the other: the second is submitted to a tier that knows of the trouble.
        result = rig.store(keys)
        stored += keys if result.success else result.successful_keys
    rig.heal()
    for key in stored:
        expect(
            rig.load([key]).keys,
            f"a store during the fault {fault.value!r} was reported as a success, but what it "
            "stored cannot be loaded",
        )


@case("JOB-2")
def test_jobs_during_an_outage_are_reported_as_failed(rigs: Rigs) -> None:
    """While everything fails: loads fail, stores fail or have stored, and no submit raises."""
    rig = rigs.open(faults=True)
    rig.blame_bytes = "JOB-2"
    rig.inject(Fault.ERROR)
    for _ in range(3):
        _expect_not_loaded(rig, rigs.keys(min(2, rig.job_keys)), "keys while everything fails")
    _expect_honest_stores(rig, rigs, Fault.ERROR)


@case("JOB-2")
def test_stores_on_a_full_storage_are_reported_as_failed(rigs: Rigs) -> None:
    """While there is no space: stores fail or have stored, and no submit raises."""
    rig = rigs.open(faults=True)
    if Fault.FULL in rigs.harness.faults:
        _expect_honest_stores(rig, rigs, Fault.FULL)


# -- JOB-3 -----------------------------------------------------------------------------------------


@case("JOB-3")
def test_one_poll_returns_everything_that_is_finished(rigs: Rigs) -> None:
    """After a drain all jobs are finished, so the first poll has them all."""
    rig = rigs.open(num_blocks=64)
    keys = rigs.keys(10)
    rig.stored(keys)
    for part in _parts(rig, keys):
        rig.submit_load(part)
        rig.submit_store(rigs.keys(1))
    rig.drain()
    first = len(rig.poll())
    later = 0
    while found := len(rig.poll()):
        later += found
    expect(
        not later,
        f"of {first + later} finished jobs, the first get_finished_jobs returned {first} and "
        f"later calls the other {later}",
    )


@case("JOB-3", limit_s=30.0)
def test_a_poll_does_not_wait_for_a_job(rigs: Rigs) -> None:
    """With jobs in flight that cannot end, it returns what there is: nothing."""
    rig = rigs.open(faults=True)
    keys = rigs.keys(2)
    rig.stored(keys)
    rig.inject(Fault.STALL)
    for key in keys:
        rig.submit_store(rigs.keys(1))
        rig.submit_load([key])

    def poll() -> None:
        for _ in range(12):
            rig.poll()

    waiting = watch_calls(rig, poll)
    expect(not waiting, "; ".join(finding.message for finding in waiting))


# -- JOB-4 -----------------------------------------------------------------------------------------


@case("JOB-4")
def test_an_empty_job_is_reported(rigs: Rigs) -> None:
    """One of each kind, alone: nothing else happens that could take it along."""
    rig = rigs.open(deadlines=SHORT_DEADLINES)
    rig.wait(rig.submit_store([]), clause="JOB-4")
    rig.wait(rig.submit_load([]), clause="JOB-4")
    rig.wait_all([rig.submit_load([]), rig.submit_store([]), rig.submit_load([])], clause="JOB-4")


# -- JOB-5 -----------------------------------------------------------------------------------------


def _may_stay_unreported(rigs: Rigs) -> bool:
    """Say whether running I/O may outlast the deadline."""
    return not (
        rigs.harness.stall_can_be_interrupted or Capability.WITHDRAWS_IO in rigs.spec.capabilities
    )


@case("JOB-5", limit_s=90.0)
def test_jobs_end_in_time_when_the_storage_stalls(rigs: Rigs) -> None:
    """A long backlog: what has not begun fails in time, what cannot be withdrawn is counted."""
    rig = rigs.open(num_blocks=_BACKLOG, block_bytes=512, deadlines=SHORT_DEADLINES, faults=True)
    keys = rigs.keys(16)
    rig.stored(keys)
    before = rig.stats().get("stalled_jobs", 0.0)
    rig.inject(Fault.STALL)
    jobs = []
    for number in range(_BACKLOG // 2):
        jobs.append(rig.submit_load([keys[number % len(keys)]]))
        jobs.append(rig.submit_store(rigs.keys(1)))

    def unreported() -> int:
        rig.step()
        return len(rig.jobs_in_flight)

    if _may_stay_unreported(rigs):
        rig.budget.until(
            lambda: unreported() <= _BACKLOG // 2,
            f"more than half of {_BACKLOG} queued jobs were not reported: no pool is that large, "
            "so most of them have not begun, and what has not begun should fail",
            rig.limits.job_deadline_s,
        )
        # Measured after the poll that may have moved it.
        rig.budget.until(
            lambda: unreported() <= rig.stats().get("stalled_jobs", 0.0) - before,
            f"of {_BACKLOG} jobs some were neither reported nor counted in 'stalled_jobs'",
            rig.limits.job_deadline_s,
        )
    else:
        rig.wait_all(jobs, clause="JOB-5")
    rig.heal()
    rig.wait_all(jobs, clause="JOB-5")


@case("JOB-5", limit_s=90.0)
def test_large_jobs_end_in_time_when_the_storage_stalls(rigs: Rigs) -> None:
    """A job of many blocks, some begun and some not, ends as a whole."""
    rig = rigs.open(num_blocks=64, deadlines=Deadlines(job_s=0.4), faults=True)
    keys = rigs.keys(16)
    rig.stored(keys)
    before = rig.stats().get("stalled_jobs", 0.0)
    rig.inject(Fault.STALL)
    size = rig.job_keys
    jobs: list[JobId] = [
        rig.submit_load(keys[start : start + size]) for start in range(0, 16, size)
    ]
    jobs += [rig.submit_store(rigs.keys(size)) for _ in range(2)]
    if _may_stay_unreported(rigs):

        def accounted_for() -> bool:
            rig.step()
            stalled = rig.stats().get("stalled_jobs", 0.0) - before
            return len(rig.jobs_in_flight) <= stalled

        rig.budget.until(
            accounted_for,
            f"of {len(jobs)} jobs some were neither reported nor counted in 'stalled_jobs'",
            rig.limits.job_deadline_s,
        )
    else:
        rig.wait_all(jobs, clause="JOB-5")
    rig.heal()
    rig.wait_all(jobs, clause="JOB-5")


# -- JOB-6 -----------------------------------------------------------------------------------------


@case("JOB-6")
def test_the_end_of_the_request_does_not_lose_its_results(rigs: Rigs) -> None:
    """The request ends right after it has submitted a store, and another after a load."""
    rig = rigs.open(deadlines=SHORT_DEADLINES)
    key = rigs.key()
    rig.stored([key])
    jobs = []
    for _ in range(4):
        request = rig.new_request()
        jobs.append(rig.submit_store(rigs.keys(1), request=request))
        jobs.append(rig.submit_load([key], request=request))
        rig.finish_request(request)
    rig.wait_all(jobs, clause="JOB-6")


@case("JOB-6")
def test_the_end_of_the_request_does_not_lose_jobs_in_flight(rigs: Rigs) -> None:
    """The jobs are in flight for certain when their request ends: the storage stalls until then."""
    rig = rigs.open(deadlines=Deadlines(job_s=5.0), faults=True)
    keys = rigs.keys(2)
    rig.stored(keys)
    request = rig.new_request()
    rig.inject(Fault.STALL)
    jobs = [rig.submit_load([key], request=request) for key in keys]
    jobs += [rig.submit_store(rigs.keys(1), request=request) for _ in range(2)]
    rig.step()
    rig.finish_request(request)
    rig.step()
    rig.heal()
    rig.wait_all(jobs, clause="JOB-6")


@case("JOB-6")
def test_an_id_that_comes_back_does_not_lose_the_jobs_of_the_request_before(rigs: Rigs) -> None:
    """Their request has ended, they have not, and another request of the same name begins."""
    rig = rigs.open(deadlines=Deadlines(job_s=5.0), faults=True)
    keys = rigs.keys(2)
    rig.stored(keys)
    rig.inject(Fault.STALL)
    jobs = []
    for _life in range(2):
        request = ReqContext("comes back")
        rig.announce(request)
        jobs += [rig.submit_load([key], request=request) for key in keys]
        jobs += [rig.submit_store(rigs.keys(1), request=request)]
        rig.step()
        rig.finish_request(request)
    rig.heal()
    rig.wait_all(jobs, clause="JOB-6")


# -- JOB-7 -----------------------------------------------------------------------------------------


@case("JOB-7")
def test_a_bad_object_fails_its_own_job_only(rigs: Rigs) -> None:
    """Jobs before, beside and after a load of an object that is gone do what they should."""
    rig = rigs.open(num_blocks=64)
    keys = rigs.keys(6)
    rig.stored(keys)
    for lost in keys[1:3]:
        rig.lose(lost)
    jobs = {key: rig.submit_load([key]) for key in keys}
    rig.wait_all(jobs.values())
    others = [key for key in keys if key not in keys[1:3]]
    failed = [key for key in others if not rig.results[jobs[key]].success]
    expect(
        not failed,
        f"{len(failed)} of {len(others)} loads failed beside loads of two objects that are gone",
    )
    # With nothing else in flight, the next job is the one after a failure.
    rig.wait_all([rig.submit_load([keys[1]])])
    after = rig.submit_load([others[0]])
    rig.wait_all([after])
    expect(
        rig.results[after].success,
        "the load after that of an object that is gone failed, though its own object is there",
    )
    rig.stored(rigs.keys(4), clause="JOB-7")
    rig.expect_loads(others)


@case("JOB-7", limit_s=120.0)
def test_jobs_run_again_after_an_outage(rigs: Rigs) -> None:
    """More errors than any tier has threads: afterwards jobs and lookups of all kinds work."""
    rig = rigs.open(num_blocks=_BACKLOG, block_bytes=512, deadlines=SHORT_DEADLINES, faults=True)
    keys = rigs.keys(8)
    rig.stored(keys)
    rig.inject(Fault.ERROR)
    jobs = []
    for number in range(_BACKLOG // 2):
        jobs.append(rig.submit_load([keys[number % len(keys)]]))
        jobs.append(rig.submit_store(rigs.keys(1)))
    rig.wait_all(jobs, clause="JOB-7")
    for _ in range(8):
        request = rig.new_request()
        rig.resolve(rigs.keys(2), request)
        rig.finish_request(request)
    rig.heal()
    rig.wait_all([rig.submit_store(rigs.keys(1)), rig.submit_load(keys[:1])], clause="JOB-7")
    rig.stored(rigs.keys(4), clause="JOB-7")
    rig.until_found(keys, rig.limits.error_backoff_s, clause="JOB-7")
    rig.until_loaded(keys, clause="JOB-7")


# -- JOB-8 -----------------------------------------------------------------------------------------

_STORES: Final = 200
_LATE: Final = _STORES * 3 // 4
_ROUNDS: Final = 3
_POLL_S: Final = 0.0005


@case("JOB-8", limit_s=120.0)
def test_a_load_overtakes_a_backlog_of_stores(rigs: Rigs) -> None:
    """Submitted last, it is not reported after most of them, three times in a row.

    The storage stalls while the jobs are submitted, so the backlog is there for certain. Only
    the order counts: stores that are reported by the same poll as the load are not before it.
    """
    rig = rigs.open(num_blocks=_STORES + 8, block_bytes=512, faults=True)
    key = rigs.key()
    for _ in range(_ROUNDS):
        rig.stored([key])
        rig.inject(Fault.STALL)
        stores = [rig.submit_store(rigs.keys(1)) for _ in range(_STORES)]
        load = rig.submit_load([key])
        rig.heal()
        if _stores_before(rig, load) < _LATE:
            return
        rig.wait_all(stores)
    expect(
        False,
        f"{_ROUNDS} times in a row, {_LATE} or more of {_STORES} queued stores were reported "
        "before the load that was submitted after them",
    )


def _stores_before(rig: Rig, load: JobId) -> int:
    """Wait for a load; return how many other jobs an earlier poll reported."""
    before, pause = 0, threading.Event()

    def reported() -> bool:
        nonlocal before
        # Often, for a while: the order can only be told between polls.
        for _ in range(100):
            found = len(rig.step())
            if load in rig.results:
                return True
            before += found
            pause.wait(_POLL_S)
        return False

    rig.budget.until(reported, "the load was not reported", rig.limits.job_deadline_s)
    return before
