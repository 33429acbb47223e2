"""Who may remove the name of a region, and when somebody else is about to."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kv_core.cpu import PrimaryGeometry, SharedOffloadRegion
from kv_core.cpu._region_file import RegionFile, remove_leftover
from kv_core.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the name of a region."""
    return tmp_path / "region"


@pytest.fixture
def remover(path: Path) -> Iterator[int]:
    """Return a leftover's file as a process has it that is about to remove the name."""
    path.write_bytes(b"old")
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def test_a_name_that_is_being_reclaimed_is_not_a_running_engine(
    path: Path, remover: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of the last generation removes the leftover while the next scheduler starts."""
    pauses: list[float] = []

    def end_removal(seconds: float) -> None:
        pauses.append(seconds)
        path.unlink()
        fcntl.flock(remover, fcntl.LOCK_UN)

    monkeypatch.setattr(time, "sleep", end_removal)
    file = RegionFile.create(path)
    assert pauses == [0.001]
    assert file.has_name()
    file.close()


def test_a_running_engine_is_told_in_a_tenth_of_a_second(
    path: Path, remover: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever holds the lock longer than a removal takes owns the file."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(RegionError, match=r"^the region \S+ belongs to a running process"):
        RegionFile.create(path)
    assert 0 < sum(pauses) < 0.1
    assert path.exists()


def test_a_leftover_that_cannot_be_removed_is_a_clear_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, for instance, in a folder where everybody removes their own names only."""
    path.write_bytes(b"old")

    def refuse(path: Path, *, missing_ok: bool) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(RegionError, match=r"leftover and cannot be removed: .*not permitted"):
        RegionFile.create(path)
    assert remove_leftover(path) is False


def test_a_forked_child_does_not_remove_the_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a copy of the object; workers would look for the region in vain."""
    file = RegionFile.create(path)
    child = RegionFile(path, os.dup(file.descriptor), is_owner=True)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        assert child.is_owner is False
        child.close()
    assert file.has_name()
    file.close()
    assert not path.exists()


def test_leftovers_of_ids_that_do_not_come_again_are_removed(
    tmp_path: Path, geometry: PrimaryGeometry
) -> None:
    """By their beginning; what runs, or begins otherwise, stays."""

    def create(engine_id: str) -> SharedOffloadRegion:
        return SharedOffloadRegion(
            engine_id,
            geometry,
            namespace_fingerprint="ab" * 32,
            shm_dir=tmp_path,
            keep_name=True,
        )

    running = create("run-1")
    left, other = (_leave(create(engine_id)) for engine_id in ("run-2", "other-1"))
    (tmp_path / f"{left.name}-folder").mkdir()
    SharedOffloadRegion.remove_leftovers("run-", tmp_path)
    assert not left.exists()
    assert [running.path.exists(), other.exists()] == [True, True]
    running.close()
    SharedOffloadRegion.remove_leftovers("run-", tmp_path / "absent")


def _leave(region: SharedOffloadRegion) -> Path:
    """End a region as a kill does: its name stays, and nobody holds its locks."""
    elsewhere = region.path.with_name("elsewhere")
    os.link(region.path, elsewhere)
    region.close()
    elsewhere.rename(region.path)
    return region.path
