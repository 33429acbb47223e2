"""The threaded base class: outcomes of blocks and jobs."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

from kv_core.contract import JobErrorKind, ReqContext, ScheduleEndContext
from kv_core.errors import BlockDamagedError, BlockDeclinedError, BlockMissingError
from kv_core.tierkit import ThreadedTier, TierKitConfig
from kv_core.tierkit.testing import TierDriver, block_bytes_of, example_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_core.contract import OffloadKey

KEYS = [example_key(number) for number in range(8)]
WAIT_S = 20.0


class DictTier(ThreadedTier):
    """A dictionary whose single operations the test makes fail or wait."""

    @override
    def open(self) -> None:
        self.blocks: dict[OffloadKey, bytes] = {}
        self.read_errors: dict[OffloadKey, BaseException] = {}
        self.write_errors: dict[OffloadKey, BaseException] = {}
        self.retired: list[OffloadKey] = []
        self.reads: list[OffloadKey] = []
        self.write_gate = threading.Event()
        self.write_gate.set()
        self.writing = threading.Event()
        self.readonly: set[bool] = set()
        self.threads: set[str] = set()
        self.after_first_read: dict[OffloadKey, bytes] = {}

    @override
    def exists(self, key: OffloadKey) -> bool:
        return key in self.blocks

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        self.reads.append(key)
        self.threads.add(threading.current_thread().name)
        error = self.read_errors.get(key)
        if key in self.after_first_read:
            self.blocks[key] = self.after_first_read.pop(key)
            self.read_errors.pop(key)
        if error is not None:
            buffer[:4] = b"junk"
            raise error
        if key not in self.blocks:
            raise BlockMissingError("no such block")
        buffer[:] = self.blocks[key]

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> None:
        self.writing.set()
        assert self.write_gate.wait(WAIT_S)
        self.readonly.add(data.readonly)
        if key in self.write_errors:
            raise self.write_errors[key]
        self.blocks[key] = bytes(data)


class RetiringTier(DictTier):
    """A tier that can remove objects."""

    @override
    def retire(self, key: OffloadKey) -> None:
        self.retired.append(key)
        self.blocks.pop(key, None)


def drive(tier_class: type[DictTier] = DictTier, io_threads: int = 3) -> TierDriver:
    """Return a driver of a tier with real time."""
    return TierDriver(
        tier_class,
        TierKitConfig(io_threads=io_threads, error_backoff_s=0.01, lookup_deadline_s=10.0),
        row_stride=1024,
    )


@pytest.fixture
def driver() -> Iterator[TierDriver]:
    """Return a driver of a tier that cannot retire."""
    with drive() as driver:
        yield driver


@pytest.fixture
def tier(driver: TierDriver) -> DictTier:
    """Return the driver's tier."""
    assert isinstance(driver.tier, DictTier)
    return driver.tier


def test_what_was_stored_is_what_is_loaded(driver: TierDriver) -> None:
    """Bytes come back, in other slots, and a report says how much moved (DATA-1)."""
    stored = driver.store(KEYS)
    loaded = driver.load(KEYS)
    assert (stored.success, loaded.success) == (True, True)
    assert driver.loaded(KEYS) == KEYS
    assert stored.transfer_bytes == loaded.transfer_bytes == 8 * 512
    assert stored.transfer_time_s >= 0


def test_padding_is_left_alone(driver: TierDriver) -> None:
    """A load writes the payload of its slots and nothing behind it (DATA-3, ZC-4)."""
    flat = driver.primary.view.cast("B")
    flat[512:1024] = b"\x55" * 512
    driver.store(KEYS[:1])
    driver.wait(driver.submit(KEYS[:1], [0], load=True))
    assert bytes(flat[512:1024]) == b"\x55" * 512
    flat.release()


def test_stores_get_views_that_refuse_writes(driver: TierDriver, tier: DictTier) -> None:
    """A store cannot write the primary (DATA-4)."""
    driver.store(KEYS)
    assert tier.readonly == {True}


def test_lookups_resolve_after_a_store(driver: TierDriver) -> None:
    """Absent before, present after (LOOK-1, LOOK-3)."""
    assert driver.resolve(KEYS[:2]) == [False, False]
    driver.store(KEYS[:1])
    assert driver.resolve(KEYS[:2]) == [True, False]
    assert driver.resolve(KEYS[:2], ReqContext("other")) == [True, False]


def test_an_empty_job_is_reported(driver: TierDriver) -> None:
    """Jobs without keys succeed (JOB-4)."""
    assert driver.store([]).success
    assert driver.load([]).success


def test_a_large_job_uses_all_threads(driver: TierDriver, tier: DictTier) -> None:
    """A job is split in at most as many pieces as there are threads."""
    driver.store(KEYS)
    assert driver.load(KEYS).success
    assert sorted(tier.reads) == sorted(KEYS)
    assert all(name.startswith("kv-tier-io-") for name in tier.threads)


