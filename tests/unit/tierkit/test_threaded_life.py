"""The threaded base class: deadlines, drains, shutdown, failed construction and forks."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr
from typing_extensions import override

from kv_core.contract import JobErrorKind, TierConfig
from kv_core.errors import BlockMissingError, TierClosedError, TierOpenError
from kv_core.tierkit import ThreadedTier, TierKitConfig
from kv_core.tierkit.testing import ManualClock, TierDriver, example_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.contract import OffloadKey, SecondaryTierManager, TierContext

KEYS = [example_key(number) for number in range(8)]
WAIT_S = 20.0


class GateTier(ThreadedTier):
    """A dictionary behind gates: transfers and lookups of chosen keys wait for the test."""

    @override
    def open(self) -> None:
        self.blocks: dict[OffloadKey, bytes] = {}
        self.stuck: dict[OffloadKey, threading.Event] = {}
        self.entered = {key: threading.Event() for key in KEYS}
        self.closed = 0

    def _pass(self, key: OffloadKey) -> None:
        self.entered[key].set()
        if key in self.stuck:
            assert self.stuck[key].wait(WAIT_S)

    @override
    def exists(self, key: OffloadKey) -> bool:
        self._pass(key)
        return key in self.blocks

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        self._pass(key)
        if key not in self.blocks:
            raise BlockMissingError("no such block")
        buffer[:] = self.blocks[key]

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> None:
        self._pass(key)
        self.blocks[key] = bytes(data)

    @override
    def close(self) -> None:
        self.closed += 1


class Lab:
    """A driver, its tier with few threads, and a clock."""

    def __init__(self, job_deadline_s: float = 30.0, io_threads: int = 2) -> None:
        self.clock = ManualClock()
        self.driver = TierDriver(
            GateTier,
            TierKitConfig(
                io_threads=io_threads, job_deadline_s=job_deadline_s, lookup_deadline_s=5.0
            ),
            clock=self.clock,
        )
        assert isinstance(self.driver.tier, GateTier)
        self.tier = self.driver.tier

    def stick(self, key: OffloadKey) -> Callable[[], None]:
        """Make transfers of a key wait; return what lets them go."""
        gate = self.tier.stuck[key] = threading.Event()

        def release() -> None:
            self.tier.stuck.pop(key, None)
            gate.set()

        return release

    def stalled_jobs(self) -> float:
        """Return the counter."""
        return self.driver.tier.get_stats()["stalled_jobs"]


def join_threads_of_the_tier() -> None:
    """Wait for what ends on its own: also a `close()` that a busy machine did not run in time."""
    for thread in threading.enumerate():
        if thread.name.startswith("kv-tier"):
            thread.join(WAIT_S)


def test_queued_jobs_fail_at_the_deadline() -> None:
    """Work behind a hanging backend fails in time, and frees its slots (JOB-5)."""
    lab = Lab()
    with lab.driver as driver:
        release = lab.stick(KEYS[0])
        running = driver.submit_store(KEYS[:1])
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        queued = driver.submit_store(KEYS[1:3])
        lab.clock.turn(29.999)
        assert driver.poll() == []
        lab.clock.turn(0.001)
        (result,) = driver.poll()
        assert result.job_id == queued
        assert result.error is not None
        assert result.error.kind is JobErrorKind.STALLED
        assert result.successful_keys == ()
        release()
        # The block was written, late: what is there may be reported.
        assert driver.wait(running).success
        assert not {KEYS[1], KEYS[2]} & set(lab.tier.blocks)


def test_a_job_inside_io_stays_unreported_and_counts_as_stalled_once() -> None:
    """Running I/O keeps its slots past the deadline (DATA-2 and DATA-5 win over JOB-5)."""
    lab = Lab()
    with lab.driver as driver:
        release = lab.stick(KEYS[0])
        job_id = driver.submit_load(KEYS[:1])
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        for _ in range(3):
            lab.clock.turn(30.0)
            assert driver.poll() == []
            assert lab.stalled_jobs() == 1
        assert driver.tier.has_pending_work()
        release()
        assert not driver.wait(job_id).success
        assert lab.stalled_jobs() == 1


def test_no_block_is_begun_after_the_deadline() -> None:
    """A piece that comes back late reports what it moved and begins nothing more."""
    lab = Lab()
    with lab.driver as driver:
        release = lab.stick(KEYS[0])
        job_id = driver.submit_store(KEYS[:4])
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        lab.clock.turn(30.0)
        release()
        result = driver.wait(job_id)
        assert result.error is not None
        assert result.error.kind is JobErrorKind.STALLED
        assert result.successful_keys[0] == KEYS[0]
        assert KEYS[1] not in result.successful_keys
        assert set(result.successful_keys) == set(lab.tier.blocks)
        assert lab.stalled_jobs() == 1


def test_a_store_that_waits_for_its_key_fails_in_time() -> None:
    """A store behind a hanging store of the same key gives up (JOB-5)."""
    lab = Lab(job_deadline_s=0.2, io_threads=3)
    with lab.driver as driver:
        release = lab.stick(KEYS[0])
        first = driver.submit([KEYS[0]], [0], load=False)
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        second = driver.wait(driver.submit([KEYS[0]], [1], load=False))
        assert second.error is not None
        assert second.error.kind is JobErrorKind.STALLED
        assert "another store of the block" in second.error.message
        release()
        assert driver.wait(first).success


def test_lookups_go_on_while_all_transfers_hang() -> None:
    """Probes have threads of their own, so a stalled transfer does not delay them."""
    lab = Lab()
    with lab.driver as driver:
        release = lab.stick(KEYS[0])
        job_id = driver.submit_load(KEYS[:1])
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        assert driver.resolve(KEYS[1:3]) == [False, False]
        release()
        driver.wait(job_id)


def test_a_hanging_lookup_ends_at_its_deadline() -> None:
    """While probes hang, lookups resolve to absent in time (LOOK-2)."""
    lab = Lab()
    with lab.driver as driver:
        release = lab.stick(KEYS[0])
        assert driver.tier.lookup(KEYS[0], driver.request) is None
        driver.step()
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        lab.clock.turn(5.0)
        assert driver.tier.lookup(KEYS[0], driver.request) is False
        assert not driver.tier.has_pending_work()
        release()


# -- drains ---------------------------------------------------------------------------------------


def test_an_idle_drain_returns_nothing() -> None:
    """Draining a tier without jobs changes nothing (DRAIN-2)."""
    with Lab().driver as driver:
        assert tuple(driver.tier.drain_jobs()) == ()


def test_a_drain_waits_for_jobs_and_the_tier_works_on() -> None:
    """After a drain every result is there, and new jobs run (DRAIN-1, DRAIN-5)."""
    with Lab().driver as driver:
        jobs = [driver.submit_store(KEYS) for _ in range(3)]
        assert tuple(driver.tier.drain_jobs()) == ()
        assert [result.job_id for result in driver.poll()] == jobs
        assert driver.load(KEYS).success


def test_a_drain_names_what_it_cannot_stop() -> None:
    """Jobs in the kernel are returned; queued ones are cancelled with a result (DRAIN-4)."""
    lab = Lab(job_deadline_s=0.2)
    with lab.driver as driver:
        release = lab.stick(KEYS[0])
        running = driver.submit_store(KEYS[:1])
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        queued = driver.submit_store(KEYS[1:2])
        assert tuple(driver.tier.drain_jobs()) == (running,)
        (result,) = driver.poll()
        assert (result.job_id, result.success) == (queued, False)
        assert result.error is not None
        assert result.error.kind is JobErrorKind.STALLED
        assert "drain" in result.error.message
        release()
        assert driver.wait(running).success
        assert driver.store(KEYS[2:4]).success


# -- shutdown -------------------------------------------------------------------------------------


def test_shutdown_ends_threads_and_is_idempotent() -> None:
    """No thread is left, and a second call does nothing (LIFE-1, LIFE-2)."""
    before = threading.active_count()
    lab = Lab()
    with lab.driver as driver:
        driver.store(KEYS)
        assert tuple(driver.tier.shutdown()) == ()
        assert threading.active_count() == before
        assert tuple(driver.tier.shutdown()) == ()
    assert lab.tier.closed == 1


def test_results_are_available_after_shutdown() -> None:
    """Running jobs end, queued ones are cancelled, and all are reported (LIFE-3)."""
    lab = Lab()
    with lab.driver as driver:
        release = lab.stick(KEYS[0])
        running = driver.submit_store(KEYS[:1])
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        queued = driver.submit_store(KEYS[1:2])
        timer = threading.Timer(0.05, release)
        timer.start()
        assert tuple(driver.tier.shutdown()) == ()
        timer.join()
        results = {result.job_id: result for result in driver.poll()}
        assert results[running].success
        assert not results[queued].success


def test_shutdown_with_hanging_io_ends_in_time(caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be stopped is named; its storage is closed once it has come back."""
    lab = Lab(job_deadline_s=0.2)
    release = lab.stick(KEYS[0])
    running = lab.driver.submit_store(KEYS[:1])
    assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
    assert tuple(lab.driver.tier.shutdown()) == (running,)
    assert lab.tier.closed == 0
    assert "left behind" in caplog.text
    release()
    join_threads_of_the_tier()
    assert tuple(lab.driver.tier.shutdown()) == ()
    join_threads_of_the_tier()
    assert lab.tier.closed == 1
    lab.driver.close()


