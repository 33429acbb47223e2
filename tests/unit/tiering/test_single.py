"""One tier under another engine's manager: fence, deadlines, health, and every job ends once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_core.contract import (
    JobErrorKind,
    JobId,
    JobResult,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from kv_core.tiering import PARAMS_KEY, TierMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey
    from kv_core.tiering import SingleTier

A, B = ReqContext("a"), ReqContext("b")


def _slots(*slots: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(slots, dtype=np.int32)


def _load(single: SingleTier, keys: Sequence[OffloadKey], job_id: int = 7) -> None:
    single.submit_load(job_id, tuple(keys), _slots(*range(len(keys))), A)


def _store(single: SingleTier, keys: Sequence[OffloadKey], job_id: int = 9) -> None:
    single.submit_store(job_id, tuple(keys), _slots(*range(len(keys))), A)


def _fail_until_degraded(engine: Engine, single: SingleTier) -> None:
    engine.tier.raising.add("lookup")
    for number in range(engine.config.degrade_after_failures):
        assert (
            single.lookup(make_offload_key(bytes([number]), 1), ReqContext(f"r{number}")) is False
        )
    engine.tier.raising.clear()


# -- lookup -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [True, False, None])
def test_answers_come_through(
    start: Callable[..., Engine], keys: list[OffloadKey], answer: bool | None
) -> None:
    """LOOK: present, absent and unknown are what the tier says."""
    engine = start()
    single = engine.single()
    engine.tier.answers[keys[0]] = answer
    assert single.lookup(keys[0], A) is answer


def test_an_exception_is_absent(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """A tier that raises costs a recompute, and counts as an error."""
    engine = start()
    single = engine.single()
    engine.tier.raising.add("lookup")
    assert single.lookup(keys[0], A) is False
    assert single.guard.counts["errors"] == 1


def test_a_lookup_deadline_ends_the_wait(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """What a tier does not know by its own deadline is absent, and stays so for the request."""
    engine = start(lookup_deadline_s=5.0)
    single = engine.single()
    engine.tier.answers[keys[0]] = None
    assert single.lookup(keys[0], A) is None
    engine.clock.advance(5.1)
    assert single.lookup(keys[0], A) is False
    assert single.lookup(keys[0], A) is False
    assert single.lookup(keys[0], B) is None
    assert single.guard.counts["errors"] == 1


def test_a_request_waits_only_so_long(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """A tier may declare a longer deadline than requests wait."""
    engine = start(lookup_deadline_s=1000.0, request_lookup_deadline_s=3.0)
    single = engine.single()
    engine.tier.answers[keys[0]] = engine.tier.answers[keys[1]] = None
    assert single.lookup(keys[0], A) is None
    engine.clock.advance(3.1)
    assert single.lookup(keys[0], A) is False
    assert single.lookup(keys[1], A) is None, "its wait is over, and this is another"


def test_a_scheduled_request_begins_anew(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The patience of a request is for one wait, not for its life."""
    engine = start(lookup_deadline_s=1000.0, request_lookup_deadline_s=3.0)
    single = engine.single()
    engine.tier.answers[keys[0]] = None
    assert single.lookup(keys[0], A) is None
    single.on_schedule_end(ScheduleEndContext(frozenset({"a"})))
    engine.clock.advance(3.1)
    assert single.lookup(keys[0], A) is None


