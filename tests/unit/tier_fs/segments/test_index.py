"""The index in memory: exact, ordered by use, changed by one thread only."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.contract import OffloadKey
from kv_tier_fs.segments._format import Frame, FrameKind
from kv_tier_fs.segments._index import BlockIndex
from kv_tier_fs.segments._key_table import KeyTable
from kv_tier_fs.segments._segment import Segment, SegmentName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WRITER = b"w" * 16


def key_of(number: int, length: int = 36) -> OffloadKey:
    """Return one of many keys."""
    return OffloadKey(hashlib.sha512(str(number).encode()).digest()[:length])


def keys_of(*numbers: int) -> list[OffloadKey]:
    """Return several."""
    return [key_of(number) for number in numbers]


def segment_of(number: int, num_slots: int = 1000) -> Segment:
    """Return a segment that nobody knows."""
    return Segment(SegmentName(WRITER, number), Path(f"{number:08d}.seg"), num_slots)


def frame_of(
    keys: Sequence[OffloadKey], first_slot: int = 0, kind: int = FrameKind.STORED
) -> Frame:
    """Return a frame whose checksums are slots times ten."""
    slots = np.arange(first_slot, first_slot + len(keys), dtype=np.uint32)
    return Frame(kind, WRITER, 1, len(keys[0]), b"".join(keys), slots, slots.astype(np.uint64) * 10)


def load(index: BlockIndex, frames: Sequence[tuple[Segment, Frame]]) -> None:
    """Fill an index as an opening does."""
    for segment, frame in frames:
        index.load(segment, [frame])
    index.end_load()


class Listener:
    """Replays what an index tells."""

    def __init__(self, index: BlockIndex) -> None:
        self.present: set[OffloadKey] = set()
        index.listen(self._stored, self._removed)

    def _stored(self, keys: Sequence[OffloadKey]) -> None:
        assert not self.present & set(keys), "told twice that a key is present"
        self.present |= set(keys)

    def _removed(self, keys: Sequence[OffloadKey]) -> None:
        assert self.present >= set(keys), "told that an absent key left"
        self.present -= set(keys)


# -- places ---------------------------------------------------------------------------------------


def test_a_block_is_where_it_was_put() -> None:
    """With its segment, slot and checksum."""
    index, segment = BlockIndex(), segment_of(1)
    index.put(segment, keys_of(1, 2), [7, 8], [70, 80])
    assert index.locate(key_of(2)) == (segment, 8, 80)
    assert index.locate(key_of(3)) is None
    assert (key_of(1) in index, key_of(3) in index, len(index)) == (True, False, 2)
    assert (segment.live_blocks, segment.entered_blocks) == (2, 2)


def test_keys_of_any_length_are_told_apart() -> None:
    """Prefixes of one another, and the empty one."""
    index, segment = BlockIndex(), segment_of(1)
    keys = [OffloadKey(b"\0" * length) for length in range(5)]
    index.put(segment, keys, range(5), range(5))
    assert [index.locate(key) for key in keys] == [(segment, n, n) for n in range(5)]
    assert OffloadKey(b"\0" * 5) not in index


def test_equal_hashes_do_not_make_equal_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is compared in full."""
    monkeypatch.setattr("kv_tier_fs.segments._key_table.hash", lambda _: 5, raising=False)
    monkeypatch.setattr("kv_tier_fs.segments._index.hash", lambda _: 5, raising=False)
    index, segment = BlockIndex(), segment_of(1)
    keys = keys_of(*range(40))
    index.put(segment, keys[:30], range(30), range(30))
    assert [key in index for key in keys] == [True] * 30 + [False] * 10
    for number in range(0, 30, 2):
        assert index.remove(keys[number], segment, number)
    expected = [None if number % 2 == 0 else (segment, number, number) for number in range(30)]
    assert [index.locate(key) for key in keys[:30]] == expected


