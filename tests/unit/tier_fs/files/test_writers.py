"""Temporary files and locks of a writer when the storage refuses."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from kv_tier_fs.files._writers import Writer, reclaim_dead_writers


@pytest.fixture
def writers_dir(tmp_path: Path) -> Path:
    """Return an empty folder for writers."""
    folder = tmp_path / "writers"
    folder.mkdir()
    return folder


def test_a_discarded_file_is_removed_at_once(writers_dir: Path) -> None:
    """Nothing has to follow when the storage works; a file that is gone already is fine."""
    writer = Writer(writers_dir)
    path = Path(writer.temporary_path())
    path.touch()
    writer.discard(str(path))
    assert not path.exists()
    writer.discard(str(path))
    writer.close()


def test_what_cannot_be_removed_is_removed_later(writers_dir: Path) -> None:
    """A file that resists is tried again, and does not keep the others."""
    writer = Writer(writers_dir)
    stubborn, other = Path(writer.temporary_path()), Path(writer.temporary_path())
    # A folder cannot be unlinked.
    stubborn.mkdir()
    other.touch()
    writer.discard(str(stubborn))
    writer.discard(str(other))
    writer.clean_up()
    assert not other.exists()
    stubborn.rmdir()
    stubborn.touch()
    writer.clean_up()
    assert not stubborn.exists()
    writer.close()


def test_a_lock_file_that_stays_is_no_longer_locked(
    writers_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error at the end leaves no descriptor (LIFE-2), and the writer passes for dead."""
    writer = Writer(writers_dir)

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(type(writers_dir), "unlink", fail)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            writer.close()
    assert reclaim_dead_writers(writers_dir) == 1
    writer.close()


def test_what_has_taken_the_place_of_a_writer_is_left_alone(
    writers_dir: Path, tmp_path: Path
) -> None:
    """A link that leads elsewhere, and a lock of that name there, are not what was made."""
    writer = Writer(writers_dir)
    elsewhere = tmp_path / "elsewhere"
    writers_dir.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", elsewhere)
    writers_dir.symlink_to(elsewhere)
    (folder,) = (path for path in elsewhere.iterdir() if path.is_dir())
    (folder / "0.tmp").write_bytes(b"somebody else's")
    writer.discard(f"{writers_dir}/{folder.name}/0.tmp")
    writer.close()
    assert (folder / "0.tmp").read_bytes() == b"somebody else's"
    assert len(list(elsewhere.glob("*.lock"))) == 1
