"""The fsspec tier on a real folder: publication, leftovers, damage."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import JobErrorKind, parse_tier_config
from kv_core.errors import TierOpenError
from kv_core.tierkit.objects import ObjectNames
from kv_core.tierkit.testing import TierDriver, example_key, example_namespace
from kv_tier_fsspec import kv_core_register_tier
from kv_tier_fsspec._leftovers import ABANDONED_AFTER_S, Writer

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey

KEYS = [example_key(number) for number in range(4)]
BLOCK_BYTES = 4096
NAMESPACE = example_namespace(BLOCK_BYTES)


def drive(root: Path, **settings: Any) -> TierDriver:
    """Open the tier on a folder."""
    spec = kv_core_register_tier()
    everything = {"url": f"file://{root}", "min_free_bytes": 1, **settings}
    config = parse_tier_config("cold", spec.config_model, everything)
    return TierDriver(spec.factory, config, block_bytes=BLOCK_BYTES, tier_name="cold")


def path_of(root: Path, key: OffloadKey) -> Path:
    """Return the file of a block."""
    return Path(ObjectNames(str(root), NAMESPACE).block(key))


def unfinished(root: Path) -> list[str]:
    """Return the names of temporary files."""
    folder = Path(ObjectNames(str(root), NAMESPACE).folder, "unfinished")
    return sorted(path.name for path in folder.glob("*"))


def test_blocks_outlive_the_tier(tmp_path: Path) -> None:
    """A reopened tier finds them, and loads what was stored."""
    with drive(tmp_path) as driver:
        assert driver.store(KEYS).success
    with drive(tmp_path) as driver:
        assert driver.resolve(KEYS) == [True] * 4
        assert driver.load(KEYS).success
        assert driver.loaded(KEYS) == KEYS


def test_a_store_leaves_nothing_but_the_block(tmp_path: Path) -> None:
    """The temporary file has become the block, of the length that the format says."""
    with drive(tmp_path) as driver:
        driver.store(KEYS)
    assert unfinished(tmp_path) == []
    assert path_of(tmp_path, KEYS[0]).stat().st_size == BLOCK_BYTES + 256


def test_what_another_process_stored_is_found(tmp_path: Path) -> None:
    """No listing and no answer is remembered by the filesystem."""
    with drive(tmp_path) as reader, drive(tmp_path) as writer:
        assert reader.resolve(KEYS[:1]) == [False]
        writer.store(KEYS[:1])
        late = reader.request.__class__("late")
        reader.tier.on_new_request(late)
        assert reader.resolve(KEYS[:1], late) == [True]


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    """Its file stays the one it was."""
    with drive(tmp_path) as driver:
        driver.store(KEYS[:1])
        before = path_of(tmp_path, KEYS[0]).stat().st_ino
        assert driver.store(KEYS[:1]).success
        assert path_of(tmp_path, KEYS[0]).stat().st_ino == before


@pytest.mark.parametrize("length", [0, 100, BLOCK_BYTES, BLOCK_BYTES + 255])
def test_a_store_over_a_damaged_object_repairs_it(tmp_path: Path, length: int) -> None:
    """A file that happens to exist is not trusted."""
    with drive(tmp_path) as driver:
        driver.store(KEYS[:1])
        os.truncate(path_of(tmp_path, KEYS[0]), length)
        assert driver.store(KEYS[:1]).success
        assert driver.load(KEYS[:1]).success
        assert driver.loaded(KEYS[:1]) == KEYS[:1]


def test_a_flipped_bit_is_a_failed_load_and_the_object_is_gone(tmp_path: Path) -> None:
    """INT-1, and only that block fails."""
    with drive(tmp_path) as driver:
        driver.store(KEYS)
        path = path_of(tmp_path, KEYS[2])
        content = bytearray(path.read_bytes())
        content[17] ^= 1
        path.write_bytes(content)
        result = driver.load(KEYS)
        assert result.error is not None
        assert result.error.kind is JobErrorKind.DAMAGED
        assert set(result.successful_keys) == {KEYS[0], KEYS[1], KEYS[3]}
    assert not path.exists()


def test_folders_that_were_removed_are_made_again(tmp_path: Path) -> None:
    """An operator empties the cache under the running tier."""
    with drive(tmp_path) as driver:
        driver.store(KEYS[:1])
        subprocess.run(["rm", "-r", ObjectNames(str(tmp_path), NAMESPACE).folder], check=True)
        assert driver.store(KEYS[:2]).success
        assert driver.load(KEYS[:2]).success


def test_a_rename_that_fails_is_a_failed_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied in its place: readers would see the block grow."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    with drive(tmp_path) as driver:
        with monkeypatch.context() as broken:
            # However it is done.
            for place, name in ((os, "rename"), (os, "replace"), (Path, "replace")):
                broken.setattr(place, name, refuse)
            result = driver.store(KEYS[:1])
        assert result.error is not None
        assert result.error.kind is JobErrorKind.FAILED
        assert os.strerror(errno.EXDEV) in result.error.message
        assert not path_of(tmp_path, KEYS[0]).exists()
        assert unfinished(tmp_path) == []
        assert driver.store(KEYS[:1]).success


def test_a_folder_in_the_place_of_a_block_is_a_failed_store(tmp_path: Path) -> None:
    """And not one that succeeds by putting the block into the folder."""
    with drive(tmp_path) as driver:
        path = path_of(tmp_path, KEYS[0])
        path.mkdir(parents=True)
        result = driver.store(KEYS[:2])
        assert result.error is not None
        assert result.error.kind is JobErrorKind.FAILED
        assert set(result.successful_keys) == {KEYS[1]}
        assert list(path.iterdir()) == []
        assert unfinished(tmp_path) == []
        assert driver.resolve(KEYS[:2]) == [False, True]


def test_stores_are_declined_below_the_floor(tmp_path: Path) -> None:
    """More than the disk has must stay free."""
    with drive(tmp_path, min_free_bytes=2**60) as driver:
        result = driver.store(KEYS[:1])
        assert result.error is not None
        assert result.error.kind is JobErrorKind.DECLINED


def test_a_place_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    """What was tried, what the system said, and what to look at."""
    (tmp_path / "file").touch()
    with pytest.raises(TierOpenError, match=r"reading and writing .*namespace\.json"):
        drive(tmp_path / "file" / "kv")


# -- leftovers ------------------------------------------------------------------------------------


def leave(root: Path, name: str) -> None:
    """Make an unfinished file."""
    folder = Path(ObjectNames(str(root), NAMESPACE).folder, "unfinished")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"part")


def own_name() -> str:
    """Return the name of an unfinished file of this process."""
    return Writer(ObjectNames("b", NAMESPACE)).temporary_name().rpartition("/")[2]


def test_leftovers_of_a_process_that_has_ended_are_removed(tmp_path: Path) -> None:
    """PERS-3: the next open does it."""
    code = (
        "from kv_core.tierkit.objects import ObjectNames; "
        "from kv_core.tierkit.testing import example_namespace; "
        "from kv_tier_fsspec._leftovers import Writer; "
        "print(Writer(ObjectNames('b', example_namespace(4096))).temporary_name())"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    leave(tmp_path, told.stdout.strip().rpartition("/")[2])
    drive(tmp_path).close()
    assert unfinished(tmp_path) == []


def test_leftovers_of_a_living_process_are_kept(tmp_path: Path) -> None:
    """It is in the middle of a store."""
    name = own_name()
    leave(tmp_path, name)
    drive(tmp_path).close()
    assert unfinished(tmp_path) == [name]


def test_a_process_id_that_is_used_again_saves_nobody(tmp_path: Path) -> None:
    """The start of the process is in the name as well."""
    host, pid, start, rest = own_name().split("-", 3)
    leave(tmp_path, f"{host}-{pid}-{int(start) + 1}-{rest}")
    drive(tmp_path).close()
    assert unfinished(tmp_path) == []


def test_leftovers_of_another_host_are_kept_until_they_are_old(tmp_path: Path) -> None:
    """Nothing is known of its processes."""
    young, old = "0" * 12 + "-1-2-3-4.tmp", "0" * 12 + "-1-2-3-5.tmp"
    leave(tmp_path, young)
    leave(tmp_path, old)
    folder = Path(ObjectNames(str(tmp_path), NAMESPACE).folder, "unfinished")
    long_ago = time.time() - ABANDONED_AFTER_S - 60
    os.utime(folder / old, (long_ago, long_ago))
    drive(tmp_path).close()
    assert unfinished(tmp_path) == [young]


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    """What has another kind of name was made by somebody else."""
    leave(tmp_path, "notes.tmp")
    drive(tmp_path).close()
    assert unfinished(tmp_path) == ["notes.tmp"]