def test_neighbours_are_compared_in_full() -> None:
    """What was stored behind the block that was found last is tried first, and may have changed."""
    index, segment = BlockIndex(), segment_of(1)
    index.put(segment, keys_of(*range(10)), range(10), range(10))
    assert all(key in index for key in keys_of(0, 1, 2))
    assert index.remove(key_of(3), segment, 3)
    assert key_of(3) not in index
    index.put(segment, keys_of(33), [33], [33])
    assert all(key in index for key in keys_of(0, 1, 2))
    assert (key_of(3) in index, index.locate(key_of(33))) == (False, (segment, 33, 33))
    for wanted in (range(10), range(9, -1, -1), (5, 6, 3, 4, 5, 4, 5, 6)):
        found = [index.locate(key) for key in keys_of(*wanted)]
        assert found == [None if n == 3 else (segment, n, n) for n in wanted]


def test_nothing_is_found_in_memory_that_no_block_has_yet() -> None:
    """Not even a key of zeros, right behind the last block that memory was taken for."""
    zeros = OffloadKey(bytes(36))
    index, segment = BlockIndex(), segment_of(1)
    for number in range(600):
        index.put(segment, keys_of(number), [number], [number])
        assert index.locate(key_of(max(0, number - 1)))
        assert key_of(number) in index
        assert zeros not in index
        assert index.locate(zeros) is None


def test_a_key_that_comes_twice_in_one_put_is_in_both_places() -> None:
    """The later one is the current one; keys of other lengths may be between them."""
    index, segment = BlockIndex(), segment_of(1)
    listener = Listener(index)
    keys = [key_of(1), key_of(2, 20), key_of(1), key_of(3)]
    index.put(segment, keys, range(4), range(4))
    assert index.places(key_of(1)) == [(segment, 2, 2), (segment, 0, 0)]
    index.put(segment, [key_of(4), key_of(4)], [4, 5], [4, 5])
    assert index.places(key_of(4)) == [(segment, 5, 5), (segment, 4, 4)]
    assert listener.present == set(keys) | {key_of(4)}
    assert (len(index), segment.live_blocks) == (4, 4)


@pytest.mark.parametrize("seed", range(3))
def test_the_index_equals_a_dict(seed: int) -> None:
    """Through thousands of random puts, removals, copies and drops, applied late."""
    rng = random.Random(seed)
    index = BlockIndex()
    listener = Listener(index)
    model: dict[OffloadKey, list[tuple[Segment, int]]] = {}
    segments = [segment_of(number) for number in range(6)]
    next_slot = dict.fromkeys(segments, 0)
    keys = [key_of(number, rng.choice((20, 36))) for number in range(400)]
    for step in range(4000):
        segment = rng.choice(segments)
        key = rng.choice(keys)
        action = rng.random()
        if action < 0.6:
            slot = next_slot[segment]
            next_slot[segment] += 1
            index.put(segment, [key], [slot], [slot])
            model.setdefault(key, []).append((segment, slot))
        elif action < 0.9 and model.get(key):
            target, slot = rng.choice(model[key])
            model[key].remove((target, slot))
            assert index.remove(key, target, slot) == (not model[key])
        elif action > 0.995:
            index.post_drop(segment)
            index.apply_all()
            segments.remove(segment)
            segments.append(segment_of(1000 + step))
            next_slot[segments[-1]] = 0
            for places in model.values():
                places[:] = [place for place in places if place[0] is not segment]
        if step % 97 == 0:
            present = {key for key, places in model.items() if places}
            assert {key for key in keys if key in index} == present
            assert listener.present == present
            assert len(index) == len(present)
            for key in present:
                found = [place[:2] for place in index.places(key)]
                assert found == model[key][::-1]
    assert set(index.keys()) == {key for key, places in model.items() if places}
    assert sum(segment.live_blocks for segment in segments) == len(index)


def test_the_latest_place_is_the_current_one() -> None:
    """The earlier one comes back when it is removed, without anybody being told."""
    index, old, new = BlockIndex(), segment_of(1), segment_of(2)
    listener = Listener(index)
    index.put(old, keys_of(1), [0], [5])
    index.put(new, keys_of(1), [3], [5])
    assert index.places(key_of(1)) == [(new, 3, 5), (old, 0, 5)]
    assert (old.live_blocks, new.live_blocks, len(index)) == (0, 1, 1)
    assert not index.remove(key_of(1), new, 3)
    assert index.locate(key_of(1)) == (old, 0, 5)
    assert listener.present == {key_of(1)}
    assert index.remove(key_of(1), old, 0)
    assert (key_of(1) in index, listener.present) == (False, set())


