"""What dead writers leave behind is reclaimed; what live ones work on is not (PERS-3)."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from kv_tier_fs._beneath import open_beneath
from kv_tier_fs.segments._leftovers import reclaim_leftovers
from kv_tier_fs.segments._segment_file import SEALED_MODE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Open = Callable[..., Any]

BLOCK = 4096


def reclaim(instance: Any) -> int:
    """Reclaim what is in the namespace of an instance."""
    return reclaim_leftovers(instance.root, instance.folder.path)


def names(instance: Any) -> list[str]:
    """Return what is in the folder of a writer."""
    if not instance.own.path.exists():
        return []
    return sorted(path.name for path in instance.own.path.iterdir())


def test_a_segment_of_a_dead_writer_is_cut_to_what_it_holds(instance: Open) -> None:
    """And sealed; every block of it stays."""
    dead, one = instance(num_slots=64), instance()
    assert dead.store(1, 2, 3) == {}
    assert (dead.own.path / "00000001.seg").stat().st_size == 64 * BLOCK
    dead.die()
    assert reclaim(one) == 1
    for name in ("00000001.seg", "00000001.idx"):
        assert stat.S_IMODE((dead.own.path / name).stat().st_mode) == SEALED_MODE
    assert (dead.own.path / "00000001.seg").stat().st_size == 3 * BLOCK
    one.follow()
    assert one.load(1, 2, 3) == [1, 2, 3]
    assert reclaim(one) == 0


def test_a_segment_of_a_live_writer_stays_as_it_is(instance: Open) -> None:
    """It is still being filled."""
    alive, one = instance(num_slots=64), instance()
    assert alive.store(1) == {}
    (alive.own.path / "00000007.seg").write_bytes(b"about to get an index")
    assert reclaim(one) == 0
    assert (alive.own.path / "00000001.seg").stat().st_size == 64 * BLOCK
    assert "00000007.seg" in names(alive)
    (alive.own.path / "00000007.seg").unlink()
    assert alive.store(2) == {}


def test_payloads_without_an_index_go(instance: Open) -> None:
    """The writer died while it made the segment, or whoever removed it did."""
    dead, one = instance(), instance()
    assert dead.store(1) == {}
    dead.die()
    (dead.own.path / "00000001.idx").unlink()
    assert reclaim(one) == 1
    assert names(dead) == []


def test_an_index_without_payloads_goes(instance: Open) -> None:
    """It promises what is not there."""
    dead, one = instance(), instance()
    assert dead.store(*range(5)) == {}
    dead.die()
    (dead.own.path / "00000001.seg").unlink()
    assert reclaim(one) == 1
    assert names(dead) == ["00000002.idx", "00000002.seg", "lock"]


@pytest.mark.parametrize("kept_bytes", [0, 1, 127, 128, 200])
def test_a_segment_whose_index_has_no_whole_frame_goes(instance: Open, kept_bytes: int) -> None:
    """However little of the index was written."""
    dead, one = instance(), instance()
    assert dead.store(1) == {}
    dead.die()
    index = dead.own.path / "00000001.idx"
    index.write_bytes(index.read_bytes()[:kept_bytes])
    assert reclaim(one) == 1
    assert names(dead) == []


def test_a_torn_end_is_cut_off(instance: Open) -> None:
    """What comes before it stays."""
    dead, one = instance(num_slots=8), instance()
    assert dead.store(1) == {}
    whole = (dead.own.path / "00000001.idx").stat().st_size
    assert dead.store(2) == {}
    dead.die()
    index = dead.own.path / "00000001.idx"
    index.write_bytes(index.read_bytes()[:-1])
    assert reclaim(one) == 1
    assert index.stat().st_size == whole
    assert (dead.own.path / "00000001.seg").stat().st_size == BLOCK
    one.follow()
    assert one.load(1, 2) == [1]


def test_an_index_of_another_version_is_left_alone(instance: Open) -> None:
    """That version knows better what to do with it."""
    dead, one = instance(), instance()
    assert dead.store(1) == {}
    dead.die()
    index = dead.own.path / "00000001.idx"
    content = bytearray(index.read_bytes())
    content[8] += 1
    index.write_bytes(content)
    assert reclaim(one) == 0
    assert names(dead) == ["00000001.idx", "00000001.seg", "lock"]
    assert index.read_bytes() == content


def test_removals_stay_as_long_as_what_they_are_of(instance: Open) -> None:
    """Without them, removed blocks would come back."""
    alive, dead, one = instance(), instance(), instance()
    assert alive.store(1, 2, 3, 4) == {}
    dead.follow()
    segment, slot, _ = dead.index.places(*dead.keys(2))[0]
    dead.writer.remove(segment, dead.keys(2), [slot])
    dead.die()
    assert reclaim(one) == 0
    assert names(dead) == ["00000000.idx", "lock"]
    segment.index_path.unlink()
    segment.path.unlink()
    assert reclaim(one) == 1
    assert names(dead) == []


def test_a_folder_without_a_lock_is_a_dead_writer_s(instance: Open) -> None:
    """Its maker died in between; nobody is in the middle of it, for that needs the lock."""
    one = instance()
    folder = one.folder.path / ("a" * 32)
    folder.mkdir()
    assert reclaim(one) == 1
    assert not folder.exists()


def test_a_file_that_was_sealed_already_is_not_opened_for_writing(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer died between its two files: only the superuser may write to one of mode 0400."""
    dead, one = instance(num_slots=64), instance()
    assert dead.store(1, 2, 3) == {}
    dead.die()
    payloads = dead.own.path / "00000001.seg"
    os.truncate(payloads, 3 * BLOCK)
    payloads.chmod(SEALED_MODE)

    def as_a_user(root: Path, path: Path, flags: int, mode: int = 0) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY and not path.stat().st_mode & stat.S_IWUSR:
            raise PermissionError(errno.EACCES, "read-only", str(path))
        return open_beneath(root, path, flags, mode)

    monkeypatch.setattr("kv_tier_fs.segments._leftovers.open_beneath", as_a_user)
    assert reclaim(one) == 1
    assert reclaim(one) == 0
    payloads.with_suffix(".idx").chmod(0o600)
    os.truncate(payloads, 9 * BLOCK)
    assert reclaim(one) == 1
    assert payloads.stat().st_size == 3 * BLOCK
    one.follow()
    assert one.load(1, 2, 3) == [1, 2, 3]


