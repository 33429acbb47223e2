"""The base class for coroutines."""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

from kv_core.contract import JobErrorKind, ReqContext
from kv_core.errors import BlockDamagedError, BlockMissingError, TierOpenError
from kv_core.tierkit import AsyncioTier, TierKitConfig
from kv_core.tierkit.testing import ManualClock, TierDriver, block_bytes_of, example_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_core.contract import OffloadKey

KEYS = [example_key(number) for number in range(8)]
WAIT_S = 20.0


class CoroutineTier(AsyncioTier):
    """A dictionary behind gates; all on one loop."""

    @override
    async def open(self) -> None:
        self.blocks: dict[OffloadKey, bytes] = {}
        self.stuck: set[OffloadKey] = set()
        self.let_go = asyncio.Event()
        self.entered = {key: threading.Event() for key in KEYS}
        self.errors: dict[OffloadKey, BaseException] = {}
        self.retired: list[OffloadKey] = []
        self.fresh: dict[OffloadKey, bytes] = {}
        self.closed = 0
        self.at_a_time = 0
        self.most_at_a_time = 0

    async def _pass(self, key: OffloadKey) -> None:
        self.entered[key].set()
        self.at_a_time += 1
        self.most_at_a_time = max(self.most_at_a_time, self.at_a_time)
        try:
            await asyncio.sleep(0)
            if key in self.stuck:
                await self.let_go.wait()
        finally:
            self.at_a_time -= 1
        error = self.errors.get(key)
        if key in self.fresh:
            self.errors.pop(key)
            self.blocks[key] = self.fresh.pop(key)
        if error is not None:
            raise error

    @override
    async def exists(self, key: OffloadKey) -> bool:
        await self._pass(key)
        return key in self.blocks

    @override
    async def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        await self._pass(key)
        if key not in self.blocks:
            raise BlockMissingError("no such block")
        buffer[:] = self.blocks[key]

    @override
    async def write_block(self, key: OffloadKey, data: memoryview) -> None:
        await self._pass(key)
        self.blocks[key] = bytes(data)

    @override
    async def retire(self, key: OffloadKey) -> None:
        self.retired.append(key)
        self.blocks.pop(key, None)

    @override
    async def close(self) -> None:
        self.closed += 1


class WithdrawingTier(CoroutineTier):
    """A tier whose transfers end when they are cancelled."""

    withdraws_io = True


