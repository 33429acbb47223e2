"""Blocks in use are copied before their segment goes, and no others."""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.contract import OffloadKey
from kv_tier_fs import FsConfig, spec_of_layout
from kv_tier_fs.segments._file_lock import FileLock
from kv_tier_fs.segments._format import index_bytes
from kv_tier_fs.segments._index import BlockIndex
from kv_tier_fs.segments._reader import CHECKED_BYTES
from kv_tier_fs.segments._segment import Segment, SegmentName
from kv_tier_fs.segments._use_times import UseTimes
from kv_tier_fs.segments._victims import COPIED_SHARE, Victims, loss_recency, worth_copying
from kv_tier_fs.segments._watch import is_local
from kv_tier_fs.segments._writer import MOST_SEGMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    Open = Callable[..., Any]

BLOCK = 4096
SLOTS = 10
SEGMENT = SLOTS * BLOCK + index_bytes(SLOTS)


def fill(instance: Any, first: int, num_segments: int) -> None:
    """Store segment after segment of ten blocks each."""
    for start in range(first, first + SLOTS * num_segments, SLOTS):
        assert instance.store(*range(start, start + SLOTS)) == {}


# -- the victim -----------------------------------------------------------------------------------


def test_what_can_be_copied_does_not_count_as_lost() -> None:
    """The latest fifth of the slots is left out, the latest of the rest decides."""
    uses = np.array([9, 5, 1, 8, 2, 3, 7, 4, 6, 0], dtype=np.uint32)
    assert loss_recency(uses, 10) == 7
    assert loss_recency(uses, 4) == 9
    assert loss_recency(uses[:2], 10) == -1
    assert loss_recency(uses[:3], 10) == 1


def segment_of(number: int, num_slots: int = 10) -> Segment:
    """Return a segment that nobody knows."""
    return Segment(SegmentName(b"w" * 16, number), Path(f"{number:08d}.seg"), num_slots)


def keys_of(segment: Segment) -> list[OffloadKey]:
    """Return the keys of ten blocks of a segment."""
    return [OffloadKey(f"{segment.name.number}/{slot}".encode()) for slot in range(10)]


def test_victims_come_in_the_order_of_what_would_be_lost() -> None:
    """Two hot blocks do not save a segment of ten; three do."""
    index = BlockIndex()
    segments = [segment_of(number) for number in range(3)]
    for segment in segments:
        segment.published_blocks = 10
        index.put(segment, keys_of(segment), range(10), range(10))
    index.use(keys_of(segments[0])[:2])
    index.use(keys_of(segments[1])[:3])
    victims = Victims(index, reversed(segments))
    assert [victims.next(), victims.next(), victims.next()] == [
        segments[0],
        segments[2],
        segments[1],
    ]
    assert victims.next() is None


def test_empty_segments_go_first_and_unknown_ones_last() -> None:
    """One loses nothing; the other has just been written."""
    index = BlockIndex()
    empty, old, unknown = segment_of(3), segment_of(2), segment_of(1)
    for segment in (old, empty):
        segment.published_blocks = 10
        index.put(segment, keys_of(segment), range(10), range(10))
    for slot, key in enumerate(keys_of(empty)):
        index.remove(key, empty, slot)
    victims = Victims(index, [unknown, old, empty])
    assert [victims.next() for _ in range(4)] == [empty, old, unknown, None]


def test_a_segment_is_young_until_all_of_it_is_entered() -> None:
    """One old block says nothing about nine that were stored a moment ago."""
    index, fresh, old = BlockIndex(), segment_of(1), segment_of(2)
    fresh.published_blocks = old.published_blocks = 10
    index.put(fresh, keys_of(fresh)[:1], [0], [0])
    index.put(old, keys_of(old), range(10), range(10))
    index.use(keys_of(old))
    assert Victims(index, [fresh, old]).next() is old
    index.put(fresh, keys_of(fresh)[1:], range(1, 10), range(1, 10))
    assert Victims(index, [fresh, old]).next() is old


