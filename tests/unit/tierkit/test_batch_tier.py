"""Tiers that know what they hold: planned and settled by the caller, moved in batches."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar, final

import pytest
from typing_extensions import override

from kv_core.contract import JobErrorKind
from kv_core.errors import BlockDamagedError, BlockDeclinedError, TierOpenError
from kv_core.tierkit import (
    RETIRING_KINDS,
    BatchOutcome,
    BatchTier,
    BlockFailure,
    TierKitConfig,
)
from kv_core.tierkit.testing import ManualClock, TierDriver, example_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_core.contract import OffloadKey


@final
class _Plan:
    def __init__(self, keys: Sequence[OffloadKey]) -> None:
        self.keys = keys
        self.settled: Mapping[int, BlockFailure] | None = None
        self.moved: dict[int, bytes] = {}


class _DictTier(BatchTier[_Plan, _Plan]):
    """Keeps blocks in a dict that the calling thread owns."""

    batch_bytes: ClassVar[int] = 2 * 512
    emits_events = True

    @override
    def open(self) -> None:
        self.blocks: dict[OffloadKey, bytes] = {}
        self.plans: list[_Plan] = []
        self.batches: list[tuple[int, int, str]] = []
        self.caller = threading.get_ident()
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.error_at: dict[int, BaseException] = {}
        self.error: BaseException | None = None
        self.kept: list[memoryview] = []

    def _plan(self, keys: Sequence[OffloadKey]) -> _Plan:
        assert threading.get_ident() == self.caller
        if self.error is not None:
            raise self.error
        self.plans.append(_Plan(keys))
        return self.plans[-1]

    @override
    def exists(self, key: OffloadKey) -> bool:
        return key in self.blocks

    @override
    def plan_store(self, keys: Sequence[OffloadKey]) -> _Plan:
        return self._plan(keys)

    @override
    def plan_load(self, keys: Sequence[OffloadKey]) -> _Plan:
        plan = self._plan(keys)
        plan.moved = {
            index: self.blocks[key] for index, key in enumerate(keys) if key in self.blocks
        }
        return plan

    @override
    def settle_store(self, plan: _Plan, failures: Mapping[int, BlockFailure]) -> None:
        assert threading.get_ident() == self.caller
        plan.settled = failures
        for index, data in plan.moved.items():
            self.blocks[plan.keys[index]] = data
        self.note_all_stored([plan.keys[index] for index in sorted(plan.moved)])

    @override
    def settle_load(self, plan: _Plan, failures: Mapping[int, BlockFailure]) -> None:
        plan.settled = failures
        for index, failure in failures.items():
            if failure.kind in RETIRING_KINDS and plan.keys[index] in self.blocks:
                del self.blocks[plan.keys[index]]
                self.note_all_removed([plan.keys[index]])

    def _begin(self, start: int, count: int) -> dict[int, BaseException]:
        self.batches.append((start, count, threading.current_thread().name))
        return {
            at - start: self.error_at[at]
            for at in range(start, start + count)
            if at in self.error_at
        }

    @override
    def write_batch(
        self,
        plan: _Plan,
        start: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> BatchOutcome:
        failures = self._begin(start, len(keys))
        self.reached.set()
        assert self.gate.wait(20)
        for index, block in enumerate(blocks):
            assert block.readonly
            if index not in failures:
                plan.moved[start + index] = bytes(block)
        return BatchOutcome(512 * (len(keys) - len(failures)), failures)

    @override
    def read_batch(
        self,
        plan: _Plan,
        start: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> BatchOutcome:
        failures = self._begin(start, len(keys))
        for index, block in enumerate(blocks):
            if index not in failures:
                block[:] = plan.moved[start + index]
        return BatchOutcome(512 * (len(keys) - len(failures)), failures)


@pytest.fixture
def keys() -> list[OffloadKey]:
    """Return eight distinct keys."""
    return [example_key(number) for number in range(8)]


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock that stands still."""
    return ManualClock()


@final
class _Driven:
    def __init__(self, clock: ManualClock, io_threads: int = 4) -> None:
        self.driver = TierDriver(self._make, TierKitConfig(io_threads=io_threads), clock=clock)

    def _make(self, context: object) -> _DictTier:
        self.tier = _DictTier(context)  # type: ignore[arg-type]
        return self.tier


@pytest.fixture
def driven(clock: ManualClock) -> Callable[[], _Driven]:
    """Return a function that opens a tier."""
    return lambda: _Driven(clock)