def test_what_is_no_folder_of_a_writer_is_not_touched(instance: Open) -> None:
    """Neither links nor names that no writer has."""
    one = instance()
    outside = one.root.parent / "outside"
    outside.mkdir()
    (outside / "00000001.seg").write_bytes(b"precious")
    (one.folder.path / ("b" * 32)).symlink_to(outside)
    (one.folder.path / "notes").mkdir()
    (one.folder.path / "notes" / "00000001.seg").write_bytes(b"precious")
    assert reclaim(one) == 0
    assert (outside / "00000001.seg").exists()
    assert (one.folder.path / "notes" / "00000001.seg").exists()


def test_a_link_in_the_place_of_an_index_is_not_followed(instance: Open) -> None:
    """What it leads to stays as it is."""
    dead, one = instance(), instance()
    assert dead.store(1) == {}
    dead.die()
    precious = one.root.parent / "precious"
    precious.write_bytes(b"x" * 300)
    index = dead.own.path / "00000001.idx"
    index.unlink()
    index.symlink_to(precious)
    reclaim(one)
    assert precious.read_bytes() == b"x" * 300
    assert stat.S_IMODE(precious.stat().st_mode) != SEALED_MODE


def test_one_writer_that_cannot_be_reclaimed_does_not_stop_the_others(
    instance: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told and left."""
    bad, good, one = instance(num_slots=64), instance(num_slots=64), instance()
    for dead in (bad, good):
        assert dead.store(1) == {}
        dead.die()
    real = reclaim_leftovers.__globals__["_reclaim_writer"]

    def fail(root: Any, layout: Any, folder: Any) -> bool:
        if folder == bad.own.path:
            raise PermissionError(13, "Permission denied", str(folder))
        return bool(real(root, layout, folder))

    monkeypatch.setitem(reclaim_leftovers.__globals__, "_reclaim_writer", fail)
    assert reclaim(one) == 1
    assert (good.own.path / "00000001.seg").stat().st_size == BLOCK
    assert str(bad.own.path) in caplog.text
