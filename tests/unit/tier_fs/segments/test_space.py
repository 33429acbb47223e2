"""The space that segments take is bounded, whoever writes them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.errors import BlockDeclinedError, ConfigError
from kv_core.tierkit.testing import block_bytes_of, example_namespace
from kv_tier_fs.segments._format import index_bytes
from kv_tier_fs.segments._listing import list_writers
from kv_tier_fs.segments._victims import Victims

if TYPE_CHECKING:
    from collections.abc import Callable

    Open = Callable[..., Any]

BLOCK = 4096
# A segment of four blocks, with its index.
SEGMENT = 4 * BLOCK + index_bytes(4)


def fill(instance: Any, first: int, num_segments: int) -> None:
    """Store segment after segment of four blocks each."""
    for start in range(first, first + 4 * num_segments, 4):
        assert instance.store(*range(start, start + 4)) == {}


# -- the capacity ---------------------------------------------------------------------------------


def test_the_capacity_is_never_exceeded(instance: Open) -> None:
    """Not by a byte on the disk, at any moment between two stores (CAP-1)."""
    one = instance(capacity_bytes=6 * SEGMENT)
    for start in range(0, 200, 2):
        assert one.store(start, start + 1) == {}
        assert one.disk_bytes() <= 6 * SEGMENT
    assert one.space.removed_segments > 40
    assert one.load(*range(190, 200)) == list(range(190, 200))


def test_two_writers_share_one_capacity(instance: Open) -> None:
    """Each makes room at the cost of both."""
    one, two = instance(capacity_bytes=8 * SEGMENT), instance(capacity_bytes=8 * SEGMENT)
    for start in range(0, 160, 4):
        assert one.store(*range(start, start + 4)) == {}
        two.follow()
        assert two.store(*range(1000 + start, 1004 + start)) == {}
        one.follow()
        assert one.disk_bytes() <= 8 * SEGMENT
    assert one.load(*range(156, 160)) == list(range(156, 160))
    assert one.load(*range(1156, 1160)) == list(range(1156, 1160))


def test_what_is_there_counts_before_the_first_store(instance: Open) -> None:
    """After a restart, and without an index of it (CAP-3)."""
    one = instance(capacity_bytes=6 * SEGMENT)
    fill(one, 0, 6)
    one.close()
    two = instance(capacity_bytes=6 * SEGMENT)
    two.open_index()
    assert two.space.disk_bytes == two.disk_bytes() > 5 * SEGMENT - 4 * BLOCK
    fill(two, 100, 1)
    assert two.disk_bytes() <= 6 * SEGMENT
    assert len(two.present(*range(24))) == 20


def test_a_smaller_capacity_holds_from_the_first_store_on(instance: Open) -> None:
    """As many segments go as have to."""
    one = instance()
    fill(one, 0, 12)
    one.close()
    two = instance(capacity_bytes=4 * SEGMENT)
    two.open_index()
    fill(two, 100, 1)
    assert two.disk_bytes() <= 4 * SEGMENT
    assert two.present(*range(48)) == list(range(36, 48))


def test_the_space_of_an_index_that_will_grow_counts(instance: Open) -> None:
    """A segment that is being filled is counted as it will be in the end."""
    one = instance(num_slots=64, capacity_bytes=2 * (64 * BLOCK + index_bytes(64)))
    assert one.store(0) == {}
    two = instance(num_slots=64, capacity_bytes=2 * (64 * BLOCK + index_bytes(64)) - 1)
    failures = two.store(1)
    assert isinstance(failures[1], BlockDeclinedError)


def test_a_capacity_that_is_all_in_use_declines(instance: Open) -> None:
    """Segments that others fill are not touched."""
    one, two = instance(capacity_bytes=SEGMENT), instance(capacity_bytes=SEGMENT)
    assert one.store(0) == {}
    failures = two.store(1)
    assert isinstance(failures[1], BlockDeclinedError)
    assert "more than 'capacity_bytes' leaves it" in str(failures[1])
    assert one.load(0) == [0]


# -- what is measured -----------------------------------------------------------------------------


def count_twice_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next look at the folders find everything twice, as beside one who makes room."""
    looks = [2]

    def look(folder: Path) -> list[Path]:
        return list_writers(folder) * (looks.pop() if looks else 1)

    monkeypatch.setattr("kv_tier_fs.segments._space.list_writers", look)


