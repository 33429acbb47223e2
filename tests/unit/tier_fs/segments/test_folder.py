"""Folders of namespaces and writers: private, checked, and alive or not."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.errors import TierOpenError
from kv_core.tierkit.testing import example_namespace
from kv_tier_fs.segments._file_lock import FileLock
from kv_tier_fs.segments._folder import LOCK_NAME, NamespaceFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Open = Callable[..., Any]


def folder_of(root: Path, **changes: Any) -> NamespaceFolder:
    """Return the folder of a namespace, not opened."""
    return NamespaceFolder(root, example_namespace(4096, **changes))


def opened(root: Path, **changes: Any) -> NamespaceFolder:
    """Return the folder of a namespace."""
    folder = folder_of(root, **changes)
    folder.open(read_only=False, timeout_s=5)
    return folder


# -- folders --------------------------------------------------------------------------------------


def test_everything_is_private_whatever_the_umask(tmp_path: Path) -> None:
    """Folders 0700, files 0600."""
    before = os.umask(0)
    try:
        folder = opened(tmp_path / "root")
        writer = folder.become_writer(5)
    finally:
        os.umask(before)
    for path in (tmp_path / "root", *(tmp_path / "root").rglob("*")):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    writer.close()


def test_a_root_that_every_user_can_write_to_is_refused(tmp_path: Path) -> None:
    """The message says what to do."""
    tmp_path.chmod(0o777)
    with pytest.raises(TierOpenError, match=f"mode 0777.*'chmod 700 {tmp_path}'"):
        opened(tmp_path)


@pytest.mark.privileged
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users")
def test_a_root_of_another_user_is_refused(tmp_path: Path) -> None:
    """Also for root, who could write to it."""
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(TierOpenError, match="owned by user id 65534"):
        opened(tmp_path)


def test_the_root_may_be_a_symbolic_link_and_nothing_below(tmp_path: Path) -> None:
    """Nothing is made where a link of the inside leads."""
    real, link, outside = tmp_path / "real", tmp_path / "link", tmp_path / "outside"
    real.mkdir(mode=0o700)
    outside.mkdir()
    link.symlink_to(real)
    folder = opened(link)
    namespace_dir = folder.path.parent
    for path in folder.path.iterdir():
        path.unlink()
    folder.path.rmdir()
    folder.path.symlink_to(outside)
    with pytest.raises(TierOpenError, match="segments-v1 is a symbolic link"):
        opened(link)
    folder.path.unlink()
    namespace_dir.rmdir()
    namespace_dir.symlink_to(outside)
    with pytest.raises(TierOpenError, match="is a symbolic link"):
        opened(link)
    assert list(outside.iterdir()) == []


def test_the_description_names_every_field(tmp_path: Path) -> None:
    """For people, and for tools that have no engine."""
    folder = opened(tmp_path / "root")
    found = json.loads((folder.path / "config.json").read_text())
    namespace = example_namespace(4096)
    assert found["namespace"] == json.loads(json.dumps(namespace.describe()))
    assert (found["layout"], found["format_version"]) == ("segments", 1)
    assert found["fingerprint"] == namespace.fingerprint


def test_another_namespace_under_the_same_name_is_refused(tmp_path: Path) -> None:
    """The name has twelve digits of the fingerprint only."""
    folder = opened(tmp_path / "root")
    config = folder.path / "config.json"
    found = json.loads(config.read_text())
    found["namespace"]["dtype"] = "float8"
    config.write_text(json.dumps(found))
    with pytest.raises(TierOpenError, match="these fields differ: dtype"):
        opened(tmp_path / "root")


def test_both_layouts_can_share_a_root(tmp_path: Path) -> None:
    """The description of the other one is not in the way."""
    folder = folder_of(tmp_path)
    folder.path.parent.mkdir(parents=True)
    (folder.path.parent / "config.json").write_text('{"layout": "files"}')
    opened(tmp_path)


def test_reading_only_makes_nothing(tmp_path: Path) -> None:
    """The namespace may come later; the root must be there."""
    folder = folder_of(tmp_path)
    folder.open(read_only=True, timeout_s=5)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TierOpenError, match="cannot be used"):
        folder_of(tmp_path / "missing").open(read_only=True, timeout_s=5)


def test_a_description_that_was_not_finished_is_removed(tmp_path: Path) -> None:
    """By the next who publishes one."""
    folder = opened(tmp_path / "root")
    (folder.path / "config.json").rename(folder.path / "config.json.0123")
    opened(tmp_path / "root")
    assert [path.name for path in folder.path.iterdir()] == ["config.json"]


# -- locks ----------------------------------------------------------------------------------------


def test_a_lock_excludes_others_until_it_is_released(tmp_path: Path) -> None:
    """In the same process, too."""
    path = tmp_path / "lock"
    first = FileLock.take(tmp_path, path, 1)
    assert FileLock.try_take(tmp_path, path, create=False) is None
    with pytest.raises(TimeoutError, match="locked by another process"):
        FileLock.take(tmp_path, path, 0.01)
    first.release()
    first.release()
    second = FileLock.try_take(tmp_path, path, create=False)
    assert second is not None
    second.release()


def test_a_lock_without_a_file_is_not_made_unasked(tmp_path: Path) -> None:
    """Who asks whether a writer lives must not bring its lock back."""
    assert FileLock.try_take(tmp_path, tmp_path / "lock", create=False) is None
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_removed_excludes_nobody(tmp_path: Path) -> None:
    """A new one under the same name does."""
    path = tmp_path / "lock"
    stale = FileLock.take(tmp_path, path, 1)
    path.unlink()
    fresh = FileLock.take(tmp_path, path, 1)
    assert FileLock.try_take(tmp_path, path, create=True) is None
    stale.release()
    fresh.release()


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    """Nothing is made at its other end."""
    path = tmp_path / "lock"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FileLock.take(tmp_path, path, 0.01)
    assert not (tmp_path / "elsewhere").exists()


def _wait(queue: Any) -> None:
    queue.get()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_does_not_keep_a_writer_alive(tmp_path: Path) -> None:
    """A child that outlives its parent must not hold the parent's lock."""
    folder = opened(tmp_path)
    writer = folder.become_writer(5)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_wait, args=(queue,))
    child.start()
    try:
        assert FileLock.try_take(tmp_path, writer.path / LOCK_NAME, create=False) is None
        writer._lock.release()
        lock = FileLock.take(tmp_path, writer.path / LOCK_NAME, 20)
        lock.release()
    finally:
        queue.put(None)
        child.join()
        queue.close()
        queue.join_thread()


# -- writers --------------------------------------------------------------------------------------


def test_a_writer_without_segments_leaves_nothing(tmp_path: Path) -> None:
    """Its folder goes with it; closing again is fine."""
    folder = opened(tmp_path)
    writer = folder.become_writer(5)
    assert FileLock.try_take(tmp_path, writer.path / LOCK_NAME, create=False) is None
    writer.close()
    writer.close()
    assert not writer.path.exists()


def test_a_writer_with_segments_leaves_its_folder_unlocked(instance: Open) -> None:
    """Whoever comes next takes it for a dead one's."""
    one = instance()
    assert one.store(1) == {}
    one.close()
    lock = FileLock.try_take(one.root, one.own.path / LOCK_NAME, create=False)
    assert lock is not None
    lock.release()
    assert (one.own.path / "00000001.seg").stat().st_size == 4096
