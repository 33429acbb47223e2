"""The tier on a real file system: storing, finding, sharing, repairing."""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from kv_core.contract import Capability, JobErrorKind, ReqContext
from kv_core.tierkit.testing import block_bytes_of, example_namespace
from kv_tier_fs import spec_of_layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_core.tierkit.testing import TierDriver

    Drive = Callable[..., TierDriver]
    PathOf = Callable[[OffloadKey], Path]
    FilesBelow = Callable[[Path], list[str]]


def test_the_spec_says_what_the_tier_is() -> None:
    """Type, version and capabilities: nothing that is not kept."""
    spec = spec_of_layout("files")
    assert (spec.type, tuple(spec.contract)) == ("fs", (1, 0))
    assert spec.capabilities == {
        Capability.PERSISTENT,
        Capability.SHARED,
        Capability.INTEGRITY,
    }
    config = spec.config_model.model_validate({"root_dir": "/", "layout": "files"})
    assert spec.limits(config).staging_bytes == 0


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize(
    ("block_bytes", "row_stride"),
    [
        (512, 512),
        (512, 4096),
        (1000, 1024),
        (4096, 4096),
        (12288, 16384),
        (1 << 20, 1 << 20),
        (3_098_112, 3_100_672),
    ],
)
def test_blocks_of_any_size_come_back(
    drive: Drive,
    keys: list[OffloadKey],
    block_bytes: int,
    row_stride: int,
    direct_io: bool,
) -> None:
    """Sizes and strides that are multiples of a page and such that are not (GEO-1, vllm#55424)."""
    driver = drive(
        direct_io=direct_io, block_bytes=block_bytes, row_stride=row_stride, num_blocks=8
    )
    assert driver.store(keys[:4]).success
    result = driver.load(keys[:4])
    assert result.success
    assert result.transfer_bytes == 4 * block_bytes
    assert driver.loaded(keys[:4]) == keys[:4]


def test_a_reopened_tier_finds_its_blocks(drive: Drive, keys: list[OffloadKey]) -> None:
    """Blocks outlive the tier (PERS-1, NS-2)."""
    first = drive()
    first.store(keys)
    first.close()
    second = drive()
    assert second.resolve(keys) == [True] * 8
    assert second.load(keys).success
    assert second.loaded(keys) == keys


def test_tiers_of_one_root_see_each_other(drive: Drive, keys: list[OffloadKey]) -> None:
    """What one instance stored is found and loaded by another (SHARE-1)."""
    one, two = drive(), drive()
    assert two.resolve(keys) == [False] * 8
    one.store(keys)
    later = ReqContext("later")
    assert two.resolve(keys, later) == [True] * 8
    assert two.load(keys, later).success
    assert two.loaded(keys) == keys


@pytest.mark.parametrize(
    "changes",
    [{"epoch": 1, "epoch_run": "run"}, {"kv_layout": "other"}, {"revision": "other"}, {"rank": 0}],
)
def test_namespaces_do_not_mix(
    drive: Drive, keys: list[OffloadKey], changes: dict[str, object]
) -> None:
    """Under another namespace nothing is found, and both keep their own bytes (vllm#49440)."""
    one = drive()
    two = drive(namespace=example_namespace(4096, **changes))
    one.store(keys)
    assert two.resolve(keys) == [False] * 8
    assert not two.load(keys).success


def test_a_valid_block_is_not_written_again(
    drive: Drive, keys: list[OffloadKey], path_of: PathOf
) -> None:
    """A second store leaves the file and moves nothing."""
    driver = drive()
    driver.store(keys[:1])
    before = path_of(keys[0]).stat()
    result = driver.store(keys[:1])
    assert (result.success, result.transfer_bytes) == (True, 0)
    assert path_of(keys[0]).stat().st_ino == before.st_ino


def test_files_and_folders_are_private(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """Modes are 0600 and 0700 whatever the umask (vllm-metal#681)."""
    previous = os.umask(0o000)
    try:
        drive().store(keys)
        os.umask(0o777)
        drive(tmp_path / "other").store(keys)
    finally:
        os.umask(previous)
    made = [*(tmp_path / "root").rglob("*"), *(tmp_path / "other").rglob("*")]
    assert len(made) > 40
    assert {path.stat().st_mode & 0o7777 for path in made if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o7777 for path in made if path.is_dir()} == {0o700}


def test_a_closed_tier_leaves_blocks_and_description_only(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path, files_below: FilesBelow
) -> None:
    """No lock, no temporary file, nothing but what the format says."""
    driver = drive()
    driver.store(keys)
    driver.close()
    files = files_below(tmp_path / "root")
    assert len(files) == 9
    assert sum(name.endswith(".bin") for name in files) == 8
    assert sum(name.endswith("/config.json") for name in files) == 1


# -- objects that are not what they should be -----------------------------------------------------


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return damage


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _empty,
        _extend,
        _flip(0),
        _flip(4095),
        _flip(4096),
        _flip(4096 + 16),
        _flip(4096 + 99),
        _replace_by_pipe,
    ],
    ids=["cut", "empty", "long", "first", "last", "magic", "size", "key", "pipe"],
)
def test_a_damaged_file_fails_alone_is_retired_and_repaired(
    drive: Drive,
    keys: list[OffloadKey],
    path_of: PathOf,
    damage: Callable[[Path], None],
    direct_io: bool,
) -> None:
    """One bad byte or length fails one block; a store repairs it (INT-1, DATA-10, vllm#54363)."""
    driver = drive(direct_io=direct_io)
    driver.store(keys)
    damage(path_of(keys[3]))
    good = [*keys[:3], *keys[4:]]
    result = driver.load(keys)
    assert list(result.successful_keys) == good
    assert set(good) <= set(driver.loaded(keys))
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DAMAGED
    assert not path_of(keys[3]).exists()
    assert driver.resolve(keys[3:4]) == [False]
    assert driver.tier.get_stats()["load_failures"] == 1
    assert driver.store(keys[3:4]).success
    assert driver.resolve(keys[3:4]) == [True]
    assert driver.load(keys).success


