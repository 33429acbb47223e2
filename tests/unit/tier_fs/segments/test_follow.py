"""Followers see what other processes store and remove, and believe nothing else."""

from __future__ import annotations

import os
import select
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.tierkit.testing import example_namespace
from kv_tier_fs.segments._format import FrameKind
from kv_tier_fs.segments._watch import InotifyWatch, TimerWatch, open_watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Open = Callable[..., Any]


def test_what_another_writer_stores_is_found(instance: Open) -> None:
    """Before and after the first look, frame by frame (SHARE-1)."""
    one, two = instance(), instance()
    assert one.store(1, 2) == {}
    two.follow()
    assert two.load(1, 2, 3) == [1, 2]
    assert one.store(3, 4, 5) == {}
    two.follow()
    assert two.load(*range(1, 6)) == [1, 2, 3, 4, 5]


def stored(instance: Any) -> list[Any]:
    """Look; return the segments in which something was stored."""
    segments: list[Any] = []
    instance.follower.look(lambda segment, _: segments.append(segment))
    return segments


def test_a_look_without_news_has_none(instance: Open) -> None:
    """Nothing is told twice."""
    one, two = instance(), instance()
    assert one.store(1) == {}
    assert len(stored(two)) == 1
    again: list[Any] = []
    news = two.follower.look(lambda *found: again.append(found))
    assert (again, news.removed, news.gone) == ([], [], [])


def test_own_stores_are_no_news(instance: Open) -> None:
    """The engine's thread enters them itself."""
    one = instance()
    assert one.store(1) == {}
    assert stored(one) == []


def test_the_oldest_index_comes_first(instance: Open) -> None:
    """After a restart, the order of writing is all that is known of uses."""
    older, newer, one = instance(), instance(), instance()
    assert newer.store(1) == {}
    assert older.store(2) == {}
    for made, at in ((older, 1000), (newer, 2000)):
        os.utime(made.own.path / "00000001.idx", (at, at))
    found = [segment.name.writer for segment in stored(one)]
    assert found == [older.own.writer, newer.own.writer]


def test_what_another_writer_removes_is_not_found(instance: Open) -> None:
    """Of its own blocks or of ours, at once."""
    one, two = instance(), instance()
    assert one.store(1, 2) == {}
    assert two.store(3) == {}
    for each in (one, two):
        each.follow()
    for number in (1, 3):
        segment, slot, _ = two.index.places(*two.keys(number))[0]
        two.writer.remove(segment, two.keys(number), [slot])
    one.follow()
    assert one.present(1, 2, 3) == [2]


def test_a_removal_that_is_read_before_its_store_counts_in_the_end(instance: Open) -> None:
    """Between the reading of two files, a block may have been stored and removed."""
    one, two = instance(num_slots=8), instance()
    assert one.store(1) == {}
    two.follow()
    index = one.own.path / "00000001.idx"
    before = index.read_bytes()
    assert one.store(2) == {}
    segment, slot, _ = one.index.places(*one.keys(2))[0]
    one.writer.remove(segment, one.keys(2), [slot])
    after = index.read_bytes()
    index.write_bytes(before)
    two.follow()
    index.write_bytes(after)
    two.follow()
    assert two.present(1, 2) == [1]