@pytest.mark.parametrize("bad", [(0,), (3, 4), (7,), tuple(range(8))])
def test_a_bad_block_loses_only_itself(
    driver: TierDriver, tier: DictTier, bad: tuple[int, ...]
) -> None:
    """Of n keys of which k are bad, exactly n - k load, with the right bytes (vllm#50321)."""
    driver.store(KEYS)
    for index in bad:
        del tier.blocks[KEYS[index]]
    good = [key for index, key in enumerate(KEYS) if index not in bad]
    result = driver.load(KEYS)
    assert not result.success
    assert list(result.successful_keys) == good
    assert driver.loaded(KEYS) == good
    assert result.error is not None
    assert result.error.kind is JobErrorKind.MISSING
    assert result.error.message.startswith(f"{len(bad)} of 8 block(s): BlockMissingError")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BlockDeclinedError("full"), JobErrorKind.DECLINED),
        (OSError(errno.ENOSPC, "No space left on device"), JobErrorKind.DECLINED),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), JobErrorKind.DECLINED),
        (OSError(errno.EIO, "Input/output error"), JobErrorKind.FAILED),
        (OSError(errno.EMFILE, "Too many open files"), JobErrorKind.FAILED),
        (MemoryError(), JobErrorKind.FAILED),
        (SystemExit(1), JobErrorKind.FAILED),
        (BlockMissingError("odd"), JobErrorKind.FAILED),
    ],
)
def test_store_errors_have_kinds(
    driver: TierDriver, tier: DictTier, error: BaseException, kind: JobErrorKind
) -> None:
    """Any exception fails its block alone, with the kind the engine acts on (JOB-7, DATA-11)."""
    tier.write_errors[KEYS[1]] = error
    result = driver.store(KEYS)
    assert result.error is not None
    assert result.error.kind is kind
    assert list(result.successful_keys) == [KEYS[0], *KEYS[2:]]
    assert driver.resolve(KEYS[:3]) == [True, False, True]
    tier.write_errors.clear()
    assert driver.store(KEYS).success


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BlockMissingError("gone"), JobErrorKind.MISSING),
        (BlockDamagedError("bad bytes"), JobErrorKind.DAMAGED),
        (OSError(errno.ENOSPC, "odd"), JobErrorKind.FAILED),
        (KeyboardInterrupt(), JobErrorKind.FAILED),
        (TimeoutError("slow"), JobErrorKind.FAILED),
    ],
)
def test_load_errors_have_kinds(
    driver: TierDriver, tier: DictTier, error: BaseException, kind: JobErrorKind
) -> None:
    """Any exception fails its block alone, and the threads live on (JOB-7, LMCache#2420)."""
    driver.store(KEYS)
    tier.read_errors[KEYS[1]] = error
    result = driver.load(KEYS)
    assert result.error is not None
    assert result.error.kind is kind
    assert list(result.successful_keys) == [KEYS[0], *KEYS[2:]]
    tier.read_errors.clear()
    assert driver.load(KEYS).success


def test_bytes_that_are_returned_are_no_loaded_block() -> None:
    """A hook that returns the bytes has not written them: the block fails, and is told why."""

    class ReturningTier(DictTier):
        @override
        def read_block(self, key: OffloadKey, buffer: memoryview) -> Any:
            return self.blocks[key]

        @override
        def write_block(self, key: OffloadKey, data: memoryview) -> Any:
            super().write_block(key, data)
            return "stored"

    with drive(ReturningTier) as driver:
        stored = driver.store(KEYS[:1])
        loaded = driver.load(KEYS[:1])
    assert (stored.success, loaded.success) == (False, False)
    assert stored.error is not None
    assert loaded.error is not None
    assert "write_block returned a str, expected None or the number" in stored.error.message
    assert "read_block returned a bytes, expected None or the number" in loaded.error.message
    assert loaded.error.kind is JobErrorKind.FAILED


def test_the_most_serious_kind_is_reported(driver: TierDriver, tier: DictTier) -> None:
    """Different failures of one job: FAILED over DAMAGED over MISSING."""
    driver.store(KEYS)
    tier.read_errors = {
        KEYS[0]: BlockMissingError("gone"),
        KEYS[1]: BlockDamagedError("bad bytes"),
    }
    error = driver.load(KEYS).error
    assert error is not None
    assert error.kind is JobErrorKind.DAMAGED
    tier.read_errors[KEYS[7]] = OSError("no route")
    error = driver.load(KEYS).error
    assert error is not None
    assert error.kind is JobErrorKind.FAILED
    assert "OSError: no route" in error.message