class Lab:
    """A driver, its tier and a clock."""

    def __init__(
        self, tier_class: type[CoroutineTier] = CoroutineTier, job_deadline_s: float = 30.0
    ) -> None:
        self.clock = ManualClock()
        self.driver = TierDriver(
            tier_class,
            TierKitConfig(io_threads=4, job_deadline_s=job_deadline_s, error_backoff_s=1.0),
            clock=self.clock,
        )
        assert isinstance(self.driver.tier, CoroutineTier)
        self.tier = self.driver.tier

    def release(self) -> None:
        """Let everything go that hangs."""
        self.tier.stuck.clear()
        self.tier._thread.post(self.tier.let_go.set)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Return a lab, and leave it in the end."""
    lab = Lab()
    with lab.driver:
        yield lab


def test_what_was_stored_is_what_is_loaded(lab: Lab) -> None:
    """Bytes come back, in other slots (DATA-1)."""
    assert lab.driver.store(KEYS).success
    assert lab.driver.load(KEYS).success
    assert lab.driver.loaded(KEYS) == KEYS


def test_empty_jobs_are_reported(lab: Lab) -> None:
    """Jobs without keys succeed (JOB-4)."""
    assert lab.driver.store([]).success
    assert lab.driver.load([]).success


def test_lookups_resolve(lab: Lab) -> None:
    """Absent, then present after the store."""
    assert lab.driver.resolve(KEYS) == [False] * 8
    lab.driver.store(KEYS[:3])
    assert lab.driver.resolve(KEYS) == [True] * 3 + [False] * 5


def test_a_bad_block_loses_only_itself(lab: Lab) -> None:
    """Partial results name exactly what was loaded (vllm#50321)."""
    lab.driver.store(KEYS)
    del lab.tier.blocks[KEYS[2]]
    result = lab.driver.load(KEYS)
    assert list(result.successful_keys) == [*KEYS[:2], *KEYS[3:]]
    assert lab.driver.loaded(KEYS) == [*KEYS[:2], *KEYS[3:]]
    assert result.error is not None
    assert result.error.kind is JobErrorKind.MISSING


@pytest.mark.parametrize("error", [OSError("broken"), SystemExit(1), asyncio.CancelledError()])
def test_any_exception_fails_one_block_only(lab: Lab, error: BaseException) -> None:
    """The loop survives whatever a coroutine raises (JOB-7, sglang#38428)."""
    lab.tier.errors[KEYS[0]] = error
    assert list(lab.driver.store(KEYS).successful_keys) == KEYS[1:]
    lab.tier.errors.clear()
    assert lab.driver.store(KEYS).success


def test_errors_of_lookups_stay_with_their_keys(lab: Lab) -> None:
    """One key that cannot be asked is an error, the others are answered (LOOK-6)."""
    lab.driver.store(KEYS[:2])
    lab.tier.errors[KEYS[0]] = OSError("no route")
    assert lab.driver.resolve(KEYS[:3], ReqContext("other")) == [False, True, False]
    stats = lab.driver.tier.get_stats()
    assert (stats["lookup_hits"], stats["lookup_misses"], stats["lookup_errors"]) == (1, 1, 1)


def test_a_damaged_object_is_retired(lab: Lab) -> None:
    """A bad object is removed, and a later store repairs it (DATA-10)."""
    lab.driver.store(KEYS[:1])
    lab.tier.errors[KEYS[0]] = BlockDamagedError("bad bytes")
    assert not lab.driver.load(KEYS[:1]).success
    assert lab.tier.retired == KEYS[:1]
    lab.tier.errors.clear()
    assert lab.driver.resolve(KEYS[:1]) == [False]
    lab.driver.store(KEYS[:1])
    assert lab.driver.load(KEYS[:1]).success


def test_a_fresh_object_is_not_retired(lab: Lab) -> None:
    """An object that was replaced between two reads is loaded, not removed."""
    lab.driver.store(KEYS[:1])
    lab.tier.errors[KEYS[0]] = BlockDamagedError("bad bytes")
    lab.tier.fresh[KEYS[0]] = block_bytes_of(KEYS[0], 512)
    assert lab.driver.load(KEYS[:1]).success
    assert lab.tier.retired == []


def test_no_more_transfers_than_slots_run_at_a_time(lab: Lab) -> None:
    """The number of concurrent transfers is bounded, that of stores by half of it."""
    jobs = [lab.driver.submit_store(KEYS) for _ in range(4)]
    assert all(lab.driver.wait(job).success for job in jobs)
    assert lab.tier.most_at_a_time == 2
    jobs = [lab.driver.submit_load(KEYS) for _ in range(4)]
    assert all(lab.driver.wait(job).success for job in jobs)
    assert lab.tier.most_at_a_time == 4


def test_a_load_overtakes_hanging_stores(lab: Lab) -> None:
    """A load runs although stores hang and more are queued (JOB-8)."""
    lab.driver.store(KEYS[4:5])
    lab.tier.stuck = set(KEYS[:4])
    stores = [lab.driver.submit([key], [index], load=False) for index, key in enumerate(KEYS[:4])]
    assert lab.tier.entered[KEYS[1]].wait(WAIT_S)
    assert lab.driver.load(KEYS[4:5]).success
    lab.release()
    assert all(lab.driver.wait(job).success for job in stores)


def test_two_stores_of_one_key_take_turns(lab: Lab) -> None:
    """The second store of a key begins after the first has ended."""
    lab.tier.stuck = {KEYS[0]}
    first = lab.driver.submit([KEYS[0]], [0], load=False)
    second = lab.driver.submit([KEYS[0]], [1], load=False)
    assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
    lab.driver.load(KEYS[1:2])
    assert lab.tier.most_at_a_time <= 2
    lab.release()
    assert lab.driver.wait(first).success
    assert lab.driver.wait(second).success
    assert lab.tier._locks._waiters == {}


def test_queued_jobs_fail_at_the_deadline(lab: Lab) -> None:
    """Work behind a hanging backend fails in time; what runs stays unreported (JOB-5)."""
    lab.tier.stuck = set(KEYS)
    running = [lab.driver.submit([key], [index], load=False) for index, key in enumerate(KEYS[:2])]
    assert lab.tier.entered[KEYS[1]].wait(WAIT_S)
    queued = lab.driver.submit([KEYS[2]], [2], load=False)
    lab.clock.turn(30.0)
    (result,) = lab.driver.poll()
    assert result.job_id == queued
    assert result.error is not None
    assert result.error.kind is JobErrorKind.STALLED
    assert lab.driver.tier.get_stats()["stalled_jobs"] == 3
    lab.release()
    assert all(lab.driver.wait(job).success for job in running)


def test_a_tier_that_withdraws_io_keeps_the_deadline() -> None:
    """Running transfers are cancelled at the deadline, without exception (WITHDRAWS_IO)."""
    lab = Lab(WithdrawingTier)
    with lab.driver as driver:
        lab.tier.stuck = set(KEYS[:2])
        job_id = driver.submit_store(KEYS[:2])
        assert lab.tier.entered[KEYS[1]].wait(WAIT_S)
        lab.clock.turn(30.0)
        result = driver.wait(job_id)
        assert result.error is not None
        assert result.error.kind is JobErrorKind.STALLED
        assert result.successful_keys == ()
        lab.release()
        assert driver.store(KEYS).success


def test_a_drain_names_what_it_cannot_stop() -> None:
    """A tier that cannot withdraw I/O returns its running jobs (DRAIN-4)."""
    lab = Lab(job_deadline_s=0.2)
    with lab.driver as driver:
        lab.tier.stuck = {KEYS[0]}
        running = driver.submit_store(KEYS[:1])
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        assert tuple(driver.tier.drain_jobs()) == (running,)
        lab.release()
        assert driver.wait(running).success
        assert tuple(driver.tier.drain_jobs()) == ()


def test_a_drain_cancels_what_can_be_withdrawn() -> None:
    """A tier that withdraws I/O ends every job in a drain."""
    lab = Lab(WithdrawingTier, job_deadline_s=0.2)
    with lab.driver as driver:
        lab.tier.stuck = {KEYS[0]}
        job_id = driver.submit_store(KEYS[:1])
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        assert tuple(driver.tier.drain_jobs()) == ()
        (result,) = driver.poll()
        assert (result.job_id, result.success) == (job_id, False)


def test_shutdown_ends_the_loop_with_lookups_in_flight() -> None:
    """Hanging lookups are cancelled, the storage is closed once, no thread is left (LIFE-2)."""
    before = threading.active_count()
    lab = Lab()
    with lab.driver as driver:
        lab.tier.stuck = {KEYS[0]}
        driver.tier.lookup(KEYS[0], driver.request)
        driver.step()
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        assert tuple(driver.tier.shutdown()) == ()
        assert tuple(driver.tier.shutdown()) == ()
    assert lab.tier.closed == 1
    assert threading.active_count() == before


def test_shutdown_with_hanging_io_ends_in_time() -> None:
    """What cannot be stopped is named, and closed at a later call."""
    lab = Lab(job_deadline_s=0.2)
    lab.tier.stuck = {KEYS[0]}
    running = lab.driver.submit_store(KEYS[:1])
    assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
    assert tuple(lab.driver.tier.shutdown()) == (running,)
    assert lab.tier.closed == 0
    lab.release()
    assert lab.driver.wait(running).success
    assert tuple(lab.driver.tier.shutdown()) == ()
    assert lab.tier.closed == 1
    lab.driver.close()


def test_shutdown_after_a_blocked_loop_is_idempotent(caplog: pytest.LogCaptureFixture) -> None:
    """A lookup that blocks the loop keeps no memory mapped; later calls finish the job (LIFE-1)."""
    blocked, release = threading.Event(), threading.Event()

    class BlockingTier(CoroutineTier):
        @override
        async def exists(self, key: OffloadKey) -> bool:
            blocked.set()
            return release.wait(WAIT_S)

    lab = Lab(BlockingTier, job_deadline_s=0.2)
    lab.driver.tier.lookup(KEYS[0], lab.driver.request)
    lab.driver.step()
    assert blocked.wait(WAIT_S)
    assert tuple(lab.driver.tier.shutdown()) == ()
    lab.driver.close()
    release.set()
    lab.tier._thread._thread.join(WAIT_S)
    caplog.clear()
    assert tuple(lab.driver.tier.shutdown()) == ()
    assert caplog.records == []


def test_a_failed_open_leaves_nothing() -> None:
    """An exception of open() becomes a TierOpenError; loop and thread are gone (LIFE-4)."""
    before = threading.active_count()

    class BrokenTier(CoroutineTier):
        @override
        async def open(self) -> None:
            raise OSError("no such server")

        @override
        async def close(self) -> None:
            pass

    with pytest.raises(TierOpenError, match="OSError: no such server"):
        TierDriver(BrokenTier, TierKitConfig())
    assert threading.active_count() == before


def test_a_loop_that_cannot_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last descriptor taken by the selector, there is none for the loop (LIFE-4)."""
    selectors: list[Any] = []

    def fail(selector: object) -> None:
        selectors.append(selector)
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(asyncio, "SelectorEventLoop", fail)
    with pytest.raises(TierOpenError, match="too many open files"):
        TierDriver(CoroutineTier, TierKitConfig())
    (selector,) = selectors
    assert selector.get_map() is None


def test_plain_functions_are_named() -> None:
    """A hook without ``async`` is said to be one, at the start and for each block."""

    class PlainOpen(CoroutineTier):
        @override
        def open(self) -> Any:
            self.closed = 0

    class PlainRead(CoroutineTier):
        @override
        def read_block(self, key: OffloadKey, buffer: memoryview) -> Any:
            buffer[:] = self.blocks[key]

    with pytest.raises(TierOpenError, match="open returned a NoneType, expected a coroutine"):
        TierDriver(PlainOpen, TierKitConfig())
    with TierDriver(PlainRead, TierKitConfig()) as driver:
        assert driver.store(KEYS[:1]).success
        error = driver.load(KEYS[:1]).error
    assert error is not None
    assert "write 'async def read_block'" in error.message


def test_an_open_that_hangs_ends_at_its_deadline() -> None:
    """The constructor raises within open_deadline_s, the closing included."""
    before = threading.active_count()

    class SlowTier(CoroutineTier):
        open_deadline_s = 0.05

        @override
        async def open(self) -> None:
            await asyncio.Event().wait()

        @override
        async def close(self) -> None:
            pass

    with pytest.raises(TierOpenError, match=r"TimeoutError: no end after 0.045 s"):
        TierDriver(SlowTier, TierKitConfig())
    assert threading.active_count() == before


def test_the_loop_survives_an_exit_of_a_foreign_task(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """SystemExit of a task of the client library does not end the tier (JOB-7)."""

    async def leave() -> None:
        raise SystemExit(3)

    tasks: list[asyncio.Task[None]] = []
    loop = lab.tier._thread.loop
    lab.tier._thread.post(lambda: tasks.append(loop.create_task(leave())))
    assert lab.driver.store(KEYS).success
    assert lab.driver.load(KEYS).success
    assert isinstance(tasks[0].exception(), SystemExit)
    assert "out of its event loop" in caplog.text