def test_a_segment_that_was_pinned_meanwhile_is_no_victim() -> None:
    """Pins are looked at when the victim is taken."""
    index, segment, unknown = BlockIndex(), segment_of(1), segment_of(2)
    segment.published_blocks = 10
    index.put(segment, keys_of(segment), range(10), range(10))
    victims = Victims(index, [segment, unknown])
    segment.pins = unknown.pins = 1
    assert victims.next() is None


def test_a_segment_that_is_pinned_during_the_measurement_is_no_victim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lookup may come while the uses of all blocks are looked through."""
    index, first, second = BlockIndex(), segment_of(1), segment_of(2)
    for segment in (first, second):
        segment.published_blocks = 10
        index.put(segment, keys_of(segment), range(10), range(10))
    uses_in = BlockIndex.uses_in

    def pin_meanwhile(self: BlockIndex, segment: Segment) -> Any:
        first.pins = 1
        return uses_in(self, segment)

    monkeypatch.setattr(BlockIndex, "uses_in", pin_meanwhile)
    victims = Victims(index, [first, second])
    assert [victims.next(), victims.next()] == [second, None]


def test_the_latest_uses_are_worth_copying() -> None:
    """At most a fifth of the slots."""
    used: Any = [(use, f"{use}".encode(), use, 10 * use) for use in (3, 9, 5)]
    assert worth_copying(used, 10) == [(b"9", 9, 90), (b"5", 5, 50)]
    assert worth_copying(used, 4) == []


# -- copies ---------------------------------------------------------------------------------------


def test_used_blocks_outlive_their_segment(instance: Open) -> None:
    """Two of ten, at their new place, without a copy of the rest."""
    one = instance(num_slots=SLOTS, capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    assert one.load(3, 7) == [3, 7]
    assert one.store(*range(100, 104)) == {}
    assert one.space.is_short
    assert one.collector.collect() == 2
    assert one.store(*range(104, 110)) == {}
    assert one.present(*range(SLOTS)) == [3, 7]
    assert one.load(3, 7) == [3, 7]
    assert one.disk_bytes() <= 4 * SEGMENT


def test_blocks_that_are_larger_than_the_staging_memory_are_copied_one_by_one(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice of the victim counts them as kept, whatever their size."""
    block_bytes, num_slots = (4 << 20) + 4096, 10
    segment_bytes = num_slots * block_bytes + index_bytes(num_slots)
    one = instance(num_slots=num_slots, block_bytes=block_bytes, capacity_bytes=2 * segment_bytes)
    fill(one, 0, 1)
    assert one.load(3, 7) == [3, 7]
    assert one.store(100, 101) == {}
    at_once: list[int] = []
    load = one.collector._reader.load

    class Noting:
        def load(self, places: Any, keys: Any, blocks: Any) -> Any:
            at_once.append(sum(map(len, blocks)))
            return load(places, keys, blocks)

    monkeypatch.setattr(one.collector, "_reader", Noting())
    assert one.collector.collect() == 2
    assert at_once == [block_bytes, block_bytes]
    assert one.store(*range(102, 109)) == {}
    assert one.present(*range(10)) == [3, 7]
    assert one.load(3, 7) == [3, 7]


def test_the_memory_of_copies_is_declared() -> None:
    """For the largest block of which one can be spared, in whole pages."""
    least_slots = next(count for count in range(100) if int(count * COPIED_SHARE))
    largest_bytes = MOST_SEGMENT_BYTES // least_slots
    config = FsConfig(root_dir=Path("root"), io_threads=2)
    limits = spec_of_layout("segments").limits(config)
    assert limits.staging_bytes >= largest_bytes + mmap.PAGESIZE + 2 * CHECKED_BYTES


def test_nothing_is_copied_while_there_is_room(instance: Open) -> None:
    """No segment will have to go."""
    one = instance(num_slots=SLOTS, capacity_bytes=40 * SEGMENT)
    fill(one, 0, 3)
    assert one.load(3, 7) == [3, 7]
    assert not one.space.is_short
    assert one.collector.collect() == 0


def test_pure_stores_copy_nothing(instance: Open) -> None:
    """Store equals evict, at full speed."""
    one = instance(num_slots=SLOTS, capacity_bytes=4 * SEGMENT)
    for start in range(0, 200, 5):
        assert one.store(*range(start, start + 5)) == {}
        assert one.collector.collect() == 0