def test_a_hanging_lookup_keeps_no_memory_beyond_shutdown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without jobs in flight the region can be unmapped, whatever a lookup is stuck in (ZC-3)."""
    lab = Lab(job_deadline_s=0.2)
    release = lab.stick(KEYS[0])
    lab.driver.tier.lookup(KEYS[0], lab.driver.request)
    lab.driver.step()
    assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
    lab.driver.close()
    assert "its threads and descriptors are left behind" in caplog.text
    release()
    assert lab.tier._probes.stop(WAIT_S)
    assert tuple(lab.driver.tier.shutdown()) == ()
    join_threads_of_the_tier()
    assert lab.tier.closed == 1


def test_no_text_of_the_tier_holds_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    """Errors of open, store, lookup and close are told without the credentials (CONF-2)."""
    secret = "hunter" + "2"

    class TokenConfig(TierKitConfig):
        token: SecretStr

    class RefusedTier(GateTier):
        @override
        def exists(self, key: OffloadKey) -> bool:
            raise PermissionError(f"{secret} is not valid")

        @override
        def write_block(self, key: OffloadKey, data: memoryview) -> None:
            raise PermissionError(f"{secret} is not valid")

        @override
        def close(self) -> None:
            raise PermissionError(f"{secret} is not valid")

    class LockedTier(GateTier):
        @override
        def open(self) -> None:
            raise PermissionError(f"{secret} is not valid")

        @override
        def close(self) -> None:
            pass

    config = TokenConfig(token=SecretStr(secret))
    with pytest.raises(TierOpenError, match=r"PermissionError: \*+ is not valid"):
        TierDriver(LockedTier, config)
    with TierDriver(RefusedTier, config) as driver:
        result = driver.store(KEYS[:1])
        assert result.error is not None
        assert result.error.message.endswith("PermissionError: ********** is not valid")
        assert driver.resolve(KEYS[:1]) == [False]
    assert len(caplog.records) == 2
    assert secret not in caplog.text


def test_a_closed_tier_refuses_politely() -> None:
    """After the shutdown jobs are reported as failed and lookups are absent; nothing raises."""
    with Lab().driver as driver:
        driver.store(KEYS)
        driver.tier.shutdown()
        result = driver.load(KEYS[:1])
        assert result.error is not None
        assert result.error.kind is JobErrorKind.FAILED
        assert not driver.store(KEYS[:1]).success
        assert driver.tier.lookup(KEYS[0], driver.request) is False
        assert driver.tier.lookup_many(KEYS[:2], driver.request) == [False, False]
        assert tuple(driver.tier.drain_jobs()) == ()
        assert not driver.tier.has_pending_work()


def test_an_error_of_close_is_contained(caplog: pytest.LogCaptureFixture) -> None:
    """A storage that cannot be closed is logged; the shutdown ends."""

    class OddTier(GateTier):
        @override
        def close(self) -> None:
            raise OSError("still busy")

    with TierDriver(OddTier, TierKitConfig()) as driver:
        assert tuple(driver.tier.shutdown()) == ()
    assert "close() raised" in caplog.text


def test_a_close_that_hangs_does_not_hang_the_shutdown() -> None:
    """The shutdown of an idle tier ends within the deadline, and again when it has come back."""
    hang, closed = threading.Event(), threading.Event()

    class HangingTier(GateTier):
        @override
        def close(self) -> None:
            assert hang.wait(WAIT_S)
            closed.set()

    config = TierKitConfig(job_deadline_s=0.2)
    with TierDriver(HangingTier, config) as driver:
        assert tuple(driver.tier.shutdown()) == ()
        assert not closed.is_set()
        hang.set()
        assert closed.wait(WAIT_S)
    assert [thread.name for thread in threading.enumerate() if thread.name == "kv-tier-close"] == []


# -- construction ---------------------------------------------------------------------------------


def test_a_failed_open_leaves_nothing() -> None:
    """An exception of open() becomes a TierOpenError, without threads or exports (LIFE-4)."""
    before = threading.active_count()
    closed: list[bool] = []

    class BrokenTier(GateTier):
        @override
        def open(self) -> None:
            raise RuntimeError("no such server")

        @override
        def close(self) -> None:
            closed.append(True)

    with pytest.raises(TierOpenError, match="'tier' cannot be opened: RuntimeError: no such serv"):
        TierDriver(BrokenTier, TierKitConfig())
    assert threading.active_count() == before
    assert closed == [True]


def test_errors_of_kv_core_pass_through() -> None:
    """A tier's own TierOpenError keeps its message."""

    class BrokenTier(GateTier):
        @override
        def open(self) -> None:
            raise TierOpenError("the bucket does not exist: create it")

    with pytest.raises(TierOpenError, match=r"^the bucket does not exist: create it"):
        TierDriver(BrokenTier, TierKitConfig())