def test_another_place_than_those_known_is_not_removed() -> None:
    """A removal of a slot that was given to the key before says nothing about the slot now."""
    index, segment = BlockIndex(), segment_of(1)
    index.put(segment, keys_of(1), [4], [0])
    assert not index.remove(key_of(1), segment, 3)
    assert not index.remove(key_of(1), segment_of(2), 4)
    assert index.locate(key_of(1)) == (segment, 4, 0)


# -- segments that are gone -----------------------------------------------------------------------


def test_the_blocks_of_a_segment_that_is_gone_are_absent_at_once() -> None:
    """Before anything has been applied, in another thread's call."""
    index, segment, other = BlockIndex(), segment_of(1), segment_of(2)
    index.put(segment, keys_of(1, 2), [0, 1], [0, 0])
    index.put(other, keys_of(3), [0], [0])
    index.post_drop(segment)
    assert [key in index for key in keys_of(1, 2, 3)] == [False, False, True]
    assert index.locate(key_of(1)) is None
    assert index.places(key_of(1)) == []
    index.apply()
    assert (len(index), list(index.keys())) == (1, keys_of(3))


def test_a_large_segment_is_cleaned_up_in_slices() -> None:
    """So that no single call takes long; the count is right from the first."""
    index, segment = BlockIndex(), segment_of(1)
    listener = Listener(index)
    index.put(segment, keys_of(*range(1000)), range(1000), range(1000))
    index.post_drop(segment)
    index.apply()
    assert len(index) == 0
    assert 700 < len(listener.present) < 1000
    index.apply_all()
    assert (listener.present, index.has_changes) == (set(), False)


def test_a_key_can_come_back_before_it_was_cleaned_up() -> None:
    """It is told to have left, then to have come."""
    index, segment, other = BlockIndex(), segment_of(1), segment_of(2)
    listener = Listener(index)
    index.put(segment, keys_of(*range(300)), range(300), range(300))
    index.post_drop(segment)
    index.put(other, keys_of(299), [0], [9])
    index.apply_all()
    assert listener.present == {key_of(299)}
    assert index.locate(key_of(299)) == (other, 0, 9)


def test_a_place_elsewhere_outlives_the_segment() -> None:
    """Two processes have stored the block, and one of the segments goes."""
    index, segment, other = BlockIndex(), segment_of(1), segment_of(2)
    listener = Listener(index)
    index.put(other, keys_of(1), [4], [40])
    index.put(segment, keys_of(1), [0], [40])
    index.post_drop(segment)
    index.apply_all()
    assert index.locate(key_of(1)) == (other, 4, 40)
    assert (listener.present, len(index)) == ({key_of(1)}, 1)


def test_what_comes_in_during_the_search_is_found() -> None:
    """A put between the search of another thread and its effect leaves nothing behind."""
    index, segment = BlockIndex(), segment_of(1)
    index.put(segment, keys_of(1), [0], [0])
    index.post_drop(segment)
    segment.gone = False
    index.put(segment, keys_of(2), [1], [0])
    segment.gone = True
    index.apply_all()
    assert (list(index.keys()), len(index)) == ([], 0)
    other = segment_of(2)
    index.put(other, keys_of(2), [0], [7])
    assert index.locate(key_of(2)) == (other, 0, 7)


def test_what_comes_in_while_as_much_leaves_is_found() -> None:
    """The search of another thread has found as many blocks as there are, but not the same."""
    index, segment, other = BlockIndex(), segment_of(1), segment_of(2)
    listener = Listener(index)
    index.put(segment, keys_of(1, 2), [0, 1], [0, 0])
    index.post_drop(segment)
    segment.gone = False
    index.put(other, keys_of(1), [0], [0])
    index.put(segment, keys_of(3), [2], [0])
    segment.gone = True
    index.apply_all()
    assert listener.present == set(index.keys()) == {*keys_of(1)}
    assert len(index) == 1


def test_nothing_is_put_into_a_segment_that_is_gone() -> None:
    """The report of a store may come after the segment has gone again."""
    index, segment = BlockIndex(), segment_of(1)
    segment.gone = True
    index.put(segment, keys_of(1), [0], [0])
    assert (key_of(1) in index, len(index)) == (False, 0)


