"""The floor of free space: when the file system is asked, and what is declined."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

import pytest

from kv_core.contract import JobErrorKind, parse_tier_config
from kv_core.errors import BlockDeclinedError, ConfigError
from kv_core.tierkit._free_space import LOOK_EVERY_S, FreeSpace
from kv_core.tierkit.testing import ManualClock
from kv_tier_fs import kv_core_register_tier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_core.tierkit.testing import TierDriver

BLOCK: Final = 512
FLOOR_BLOCKS: Final = 10
FLOOR_BYTES: Final = FLOOR_BLOCKS * BLOCK


class FakeFileSystem:
    """What ``statvfs`` says of every folder.

    Attributes:
        free_blocks: Free blocks, of 512 bytes each, for processes without privileges.
        blocks: All blocks; 0 on file systems that know no limit.
        error: What asking raises.
        asked: How often it was asked.
    """

    def __init__(self) -> None:
        self.free_blocks = 0
        self.blocks = 1000
        self.error: OSError | None = None
        self.asked = 0

    def statvfs(self, path: str) -> os.statvfs_result:
        """Answer like the function of this name; half of what is free is root's."""
        self.asked += 1
        if self.error is not None:
            raise self.error
        free = self.free_blocks
        return os.statvfs_result((4096, BLOCK, self.blocks, free * 2, free, 0, 0, 0, 0, 255))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FakeFileSystem:
    """Put a fake in the place of every file system."""
    fake = FakeFileSystem()
    monkeypatch.setattr(os, "statvfs", fake.statvfs)
    return fake


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock that stands still."""
    return ManualClock()


@pytest.fixture
def space(disk: FakeFileSystem, clock: ManualClock) -> FreeSpace:
    """Return the object under test, with a floor of ten blocks."""
    return FreeSpace("/mnt/kv", FLOOR_BYTES, clock)


def test_the_floor_itself_is_enough(space: FreeSpace, disk: FakeFileSystem) -> None:
    """Exactly the floor may be used, one block less may not; root's reserve does not count."""
    disk.free_blocks = FLOOR_BLOCKS
    space.take(BLOCK)
    disk.free_blocks = FLOOR_BLOCKS - 1
    with pytest.raises(BlockDeclinedError, match=r"/mnt/kv has 4.50 KiB free, less .*\(5 KiB\)"):
        space.take(BLOCK)


def test_plenty_of_space_is_asked_for_once(
    space: FreeSpace, disk: FakeFileSystem, clock: ManualClock
) -> None:
    """A look is good for a while, so that blocks cost no call to the system."""
    disk.free_blocks = 900
    for _ in range(100):
        space.take(BLOCK)
    assert disk.asked == 1
    clock.turn(LOOK_EVERY_S)
    space.take(BLOCK)
    assert disk.asked == 2


def test_own_writes_count_between_two_looks(space: FreeSpace, disk: FakeFileSystem) -> None:
    """A fast tier cannot run through the floor before the next look."""
    disk.free_blocks = FLOOR_BLOCKS + 2
    for _ in range(3):
        space.take(BLOCK)
        disk.free_blocks -= 1
    with pytest.raises(BlockDeclinedError):
        space.take(BLOCK)


def test_what_was_counted_and_not_written_is_no_reason_to_decline(
    space: FreeSpace, disk: FakeFileSystem
) -> None:
    """Before own writes are held against the tier, the file system is asked again."""
    disk.free_blocks = FLOOR_BLOCKS + 2
    for _ in range(10):
        space.take(BLOCK)
    assert disk.asked == 4


def test_declining_ends_with_the_shortage(space: FreeSpace, disk: FakeFileSystem) -> None:
    """Nothing is declined on an old answer."""
    for _ in range(3):
        with pytest.raises(BlockDeclinedError):
            space.take(BLOCK)
    assert disk.asked == 3
    disk.free_blocks = FLOOR_BLOCKS
    space.take(BLOCK)


def test_a_file_system_without_a_limit_is_never_full(
    space: FreeSpace, disk: FakeFileSystem
) -> None:
    """Some network file systems count no blocks at all."""
    disk.blocks = 0
    space.take(BLOCK)


def test_a_file_system_that_does_not_answer_is_left_to_the_write(
    space: FreeSpace, disk: FakeFileSystem
) -> None:
    """An error is no lack of space."""
    disk.error = OSError(errno.ENOENT, "No such file or directory")
    space.take(BLOCK)


# -- in the tier ----------------------------------------------------------------------------------


def test_a_tier_declines_below_its_floor_and_recovers(
    drive: Callable[..., TierDriver],
    keys: list[OffloadKey],
    disk: FakeFileSystem,
    clock: ManualClock,
) -> None:
    """Stores are declined, which is no failure; loads, lookups and known blocks go on."""
    driver = drive(min_free_bytes=FLOOR_BYTES, clock=clock)
    disk.free_blocks = 900
    assert driver.store(keys[:2]).success
    disk.free_blocks = FLOOR_BLOCKS - 1
    clock.turn(LOOK_EVERY_S)
    declined = driver.store(keys[2:4])
    assert declined.error is not None
    assert (declined.error.kind, list(declined.successful_keys)) == (JobErrorKind.DECLINED, [])
    assert driver.store(keys[:2]).success
    assert driver.load(keys[:2]).success
    assert driver.resolve(keys[:4]) == [True, True, False, False]
    disk.free_blocks = FLOOR_BLOCKS
    assert driver.store(keys[2:3]).success


@pytest.mark.parametrize(
    ("written", "floor_bytes"),
    [({}, 2**30), ({"min_free_bytes": "20GiB"}, 20 * 2**30), ({"min_free_bytes": 1}, 1)],
)
def test_the_floor_is_a_size_and_declared(
    written: dict[str, object], floor_bytes: int, tmp_path: Path
) -> None:
    """Read as sizes are read everywhere, not zero by default, and in the limits."""
    spec = kv_core_register_tier()
    config = parse_tier_config("fs", spec.config_model, {"root_dir": tmp_path, **written})
    assert spec.limits(config).min_free_bytes == floor_bytes


@pytest.mark.parametrize("written", [0, -1, "0", "1 Gb", 1.5, True, None])
def test_what_is_no_size_is_refused(written: object, tmp_path: Path) -> None:
    """Without a floor the tier would fill the disk; the setting is named."""
    spec = kv_core_register_tier()
    settings = {"root_dir": tmp_path, "min_free_bytes": written}
    with pytest.raises(ConfigError, match="min_free_bytes") as caught:
        parse_tier_config("fs", spec.config_model, settings)
    assert caught.value.setting == "fs.min_free_bytes"