def test_a_slot_out_of_range_fails_its_block(driver: TierDriver) -> None:
    """Even a job the engine should not have made is reported, not raised (JOB-2)."""
    result = driver.wait(driver.submit(KEYS[:2], [0, 999], load=False))
    assert list(result.successful_keys) == KEYS[:1]


def test_an_object_that_cannot_be_retired_stays_hidden(driver: TierDriver, tier: DictTier) -> None:
    """Without retire() the kit answers absent until the key is stored again (LOOK-4)."""
    driver.store(KEYS)
    tier.read_errors[KEYS[0]] = BlockDamagedError("bad bytes")
    driver.load(KEYS[:1])
    assert tier.exists(KEYS[0])
    assert driver.resolve(KEYS[:1]) == [False]
    assert driver.resolve(KEYS[:1], ReqContext("later")) == [False]
    tier.read_errors.clear()
    driver.store(KEYS[:1])
    assert driver.resolve(KEYS[:1]) == [True]


def test_a_damaged_object_is_retired() -> None:
    """A bad object is removed, and a later store repairs it (DATA-10)."""
    with drive(RetiringTier) as driver:
        tier = driver.tier
        assert isinstance(tier, DictTier)
        driver.store(KEYS)
        tier.read_errors[KEYS[0]] = BlockDamagedError("bad bytes")
        driver.load(KEYS)
        assert tier.retired == [KEYS[0]]
        tier.read_errors.clear()
        assert driver.resolve(KEYS[:1]) == [False]
        driver.store(KEYS[:1])
        assert driver.load(KEYS[:1]).success


def test_a_retirement_that_fails_is_remembered(caplog: pytest.LogCaptureFixture) -> None:
    """When the bad object cannot be removed, lookups deny it all the same."""

    class StuckTier(DictTier):
        @override
        def retire(self, key: OffloadKey) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    with drive(StuckTier) as driver:
        tier = driver.tier
        assert isinstance(tier, DictTier)
        driver.store(KEYS[:1])
        tier.read_errors[KEYS[0]] = BlockDamagedError("bad bytes")
        driver.load(KEYS[:1])
        assert driver.resolve(KEYS[:1], ReqContext("later")) == [False]
        assert "could not be removed: PermissionError" in caplog.text


def test_a_fresh_object_is_not_retired() -> None:
    """An object that was replaced between two reads is loaded, not removed."""
    with drive(RetiringTier) as driver:
        tier = driver.tier
        assert isinstance(tier, DictTier)
        driver.store(KEYS[:1])
        tier.read_errors[KEYS[0]] = BlockDamagedError("bad bytes")
        tier.after_first_read[KEYS[0]] = block_bytes_of(KEYS[0], 512)
        assert driver.load(KEYS[:1]).success
        assert driver.loaded(KEYS[:1]) == KEYS[:1]
        assert tier.retired == []


def test_a_transient_failure_hides_a_block_from_the_living(
    driver: TierDriver, tier: DictTier
) -> None:
    """One failed load is not tried again by the requests of that time (vllm#49176)."""
    driver.store(KEYS)
    tier.read_errors[KEYS[0]] = OSError("no route")
    driver.load(KEYS[:1])
    tier.read_errors.clear()
    assert driver.resolve(KEYS[:1]) == [False]
    later = ReqContext("later")
    pause = threading.Event()
    pause.wait(0.02)
    assert driver.resolve(KEYS[:1], later) == [True]
    assert driver.resolve(KEYS[:1]) == [False]


def test_failures_are_counted_at_the_next_poll(driver: TierDriver, tier: DictTier) -> None:
    """Counters move with the report (MET-1, LMCache#5119)."""
    driver.store(KEYS)
    assert driver.resolve(KEYS) == [True] * 8
    tier.write_errors = {KEYS[0]: OSError("broken"), KEYS[1]: OSError("broken")}
    tier.read_errors = {KEYS[2]: OSError("broken")}
    driver.store(KEYS)
    driver.load(KEYS)
    stats = driver.tier.get_stats()
    assert (stats["store_failures"], stats["load_failures"]) == (2, 1)
    assert (stats["lookup_hits"], stats["lookup_misses"]) == (7, 1)
    assert stats["stalled_jobs"] == 0


def test_errors_of_lookups_are_counted(driver: TierDriver, tier: DictTier) -> None:
    """A backend that cannot be asked shows up as lookup errors."""

    def fail(key: OffloadKey) -> bool:
        raise OSError("no route")

    tier.exists = fail  # type: ignore[method-assign]
    assert driver.resolve(KEYS[:2]) == [False, False]
    assert driver.tier.get_stats()["lookup_errors"] == 2


