"""LIFE: from the constructor to the end."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from kv_conformance.harness import SHORT_DEADLINES, Corruption, Fault
from kv_conformance.rig import Broken, Footprint, OutOfTime, expect
from kv_conformance.rig._attempt import attempt_open
from kv_conformance.rig._fork import use_in_fork
from kv_conformance.rig._process import failing_thread, few_descriptors
from kv_conformance.run._case import case
from kv_core.contract import Capability, ScheduleEndContext

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import JobId

# A thread that has been joined is in the kernel's list for a moment longer.
_MOMENT_S: Final = 2.0

# How long memory is watched while threads of the tier are left that may still write.
_WATCH_S: Final = 1.0

_DAMAGE: Final = (Corruption.TRUNCATED, Corruption.EMPTY, Corruption.OVERLONG)

# Which thread, or which descriptor, is the first that cannot be had.
_NUMBERS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def _work(rig: Rig, rigs: Rigs) -> None:
    """Do a little of everything that makes a tier start and open things."""
    keys = rigs.keys(4)
    rig.stored(keys)
    rig.resolve([*keys, *rigs.keys(2)])
    rig.load(keys[: rig.job_keys])
    rig.load(rigs.keys(1))
    rig.finish_request(rig.request)


# -- LIFE-1 ---------------------------------------------------------------------------------------


@case("LIFE-1", limit_s=15)
def test_a_second_shutdown_does_nothing(rigs: Rigs) -> None:
    """It returns, with nothing left in use."""
    rig = rigs.open()
    _work(rig, rigs)
    rig.shutdown()
    unfinished = rig.shutdown()
    expect(not unfinished, f"the second shutdown of an idle tier returned jobs: {unfinished!r}")


@case("LIFE-1", limit_s=15)
def test_a_tier_that_was_never_used_is_shut_down_twice(rigs: Rigs) -> None:
    """There is nothing to end, and no error either."""
    rig = rigs.open()
    rig.shutdown()
    rig.shutdown()


@case("LIFE-1", limit_s=15)
def test_a_shutdown_follows_a_drain(rigs: Rigs) -> None:
    """What the drain has ended, the shutdown finds ended; so does a second one."""
    rig = rigs.open()
    rig.submit_store(rigs.keys(2)[: rig.job_keys])
    rig.drain()
    rig.poll()
    rig.shutdown()
    rig.shutdown()


# -- LIFE-2 ---------------------------------------------------------------------------------------


def _meet_bad_objects(rig: Rig, rigs: Rigs) -> None:
    """Load objects that are lost or damaged, and repair them."""
    keys = rigs.keys(4)
    rig.stored(keys)
    rig.lose(keys[0])
    for key, how in zip(keys[1:], _DAMAGE, strict=True):
        rig.corrupt(key, how)
    for key in keys:
        rig.load([key])
    rig.stored(keys)


def _meet_an_outage(rig: Rig, rigs: Rigs) -> None:
    """Do a little of everything while the storage fails."""
    rig.inject(Fault.ERROR)
    keys = rigs.keys(2)[: rig.job_keys]
    rig.store(keys)
    rig.load(keys)
    rig.resolve(keys)
    rig.heal()


def _growth(rigs: Rigs, use: Callable[[Rig, Rigs], None], *, faults: bool = False) -> None:
    """Open, use and shut down several times, and expect that not every time leaves something.

    Growth and not presence: a library may keep a thread pool for ever once it has been used.
    """
    storage = rigs.storage()
    left: list[Footprint] = []
    for cycle in range(4):
        opening = rigs.opening(storage=storage, faults=faults)
        settings = rigs.harness.settings(opening)
        before = Footprint.now()
        rig = rigs.open(storage=storage, faults=faults, settings=settings)
        use(rig, rigs)
        rig.shutdown()
        # The first time is for what is started once and for all.
        if cycle:
            left.append(Footprint.now().since(before))
    try:
        rigs.budget.until(
            lambda: not all(footprint.still_there() for footprint in left),
            "what the tier had was not given back",
            0.0,
            grace_s=_MOMENT_S,
        )
    except OutOfTime:
        examples = ", ".join(sorted(left[-1].still_there())[:4])
        raise Broken(
            f"each time the tier is opened, used and shut down, something is left: {examples}"
        ) from None


@case("LIFE-2")
def test_opening_and_closing_leaves_nothing(rigs: Rigs) -> None:
    """No thread, process, socket or file, however often it is done."""
    _growth(rigs, _work)


@case("LIFE-2")
def test_failed_jobs_leave_nothing(rigs: Rigs) -> None:
    """What was opened for a job that failed is closed as well."""
    _growth(rigs, _meet_an_outage, faults=True)


@case("LIFE-2")
def test_bad_objects_leave_nothing(rigs: Rigs) -> None:
    """What was opened for an object that turned out lost or damaged is closed as well."""
    _growth(rigs, _meet_bad_objects)


# -- LIFE-3 ---------------------------------------------------------------------------------------


def _shut_down_in_flight(rig: Rig, rigs: Rigs, before: Footprint) -> frozenset[JobId]:
    """Shut down, and expect that to end in time. Returns the jobs that are said to go on."""
    jobs = rig.jobs_in_flight
    start = time.monotonic()
    unfinished = frozenset(rig.shutdown())
    seconds = time.monotonic() - start
    limit_s = rig.limits.job_deadline_s
    expect(
        seconds <= limit_s + rigs.budget.grace_s,
        f"shutdown took {seconds:.1f} s with jobs in flight, {limit_s:g} s are declared",
    )
    expect(
        unfinished <= jobs,
        f"shutdown returned ids of jobs that were not in flight: {sorted(unfinished - jobs)}",
    )
    _give_back(rig, jobs - unfinished)
    if rig.opening.faults:
        rig.heal()
    _watch(rig, before)
    return unfinished


def _give_back(rig: Rig, jobs: frozenset[JobId]) -> None:
    """Poison the slots of these jobs: they belong to somebody else now."""
    for job_id in jobs:
        slots = rig.slots_of(job_id)
        rig.region.end_load(slots)
        for slot in slots:
            rig.region.poison(slot)


def _watch(rig: Rig, before: Footprint) -> None:
    """Watch the memory for as long as a thread of the tier is there that could write to it."""
    pause, end = threading.Event(), time.monotonic() + _WATCH_S
    while True:
        came = Footprint.now().since(before).items
        working = any(item.startswith(("thread", "process")) for item in came)
        if changed := rig.region.unexpected_changes():
            places = ", ".join(f"{place} {slot}" for place, slot in changed[:4])
            raise Broken(f"the memory was written to after the shutdown: {places}")
        if not working or time.monotonic() > end:
            return
        pause.wait(0.01)


def _expect_no_late_reads(rig: Rig, rigs: Rigs) -> None:
    """Expect that of what was being stored, what is found has the right bytes."""
    again = rigs.open(storage=rig.opening.storage, faults=rig.opening.faults)
    again.blame_bytes = "LIFE-3"
    keys = sorted(again.list_keys())
    for start in range(0, len(keys), again.job_keys):
        again.load(keys[start : start + again.job_keys])


@case("LIFE-3")
def test_a_shutdown_with_jobs_in_flight_lets_go_of_the_memory(rigs: Rigs) -> None:
    """Carried out or cancelled, the jobs are over when it returns."""
    before = Footprint.now()
    rig = rigs.open(num_blocks=64)
    keys = rigs.keys(4)[: rig.job_keys]
    rig.stored(keys)
    for _ in range(4):
        rig.submit_store(rigs.keys(len(keys)))
        rig.submit_load(keys)
    unfinished = _shut_down_in_flight(rig, rigs, before)
    expect(
        not unfinished,
        f"{len(unfinished)} job(s) could not be stopped, although the storage is in order",
    )
    if Capability.PERSISTENT in rigs.spec.capabilities:
        _expect_no_late_reads(rig, rigs)


@case("LIFE-3", limit_s=30)
def test_a_shutdown_of_a_stalled_storage_ends(rigs: Rigs) -> None:
    """In time, and when the storage comes back, only the jobs that it named touch the memory."""
    before = Footprint.now()
    rig = rigs.open(num_blocks=64, faults=True, deadlines=SHORT_DEADLINES)
    keys = rigs.keys(2)[: rig.job_keys]
    rig.stored(keys)
    rig.inject(Fault.STALL)
    for _ in range(3):
        rig.submit_load(keys)
        rig.submit_store(rigs.keys(len(keys)))
        rig.ask(keys[0], rig.new_request())
        rig.step()
    unfinished = _shut_down_in_flight(rig, rigs, before)
    expect(
        not unfinished or Capability.WITHDRAWS_IO not in rigs.spec.capabilities,
        f"the tier declares WITHDRAWS_IO, but {len(unfinished)} job(s) could not be stopped",
    )
    if Capability.PERSISTENT in rigs.spec.capabilities and not unfinished:
        _expect_no_late_reads(rig, rigs)


# -- LIFE-4 ---------------------------------------------------------------------------------------


def _expect_clean(rigs: Rigs, before: Footprint, kept: str | None, failure: str) -> None:
    """Expect that an attempt which failed has left nothing."""
    expect(
        kept is None,
        f"after the constructor failed ({failure}), something still holds the memory: {kept}",
    )
    came = Footprint.now().since(before)
    try:
        rigs.budget.until(
            lambda: not came.still_there(), "what it had was not given back", 0.0, grace_s=_MOMENT_S
        )
    except OutOfTime:
        left = ", ".join(sorted(came.still_there())[:4])
        raise Broken(f"the constructor failed ({failure}) and has left behind: {left}") from None


def _warm_up(rigs: Rigs, storage: str) -> tuple[Footprint, int]:
    """Open the tier once, so that what libraries keep for ever is there.

    Returns:
        What the process owns afterwards, and the unfinished objects while the tier was open.
    """
    rig = rigs.open(storage=storage)
    _work(rig, rigs)
    leftovers = rig.count_leftovers()
    rig.shutdown()
    return Footprint.now(), leftovers


def _expect_usable(rigs: Rigs, storage: str, leftovers: int) -> None:
    """Expect that the storage can be opened and used, and holds nothing that nobody needs."""
    rig = rigs.open(storage=storage)
    more = rig.count_leftovers() - leftovers
    expect(more <= 0, f"failed constructors have left {more} unfinished object(s) in the storage")
    keys = rigs.keys(2)
    rig.stored(keys, clause="LIFE-4")
    expect(all(rig.resolve(keys)), "after a failed constructor, a stored key is not found")


@case("LIFE-4")
def test_a_storage_that_cannot_be_opened_costs_nothing(rigs: Rigs) -> None:
    """Not once, and not again and again."""
    storage = rigs.storage()
    before, leftovers = _warm_up(rigs, storage)
    for _ in range(2):
        settings = rigs.harness.unusable_settings(rigs.opening())
        if settings is None:
            return
        attempt = attempt_open(rigs.spec, settings)
        expect(attempt.error, "settings that cannot be used were opened without an error")
        _expect_clean(rigs, before, attempt.kept, attempt.error)
    _expect_usable(rigs, storage, leftovers)


@case("LIFE-4")
def test_a_thread_that_cannot_be_started_costs_nothing(rigs: Rigs) -> None:
    """The first, the second and so on: at a limit of threads, those before it end again."""
    storage = rigs.storage()
    before, leftovers = _warm_up(rigs, storage)
    for number in _NUMBERS:
        settings = rigs.harness.settings(rigs.opening(storage=storage))
        with failing_thread(number) as countdown:
            attempt = attempt_open(rigs.spec, settings)
        if not countdown.was_hit:
            break
        if attempt.error:
            _expect_clean(rigs, before, attempt.kept, f"thread {number} did not start")
    _expect_usable(rigs, storage, leftovers)


@case("LIFE-4")
def test_a_lack_of_descriptors_costs_nothing(rigs: Rigs) -> None:
    """With room for none, for one, for two and so on, until it is enough."""
    storage = rigs.storage()
    before, leftovers = _warm_up(rigs, storage)
    for number in (0, *_NUMBERS):
        settings = rigs.harness.settings(rigs.opening(storage=storage))
        under: AbstractContextManager[None] = few_descriptors(number)
        attempt = attempt_open(rigs.spec, settings, under=under)
        if not attempt.error:
            break
        failure = f"{os.strerror(errno.EMFILE)}: room for {number}"
        _expect_clean(rigs, before, attempt.kept, failure)
    _expect_usable(rigs, storage, leftovers)


# -- LIFE-5 ---------------------------------------------------------------------------------------


@case("LIFE-5")
def test_instances_with_storages_of_their_own_know_nothing_of_each_other(rigs: Rigs) -> None:
    """Neither of each other's blocks nor of each other's results, under the same keys."""
    first, second = rigs.open(), rigs.open()
    keys = rigs.keys(4)
    first.stored(keys, clause="LIFE-5")
    expect(
        not any(second.resolve(keys)), "a key stored through one instance was found by the other"
    )
    mine, shared = rigs.keys(2), keys[: second.job_keys]
    first.submit_load(shared)
    second.submit_store(shared)
    first.submit_store(mine[: first.job_keys])

    def reported() -> bool:
        for rig in (first, second):
            rig.call("on_schedule_end", ScheduleEndContext())
        # The other way round: whoever asks first must not be given everything.
        for rig in (second, first):
            rig.poll()
        return not first.jobs_in_flight and not second.jobs_in_flight

    rigs.budget.until(
        reported, "a job was not reported", first.limits.job_deadline_s, clause="LIFE-5"
    )
    second.stored(keys, clause="LIFE-5")
    expect(not any(second.resolve(mine)), "one instance found what the other had just stored")
    second.expect_loads(keys, clause="LIFE-5")


def _expect_work(rig: Rig, rigs: Rigs, known: list[bytes], what: str) -> None:
    """Expect that an instance finds what it has stored, and goes on working."""
    keys = [*known, *(new := rigs.keys(2))]
    rig.stored(new, clause="LIFE-5")
    expect(all(rig.resolve(keys)), f"{what}, stored keys are not found")  # type: ignore[arg-type]
    rig.expect_loads(keys, clause="LIFE-5")  # type: ignore[arg-type]


@case("LIFE-5")
def test_the_end_of_one_instance_is_not_that_of_another(rigs: Rigs) -> None:
    """In either order of their opening."""
    first, second, third = rigs.open(), rigs.open(), rigs.open()
    keys = rigs.keys(2)
    for rig in (first, second, third):
        rig.stored(keys, clause="LIFE-5")
    first.shutdown()
    _expect_work(second, rigs, [*keys], "after an older instance was shut down")
    third.shutdown()
    _expect_work(second, rigs, [*keys], "after a younger instance was shut down")


@case("LIFE-5")
def test_two_instances_share_a_storage(rigs: Rigs) -> None:
    """Where the tier can do that, the end of one leaves the other's blocks alone."""
    if Capability.SHARED not in rigs.spec.capabilities:
        return
    storage = rigs.storage()
    first, second = rigs.open(storage=storage), rigs.open(storage=storage)
    keys = rigs.keys(2)
    first.stored(keys, clause="LIFE-5")
    second.stored(rigs.keys(2), clause="LIFE-5")
    second.until_found(keys, second.limits.visibility_delay_s, clause="LIFE-5")
    first.shutdown()
    _expect_work(second, rigs, [*keys], "after another instance on the storage was shut down")