def test_what_is_stored_is_loaded(driven: Callable[[], _Driven], keys: list[OffloadKey]) -> None:
    """Blocks come back over several batches, into other slots."""
    it = driven()
    with it.driver as driver:
        assert driver.store(keys).transfer_bytes == 8 * 512
        assert driver.load(keys).success
        assert driver.loaded(keys) == keys
        assert sorted(start for start, _, _ in it.tier.batches[:4]) == [0, 2, 4, 6]


def test_a_batch_has_at_least_one_block(
    driven: Callable[[], _Driven], keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks larger than a batch are moved one at a time."""
    monkeypatch.setattr(_DictTier, "batch_bytes", 1)
    it = driven()
    with it.driver as driver:
        assert driver.store(keys[:3]).success
        assert sorted(count for _, count, _ in it.tier.batches) == [1, 1, 1]


@pytest.mark.parametrize(("calls", "expected"), [(1, 4), (16, 4), (17, 5), (99, 8)])
def test_a_scattered_load_has_more_batches(
    clock: ManualClock,
    keys: list[OffloadKey],
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
    expected: int,
) -> None:
    """Loads that take many calls are split further, up to half of the threads; stores are not."""

    def count(_: _DictTier, plan: _Plan) -> int:
        assert plan.keys == tuple(keys)
        return calls

    monkeypatch.setattr(_DictTier, "count_calls", count)
    it = _Driven(clock, io_threads=16)
    with it.driver as driver:
        driver.store(keys)
        assert len(it.tier.batches) == 4
        driver.load(keys)
        assert driver.loaded(keys) == keys
    assert len(it.tier.batches) - 4 == expected


def test_lookups_are_never_unknown(driven: Callable[[], _Driven], keys: list[OffloadKey]) -> None:
    """A block is absent until its store is reported, and present from then on (LOOK-3, LOOK-8)."""
    it = driven()
    with it.driver as driver:
        it.tier.gate.clear()
        job = driver.submit_store(keys[:1])
        assert driver.tier.lookup(keys[0], driver.request) is False
        it.tier.gate.set()
        driver.wait(job)
        assert driver.tier.lookup_many(keys[:2], driver.request) == [True, False]
        assert not driver.tier.has_pending_work()


def test_lookups_are_counted_once(driven: Callable[[], _Driven], keys: list[OffloadKey]) -> None:
    """Each request and key counts once, and a hit that fails to load becomes a miss (MET-1)."""
    it = driven()
    with it.driver as driver:
        driver.store(keys[:2])
        for _ in range(3):
            driver.resolve(keys[:4])
        assert driver.tier.get_stats()["lookup_hits"] == 2
        it.tier.error_at = {0: BlockDamagedError("bad")}
        driver.load(keys[:2])
        stats = driver.tier.get_stats()
    assert (stats["lookup_queries"], stats["lookup_hits"], stats["lookup_misses"]) == (4, 1, 3)
    assert stats["load_failures"] == 1


def test_each_block_has_its_own_outcome(
    driven: Callable[[], _Driven], keys: list[OffloadKey]
) -> None:
    """A store fails for the blocks that failed, and the worst kind is reported."""
    it = driven()
    with it.driver as driver:
        it.tier.error_at = {1: BlockDeclinedError("full"), 4: OSError(5, "bad")}
        result = driver.store(keys[:6])
        assert result.successful_keys == (keys[0], keys[2], keys[3], keys[5])
        assert result.error is not None
        assert result.error.kind is JobErrorKind.FAILED
        assert (result.transfer_bytes, sorted(it.tier.blocks)) == (
            4 * 512,
            sorted(result.successful_keys),
        )
        (plan,) = it.tier.plans
        assert plan.settled is not None
        assert {at: failure.kind for at, failure in plan.settled.items()} == {
            1: JobErrorKind.DECLINED,
            4: JobErrorKind.FAILED,
        }


def test_a_hook_that_raises_fails_its_batch(
    driven: Callable[[], _Driven], keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a batch raises has happened to its blocks and to no others (JOB-7)."""
    real = _DictTier.write_batch

    def broken(
        tier: _DictTier,
        plan: _Plan,
        start: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> BatchOutcome:
        if start == 2:
            raise RuntimeError("a bug")
        return real(tier, plan, start, keys, blocks)

    monkeypatch.setattr(_DictTier, "write_batch", broken)
    with driven().driver as driver:
        result = driver.store(keys[:6])
        assert result.successful_keys == (*keys[:2], *keys[4:6])
        assert result.error is not None
        assert "RuntimeError: a bug" in result.error.message


def test_a_plan_that_raises_fails_its_job(
    driven: Callable[[], _Driven], keys: list[OffloadKey]
) -> None:
    """A submission never raises for what the tier cannot do (JOB-2)."""
    it = driven()
    with it.driver as driver:
        it.tier.error = ValueError("no plan")
        result = driver.store(keys[:2])
        assert (result.success, result.successful_keys) == (False, ())
        it.tier.error = None
        assert driver.store(keys[:2]).success


def test_what_settling_raises_fails_its_job(
    driven: Callable[[], _Driven], keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose outcome cannot be entered has failed, and the others are reported."""

    def broken(tier: _DictTier, plan: _Plan, failures: Mapping[int, BlockFailure]) -> None:
        raise RuntimeError("a bug")

    with driven().driver as driver:
        with monkeypatch.context() as patch:
            patch.setattr(_DictTier, "settle_store", broken)
            result = driver.store(keys[:1])
        assert (result.success, result.successful_keys) == (False, ())
        assert driver.store(keys[:1]).success


def test_a_transient_failure_is_avoided_for_a_while(
    driven: Callable[[], _Driven], keys: list[OffloadKey], clock: ManualClock
) -> None:
    """After an error there is no hit for requests alive then, until a new store (LOOK-4)."""
    it = driven()
    with it.driver as driver:
        driver.store(keys[:2])
        assert driver.resolve(keys[:2]) == [True, True]
        it.tier.error_at = {0: OSError(5, "bad")}
        driver.load(keys[:2])
        assert driver.resolve(keys[:2]) == [False, True]
        clock.turn(2.0)
        assert driver.resolve(keys[:2]) == [False, True]
        driver.tier.on_request_finished(driver.request)
        assert driver.resolve(keys[:2]) == [True, True]
        driver.load(keys[:1])
        assert driver.resolve(keys[:1]) == [False]
        it.tier.error_at = {}
        driver.store(keys[:1])
        assert driver.resolve(keys[:1]) == [True]


def test_damage_is_absent_and_told(driven: Callable[[], _Driven], keys: list[OffloadKey]) -> None:
    """A damaged block leaves the tier with an event; a store brings it back (LOOK-4, EVT-1)."""
    it = driven()
    with it.driver as driver:
        driver.store(keys[:3])
        it.tier.error_at = {1: BlockDamagedError("bad")}
        driver.load(keys[:3])
        assert driver.resolve(keys[:3]) == [True, False, True]
        told = [(event.keys, event.removed) for event in driver.tier.take_events()]
        assert told == [(tuple(keys[:3]), False), ((keys[1],), True)]


def test_half_of_the_threads_are_free_of_stores(
    driven: Callable[[], _Driven], keys: list[OffloadKey]
) -> None:
    """With all stores stuck, loads go on (JOB-8), on threads that no store may take."""
    it = driven()
    with it.driver as driver:
        driver.store(keys[:1])
        it.tier.batches.clear()
        it.tier.reached.clear()
        it.tier.gate.clear()
        job = driver.submit_store(keys)
        assert it.tier.reached.wait(20)
        assert driver.load(keys[:1]).success
        assert len(it.tier.batches) <= 2 + 1
        it.tier.gate.set()
        assert driver.wait(job).success


def test_plans_of_cancelled_jobs_are_settled(
    driven: Callable[[], _Driven], keys: list[OffloadKey], clock: ManualClock
) -> None:
    """What a plan holds is given up exactly once, also when no batch of it ran."""
    it = driven()
    with it.driver as driver:
        it.tier.gate.clear()
        first, second = driver.submit_store(keys), driver.submit_store(keys[:2])
        assert it.tier.reached.wait(20)
        clock.turn(60)
        driver.poll()
        it.tier.gate.set()
        assert not driver.wait(first).success
        assert not driver.wait(second).success
        assert [plan.settled is not None for plan in it.tier.plans] == [True, True]
        assert it.tier.plans[1].settled is not None
        kinds = {failure.kind for failure in it.tier.plans[1].settled.values()}
        assert kinds == {JobErrorKind.STALLED}


def test_tasks_run_before_stores_that_wait(
    driven: Callable[[], _Driven], keys: list[OffloadKey]
) -> None:
    """What a tier has to do on the side does not wait for a backlog of stores."""
    done = threading.Event()
    it = driven()
    with it.driver as driver:
        it.tier.gate.clear()
        job = driver.submit_store(keys)
        it.tier.run_soon(done.set)
        assert done.wait(20)
        it.tier.gate.set()
        driver.wait(job)


def test_coroutines_are_refused(clock: ManualClock) -> None:
    """A hook that forgot it is not awaited is found at the opening."""

    class Mistaken(_DictTier):
        @override
        async def read_batch(self, *_: object) -> BatchOutcome:  # type: ignore[override]
            return BatchOutcome(0)

    with pytest.raises(TierOpenError, match="read_batch is a coroutine"):
        TierDriver(Mistaken, TierKitConfig(), clock=clock)
