"""The checker of the engine's guarantees sees every breach, and none where there is none."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typing_extensions import override

from kv_conformance.checker import GUARANTEES, Breach, EngineChecker
from kv_core.contract import (
    JobId,
    JobMetadata,
    JobResult,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TierConfig,
)
from kv_core.tierkit.testing import TierDriver, example_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from kv_core.contract import LookupAnswer, OffloadKey, ReqContext, TierContext


class HeldTier(SecondaryTierManager):
    """Takes jobs and reports them when the test says so."""

    def __init__(self, context: TierContext) -> None:
        self.finished: list[JobResult] = []
        self.during_lookup: Callable[[], None] = lambda: None

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        self.during_lookup()
        return False

    @override
    def submit_store(self, job: JobMetadata) -> None:
        pass

    @override
    def submit_load(self, job: JobMetadata) -> None:
        pass

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self.finished = self.finished, []
        return finished

    @override
    def drain_jobs(self) -> Collection[JobId]:
        return ()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()


class Engine:
    """An engine that does what the test says."""

    def __init__(self) -> None:
        self.breaches: list[Breach] = []
        self.driver = TierDriver(self._make, TierConfig(), num_blocks=8)

    def _make(self, context: TierContext) -> SecondaryTierManager:
        self.tier = HeldTier(context)
        self.checker = EngineChecker(context, self.tier, self.breaches)
        return self.checker

    def submit(self, job_id: int, keys: list[int], slots: list[int], **fields: Any) -> None:
        """Submit a store, or a load with ``load=True``; ``block_ids`` replaces the slots."""
        load = fields.get("load", False)
        job = JobMetadata(
            job_id=JobId(job_id),
            keys=tuple(example_key(number) for number in keys),
            block_ids=fields.get("block_ids", np.array(slots, dtype=np.int32)),
            is_promotion=load,
            req_context=self.driver.request,
            submit_time=0.0,
        )
        (self.checker.submit_load if load else self.checker.submit_store)(job)

    def report(self, job_id: int) -> None:
        """Let the tier report a job, and poll."""
        self.tier.finished.append(JobResult(JobId(job_id), success=True))
        self.checker.get_finished_jobs()

    @property
    def broken(self) -> list[str]:
        """Ids of what was breached, each once."""
        return sorted({breach.guarantee for breach in self.breaches})


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine over eight slots."""
    made = Engine()
    yield made
    made.driver.close()


def test_a_careful_engine_breaches_nothing(engine: Engine) -> None:
    """Two stores of one slot and a load of another, polled and reported, are fine."""
    for job_id, slots in ((1, [0, 1]), (2, [1, 2])):
        engine.submit(job_id, slots, slots)
    engine.submit(3, [5], [5], load=True)
    for _ in range(5):
        engine.checker.begin_step()
        engine.checker.on_schedule_end(ScheduleEndContext())
        engine.checker.get_finished_jobs()
    for job_id in (1, 2, 3):
        engine.report(job_id)
    assert engine.breaches == []
    assert engine.checker.unreported == frozenset()
    assert (engine.checker.steps, engine.checker.jobs) == (5, 3)


def test_two_calls_at_once(engine: Engine) -> None:
    """G-1: a second thread calls while the first is inside."""

    def call_from_another_thread() -> None:
        thread = threading.Thread(target=engine.checker.get_stats)
        thread.start()
        thread.join()

    engine.tier.during_lookup = call_from_another_thread
    engine.checker.lookup(example_key(1), engine.driver.request)
    assert engine.broken == ["G-1"]


def test_another_thread_later_is_fine(engine: Engine) -> None:
    """G-1 allows calls from different threads, one after the other."""
    thread = threading.Thread(target=engine.checker.get_stats)
    thread.start()
    thread.join()
    engine.checker.get_stats()
    assert engine.breaches == []


def test_a_slot_that_is_being_loaded_is_given_away(engine: Engine) -> None:
    """G-2: one slot in a load and a store at the same time."""
    engine.submit(1, [1], [4], load=True)
    engine.submit(2, [2], [4])
    assert engine.broken == ["G-2"]


def test_a_slot_is_stored_as_two_keys(engine: Engine) -> None:
    """G-2: one slot cannot hold two blocks."""
    engine.submit(1, [1], [4])
    engine.submit(2, [2], [4])
    assert engine.broken == ["G-2"]


def test_a_slot_changes_while_it_is_stored(engine: Engine) -> None:
    """G-2: the engine wrote into a slot before the store was reported."""
    engine.driver.fill(4, example_key(1))
    engine.submit(1, [1], [4])
    engine.driver.poison(4)
    assert engine.breaches == []
    engine.report(1)
    assert engine.broken == ["G-2"]


@pytest.mark.parametrize(
    ("keys", "slots", "fields"),
    [
        ([1, 1], [2, 3], {}),
        ([1, 2], [3, 3], {}),
        ([1], [8], {}),
        ([1], [-1], {}),
        ([1, 2], [3], {}),
        ([1], [], {"block_ids": np.array([2], dtype=np.int64)}),
    ],
    ids=["key twice", "slot twice", "beyond the end", "negative", "too few slots", "int64"],
)
def test_a_job_is_malformed(
    engine: Engine, keys: list[int], slots: list[int], fields: dict[str, Any]
) -> None:
    """G-3: keys and slots are distinct, in range, equally many, and int32."""
    engine.submit(1, keys, slots, **fields)
    assert engine.broken == ["G-3"]


def test_a_job_id_is_used_again(engine: Engine) -> None:
    """G-4: also after the first job of that id has been reported."""
    engine.submit(1, [1], [1])
    engine.report(1)
    engine.submit(1, [2], [2])
    assert engine.broken == ["G-4"]


def test_the_view_is_gone_before_the_shutdown(engine: Engine) -> None:
    """G-5: the engine released the memory first."""
    engine.driver.primary.release()
    engine.checker.shutdown()
    assert engine.broken == ["G-5"]


def test_nobody_polls(engine: Engine) -> None:
    """G-6: steps go by with a job in flight and no poll."""
    engine.submit(1, [1], [1])
    for _ in range(3):
        engine.checker.on_schedule_end(ScheduleEndContext())
    assert engine.broken == ["G-6"]
    assert engine.checker.unreported == {1}


def test_a_step_ends_twice(engine: Engine) -> None:
    """G-7: two calls between one begin of a step and the next."""
    engine.checker.begin_step()
    for _ in range(2):
        engine.checker.on_schedule_end(ScheduleEndContext())
    assert engine.broken == ["G-7"]


def test_a_step_does_not_end(engine: Engine) -> None:
    """G-7: a step begins while the one before is open."""
    engine.checker.begin_step()
    engine.checker.begin_step()
    assert engine.broken == ["G-7"]


def test_every_guarantee_has_a_sentence() -> None:
    """The ids are those of the specification."""
    assert list(GUARANTEES) == [f"G-{number}" for number in range(1, 8)]
