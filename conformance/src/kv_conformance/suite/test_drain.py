"""DRAIN: bringing jobs to an end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kv_conformance.harness import SHORT_DEADLINES, Deadlines, Fault
from kv_conformance.rig import CallWatch, expect
from kv_conformance.run._case import case
from kv_core.contract import Capability

if TYPE_CHECKING:
    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import JobId, OffloadKey

_BACKLOG: Final = 256

# A drain of a stalled storage takes as long as it may: no reason to let it have more.
_DRAIN_DEADLINES: Final = Deadlines(job_s=0.3, lookup_s=0.5)


def _poll_while_there_is_any(rig: Rig) -> None:
    """Collect what is available, without waiting for anything."""
    while rig.poll():
        pass


# -- DRAIN-1 ---------------------------------------------------------------------------------------


@case("DRAIN-1")
def test_after_a_drain_every_result_is_available(rigs: Rigs) -> None:
    """A drain in the middle of the work; polls right after it have all results."""
    rig = rigs.open(num_blocks=128)
    keys = rigs.keys(16)
    rig.stored(keys)
    for key in keys:
        rig.submit_load([key])
        rig.submit_store(rigs.keys(1))
    jobs = len(rig.jobs_in_flight)
    named = rig.drain()
    _poll_while_there_is_any(rig)
    missing = rig.jobs_in_flight - named
    expect(
        not missing,
        f"after drain_jobs had returned {len(named)} id(s), {len(missing)} of {jobs} jobs were "
        "neither among them nor reported by get_finished_jobs",
    )


def _stall_a_backlog(
    rigs: Rigs, deadlines: Deadlines = _DRAIN_DEADLINES
) -> tuple[Rig, list[OffloadKey]]:
    """Open a tier, store keys, stall the storage and submit a backlog of stores and loads.

    Returns:
        The rig, and the keys of the stores.
    """
    rig = rigs.open(num_blocks=_BACKLOG + 16, block_bytes=512, deadlines=deadlines, faults=True)
    keys = rigs.keys(8)
    rig.stored(keys)
    rig.inject(Fault.STALL)
    storing = rigs.keys(_BACKLOG // 2)
    for number, key in enumerate(storing):
        rig.submit_load([keys[number % len(keys)]])
        rig.submit_store([key])
    return rig, storing


@case("DRAIN-1")
def test_nothing_touches_the_memory_after_a_drain(rigs: Rigs) -> None:
    """Slots of jobs that a drain has brought to an end get a new owner; then the stall ends."""
    rig, storing = _stall_a_backlog(rigs)
    named = rig.drain()
    _poll_while_there_is_any(rig)
    # The rig has overwritten the slots of every job that was reported.
    rig.heal()

    def has_let_go() -> bool:
        changes = rig.region.unexpected_changes()
        expect(
            not changes,
            f"after drain_jobs, slots were written whose jobs were not named: {changes[:4]}",
        )
        rig.step()
        return not (named & rig.jobs_in_flight)

    rig.budget.until(has_let_go, "named jobs were not reported", rig.limits.job_deadline_s)
    rig.drain()
    has_let_go()
    rig.blame_bytes = "DRAIN-1"
    for key in storing[:32]:
        # Most have failed; none may have stored what came into its slot later.
        rig.load([key])


# -- DRAIN-2 ---------------------------------------------------------------------------------------

_AT_ONCE_S: Final = 1.0
_ATTEMPTS: Final = 3


def _expect_idle_drain(rig: Rig, when: str) -> None:
    quickest_s = float("inf")
    for _ in range(_ATTEMPTS):
        start = time.monotonic()
        rig.drain()
        quickest_s = min(quickest_s, time.monotonic() - start)
        if quickest_s < _AT_ONCE_S * rig.budget.scale:
            return
    expect(
        False,
        f"{when}, the quickest of {_ATTEMPTS} drains took {quickest_s:.1f} s",
    )


@case("DRAIN-2")
def test_the_drain_of_an_idle_tier_returns_at_once(rigs: Rigs) -> None:
    """Before any job, after jobs, after jobs that failed, and twice in a row."""
    rig = rigs.open(deadlines=Deadlines(job_s=5.0))
    _expect_idle_drain(rig, "before any job")
    keys = rigs.keys(4)
    rig.stored(keys)
    rig.expect_loads(keys)
    _expect_idle_drain(rig, "after jobs that were reported")
    rig.load(rigs.keys(1))
    rig.lose(keys[0])
    rig.load(keys[:1])
    rig.wait_all([rig.submit_load([]), rig.submit_store([])])
    _expect_idle_drain(rig, "after jobs that failed")


@case("DRAIN-2")
def test_questions_do_not_hold_up_a_drain(rigs: Rigs) -> None:
    """Lookups without an answer, and requests that go on, are no jobs."""
    rig = rigs.open(deadlines=Deadlines(job_s=5.0), faults=True)
    rig.inject(Fault.STALL)
    rig.ask_many(rigs.keys(4))
    rig.step()
    _expect_idle_drain(rig, "with lookups that a stalled storage does not answer")


# -- DRAIN-3 ---------------------------------------------------------------------------------------


@case("DRAIN-3")
def test_results_of_cancelled_jobs_appear(rigs: Rigs) -> None:
    """Whatever a drain does to a backlog, every job of it is reported in the end."""
    rig, _ = _stall_a_backlog(rigs)
    rig.drain()
    rig.heal()
    rig.wait_all(rig.jobs_in_flight, clause="DRAIN-3")


# -- DRAIN-4 ---------------------------------------------------------------------------------------


@case("DRAIN-4", limit_s=90.0)
def test_a_drain_ends_in_time_when_the_storage_stalls(rigs: Rigs) -> None:
    """And names the jobs that it could not stop: all of them, and no others."""
    for attempt in (1, 2):
        rig, _ = _stall_a_backlog(rigs)
        named, seconds = _drain_in_time(rig)
        _poll_while_there_is_any(rig)
        unreported = rig.jobs_in_flight
        expect(
            unreported <= named,
            f"drain_jobs named {len(named)} job(s), but {len(unreported - named)} others were not "
            "reported after it",
        )
        interruptible = (
            rigs.harness.stall_can_be_interrupted
            or Capability.WITHDRAWS_IO in rigs.spec.capabilities
        )
        expect(
            not (interruptible and named),
            f"drain_jobs named {len(named)} job(s) as impossible to stop, although the calls of "
            "this tier can be broken off",
        )
        rig.heal()
        rig.wait_all(unreported, clause="DRAIN-4")
        # A job may end between the return of the drain and the poll. Not twice.
        if named == unreported:
            return
        expect(
            attempt == 1,
            f"drain_jobs took {seconds:.2f} s and named {len(named)} job(s), of which "
            f"{len(named - unreported)} were reported at once: slots are kept that nothing touches",
        )


def _drain_in_time(rig: Rig) -> tuple[frozenset[JobId], float]:
    """Drain, and end the stall if the drain does not end without that."""
    limit_s = rig.limits.job_deadline_s
    start = time.monotonic()
    with CallWatch(rig, hanging_s=limit_s + rig.budget.grace_s) as watch:
        named = rig.drain()
    expect(
        not watch.hung,
        f"drain_jobs did not return within job_deadline_s = {limit_s:g} s (nor within "
        f"{rig.budget.grace_s:g} s of grace), until the stall was ended",
    )
    return named, time.monotonic() - start


# -- DRAIN-5 ---------------------------------------------------------------------------------------


def _expect_work(rig: Rig, rigs: Rigs) -> None:
    keys = rigs.keys(4)
    rig.stored(keys, clause="DRAIN-5")
    rig.until_loaded(keys, clause="DRAIN-5")
    expect(all(rig.resolve(keys, rig.new_request())), "a block stored after a drain was not found")


@case("DRAIN-5")
def test_the_tier_works_after_a_drain(rigs: Rigs) -> None:
    """An idle one, and one in the middle of the work."""
    rig = rigs.open(num_blocks=64, deadlines=Deadlines(job_s=5.0))
    rig.drain()
    _expect_work(rig, rigs)
    for _ in range(8):
        rig.submit_store(rigs.keys(1))
    rig.drain()
    _expect_work(rig, rigs)


@case("DRAIN-5")
def test_the_tier_works_after_a_drain_that_could_not_finish(rigs: Rigs) -> None:
    """Jobs were cancelled or given up; when the stall ends, later jobs run."""
    rig, _ = _stall_a_backlog(rigs, SHORT_DEADLINES)
    rig.drain()
    rig.heal()
    _expect_work(rig, rigs)