def test_threads_that_cannot_start_close_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constructor that fails at its last step undoes the first (LIFE-4)."""
    closed: list[bool] = []

    class PoorTier(GateTier):
        @override
        def close(self) -> None:
            closed.append(True)

    start = threading.Thread.start

    def start_probes_only(thread: threading.Thread) -> None:
        if "-io-" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_probes_only)
    with pytest.raises(TierOpenError, match="can't start new thread"):
        TierDriver(PoorTier, TierKitConfig())
    assert closed == [True]


def test_a_config_of_another_kind_is_refused() -> None:
    """The kit needs its own settings."""
    with pytest.raises(TypeError, match=r"GateTier needs a config.*derive the config_model"):
        TierDriver(GateTier, TierConfig())


def test_coroutines_are_refused_at_the_start() -> None:
    """A coroutine that nobody awaits would count as a block that is there and was loaded."""

    class ConfusedTier(GateTier):
        @override
        async def exists(self, key: OffloadKey) -> bool:  # type: ignore[override]  # the mistake
            return True

    with pytest.raises(TierOpenError, match=r"ConfusedTier\.exists is a coroutine.*AsyncioTier"):
        TierDriver(ConfusedTier, TierKitConfig())


def test_a_constructor_that_is_not_called_is_named() -> None:
    """The first call says what is missing, with an error that takes the tier out of use."""

    class HeadlessTier(GateTier):
        @override
        def __init__(self, context: TierContext) -> None:
            self.context = context

    # The driver announces a request.
    with pytest.raises(TierClosedError, match=r"HeadlessTier was never opened.*super\(\)"):
        TierDriver(HeadlessTier, TierKitConfig())


def test_two_tiers_do_not_interfere() -> None:
    """Instances of one process share nothing (LIFE-5)."""
    with Lab().driver as one, Lab().driver as two:
        one.store(KEYS[:2])
        assert two.resolve(KEYS[:2]) == [False, False]
        one.tier.shutdown()
        assert two.store(KEYS[:2]).success


def _calls(tier: SecondaryTierManager, driver: TierDriver) -> list[Callable[[], object]]:
    return [
        lambda: tier.lookup(KEYS[0], driver.request),
        lambda: tier.lookup_many(KEYS, driver.request),
        lambda: driver.submit(KEYS[:1], [0], load=False),
        lambda: driver.submit(KEYS[:1], [0], load=True),
        tier.get_finished_jobs,
        tier.drain_jobs,
        lambda: tier.on_new_request(driver.request),
        lambda: tier.on_request_finished(driver.request),
        driver.step,
        tier.has_pending_work,
        tier.take_events,
        tier.get_stats,
        tier.shutdown,
    ]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_is_refused_at_once() -> None:
    """In a forked child every method raises, although the parent holds locks (LIFE-6)."""
    lab = Lab()
    with lab.driver as driver:
        release = lab.stick(KEYS[0])
        job_id = driver.submit_store(KEYS[:1])
        assert lab.tier.entered[KEYS[0]].wait(WAIT_S)
        calls = _calls(driver.tier, driver)
        child = os.fork()
        if child == 0:
            refused = 0
            for call in calls:
                try:
                    call()
                except TierClosedError:
                    refused += 1
            os._exit(refused)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == len(calls)
        release()
        assert driver.wait(job_id).success
