"""The tier of layout ``segments``, driven the way an engine does."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import JobErrorKind, parse_tier_config
from kv_core.errors import ConfigError, TierClosedError, TierOpenError
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_fs import spec_of_layout
from kv_tier_fs.segments._index import BlockIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kv_core.contract import OffloadKey

    Drive = Callable[..., TierDriver]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """Return a function that opens a tier over one folder; tiers are closed at the end."""
    opened: list[TierDriver] = []

    def run(
        *, block_bytes: int = 4096, row_stride: int | None = None, **settings: Any
    ) -> TierDriver:
        spec = spec_of_layout("segments")
        settings = {"root_dir": str(tmp_path / "root"), "min_free_bytes": 1, **settings}
        config = parse_tier_config("fs", spec.config_model, settings)
        driver = TierDriver(
            spec.factory, config, block_bytes=block_bytes, row_stride=row_stride, tier_name="fs"
        )
        opened.append(driver)
        return driver

    yield run
    for driver in opened:
        driver.close()


def _files(tmp_path: Path, pattern: str) -> list[Path]:
    return sorted((tmp_path / "root").rglob(pattern))


def _damage(path: Path, offset: int) -> None:
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"damage")


def test_the_spec_says_what_the_tier_is() -> None:
    """The layout declares what it keeps: bounded, shared, persistent and the rest."""
    declared = {capability.value for capability in spec_of_layout("segments").capabilities}
    assert declared == {
        "bounded", "delete", "events", "integrity", "persistent", "shared", "usage",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("block_bytes", "row_stride"),
    [(512, 512), (1000, 4096), (4096, 4096), (4096, 4608), (100, 100)],
)
def test_blocks_come_back_after_a_restart(
    drive: Drive, keys: list[OffloadKey], block_bytes: int, row_stride: int
) -> None:
    """Blocks of any size and alignment are found and loaded by the next process (PERS-1)."""
    first = drive(block_bytes=block_bytes, row_stride=row_stride)
    assert first.store(keys).success
    first.close()
    second = drive(block_bytes=block_bytes, row_stride=row_stride)
    assert second.resolve(keys) == [True] * 8
    assert second.load(keys[::-1]).success
    assert second.loaded(keys[::-1]) == keys[::-1]


def test_lookups_are_answered_at_once(drive: Drive, keys: list[OffloadKey]) -> None:
    """A lookup is never unknown, and is a miss while the only store is in flight (LOOK-8)."""
    driver = drive()
    assert driver.tier.lookup(keys[0], driver.request) is False
    job = driver.submit_store(keys[:1])
    assert driver.tier.lookup(keys[0], driver.request) is False
    driver.wait(job)
    assert driver.tier.lookup(keys[0], driver.request) is True


def test_what_is_present_is_not_written_again(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """A store of intact blocks moves nothing and succeeds."""
    driver = drive()
    driver.store(keys[:4])
    before = _files(tmp_path, "00000001.idx")[0].stat().st_size
    result = driver.store(keys[:4])
    assert (result.success, result.transfer_bytes) == (True, 0)
    assert _files(tmp_path, "00000001.idx")[0].stat().st_size == before


def test_what_is_about_to_be_removed_does_not_count(drive: Drive, keys: list[OffloadKey]) -> None:
    """A store writes it anew, and a load does not touch bytes that may be written over."""
    driver = drive()
    assert driver.store(keys[:2]).success
    index = driver.tier._index  # type: ignore[attr-defined]
    segment, slot, _ = index.places(keys[0])[0]
    segment.leaving = True
    result = driver.load(keys[:2])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.MISSING
    assert driver.store(keys[:1]).success
    segment.leaving = False
    assert [place[1] for place in index.places(keys[0])] == [2, slot]
    assert driver.load(keys[:2]).success
    assert segment.pins == 0


def test_a_store_repairs_what_is_damaged(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """A store of a block that is damaged on disk puts it right, before anybody has loaded it."""
    driver = drive()
    driver.store(keys[:3])
    _damage(_files(tmp_path, "*.seg")[0], 4096)
    assert driver.store(keys[:3]).transfer_bytes == 4096
    assert driver.load(keys[:3]).success
    driver.close()
    again = drive()
    assert again.load(keys[:3]).success


def test_damage_is_reported_retired_and_forgotten(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """A damaged block fails alone, and is absent from then on, in later processes too (LOOK-4)."""
    driver = drive()
    driver.store(keys[:3])
    _damage(_files(tmp_path, "*.seg")[0], 4096)
    result = driver.load(keys[:3])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DAMAGED
    assert result.successful_keys == (keys[0], keys[2])
    assert driver.resolve(keys[:3]) == [True, False, True]
    assert driver.tier.get_stats()["load_failures"] == 1
    driver.close()
    assert drive().resolve(keys[:3]) == [True, False, True]


def test_deleted_blocks_stay_deleted(drive: Drive, keys: list[OffloadKey]) -> None:
    """Deleted keys are absent at once, after a restart, and until they are stored again (DEL-1)."""
    driver = drive()
    driver.store(keys[:4])
    driver.tier.delete(keys[1:3])
    assert driver.resolve(keys[:4]) == [True, False, False, True]
    assert driver.tier.usage().blocks == 2
    driver.close()
    again = drive()
    assert again.resolve(keys[:4]) == [True, False, False, True]
    again.store(keys[1:2])
    assert again.resolve(keys[:4]) == [True, True, False, True]


def test_usage_tells_of_more_than_the_capacity(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """What was stored before the capacity was lowered counts, until a store needs room (USE-1)."""
    first = drive()
    assert first.store(keys).success
    first.close()
    driver = drive(capacity_bytes=20000)
    files = [*_files(tmp_path, "*.seg"), *_files(tmp_path, "*.idx")]
    on_disk = sum(max(s.st_size, 512 * s.st_blocks) for s in map(os.stat, files))
    usage = driver.tier.usage()
    assert (usage.blocks, usage.bytes, usage.capacity_bytes) == (8, on_disk, 20000)
    assert on_disk > 20000
    assert driver.store([example_key(100)]).success
    usage = driver.tier.usage()
    assert usage.blocks * 4096 <= usage.bytes <= 20000


def test_usage_takes_no_blocks_for_stored_that_went(
    drive: Drive, keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index may hear of it later than of the stores that room was made for."""
    driver = drive(capacity_bytes=100_000)
    assert driver.store(keys[:2]).success
    monkeypatch.setattr(BlockIndex, "__len__", lambda _: 1000)
    assert driver.tier.usage().bytes == 100_000