def test_a_copy_has_to_be_used_again_to_be_copied_again(instance: Open) -> None:
    """Nothing is carried along for ever."""
    one = instance(num_slots=SLOTS, capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    assert one.load(3) == [3]
    copied = 0
    for start in range(100, 200, 5):
        assert one.store(*range(start, start + 5)) == {}
        copied += one.collector.collect()
    assert copied == 1
    assert one.present(3) == []


def test_a_damaged_block_is_not_copied(instance: Open) -> None:
    """What fails its checksum stays where it is, to be found by a load."""
    one = instance(num_slots=SLOTS, capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    assert one.load(3, 7) == [3, 7]
    segment, slot, _ = one.index.places(*one.keys(3))[0]
    segment.path.chmod(0o600)
    with segment.path.open("r+b") as file:
        file.seek(slot * BLOCK)
        file.write(b"bad")
    segment.path.chmod(0o400)
    assert one.store(100) == {}
    assert one.collector.collect() == 1
    one.index.apply_all()
    assert one.index.places(*one.keys(3))[0][0] is segment
    assert one.index.places(*one.keys(7))[0][0] is not segment


def test_a_block_that_was_removed_while_it_was_copied_stays_removed(instance: Open) -> None:
    """Also after a restart: the copy is removed where it is."""
    one, two = instance(num_slots=SLOTS, capacity_bytes=4 * SEGMENT), instance()
    fill(one, 0, 3)
    assert one.load(3) == [3]
    assert one.store(100) == {}
    assert one.collector.collect() == 1
    places = one.index.places(*one.keys(3))
    assert len(places) == 1, "the copy must not be entered by the collector"
    one.index.remove(*one.keys(3), *places[0][:2])
    one.writer.remove(places[0][0], one.keys(3), [places[0][1]])
    one.index.apply_all()
    one.collector.collect()
    two.follow()
    two.follow()
    assert (one.present(3), two.present(3)) == ([], [])


def test_a_removal_that_cannot_be_written_down_is_tried_again(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk does not bring back what was removed."""
    one = instance(num_slots=SLOTS)
    fill(one, 0, 1)
    [place] = one.index.places(*one.keys(3))
    one.index.unwanted.append((*one.keys(3), *place[:2]))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(one.writer, "remove", fail)
        one.collector.collect()
        assert len(one.index.unwanted) == 1
    one.collector.collect()
    assert not one.index.unwanted
    two = instance()
    two.follow()
    two.follow()
    assert two.present(*range(SLOTS)) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_one_process_copies_at_a_time(instance: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one would copy the same blocks."""
    monkeypatch.setattr("kv_tier_fs.segments._collect._LOCK_TIMEOUT_S", 0.01)
    one = instance(num_slots=SLOTS, capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    assert one.load(3, 7) == [3, 7]
    assert one.store(100) == {}
    with FileLock.take(one.root, one.folder.path / "collect.lock", 1):
        assert one.collector.collect() == 0
    assert one.collector.collect() == 2


def test_the_thread_collects_when_it_is_woken(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends when it is told to."""
    one = instance(num_slots=SLOTS, capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    assert one.load(3, 7) == [3, 7]
    assert one.store(100) == {}
    done = threading.Event()
    collect = one.collector.collect

    def note() -> int:
        copied = int(collect())
        done.set()
        return copied

    monkeypatch.setattr(one.collector, "collect", note)
    one.collector.start("kv-test-collect")
    one.collector.wake()
    assert done.wait(20)
    assert one.collector.stop(20)
    assert one.collector.copied_blocks == 2


def test_the_thread_is_not_idle_while_it_collects(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the last collection has ended in the middle of the wake-up."""
    one = instance()
    idle: list[bool] = []
    done = threading.Event()

    def note() -> int:
        idle.append(one.collector._idle.is_set())
        done.set()
        return 0

    monkeypatch.setattr(one.collector, "collect", note)
    one.collector._due.set()
    assert one.collector._idle.is_set()
    one.collector.start("kv-test-collect")
    assert done.wait(20)
    assert one.collector.stop(20)
    assert idle == [False]


def test_who_needs_room_waits_for_the_copies(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they are read; not for a thread that waits for room itself."""
    one = instance(num_slots=SLOTS, capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    assert one.load(3, 7) == [3, 7]
    assert one.store(100) == {}
    reading, go_on = threading.Event(), threading.Event()
    load = one.collector._reader.load

    class Slow:
        def load(self, *arguments: Any) -> Any:
            reading.set()
            assert go_on.wait(20)
            return load(*arguments)

    one.collector._reader = Slow()
    monkeypatch.setattr("kv_tier_fs.segments._collect._PATIENCE_S", 20)
    one.collector.settle()
    one.collector.start("kv-test-collect")
    one.collector.wake()
    assert reading.wait(20)
    waiter = threading.Thread(target=one.collector.settle)
    waiter.start()
    assert waiter.is_alive()
    go_on.set()
    waiter.join(20)
    assert one.collector.copied_blocks == 2
    assert one.collector.stop(20)
    one.collector.settle()


def test_nobody_waits_for_long_while_a_copy_is_written(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may be waiting for the very segment that is about to be made."""
    one = instance(num_slots=SLOTS, capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    assert one.load(3, 7) == [3, 7]
    assert one.store(100) == {}
    writing, go_on = threading.Event(), threading.Event()
    store = one.collector._writer.store

    def slow(*arguments: Any) -> Any:
        writing.set()
        assert go_on.wait(20)
        return store(*arguments)

    monkeypatch.setattr(one.collector._writer, "store", slow)
    monkeypatch.setattr("kv_tier_fs.segments._collect._PATIENCE_S", 1e9)
    one.collector.start("kv-test-collect")
    one.collector.wake()
    assert writing.wait(20)
    one.collector.settle()
    assert one.collector.copied_blocks == 0
    go_on.set()
    assert one.collector.stop(20)


def test_an_error_does_not_end_the_thread(
    instance: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next segment wakes it again."""
    one = instance()
    calls = threading.Semaphore(0)

    def fail() -> int:
        calls.release()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(one.collector, "collect", fail)
    one.collector.start("kv-test-collect")
    for _ in range(2):
        one.collector.wake()
        assert calls.acquire(timeout=20)
    assert one.collector.stop(20)
    assert "Input/output error" in caplog.text


# -- times of use ---------------------------------------------------------------------------------


def test_a_use_touches_the_file_once_a_second(tmp_path: Path) -> None:
    """A clock that was set back does not end that."""
    path = tmp_path / "1.seg"
    path.write_bytes(b"")
    segment = Segment(SegmentName(b"w" * 16, 1), path, 1)
    now = [5000.0]
    with path.open("rb") as file:
        times = UseTimes(lambda _: nullcontext(file.fileno()), lambda: now[0])
        found = []
        for moment in (5000.0, 5000.9, 5001.1, 100.0, 100.5, 101.5):
            now[0] = moment
            times.note_use(segment)
            found.append(path.stat().st_mtime)
    assert found == [5000.0, 5000.0, 5001.1, 100.0, 100.0, 101.5]


def test_a_file_that_cannot_be_touched_is_no_error(tmp_path: Path) -> None:
    """The time is a hint."""

    def missing(_: Segment) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    UseTimes(missing).note_use(Segment(SegmentName(b"w" * 16, 1), tmp_path / "1.seg", 1))


# -- file systems ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "expected"), [("ext4", True), ("nfs4", False), ("fuse.x", False)])
def test_local_file_systems_are_known_by_kind(tmp_path: Path, kind: str, expected: bool) -> None:
    """Everything else may have other hosts behind it."""
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"20 1 0:7 / /proc rw - proc proc rw\n"
        f"21 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} /dev/x rw\n"
    )
    assert is_local(tmp_path, str(mounts)) is expected
    mounts.write_text("nonsense\n")
    assert not is_local(tmp_path, str(mounts))
    assert not is_local(tmp_path, str(tmp_path / "missing"))