def test_swapped_files_are_found_out(
    drive: Drive, keys: list[OffloadKey], path_of: PathOf, tmp_path: Path
) -> None:
    """A file under another key's name never yields that key's bytes (LMCache#4385)."""
    driver = drive()
    driver.store(keys)
    path_of(keys[0]).rename(tmp_path / "aside")
    path_of(keys[1]).rename(path_of(keys[0]))
    (tmp_path / "aside").rename(path_of(keys[1]))
    result = driver.load(keys)
    assert list(result.successful_keys) == keys[2:]
    assert result.error is not None
    assert "belongs to another key" in result.error.message


def test_a_missing_file_is_missing(drive: Drive, keys: list[OffloadKey], path_of: PathOf) -> None:
    """A file deleted behind the tier's back loses one block (LMCache#2420)."""
    driver = drive()
    driver.store(keys)
    path_of(keys[0]).unlink()
    result = driver.load(keys)
    assert list(result.successful_keys) == keys[1:]
    assert result.error is not None
    assert result.error.kind is JobErrorKind.MISSING
    assert driver.resolve(keys[:1]) == [False]


def test_a_cut_file_is_stored_over(drive: Drive, keys: list[OffloadKey], path_of: PathOf) -> None:
    """A store checks length and trailer before it trusts what is there."""
    driver = drive()
    driver.store(keys[:1])
    _truncate(path_of(keys[0]))
    assert driver.resolve(keys[:1], ReqContext("other")) == [False]
    assert driver.store(keys[:1]).transfer_bytes == 4096
    assert driver.load(keys[:1]).success


def test_a_fresh_file_of_another_process_is_put_back(
    drive: Drive, keys: list[OffloadKey], path_of: PathOf
) -> None:
    """Retiring removes the file that was read, not the one that has replaced it."""
    driver = drive()
    driver.store(keys[:1])
    good = path_of(keys[0]).read_bytes()
    _flip(0)(path_of(keys[0]))
    tier = driver.tier
    with driver.primary.block(0) as slot, pytest.raises(OSError, match="checksum"):
        tier.read_block(keys[0], slot)  # type: ignore[attr-defined]
    path_of(keys[0]).unlink()
    path_of(keys[0]).write_bytes(good)
    tier.retire(keys[0])  # type: ignore[attr-defined]
    assert path_of(keys[0]).read_bytes() == good
    assert driver.load(keys[:1]).success


def test_a_bad_file_is_retired_although_the_place_to_move_it_is_gone(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path, path_of: PathOf
) -> None:
    """A clean-up job that removes empty folders does not bring a bad block back (LOOK-4)."""
    driver = drive()
    driver.store(keys[:1])
    _flip(0)(path_of(keys[0]))
    (folder,) = (path for path in (tmp_path / "root").glob("*/writers/*") if path.is_dir())
    folder.rmdir()
    assert not driver.load(keys[:1]).success
    assert driver.resolve(keys[:1], ReqContext("later")) == [False]
    assert not path_of(keys[0]).exists()
    assert driver.store(keys[:1]).success
    assert driver.load(keys[:1]).success


def test_a_folder_of_the_right_size_is_no_block(
    drive: Drive, keys: list[OffloadKey], path_of: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a file is found, whatever length something else reports."""
    driver = drive()
    path_of(keys[0]).mkdir(parents=True)
    real = os.lstat

    def lstat(path: str) -> os.stat_result:
        status = list(real(path))
        status[stat.ST_SIZE] = 8192
        return os.stat_result(status)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lstat)
        assert driver.resolve(keys[:1]) == [False]


def test_retiring_what_was_missing_removes_nothing(
    drive: Drive, keys: list[OffloadKey], path_of: PathOf
) -> None:
    """A file that appears after a load found none is somebody's fresh block."""
    driver = drive()
    driver.store(keys[:1])
    driver.tier.retire(keys[0])  # type: ignore[attr-defined]
    assert path_of(keys[0]).exists()


def test_a_removed_root_is_made_again(
    drive: Drive, keys: list[OffloadKey], tmp_path: Path, path_of: PathOf
) -> None:
    """Emptying the cache under a running tier costs its blocks, not the tier."""
    driver = drive()
    driver.store(keys)
    shutil.rmtree(tmp_path / "root")
    assert not driver.load(keys).success
    assert driver.store(keys).success
    assert driver.load(keys).success
    assert path_of(keys[0]).exists()
    assert list((tmp_path / "root").glob("*/config.json"))


def test_a_store_that_fails_leaves_nothing(
    drive: Drive,
    keys: list[OffloadKey],
    path_of: PathOf,
    tmp_path: Path,
    files_below: FilesBelow,
) -> None:
    """A failed store leaves no temporary file, and no block (DATA-8)."""
    driver = drive()
    driver.store(keys[1:2])
    before = files_below(tmp_path / "root")
    path_of(keys[0]).mkdir(parents=True)
    result = driver.store(keys[:1])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.FAILED
    assert files_below(tmp_path / "root") == before


def test_the_file_is_what_the_specification_says(
    drive: Drive, keys: list[OffloadKey], path_of: PathOf
) -> None:
    """Payload first, then a page of trailer."""
    drive().store(keys[:1])
    content = path_of(keys[0]).read_bytes()
    assert content[:4096] == block_bytes_of(keys[0], 4096)
    assert content[4096:4104] == b"KVCBLOCK"
    assert len(content) == 8192