def test_usage_without_blocks_is_nothing(drive: Drive, keys: list[OffloadKey]) -> None:
    """A segment that is being filled is there, and no block takes anything (USE-1)."""
    driver = drive(capacity_bytes=100_000)
    assert driver.store(keys[:2]).success
    driver.tier.delete(keys[:2])
    assert (driver.tier.usage().blocks, driver.tier.usage().bytes) == (0, 0)


def test_events_tell_what_changed(drive: Drive, keys: list[OffloadKey]) -> None:
    """Stores and removals are told in order, and what was there at the opening is not (EVT-1)."""
    first = drive()
    first.store(keys[:2])
    first.close()
    driver = drive()
    assert list(driver.tier.take_events()) == []
    driver.store(keys[:3])
    driver.tier.delete(keys[1:2])
    told = [(event.keys, event.removed) for event in driver.tier.take_events()]
    assert told == [((keys[2],), False), ((keys[1],), True)]


def test_a_full_disk_declines(
    drive: Drive, keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room is no failure of the backend: stores are declined, loads go on (DATA-11)."""
    driver = drive()
    driver.store(keys[:2])

    def full(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(os, "pwritev", full)
    result = driver.store(keys[2:4])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DECLINED
    assert driver.load(keys[:2]).success


def test_a_floor_of_free_space_declines(drive: Drive, keys: list[OffloadKey]) -> None:
    """Below min_free_bytes nothing is stored."""
    result = drive(min_free_bytes="1000TiB").store(keys[:1])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DECLINED


def test_a_folder_without_room_is_refused(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where not one block can be written, the tier does not open, and leaves nothing (LIFE-4)."""

    def full(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(TierOpenError, match="is on a full file system"):
        drive()
    assert _files(tmp_path, "probe") == _files(tmp_path, "*.seg") == []


def test_the_capacity_is_kept(drive: Drive, tmp_path: Path) -> None:
    """However much is stored, the files stay within the capacity, and the latest are there."""
    driver = drive(capacity_bytes="1MiB")
    for first in range(0, 1000, 10):
        batch = [example_key(first + number) for number in range(10)]
        assert driver.store(batch).success
        size = sum(
            path.stat().st_size
            for path in (tmp_path / "root").rglob("*")
            if path.suffix != ".json"
            if path.is_file()
        )
        assert size <= 1 << 20
        assert driver.resolve(batch) == [True] * 10


def test_a_tier_for_reading_only_changes_nothing(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """With read_only blocks are loaded, stores are declined, and no file changes."""
    first = drive()
    first.store(keys[:2])
    first.close()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "root").rglob("*")}
    driver = drive(read_only=True)
    assert driver.load(keys[:2]).success
    result = driver.store(keys[2:3])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DECLINED
    assert driver.store(keys[:1]).success
    driver.tier.delete(keys[:1])
    assert driver.resolve(keys[:2]) == [False, True]
    driver.close()
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "root").rglob("*")}
    assert {path for path in after if path.suffix != ".seg"} == {
        path for path in before if path.suffix != ".seg"
    }