def test_rows_and_numbers_are_used_again() -> None:
    """Blocks that come and go for long take no more memory."""
    index = BlockIndex()
    for number in range(200):
        segment = segment_of(number)
        index.put(segment, keys_of(*range(number, number + 50)), range(50), range(50))
        assert segment.number_in_index <= 1
        index.post_drop(segment)
        index.apply_all()
    assert index.survey()[0].sum() == 0


# -- changes of other threads ---------------------------------------------------------------------


def test_posted_frames_take_effect_when_they_are_applied() -> None:
    """Not before: only the engine's thread changes the index."""
    index, segment = BlockIndex(), segment_of(1)
    index.post(segment, frame_of(keys_of(1, 2)))
    assert key_of(1) not in index
    index.apply()
    assert index.locate(key_of(2)) == (segment, 1, 10)
    index.post(segment, frame_of(keys_of(2), 1, FrameKind.REMOVED))
    index.apply()
    assert [key in index for key in keys_of(1, 2)] == [True, False]


def test_many_posts_are_applied_in_slices() -> None:
    """A writer that appears with many blocks does not stop the engine."""
    index, segment = BlockIndex(), segment_of(1, 10_000)
    for start in range(0, 2000, 100):
        index.post(segment, frame_of(keys_of(*range(start, start + 100)), start))
    index.apply()
    assert 0 < len(index) < 1000
    index.apply_all()
    assert len(index) == 2000


def test_a_copy_takes_the_place_of_the_original_and_its_age() -> None:
    """It is as old as before, and counts as unused since it was written."""
    index, old, new = BlockIndex(), segment_of(1), segment_of(2)
    index.put(old, keys_of(1, 2), [0, 1], [5, 6])
    index.count_use()
    index.locate(key_of(1))
    assert index.used_blocks_in(old) == [(3, key_of(1), 0, 5)]
    index.post_copies(old, new, [(key_of(1), 0, 9, 5)])
    index.apply()
    assert index.places(key_of(1)) == [(new, 9, 5), (old, 0, 5)]
    assert index.used_blocks_in(new) == []
    assert index.uses_in(new).tolist() == [3]
    index.post_drop(old)
    index.apply_all()
    assert [key in index for key in keys_of(1, 2)] == [True, False]


def test_a_copy_of_a_block_that_was_removed_meanwhile_is_not_wanted() -> None:
    """It must not come back to life."""
    index, old, new = BlockIndex(), segment_of(1), segment_of(2)
    index.put(old, keys_of(1), [0], [5])
    index.remove(key_of(1), old, 0)
    index.post_copies(old, new, [(key_of(1), 0, 9, 5)])
    index.apply()
    assert key_of(1) not in index
    assert list(index.unwanted) == [(key_of(1), new, 9)]


def test_a_copy_of_a_block_that_was_stored_again_is_a_further_place() -> None:
    """A later removal of the block finds it."""
    index, old, new, again = BlockIndex(), segment_of(1), segment_of(2), segment_of(3)
    index.put(old, keys_of(1), [0], [5])
    index.put(again, keys_of(1), [0], [5])
    index.post_copies(old, new, [(key_of(1), 0, 9, 5)])
    index.apply()
    assert index.locate(key_of(1)) == (again, 0, 5)
    assert set(index.places(key_of(1))) == {(again, 0, 5), (new, 9, 5), (old, 0, 5)}


# -- filling at the opening -----------------------------------------------------------------------


def test_a_large_listing_is_filled_in_at_once() -> None:
    """Every block is where its frame says, and changes find the same index."""
    index = BlockIndex()
    first, second = segment_of(1), segment_of(2)
    first.used_at, second.used_at = 4, 9
    frames = [
        (first if start < 600 else second, frame_of(keys_of(*range(start, start + 50)), start))
        for start in range(0, 1200, 50)
    ]
    load(index, frames)
    assert len(index) == 1200
    for number in (0, 599, 600, 1199):
        assert index.locate(key_of(number)) == (
            first if number < 600 else second,
            number,
            number * 10,
        )
    assert (first.live_blocks, second.live_blocks) == (600, 600)
    assert key_of(1200) not in index
    index.put(first, keys_of(5000), [999], [1])
    assert index.remove(key_of(3), first, 3)
    assert (key_of(3) in index, key_of(5000) in index, len(index)) == (False, True, 1200)