def test_more_than_the_capacity_is_measured_as_such(instance: Open) -> None:
    """It was lowered, and nothing was stored since."""
    one = instance()
    fill(one, 0, 6)
    two = instance(capacity_bytes=3 * SEGMENT)
    two.space.measure()
    assert two.space.disk_bytes == two.disk_bytes() > 3 * SEGMENT


def test_what_goes_and_what_comes_in_its_place_do_not_both_count(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the capacity is believed only of a look while nobody makes room."""
    one = instance(capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    count_twice_at_first(monkeypatch)
    one.space.measure()
    assert one.space.disk_bytes == one.disk_bytes() < 4 * SEGMENT


def test_beside_one_who_makes_room_no_more_than_the_capacity_is_measured(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the lock, and the next look will tell."""
    one = instance(capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    count_twice_at_first(monkeypatch)
    with one.folder.lock_space(1):
        one.space.measure()
    assert one.space.disk_bytes == 4 * SEGMENT
    one.space.measure()
    assert one.space.disk_bytes == one.disk_bytes()


# -- which segment goes ---------------------------------------------------------------------------


def test_the_least_recently_used_segment_goes_first(instance: Open) -> None:
    """A load is a use, however old the segment (CAP-2)."""
    one = instance(capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    assert one.load(0, 1, 2, 3) == [0, 1, 2, 3]
    fill(one, 100, 2)
    assert one.present(*range(12)) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_a_segment_that_is_being_loaded_from_stays(instance: Open) -> None:
    """It is passed over as long as anybody has it pinned."""
    one = instance(capacity_bytes=4 * SEGMENT)
    fill(one, 0, 3)
    pinned, _, _ = one.index.places(*one.keys(0))[0]
    pinned.pins += 1
    fill(one, 100, 4)
    assert one.present(*range(12)) == [0, 1, 2, 3]
    pinned.pins -= 1
    fill(one, 200, 3)
    assert one.present(*range(12)) == []


def test_a_segment_that_is_pinned_after_it_was_chosen_stays(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one goes in its place."""
    one = instance(capacity_bytes=4 * SEGMENT)
    fill(one, 0, 4)
    chosen = one.index.places(*one.keys(0))[0][0]
    choose = Victims.next

    def pin_afterwards(self: Victims) -> Any:
        victim = choose(self)
        chosen.pins = 1
        return victim

    monkeypatch.setattr(Victims, "next", pin_afterwards)
    fill(one, 100, 1)
    assert (chosen.gone, chosen.leaving) == (False, False)
    assert one.load(*range(8)) == [0, 1, 2, 3]
    assert one.disk_bytes() <= 4 * SEGMENT


def test_the_index_goes_before_the_payloads(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in between leaves payloads to reclaim, never a promise of blocks that are gone."""
    one, _ = instance(capacity_bytes=2 * SEGMENT), instance()
    gone: list[str] = []
    unlink = Path.unlink

    def note(path: Path, missing_ok: bool = False) -> None:
        gone.append(path.name)
        unlink(path, missing_ok=missing_ok)

    fill(one, 0, 2)
    monkeypatch.setattr(Path, "unlink", note)
    fill(one, 100, 1)
    assert gone == ["00000001.idx", "00000001.seg"]


def test_everybody_is_told_of_a_segment_that_goes(instance: Open) -> None:
    """The index, the registry, and whoever keeps its file open."""
    one = instance(capacity_bytes=2 * SEGMENT)
    fill(one, 0, 2)
    first = one.index.places(*one.keys(0))[0][0]
    fill(one, 100, 1)
    assert one.removed == [first]
    assert first.gone
    assert one.segments.get(first.name) is None
    assert one.present(0, 1, 2, 3) == []


def test_a_segment_that_cannot_be_removed_is_passed_over(
    instance: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And said to be."""
    one = instance(capacity_bytes=3 * SEGMENT)
    fill(one, 0, 3)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "00000001.idx":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    fill(one, 100, 1)
    assert one.present(*range(12)) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert "00000001.seg cannot be removed" in caplog.text


def test_what_is_not_in_the_index_yet_is_the_youngest(instance: Open) -> None:
    """The report of a store may come after its segment is full and sealed."""
    one = instance(num_slots=1, capacity_bytes=4 * (BLOCK + index_bytes(1)))
    assert one.store(0) == {}
    keys, views = one.keys(1, 2), one._views(2)
    stored, failures = one.writer.store(keys, views)
    assert not failures
    assert one.store(3, 4) == {}
    for part in stored:
        one.index.put(part.segment, [keys[part.start]], part.slots, part.checksums)
    assert one.present(0, 1, 2, 3, 4) == [1, 2, 3, 4]


# -- payloads that are written over ---------------------------------------------------------------


def inodes(instance: Any) -> dict[str, int]:
    """Return the inodes of payload files by name."""
    return {path.name: path.stat().st_ino for path in instance.own.path.glob("*.seg")}


def test_who_is_alone_writes_over_the_payloads_of_the_victim(instance: Open) -> None:
    """The file system need neither free nor allocate; what is there is what was stored."""
    one = instance(capacity_bytes=2 * SEGMENT)
    fill(one, 0, 2)
    before = inodes(one)
    assert one.store(100, 101) == {}
    after = inodes(one)
    assert after["00000003.seg"] == before["00000001.seg"]
    assert sorted(after) == ["00000002.seg", "00000003.seg"]
    assert one.load(*range(8), 100, 101) == [4, 5, 6, 7, 100, 101]
    one.close()
    two = instance()
    two.open_index()
    assert two.load(*range(8), 100, 101) == [4, 5, 6, 7, 100, 101]


def test_nothing_is_written_over_that_another_process_may_read(instance: Open) -> None:
    """It has the file open, and reads from it what it held."""
    one, two = instance(capacity_bytes=2 * SEGMENT), instance()
    fill(one, 0, 2)
    two.follow()
    (key,) = two.keys(0)
    segment, slot, _ = two.index.places(key)[0]
    with two.files.using(segment) as descriptor:
        assert one.store(100) == {}
        assert os.pread(descriptor, BLOCK, slot * BLOCK) == block_bytes_of(key, BLOCK)
    before = inodes(one)
    two.close()
    assert one.store(*range(101, 105)) == {}
    assert inodes(one)["00000004.seg"] == before["00000002.seg"]


def test_a_shorter_victim_is_not_written_over(instance: Open) -> None:
    """A segment that was cut has not the space that is needed."""
    one = instance(capacity_bytes=2 * SEGMENT)
    assert one.store(0) == {}
    one.close()
    two = instance(capacity_bytes=2 * SEGMENT)
    two.open_index()
    fill(two, 4, 2)
    assert two.disk_bytes() <= 2 * SEGMENT
    assert two.load(*range(4, 12)) == list(range(4, 12))
    assert two.present(0) == []


def test_payloads_that_are_not_used_after_all_go(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment that they were for could not be made."""
    one = instance(capacity_bytes=2 * SEGMENT)
    fill(one, 0, 2)

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("kv_tier_fs.segments._segment_file.IndexFile", fail)
        assert isinstance(one.store(100)[100], OSError)
    assert list(inodes(one)) == ["00000002.seg"]
    fill(one, 300, 1)
    with monkeypatch.context() as patch:
        patch.setattr("kv_tier_fs.segments._segment_file._reopen", fail)
        assert isinstance(one.store(100)[100], OSError)
    fill(one, 200, 2)
    assert one.disk_bytes() <= 2 * SEGMENT
    assert one.load(*range(200, 208)) == list(range(200, 208))


# -- empty segments ------------------------------------------------------------------------------


def remove(instance: Any, *numbers: int) -> None:
    """Remove blocks, as a deletion does."""
    for number in numbers:
        for segment, slot, _ in instance.index.places(*instance.keys(number)):
            instance.index.remove(*instance.keys(number), segment, slot)
            instance.writer.remove(segment, instance.keys(number), [slot])


def test_a_segment_without_blocks_gives_its_space_back(instance: Open) -> None:
    """Also when there is room for all (DEL-1, CAP-4); one with a block left stays."""
    one = instance()
    fill(one, 0, 2)
    remove(one, 0, 1, 2, 3, 4, 5, 6)
    assert one.collector.collect() == 0
    assert [path.name for path in sorted(one.own.path.glob("*.seg"))] == ["00000002.seg"]
    assert one.load(*range(8)) == [7]


def test_a_segment_that_holds_more_than_the_index_knows_stays(instance: Open) -> None:
    """Blocks were stored, and the store is yet to be reported."""
    one = instance()
    assert one.store(0, 1) == {}
    stored, _ = one.writer.store(one.keys(2, 3), one._views(2))
    remove(one, 0, 1)
    assert one.space.remove_empty() == 0
    for part in stored:
        one.index.put(part.segment, one.keys(2, 3), part.slots, part.checksums)
    remove(one, 2, 3)
    assert one.space.remove_empty() == 1
    assert one.disk_bytes() < BLOCK + 4096


def test_an_empty_segment_that_is_in_use_stays(instance: Open) -> None:
    """Somebody still loads from it, or still writes to it."""
    one = instance()
    fill(one, 0, 1)
    assert one.store(4) == {}
    segment = one.index.places(*one.keys(0))[0][0]
    remove(one, 0, 1, 2, 3, 4)
    segment.pins += 1
    assert one.space.remove_empty() == 0
    segment.pins -= 1
    assert one.space.remove_empty() == 1
    assert [path.name for path in one.own.path.glob("*.seg")] == ["00000002.seg"]


# -- free space -----------------------------------------------------------------------------------


def set_free(monkeypatch: pytest.MonkeyPatch, answers: list[int]) -> None:
    """Let the file system have so many bytes free, one answer after the other."""
    real = os.statvfs

    def answer(path: Any) -> os.statvfs_result:
        values = list(real(path))
        values[:5] = [1, 1, 1 << 40, answers[0], answers.pop(0) if len(answers) > 1 else answers[0]]
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", answer)


def test_segments_go_to_keep_the_floor_of_free_space(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a capacity; no more than have to."""
    one = instance(min_free_bytes=10_000_000)
    fill(one, 0, 4)
    set_free(monkeypatch, [10_000_000 + SEGMENT - 1, 20_000_000])
    fill(one, 100, 1)
    assert one.present(*range(16)) == list(range(4, 16))


def test_below_the_floor_stores_are_declined(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When removals have not helped: no more of the cache is given up than was asked for."""
    one, _ = instance(min_free_bytes=10_000_000), instance()
    fill(one, 0, 4)
    set_free(monkeypatch, [10_000_000 + SEGMENT - 1])
    failures = one.store(100)
    assert isinstance(failures[100], BlockDeclinedError)
    assert "'min_free_bytes'" in str(failures[100])
    assert one.present(*range(16)) == list(range(4, 16))


# -- other processes and namespaces ---------------------------------------------------------------


def test_a_lock_that_is_held_for_too_long_declines(instance: Open) -> None:
    """A process that is stopped while it makes room costs the others stores, and no more."""
    one = instance()
    with one.folder.lock_space(1):
        failures = one.store(0)
    assert isinstance(failures[0], BlockDeclinedError)
    assert "another process" in str(failures[0])
    assert one.store(0) == {}


def test_only_the_first_store_waits_for_a_lock_that_is_held(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would keep threads from loads; after a while, one waits again."""
    one = instance()
    waits: list[float] = []

    def refuse(timeout_s: float) -> Any:
        waits.append(timeout_s)
        raise TimeoutError("locked")

    monkeypatch.setattr(one.folder, "lock_space", refuse)
    for _ in range(3):
        assert 0 in one.store(0)
    one.clock.turn(1)
    assert 0 in one.store(0)
    assert waits == [0.05, 0.0, 0.0, 0.05]


def test_a_capacity_that_holds_no_segment_is_refused(instance: Open) -> None:
    """At the opening, with the least that would do."""
    with pytest.raises(ConfigError, match=r"'capacity_bytes' is 9000: .* need 16384 bytes"):
        instance(capacity_bytes=9000)


def test_dead_writers_in_a_full_folder_are_reclaimed(instance: Open) -> None:
    """What they had reserved is given back as soon as room is short."""
    dead, one = instance(num_slots=16), instance(capacity_bytes=16 * BLOCK + 2 * SEGMENT)
    assert dead.store(500) == {}
    dead.die()
    one.clock.turn(60)
    fill(one, 0, 3)
    assert (dead.own.path / "00000001.seg").stat().st_size == BLOCK
    one.follow()
    assert one.present(500, *range(12)) == [500, *range(12)]


def test_a_dead_writer_is_reclaimed_before_a_store_is_declined(instance: Open) -> None:
    """Right after it has died, when there is nothing else to remove."""
    dead, one = instance(num_slots=16), instance(capacity_bytes=16 * BLOCK + SEGMENT)
    assert dead.store(500) == {}
    dead.die()
    fill(one, 0, 3)
    assert (dead.own.path / "00000001.seg").stat().st_size == BLOCK


def test_the_floor_is_named_when_it_is_what_declines(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be removed, and nobody has set a capacity."""
    one = instance(min_free_bytes=10_000_000)
    set_free(monkeypatch, [10_000_000])
    assert "more than 'min_free_bytes' leaves it" in str(one.store(0)[0])


def test_the_whole_root_is_bounded(instance: Open) -> None:
    """What was touched least recently goes first, whichever namespace it belongs to."""
    other = instance(namespace=example_namespace(BLOCK, model="other", model_fingerprint="f" * 64))
    fill(other, 0, 3)
    other.follow()
    for number, segment in enumerate(sorted(other.own.path.glob("*.seg"))):
        os.utime(segment, (1000 + number, 1000 + number))
    one = instance(root_capacity_bytes=4 * SEGMENT)
    fill(one, 100, 3)
    assert one.disk_bytes() <= 4 * SEGMENT
    other.follow()
    assert other.present(*range(12)) == [8, 9, 10, 11]
    assert one.present(*range(100, 112)) == list(range(100, 112))


def test_indexes_of_other_namespaces_count_as_long_as_they_will_be(instance: Open) -> None:
    """The root stays bounded while segments of other namespaces are filled, block by block."""
    whole = 64 * BLOCK + index_bytes(64)
    other = instance(
        num_slots=64,
        namespace=example_namespace(BLOCK, model="other", model_fingerprint="f" * 64),
    )
    assert other.store(0) == {}
    one = instance(num_slots=64, root_capacity_bytes=2 * whole - 1)
    assert isinstance(one.store(0)[0], BlockDeclinedError)
    one = instance(num_slots=64, root_capacity_bytes=2 * whole)
    for number in range(1, 64):
        assert one.store(number) == {}
        assert other.store(number) == {}
    assert one.disk_bytes() <= 2 * whole


def test_a_namespace_that_nobody_has_used_for_long_goes(instance: Open) -> None:
    """At the opening and now and then: one whose writer lives stays, and so does a young one."""

    def named(model: str) -> Any:
        return instance(
            namespace=example_namespace(BLOCK, model=model, model_fingerprint=model * 64)
        )

    old, alive, young = named("a"), named("b"), named("c")
    for one in (old, alive, young):
        fill(one, 0, 1)
    old.close()
    young.close()
    long_ago = time.time() - 1000
    for one in (old, alive):
        for path in (one.folder.path, *one.folder.path.rglob("*")):
            os.utime(path, (long_ago, long_ago))
    one = instance(namespace_ttl_s=500)
    assert one.store(0, 1, 2, 3) == {}
    assert old.folder.path.parent.exists()
    one.clock.turn(601)
    assert one.store(4) == {}
    assert not old.folder.path.parent.exists()
    assert (alive.own.path / "00000001.seg").exists()
    assert (young.own.path / "00000001.seg").exists()


def test_a_namespace_goes_with_what_its_writers_had_not_finished(instance: Open) -> None:
    """Writers that died at the opening, or while they made their index of removals anew."""
    first, second = (
        instance(namespace=example_namespace(BLOCK, revision="other")) for _ in range(2)
    )
    for dead, name in ((first, "00000000.new"), (second, "probe")):
        fill(dead, 0, 1)
        dead.die()
        (dead.own.path / name).touch()
    folder = first.folder.path
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (1000, 1000))
    one = instance(namespace_ttl_s=500)
    one.space.tidy()
    assert not folder.parent.exists()


def test_what_was_not_reported_yet_stays(instance: Open) -> None:
    """It would be gone by the time when its store is reported as a success."""
    one = instance(capacity_bytes=2 * SEGMENT)
    keys = one.keys(*range(12))
    memory = memoryview(bytearray(12 * BLOCK))
    views = [memory[start : start + BLOCK] for start in range(0, 12 * BLOCK, BLOCK)]
    stored, failures = one.writer.store(keys, views)
    assert sorted(failures) == list(range(8, 12))
    assert all(isinstance(error, BlockDeclinedError) for error in failures.values())
    for part in stored:
        chosen = keys[part.start : part.start + len(part.slots)]
        one.index.put(part.segment, chosen, part.slots, part.checksums)
    assert one.present(*range(12)) == list(range(8))
    assert one.store(8, 9, 10, 11) == {}
    assert one.present(*range(12)) == list(range(4, 12))
