"""Temporary files and locks of a writer when the storage refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_tier_fs.files._writers import Writer


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


def test_a_lock_file_that_stays_is_no_longer_locked(writers_dir: Path) -> None:
    """An error at the end leaves no descriptor (LIFE-2), and the writer passes for dead."""
    writer = Writer(writers_dir)
    (lock,) = writers_dir.glob("*.lock")
    lock.unlink()
    lock.mkdir()
    with pytest.raises(OSError, match="directory"):
        writer.close()
    writer.close()