def test_of_blocks_that_are_listed_twice_the_latest_counts() -> None:
    """The earlier place is kept as a further one."""
    index, old, new = BlockIndex(), segment_of(1), segment_of(2)
    keys = keys_of(*range(400))
    load(index, [(old, frame_of(keys)), (new, frame_of(keys[:10], 500))])
    assert len(index) == 400
    assert index.places(keys[3]) == [(new, 503, 5030), (old, 3, 30)]
    assert index.places(keys[10]) == [(old, 10, 100)]
    assert (old.live_blocks, new.live_blocks) == (390, 10)


def test_nobody_is_told_of_what_was_there_from_the_start() -> None:
    """Events replay onto the listing at the opening."""
    told: list[Sequence[OffloadKey]] = []
    index = BlockIndex()
    load(index, [(segment_of(1), frame_of(keys_of(*range(300))))])
    index.listen(told.append, told.append)
    assert (told, len(index)) == ([], 300)


# -- uses -----------------------------------------------------------------------------------------


def test_uses_are_ordered_by_job() -> None:
    """Blocks of one job have one use; later jobs have later ones."""
    index, segment = BlockIndex(), segment_of(1)
    index.put(segment, keys_of(0, 1, 2), range(3), range(3))
    index.count_use()
    index.locate(key_of(2))
    index.use(keys_of(0, 99))
    uses = dict(zip(range(3), index.uses_in(segment).tolist(), strict=True))
    assert uses[1] < uses[2] < uses[0]
    assert segment.used_at == uses[0]
    counts, sums = index.survey()
    assert (counts.tolist(), sums.tolist()) == ([3], [float(sum(uses.values()))])


def grow_after_a_look_at(
    monkeypatch: pytest.MonkeyPatch, attribute: str, grow: Callable[[], None]
) -> None:
    """Let something be done right after an attribute of a table was read for the first time."""
    slot: Any = KeyTable.__dict__[attribute]
    due = [grow]

    def read(table: KeyTable) -> Any:
        found = slot.__get__(table)
        if due:
            due.pop()()
        return found

    monkeypatch.setattr(KeyTable, attribute, property(read, slot.__set__))


@pytest.mark.parametrize("attribute", ["num_rows", "segments", "uses"])
@pytest.mark.parametrize("how", ["survey", "uses_in"])
def test_the_table_may_grow_under_a_survey(
    monkeypatch: pytest.MonkeyPatch, attribute: str, how: str
) -> None:
    """Another thread looks at one column after the other, and in between the engine stores."""
    index, old, new = BlockIndex(), segment_of(1), segment_of(2, 3000)
    index.put(old, keys_of(*range(10)), range(10), range(10))
    keys = keys_of(*range(10, 3010))
    grow_after_a_look_at(
        monkeypatch, attribute, lambda: index.put(new, keys, range(3000), range(3000))
    )
    if how == "survey":
        counts, sums = index.survey()
        assert (counts.tolist(), sums.tolist()) == ([10], [20.0])
    else:
        assert index.uses_in(old).tolist() == [2] * 10
    assert len(index) == 3010


def test_a_lookup_that_finds_a_block_is_a_use_of_it() -> None:
    """What was just promised should not be the first to go."""
    index, segment = BlockIndex(), segment_of(1)
    index.put(segment, keys_of(0, 1), range(2), range(2))
    index.count_use()
    assert key_of(1) in index
    assert [key for _, key, _, _ in index.used_blocks_in(segment)] == keys_of(1)


def test_uses_keep_their_order_when_the_counter_is_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are halved, and so is the counter."""
    monkeypatch.setattr("kv_tier_fs.segments._index._LAST_USE", 20)
    index, segment = BlockIndex(), segment_of(1)
    index.put(segment, keys_of(0, 1, 2), range(3), range(3))
    for step in range(60):
        index.use(keys_of(step % 3))
    uses = index.uses_in(segment).tolist()
    assert uses[0] <= uses[1] <= uses[2] <= 20
    assert uses[0] < uses[2]