def test_removals_that_are_moot_are_forgotten(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing blocks for months does not fill the disk, and those that count still do."""
    monkeypatch.setattr("kv_tier_fs.segments._removals._LEAST_COMPACTED_BYTES", 2048)
    one, two = instance(capacity_bytes=200_000), instance()
    monkeypatch.setattr(one.writer._removals, "_compact_at_bytes", 2048)
    sizes = []
    for start in range(0, 400, 4):
        assert one.store(*range(start, start + 4)) == {}
        segment, slot, _ = one.index.places(*one.keys(start))[0]
        one.writer.remove(segment, one.keys(start), [slot])
        sizes.append((one.own.path / "00000000.idx").stat().st_size)
        if start % 40 == 0:
            two.follow()
    assert max(sizes) < 6000
    for each in (two, instance()):
        each.follow()
        each.follow()
        kept = each.present(*range(400))
        assert kept == [n for n in one.present(*range(400)) if n % 4]
        assert len(kept) > 12
    assert sorted(path.suffix for path in one.own.path.iterdir() if "0000000." in path.name) == [
        ".idx"
    ]


def test_removals_that_cannot_be_made_anew_stay_as_they_are(
    instance: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, for example, costs no removal."""
    one, two = instance(), instance()
    assert one.store(*range(8)) == {}
    monkeypatch.setattr(one.writer._removals, "_compact_at_bytes", 1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kv_tier_fs.segments._segment_file.IndexFile.move", fail)
    for number in (1, 5):
        segment, slot, _ = one.index.places(*one.keys(number))[0]
        one.writer.remove(segment, one.keys(number), [slot])
    two.follow()
    two.follow()
    assert two.present(*range(8)) == [0, 2, 3, 4, 6, 7]
    assert not (one.own.path / "00000000.new").exists()
    assert "cannot be made anew" in caplog.text


def test_removals_are_not_written_to_a_file_that_was_removed(instance: Open) -> None:
    """Nobody would read them. Without their folder they fail, to be tried again in another one."""
    one, two = instance(), instance()
    assert one.store(*range(4)) == {}
    two.follow()
    places = {number: two.index.places(*two.keys(number))[0] for number in (0, 1, 2)}

    def remove(number: int) -> None:
        two.writer.remove(places[number][0], two.keys(number), [places[number][1]])

    remove(0)
    (two.own.path / "00000000.idx").unlink()
    remove(1)
    one.follow()
    one.follow()
    assert one.present(*range(4)) == [0, 2, 3]
    shutil.rmtree(two.own.path)
    with pytest.raises(FileNotFoundError):
        remove(2)


def test_removals_that_were_made_anew_at_the_same_inode_are_read_anew(instance: Open) -> None:
    """File systems give the inode of a removed file to the next one."""
    one, two = instance(), instance()
    assert one.store(*range(8)) == {}
    for number in (1, 2, 5):
        segment, slot, _ = one.index.places(*one.keys(number))[0]
        one.writer.remove(segment, one.keys(number), [slot])
    two.follow()
    path = one.own.path / "00000000.idx"
    inode = path.stat().st_ino
    os.truncate(path, 128)
    file = one.writer._removals._file
    file._end = 128
    segment, slot, _ = one.index.places(*one.keys(3))[0]
    file.append(FrameKind.REMOVED, segment.name, [(one.keys(3), [slot], [0])])
    assert path.stat().st_ino == inode
    two.follow()
    two.follow()
    assert two.present(*range(8)) == [0, 4, 6, 7]


def test_a_segment_that_another_process_removed_is_forgotten(instance: Open) -> None:
    """Its descriptor as well, and whoever wrote it hears of it, too."""
    one, two = instance(), instance()
    assert one.store(*range(8)) == {}
    for each in (one, two):
        each.follow()
    segment = two.index.places(*two.keys(0))[0][0]
    segment.index_path.unlink()
    segment.path.unlink()
    for each in (one, two):
        each.follow()
        assert each.present(*range(8)) == [4, 5, 6, 7]
        assert [gone.name for gone in each.removed] == [segment.name]


def test_a_folder_that_was_removed_is_forgotten(instance: Open) -> None:
    """Somebody has emptied the cache by hand."""
    one, two = instance(), instance()
    assert one.store(*range(8)) == {}
    for each in (one, two):
        each.follow()
    shutil.rmtree(one.own.path)
    for each in (one, two):
        each.follow()
        assert each.present(*range(8)) == []


def test_half_a_frame_is_left_for_later(instance: Open) -> None:
    """What is being appended counts when it is whole."""
    one, two = instance(), instance()
    assert one.store(1) == {}
    index = one.own.path / "00000001.idx"
    whole = index.read_bytes()
    for size in (3, 130, len(whole) - 1):
        index.write_bytes(whole[:size])
        two.follow()
        assert two.present(1) == []
    index.write_bytes(whole)
    two.follow()
    assert two.load(1) == [1]


def test_garbage_behind_the_last_frame_is_ignored(instance: Open) -> None:
    """What a failed append has left is overwritten by the next one."""
    one, two = instance(), instance()
    assert one.store(1) == {}
    with (one.own.path / "00000001.idx").open("ab") as index:
        index.write(b"\0" * 500)
    two.follow()
    assert one.store(2) == {}
    two.follow()
    assert two.load(1, 2) == [1, 2]


@pytest.mark.parametrize("how", ["another number", "another writer", "another namespace"])
def test_an_index_in_the_wrong_place_is_not_believed(instance: Open, how: str) -> None:
    """Files that were copied or swapped would name blocks that are somewhere else."""
    one, two = instance(), instance()
    assert one.store(*range(8)) == {}
    source = one.own.path / "00000001.idx"
    target = one.own.path / "00000002.idx"
    if how == "another writer":
        folder = one.folder.path / ("c" * 32)
        folder.mkdir()
        shutil.copy(one.own.path / "00000001.seg", folder)
        target = folder / "00000001.idx"
    elif how == "another namespace":
        other = instance(namespace=example_namespace(4096, dtype="float8"))
        assert other.store(*range(100, 104)) == {}
        source = other.own.path / "00000001.idx"
        target = one.own.path / "00000001.idx"
    content = source.read_bytes()
    target.unlink(missing_ok=True)
    target.write_bytes(content)
    two.follow()
    expected = {"another number": 4, "another writer": 8, "another namespace": 4}[how]
    assert len(two.index) == expected
    assert len(two.load(*range(8))) == expected
    assert two.present(*range(100, 104)) == []


def test_a_sealed_segment_is_not_looked_at_again(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with thousands of them costs a look at the folder."""
    one, two = instance(), instance()
    assert one.store(*range(8)) == {}
    two.follow()
    one.close()
    two.follow()
    for path in (one.own.path, two.own.path):
        os.utime(path, (1000, 1000))
    two.follow()
    looked_at: list[str] = []
    real = os.lstat

    def note(path: Any, **more: Any) -> os.stat_result:
        looked_at.append(str(path))
        return real(path, **more)

    monkeypatch.setattr(os, "lstat", note)
    two.follow()
    assert looked_at == []


def test_an_error_costs_one_look(instance: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be read is read next time."""
    one, two = instance(), instance()
    assert one.store(1) == {}
    real = os.pread

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    two.follow()
    assert two.present(1) == []
    monkeypatch.setattr(os, "pread", real)
    two.follow()
    assert two.load(1) == [1]


# -- the thread -----------------------------------------------------------------------------------


def test_the_thread_finds_what_is_stored_later(instance: Open) -> None:
    """Without anybody asking, and ends when it is told to."""
    one, two = instance(), instance()
    told = threading.Event()
    post = two.index.post

    def note(*change: Any) -> None:
        post(*change)
        told.set()

    two.index.post = note
    two.follower.start(TimerWatch, interval_s=0.005, name="kv-test-follow")
    try:
        assert one.store(1) == {}
        assert told.wait(20)
    finally:
        assert two.follower.stop(20)
    assert two.load(1) == [1]


def test_the_kernel_tells_of_changes(instance: Open) -> None:
    """Long before the timer, which is set to minutes here."""
    one, two = instance(), instance()
    assert one.store(1) == {}
    two.follow()
    told = threading.Event()
    listening = threading.Event()
    post = two.index.post

    def note(*change: Any) -> None:
        post(*change)
        told.set()

    def watch() -> Any:
        made: Any = open_watch(two.folder.path, local=True)
        made._watch(one.own.path)
        listening.set()
        return made

    two.index.post = note
    two.follower.start(watch, interval_s=600, name="kv-test-follow")
    try:
        assert listening.wait(20)
        assert one.store(2) == {}
        assert told.wait(20)
    finally:
        assert two.follower.stop(20)
    assert two.load(1, 2) == [1, 2]


def test_an_error_does_not_end_the_thread(
    instance: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, not four times a second."""
    one = instance()
    looks = threading.Semaphore(0)

    def fail(_: Any) -> None:
        looks.release()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(one.follower, "look", fail)
    one.follower.start(TimerWatch, interval_s=0.001, name="kv-test-follow")
    try:
        for _ in range(5):
            assert looks.acquire(timeout=20)
    finally:
        assert one.follower.stop(20)
    assert caplog.text.count("cannot be followed") == 1


def test_a_watch_of_a_missing_folder_is_a_timer(tmp_path: Path) -> None:
    """As where there is no inotify at all."""
    assert isinstance(open_watch(tmp_path / "missing", local=True), TimerWatch)
    assert isinstance(open_watch(tmp_path, local=False), TimerWatch)


def test_a_watch_that_is_woken_waits_no_more(tmp_path: Path) -> None:
    """At once, whatever the time; and after its end, to wake it touches nobody's descriptor."""
    stop = threading.Event()
    watch = InotifyWatch(tmp_path)
    with watch:
        # Whether it is woken before or while it waits.
        watch.wake()
        watch.wait(600, [], stop)
    before = os.pipe()
    try:
        watch.wake()
        assert not select.select([before[0]], [], [], 0)[0]
    finally:
        for descriptor in before:
            os.close(descriptor)