def test_an_error_without_a_text_fails_its_block_only(driver: TierDriver, tier: DictTier) -> None:
    """Whatever a client raises costs neither other blocks nor the engine's thread (JOB-7)."""

    class MuteError(Exception):
        @override
        def __str__(self) -> str:
            raise RuntimeError("no text")

    tier.write_errors = {KEYS[1]: MuteError()}
    result = driver.store(KEYS)
    assert result.successful_keys == (KEYS[0], *KEYS[2:])

    def fail(key: OffloadKey) -> bool:
        raise MuteError

    tier.exists = fail  # type: ignore[method-assign]
    assert driver.resolve([example_key(100)]) == [False]
    assert driver.tier.get_stats()["lookup_errors"] == 1


def test_a_whole_batch_of_lookups_can_fail(driver: TierDriver, tier: DictTier) -> None:
    """An error of exists_many is an error of each of its keys."""

    def fail(keys: object) -> list[bool | BaseException]:
        raise OSError("no route")

    tier.exists_many = fail  # type: ignore[method-assign]
    assert driver.resolve(KEYS[:2]) == [False, False]
    assert driver.tier.get_stats()["lookup_errors"] == 2


def test_results_outlive_their_request(driver: TierDriver) -> None:
    """The end of the request loses no result (JOB-6)."""
    job_id = driver.submit_store(KEYS)
    driver.tier.on_request_finished(driver.request)
    assert driver.wait(job_id).success


def test_pending_work_lasts_until_the_result_is_fetched(driver: TierDriver, tier: DictTier) -> None:
    """An idle engine keeps stepping while a job is in flight or its result is not fetched."""
    assert not driver.tier.has_pending_work()
    tier.write_gate.clear()
    job_id = driver.submit_store(KEYS[:1])
    assert driver.tier.has_pending_work()
    tier.write_gate.set()
    driver.wait(job_id)
    assert not driver.tier.has_pending_work()


def test_two_stores_of_one_key_do_not_run_at_once(driver: TierDriver, tier: DictTier) -> None:
    """The kit keeps stores of one key apart."""
    tier.write_gate.clear()
    first = driver.submit([KEYS[0]], [0], load=False)
    assert tier.writing.wait(WAIT_S)
    tier.writing.clear()
    second = driver.submit([KEYS[0]], [1], load=False)
    third = driver.submit([KEYS[1]], [2], load=True)
    assert not driver.wait(third).success
    assert not tier.writing.is_set()
    tier.write_gate.set()
    assert driver.wait(first).success
    assert driver.wait(second).success


def test_views_end_with_their_call(driver: TierDriver, tier: DictTier) -> None:
    """A view that a hook keeps cannot be used after the call (DATA-2, DATA-5)."""
    kept: list[memoryview] = []
    write = tier.write_block

    def keep(key: OffloadKey, data: memoryview) -> None:
        kept.append(data)
        write(key, data)

    tier.write_block = keep  # type: ignore[method-assign]
    driver.store(KEYS[:1])
    with pytest.raises(ValueError, match="released"):
        kept[0][0]


def test_an_export_kept_by_a_failure_is_given_back(driver: TierDriver, tier: DictTier) -> None:
    """An array in the frames of an exception does not keep the region mapped (ZC-3)."""

    def fail(key: OffloadKey, buffer: memoryview) -> None:
        window = memoryview(bytearray(1))
        array = buffer.cast("I")
        raise OSError(f"broken {len(array)} {len(window)}")

    tier.read_block = fail  # type: ignore[method-assign]
    result = driver.load(KEYS[:1])
    assert result.error is not None
    assert "OSError: broken 128 1" in result.error.message


def test_nothing_of_a_job_stays_referenced(driver: TierDriver) -> None:
    """A finished job leaves no object behind in the threads or tables of the kit."""

    class Marker:
        pass

    marker = Marker()
    alive = weakref.ref(marker)
    request = ReqContext("marked", {"marker": marker})
    driver.tier.on_new_request(request)
    driver.store(KEYS, request)
    driver.tier.on_request_finished(request)
    # Every thread takes a task once more, and so drops its last one.
    driver.store(KEYS)
    driver.load(KEYS)
    del marker, request
    gc.collect()
    assert alive() is None


def test_calls_do_not_wait_for_the_backend(driver: TierDriver, tier: DictTier) -> None:
    """All calls of a step return while the backend hangs (BLOCK-1, llm-d-kv-cache#457)."""
    tier.write_gate.clear()
    jobs = [driver.submit_store(KEYS) for _ in range(4)]
    assert tier.writing.wait(WAIT_S)
    driver.tier.lookup(KEYS[0], driver.request)
    driver.tier.on_schedule_end(ScheduleEndContext())
    assert list(driver.tier.get_finished_jobs()) == []
    driver.tier.on_new_request(ReqContext("more"))
    driver.tier.on_request_finished(ReqContext("more"))
    tier.write_gate.set()
    assert all(driver.wait(job).success for job in jobs)