# -- LIFE-6 ---------------------------------------------------------------------------------------


@case("LIFE-6")
def test_a_fork_is_refused_or_served(rigs: Rigs) -> None:
    """It never waits for ever, and the process that has opened the tier does not notice."""
    rig = rigs.open(deadlines=SHORT_DEADLINES)
    keys = rigs.keys(2)
    rig.stored(keys)
    use_in_fork(rig, keys[0], rigs.key(), idle=True)
    more = rigs.keys(2)
    rig.stored(more, clause="LIFE-6")
    expect(all(rig.resolve([*keys, *more])), "after a fork, a stored key is not found any more")
    rig.expect_loads([*keys, *more], clause="LIFE-6")


@case("LIFE-6", limit_s=30)
def test_a_fork_of_a_busy_tier_does_not_hang(rigs: Rigs) -> None:
    """Threads that hold locks are not there in a fork, and their locks are held for ever."""
    rig = rigs.open(faults=True, deadlines=SHORT_DEADLINES)
    keys = rigs.keys(2)[: rig.job_keys]
    rig.stored(keys)
    if not use_in_fork(rig, keys[0], rigs.key(), idle=True):
        # It works there, so it would wait for the storage that is about to stall.
        return
    rig.inject(Fault.STALL)
    rig.submit_load(keys)
    rig.submit_store(rigs.keys(len(keys)))
    rig.ask(keys[0], rig.new_request())
    rig.step()
    use_in_fork(rig, keys[0], rigs.key(), idle=False)
    rig.heal()
    rig.wait_all(rig.jobs_in_flight, clause="LIFE-6")