@pytest.mark.parametrize(("durability", "expected"), [("none", 0), ("data", 2)])
def test_durability(
    drive: Drive,
    keys: list[OffloadKey],
    monkeypatch: pytest.MonkeyPatch,
    durability: str,
    expected: int,
) -> None:
    """With 'data', a store waits until the disk has the payloads, then until it has the index."""
    driver = drive(durability=durability)
    driver.store(keys[:1])
    synced: list[str] = []

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}")[-4:])  # noqa: PTH115

    monkeypatch.setattr(os, "fdatasync", note)
    driver.store(keys[1:2])
    assert synced == [".seg", ".idx"][:expected]


def test_durability_of_names(
    drive: Drive, keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With 'data', the folders are synced whose new names a stored block depends on."""
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    driver = drive(durability="data")
    driver.store(keys[:1])
    (index,) = _files(tmp_path, "00000001.idx")
    assert {str(path) for path in index.parents[:4]} <= set(synced)
    assert str(tmp_path / "root") in synced


def test_a_file_system_that_refuses_direct_io_late(
    drive: Drive, keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file is there by the time that direct I/O is refused, blocks are stored."""
    opening = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = opening(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)
        if flags & os.O_DIRECT:
            os.close(descriptor)
            raise OSError(errno.EINVAL, "too late")
        return descriptor

    monkeypatch.setattr(os, "open", refuse)
    driver = drive()
    assert driver.store(keys[:2]).success
    assert driver.load(keys[:2]).success


def _remove_under_use(folder: Path) -> None:
    """Remove a folder; once more where a thread of the tier has just put something there."""
    for _ in range(100):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
        else:
            return
    pytest.fail(f"{folder} is filled faster than it is emptied")


def test_folders_that_were_removed_are_made_again(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """Who empties the cache under a running engine loses its blocks, and nothing else."""
    driver = drive()
    driver.store(keys[:2])
    _remove_under_use(tmp_path / "root")
    assert driver.store(keys[2:4]).success
    assert driver.load(keys[2:4]).success
    assert driver.resolve(keys[:4]) == [False, False, True, True]
    driver.close()
    assert drive().resolve(keys[:4]) == [False, False, True, True]


def test_a_segment_that_was_removed_is_forgotten(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """A load that finds the file gone forgets all of its blocks; a store brings them back."""
    driver = drive()
    driver.store(keys[:3])
    for path in _files(tmp_path, "00000001.*"):
        path.unlink()
    result = driver.load(keys[:1])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.MISSING
    assert driver.resolve(keys[:3]) == [False] * 3
    assert driver.store(keys[:3]).success
    assert driver.load(keys[:3]).success


def test_a_fork_cannot_use_the_tier(drive: Drive, keys: list[OffloadKey]) -> None:
    """In a forked child every call raises and none hangs (LIFE-6)."""
    driver = drive()
    driver.store(keys[:1])
    child = os.fork()
    if not child:
        try:
            driver.tier.lookup(keys[0], driver.request)
        except TierClosedError:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert driver.load(keys[:1]).success


def test_settings_of_the_other_layout_are_refused(tmp_path: Path) -> None:
    """A capacity that the layout would not keep is an error, not a wish."""
    model = spec_of_layout("files").config_model
    settings = {"root_dir": str(tmp_path), "layout": "files", "capacity_bytes": "1GiB"}
    with pytest.raises(ConfigError, match="'capacity_bytes' is a setting of layout 'segments'"):
        parse_tier_config("fs", model, settings)


def test_a_capacity_too_small_for_a_block_is_the_only_complaint(
    drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    """What was never opened is not closed either, and nothing of it is logged."""
    with pytest.raises(ConfigError, match="blocks of 4096 bytes need"):
        drive(capacity_bytes=4096)
    assert caplog.records == []