def test_a_client_may_forbid_loads_and_stores(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Wishes of a request count here as under our own engine."""
    engine = start()
    single = engine.single()
    engine.tier.has(keys[0])
    private = ReqContext("p", {PARAMS_KEY: {"load": False, "store": False}})
    assert single.lookup(keys[0], private) is False
    single.submit_store(1, (keys[1],), _slots(0), private)
    assert [outcome.is_complete for outcome in single.poll()] == [False]
    assert engine.tier.jobs == {}


# -- jobs ---------------------------------------------------------------------------------------


def test_a_load_ends_with_its_keys(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """A job that succeeded has one outcome, under the engine's own id."""
    engine = start()
    single = engine.single()
    engine.tier.has(*keys[:2])
    _load(single, keys[:2])
    assert single.poll() == []
    engine.tier.finish_all()
    [outcome] = single.poll()
    assert (outcome.job_id, outcome.is_promotion, outcome.is_complete) == (7, True, True)
    assert outcome.succeeded == tuple(keys[:2])
    assert single.poll() == []
    assert single.guard.counts["hits"] == 2


def test_a_partial_load_keeps_what_came(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Only the keys that failed are lost, and not asked for again by the request."""
    engine = start()
    single = engine.single()
    engine.tier.has(*keys[:3])
    _load(single, keys[:3])
    engine.tier.finish(engine.tier.loads[0], good=[keys[2], keys[0]])
    [outcome] = single.poll()
    assert (outcome.is_complete, outcome.succeeded) == (False, (keys[0], keys[2]))
    assert single.lookup(keys[1], A) is False
    assert single.lookup(keys[1], B) is True


def test_large_jobs_are_split_and_joined(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The tier's own limit of keys holds, and the engine sees one job."""
    engine = start(max_job_keys=2)
    single = engine.single()
    engine.tier.has(*keys[:5])
    _load(single, keys[:5])
    assert [len(job.keys) for job in engine.tier.loads] == [2, 2, 1]
    first, second, third = engine.tier.loads
    engine.tier.finish(second)
    engine.tier.finish(third, good=())
    assert single.poll() == []
    engine.tier.finish(first)
    [outcome] = single.poll()
    assert outcome.succeeded == tuple(keys[:4])


@pytest.mark.parametrize("kind", ["submit_load", "submit_store"])
def test_a_refused_job_ends(
    start: Callable[..., Engine], keys: list[OffloadKey], kind: str
) -> None:
    """An exception in submit is a failed job, not an exception."""
    engine = start()
    single = engine.single()
    engine.tier.raising.add(kind)
    (_load if kind == "submit_load" else _store)(single, keys[:1])
    [outcome] = single.poll()
    assert (outcome.is_complete, outcome.succeeded) == (False, ())
    assert single.num_jobs == 0


def test_an_empty_job_ends(start: Callable[..., Engine]) -> None:
    """JOB-4 holds towards the engine, too."""
    single = start().single()
    _store(single, [])
    assert [(outcome.job_id, outcome.is_complete) for outcome in single.poll()] == [(9, True)]


def test_nonsense_is_ignored(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """Unknown and repeated results reach no engine; vLLM would assert."""
    engine = start()
    single = engine.single()
    engine.tier.has(keys[0])
    _load(single, keys[:1])
    result = engine.tier.finish(engine.tier.loads[0])
    engine.tier.results += [result, JobResult(JobId(12345), success=True)]
    assert len(single.poll()) == 1
    assert single.guard.ignored_results == 2


# -- deadlines ----------------------------------------------------------------------------------


def test_an_overdue_load_is_given_up(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """Its request goes on; its slots are named until the tier lets go of them."""
    engine = start(promotion_deadline_s=10.0)
    single = engine.single()
    engine.tier.has(*keys[:2])
    _load(single, keys[:2])
    engine.clock.advance(10.1)
    [outcome] = single.poll()
    assert (outcome.is_complete, outcome.busy_slots) == (False, (0, 1))
    assert single.take_released() == []
    engine.tier.finish_all()
    assert single.poll() == []
    assert single.take_released() == [0, 1]
    assert single.guard.overdue_blocks == 0


def test_a_load_is_waited_for_where_slots_cannot_be_held(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """DATA-5: memory that a tier may still write to is given to nobody."""
    engine = start(promotion_deadline_s=10.0)
    single = engine.single(can_hold_slots=False)
    engine.tier.has(keys[0])
    _load(single, keys[:1])
    engine.clock.advance(10.1)
    assert single.poll() == []
    assert single.guard.counts["jobs_stalled"] == 1
    engine.tier.finish_all()
    assert [outcome.is_complete for outcome in single.poll()] == [True]


def test_of_a_split_load_only_the_rest_is_busy(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """What was reported in time is delivered with the rest given up."""
    engine = start(max_job_keys=1, promotion_deadline_s=10.0)
    single = engine.single()
    engine.tier.has(*keys[:2])
    _load(single, keys[:2])
    engine.tier.finish(engine.tier.loads[0])
    assert single.poll() == []
    engine.clock.advance(10.1)
    [outcome] = single.poll()
    assert (outcome.succeeded, outcome.busy_slots) == ((keys[0],), (1,))


def test_an_overdue_store_is_waited_for(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The tier may still read its slots: unpinned, they would be stored with other bytes."""
    engine = start(store_deadline_s=10.0)
    single = engine.single()
    _store(single, keys[:1])
    engine.clock.advance(10.1)
    assert single.poll() == []
    assert single.guard.health.failures == 1
    engine.tier.finish_all()
    assert [outcome.is_complete for outcome in single.poll()] == [True]


# -- health and back-pressure -------------------------------------------------------------------


def test_a_degraded_tier_has_nothing_and_takes_nothing(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A tier that failed repeatedly is not asked until its back-off has passed."""
    engine = start()
    single = engine.single()
    engine.tier.has(keys[0])
    _fail_until_degraded(engine, single)
    asked = len(engine.tier.lookups)
    assert single.lookup(keys[0], A) is False
    assert not single.admits(1)
    _load(single, keys[:1], job_id=1)
    _store(single, keys[1:2], job_id=2)
    outcomes = single.poll()
    assert [(outcome.job_id, outcome.is_complete) for outcome in outcomes] == [
        (1, False),
        (2, False),
    ]
    assert (len(engine.tier.lookups), engine.tier.jobs) == (asked, {})


def test_a_tier_on_probation_gets_one_block(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The rest of the first load after an outage is recomputed."""
    engine = start(degraded_backoff_s=1.0)
    single = engine.single()
    engine.tier.has(*keys[:3])
    _fail_until_degraded(engine, single)
    engine.clock.advance(1.1)
    _load(single, keys[:3])
    engine.tier.finish_all()
    [outcome] = single.poll()
    assert outcome.succeeded == (keys[0],)


def test_too_much_on_its_way_is_throttled(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """An idle tier gets any store; a busy one up to its limit of bytes."""
    engine = start(max_inflight_store_bytes=64)
    single = engine.single()
    assert single.admits(5)
    _store(single, keys[:1])
    assert single.admits(1)
    assert not single.admits(2)
    assert single.guard.counts["blocks_throttled"] == 2
    engine.tier.finish_all()
    single.poll()
    assert single.admits(5)


def test_a_read_only_tier_is_given_nothing(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Stores are refused without a word to the tier."""
    engine = start()
    single = engine.single(mode=TierMode.READ_ONLY)
    assert not single.admits(1)
    _store(single, keys[:1])
    assert [outcome.is_complete for outcome in single.poll()] == [False]
    assert engine.tier.jobs == {}


def test_declined_stores_do_not_degrade(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A full tier is healthy."""
    engine = start()
    single = engine.single()
    for number in range(5):
        _store(single, keys[number : number + 1], job_id=number)
        engine.tier.finish(engine.tier.stores[-1], good=(), kind=JobErrorKind.DECLINED)
        single.poll()
    assert single.guard.health.failures == 0
    assert single.guard.counts["blocks_declined"] == 5


# -- requests -----------------------------------------------------------------------------------


def test_the_policy_of_a_request_is_the_tiers(start: Callable[..., Engine]) -> None:
    """A tier that wants whole requests says so through us."""
    engine = start()
    single = engine.single()
    assert single.on_new_request(A) is OffloadPolicy.BLOCK_LEVEL
    engine.tier.policy = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
    assert single.on_new_request(B) is OffloadPolicy.REQUEST_LEVEL


def test_a_late_result_of_an_ended_request_counts(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """JOB-6: the end of the request does not lose the job."""
    engine = start()
    single = engine.single()
    engine.tier.has(keys[0])
    _load(single, keys[:1])
    single.on_request_finished(A)
    engine.tier.finish_all()
    assert [outcome.is_complete for outcome in single.poll()] == [True]


# -- drain and shutdown -------------------------------------------------------------------------


def test_a_drain_leaves_no_job(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """VLLM asserts that none is left: every job has an outcome afterwards, failed or not."""
    engine = start()
    single = engine.single()
    engine.tier.has(keys[0])
    _load(single, keys[:1], job_id=1)
    _store(single, keys[1:2], job_id=2)
    single.drain()
    assert sorted(outcome.job_id for outcome in single.poll()) == [1, 2]
    assert single.num_jobs == 0


def test_a_drain_without_jobs_asks_nobody(start: Callable[..., Engine]) -> None:
    """DRAIN-2: an idle tier is left in peace."""
    engine = start()
    engine.single().drain()
    assert "tier0.drain_jobs" not in engine.log


def test_a_job_that_a_drain_lost_has_failed(
    start: Callable[..., Engine], keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier has drained, so nothing touches the slots: the job is over, for want of a result."""
    engine = start()
    single = engine.single()
    _load(single, keys[:1])
    monkeypatch.setattr(engine.tier, "drain_jobs", lambda: ())
    single.drain()
    [outcome] = single.poll()
    assert (outcome.is_complete, outcome.busy_slots) == (False, ())


def test_a_drain_waits_for_what_cannot_be_stopped(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A transfer in the kernel is waited for, however long: its slots are about to be reused."""
    engine = start()
    single = engine.single()
    engine.tier.has(keys[0])
    _load(single, keys[:1])
    [job] = engine.tier.loads
    engine.tier.stuck = (job.job_id,)
    drained = threading.Event()

    def drain() -> None:
        single.drain()
        drained.set()

    thread = threading.Thread(target=drain)
    thread.start()
    assert not drained.wait(0.05)
    engine.tier.finish(job)
    assert drained.wait(20)
    thread.join()
    assert [outcome.is_complete for outcome in single.poll()] == [True]


def test_a_waiting_drain_says_so(
    start: Callable[..., Engine],
    keys: list[OffloadKey],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever looks into the log of an engine that stands finds the tier it waits for."""
    monkeypatch.setattr("kv_core.tiering._single._LOG_EVERY_S", 0.001)
    engine = start()
    single = engine.single()
    engine.tier.has(keys[0])
    _load(single, keys[:1])
    engine.tier.drain_gate = threading.Event()
    thread = threading.Thread(target=single.drain)
    thread.start()
    pause = threading.Event()
    while not caplog.messages:
        pause.wait(0.001)
    engine.tier.drain_gate.set()
    thread.join()
    assert "tier 'tier0': the drain has waited" in caplog.messages[0]


def test_a_drain_that_raises_is_no_end_of_jobs(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Nobody knows what its I/O does: only results end its jobs."""
    engine = start()
    single = engine.single()
    engine.tier.has(keys[0])
    _load(single, keys[:1])
    engine.tier.raising.add("drain_jobs")
    engine.tier.finish_all()
    single.drain()
    assert [outcome.is_complete for outcome in single.poll()] == [True]


def test_a_drain_frees_slots_of_given_up_loads(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """After a drain no slot is out of use: a reset hands all of them out again."""
    engine = start(promotion_deadline_s=10.0)
    single = engine.single()
    engine.tier.has(keys[0])
    _load(single, keys[:1])
    engine.clock.advance(10.1)
    assert len(single.poll()) == 1
    single.drain()
    assert single.poll() == []
    assert single.take_released() == [0]


def test_shutdown_tells_of_stuck_jobs(
    start: Callable[..., Engine], keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the memory has to know that it must stay mapped."""
    engine = start()
    single = engine.single()
    _store(single, keys[:1])
    [job] = engine.tier.stores
    engine.tier.stuck = (job.job_id,)
    monkeypatch.setattr(engine.tier, "shutdown", lambda: (job.job_id,))
    assert single.shutdown() == 1


def test_shutdown_flushes_stores(start: Callable[..., Engine], keys: list[OffloadKey]) -> None:
    """Blocks on their way reach the tier before it is closed."""
    engine = start()
    single = engine.single()
    _store(single, keys[:2])
    assert single.shutdown() == 0
    assert set(engine.tier.blocks) == set(keys[:2])


def test_a_tier_is_closed_at_the_interpreters_exit(
    start: Callable[..., Engine], keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that run at exit can start no thread, from Python 3.12 on."""
    engine = start()
    single = engine.single()
    _store(single, keys[:2])

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert single.shutdown() == 0
    assert set(engine.tier.blocks) == set(keys[:2])
    assert engine.log[-2:] == ["tier0.shutdown", "tier0.get_finished_jobs"]
