"""Segments are written and read back: whole batches, in bounds, and never a wrong byte."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, final

import pytest

from kv_core.contract import OffloadKey
from kv_core.errors import BlockDamagedError, BlockDeclinedError, BlockMissingError
from kv_core.tierkit.testing import block_bytes_of, example_key
from kv_tier_fs.segments import _segment_file
from kv_tier_fs.segments._direct import DirectIO
from kv_tier_fs.segments._format import HEADER_BYTES, FrameKind, IndexHeader, decode_frames
from kv_tier_fs.segments._index_reader import IndexReader
from kv_tier_fs.segments._reader import SegmentFiles, SegmentReader, count_runs
from kv_tier_fs.segments._segment import Segments
from kv_tier_fs.segments._writer import SegmentWriter, WriterPlace, slots_per_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kv_tier_fs.segments._format import Frame
    from kv_tier_fs.segments._index import Place
    from kv_tier_fs.segments._segment import Segment
    from kv_tier_fs.segments._writer import Stored

_WRITER = b"w" * 16


@final
class Bench:
    """One writer and one reader; blocks have the bytes that belong to their keys.

    Attributes:
        root: Root folder.
        folder: Folder of the writer.
        segments: Segments the writer has made.
        direct: Whether to bypass the page cache.
        writer: Writer.
        files: Descriptors of the reader.
        reader: Reader.
        used: Segments that were read from, in order.
        rooms: Bytes of each segment that room was asked for.
        created: Segments that were made.
        full: Whether room is refused.
        tasks: What the writer wants to be run soon.
    """

    def __init__(self, root: Path, block_bytes: int, num_slots: int, *, sync: bool) -> None:
        self.root = root
        self.folder = root / "namespace" / _WRITER.hex()
        self.folder.mkdir(parents=True)
        self.block_bytes = block_bytes
        self.segments = Segments()
        self.direct = DirectIO(block_bytes, wanted=True)
        self.used: list[Segment] = []
        self.rooms: list[int] = []
        self.created = 0
        self.full = False
        self.tasks: list[Callable[[], None]] = []
        place = WriterPlace(
            root, self.folder, _WRITER, "cd" * 32, block_bytes, lambda: num_slots, sync=sync
        )
        self.writer = SegmentWriter(
            place, self.segments, self, self.direct, self._note_created, self.tasks.append
        )
        self.files = SegmentFiles(root, self.direct, most_open=4)
        self.reader = SegmentReader(self.files, self.direct, block_bytes, self.used.append)
        self._memory = mmap.mmap(-1, 64 * block_bytes)
        self._view = memoryview(self._memory)

    @contextmanager
    def room(self, size_bytes: int) -> Iterator[None]:
        """Stand in for the space: give room unless the test says it is full."""
        if self.full:
            raise BlockDeclinedError("full")
        self.rooms.append(size_bytes)
        yield

    def _note_created(self) -> None:
        self.created += 1

    def blocks(self, count: int, first: int = 0) -> list[memoryview]:
        """Return views of some slots of aligned memory."""
        size = self.block_bytes
        return [self._view[at * size : (at + 1) * size] for at in range(first, first + count)]

    def store(self, keys: Sequence[OffloadKey]) -> tuple[list[Stored], dict[int, BaseException]]:
        """Store the bytes that belong to keys."""
        blocks = self.blocks(len(keys))
        for key, block in zip(keys, blocks, strict=True):
            block[:] = block_bytes_of(key, self.block_bytes)
        return self.writer.store(keys, blocks)

    def places(self, keys: Sequence[OffloadKey]) -> list[Place]:
        """Store keys, and return where they are."""
        stored, failures = self.store(keys)
        assert failures == {}
        return [
            (part.segment, slot, checksum)
            for part in stored
            for slot, checksum in zip(part.slots, part.checksums, strict=True)
        ]

    def load(
        self, places: Sequence[Place], keys: Sequence[OffloadKey]
    ) -> tuple[list[bool], dict[int, BaseException]]:
        """Load keys; say which slots hold the right bytes, and what went wrong."""
        blocks = self.blocks(len(keys), first=32)
        for block in blocks:
            block[:] = b"\xee" * self.block_bytes
        failures = self.reader.load(places, keys, blocks)
        right = [
            bytes(block) == block_bytes_of(key, self.block_bytes)
            for key, block in zip(keys, blocks, strict=True)
        ]
        return right, failures

    def frames(self, name: str) -> list[Frame]:
        """Return the frames of an index file of the writer."""
        data = memoryview((self.folder / name).read_bytes())
        header = IndexHeader.decode(data)
        return [frame for frame, _ in decode_frames(data[HEADER_BYTES:], header.seed, HEADER_BYTES)]

    def close(self) -> None:
        """Close everything."""
        self.writer.close()
        self.files.close()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Return a function that makes a writer and a reader over a folder."""
    made: list[Bench] = []

    def make(block_bytes: int = 4096, num_slots: int = 8, *, sync: bool = False) -> Bench:
        root = tmp_path / f"root{len(made)}"
        made.append(Bench(root, block_bytes, num_slots, sync=sync))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """Return a writer and a reader with segments of eight blocks."""
    return make_bench()


@pytest.fixture
def many_keys() -> list[OffloadKey]:
    """Return thirty-two distinct keys."""
    return [example_key(number) for number in range(32)]


# -- what is stored -------------------------------------------------------------------------------


def test_what_is_stored_is_loaded(bench: Bench, many_keys: list[OffloadKey]) -> None:
    """Blocks come back over the bounds of segments, with the bytes of their keys."""
    places = bench.places(many_keys[:20])
    assert [len({place[0].name for place in places}), len(places)] == [3, 20]
    assert bench.load(places, many_keys[:20]) == ([True] * 20, {})


def test_blocks_are_loaded_in_any_order(bench: Bench, many_keys: list[OffloadKey]) -> None:
    """Whatever order a load has, each buffer gets its block."""
    keys = many_keys[:12]
    by_key = dict(zip(keys, bench.places(keys), strict=True))
    shuffled = keys[7:3:-1] + keys[:2] + keys[9:] + keys[2:4]
    assert bench.load([by_key[key] for key in shuffled], shuffled) == ([True] * 11, {})


@pytest.mark.parametrize("block_bytes", [1, 512, 1000, 4095, 4096, 12288])
def test_odd_sizes(
    make_bench: Callable[..., Bench], block_bytes: int, many_keys: list[OffloadKey]
) -> None:
    """Blocks of any size come back (GEO-1): where direct I/O cannot move them, without it."""
    bench = make_bench(block_bytes)
    keys = many_keys[: 10 if block_bytes > 1 else 2]
    places = bench.places(keys)
    assert bench.load(places, keys) == ([True] * len(keys), {})


def test_a_batch_is_one_write_and_one_append(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of a batch that fit a segment go with one call each, the index last."""
    bench.store(many_keys[:1])
    calls: list[str] = []
    pwritev, pwrite = os.pwritev, os.pwrite

    def note_pwritev(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(f"{len(buffers)} blocks at {offset // 4096}")
        return pwritev(descriptor, buffers, offset)

    def note_pwrite(descriptor: int, data: bytes, offset: int) -> int:
        calls.append("index")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwritev", note_pwritev)
    monkeypatch.setattr(os, "pwrite", note_pwrite)
    bench.store(many_keys[1:6])
    assert calls == ["5 blocks at 1", "index"]


def test_adjacent_blocks_are_one_read(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks next to each other are read with one call, also when asked for in another order."""
    keys = many_keys[:8]
    places = bench.places(keys)
    reads: list[int] = []
    preadv = os.preadv

    def note(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(len(buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", note)
    order = [3, 2, 1, 0, 7, 6, 5]
    bench.load([places[at] for at in order], [keys[at] for at in order])
    assert reads == [4, 3]
    assert [segment.name.number for segment in bench.used] == [1, 1]


def test_calls_are_counted(bench: Bench, many_keys: list[OffloadKey]) -> None:
    """Adjacent blocks take one call; others, and those of another segment, take their own."""
    places = bench.places(many_keys[:10])
    assert count_runs(places) == 2
    assert count_runs([places[0], places[1], None, places[2], places[5], places[4]]) == 3
    assert count_runs([None]) == 0


def test_the_index_says_what_is_where(bench: Bench, many_keys: list[OffloadKey]) -> None:
    """Each segment has an index whose header and frames name its blocks."""
    places = bench.places(many_keys[:10])
    header = IndexHeader.decode((bench.folder / "00000001.idx").read_bytes())
    assert header == IndexHeader(_WRITER, 1, 8, 4096, "cd" * 32)
    first, second = bench.frames("00000001.idx"), bench.frames("00000002.idx")
    assert [frame.split_keys() for frame in first + second] == [many_keys[:8], many_keys[8:10]]
    found = [checksum for frame in first + second for checksum in frame.checksums.tolist()]
    assert found == [checksum for _, _, checksum in places]


def test_a_segment_takes_its_space_at_once(bench: Bench, many_keys: list[OffloadKey]) -> None:
    """Room is asked for, and taken, for whole segments; a full one is sealed at its length."""
    bench.store(many_keys[:3])
    path = bench.folder / "00000001.seg"
    assert (path.stat().st_size, path.stat().st_blocks * 512) == (8 * 4096, 8 * 4096)
    assert path.stat().st_mode & 0o777 == 0o600
    bench.store(many_keys[3:8])
    assert path.stat().st_mode & 0o777 == 0o400
    assert (path.with_suffix(".idx").stat().st_mode & 0o777, bench.rooms) == (0o400, [8 * 4096])


def test_closing_gives_back_what_was_not_used(bench: Bench, many_keys: list[OffloadKey]) -> None:
    """At the end the last segment is cut to what it holds."""
    bench.store(many_keys[:11])
    bench.close()
    path = bench.folder / "00000002.seg"
    assert path.stat().st_size == path.stat().st_blocks * 512 == 3 * 4096


def test_an_empty_segment_is_not_kept(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment in which nothing was ever published leaves no file."""

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "pwritev", fail)
    stored, failures = bench.store(many_keys[:2])
    assert (stored, sorted(failures)) == ([], [0, 1])
    bench.close()
    assert list(bench.folder.iterdir()) == []
    assert bench.segments.snapshot() == []


def test_many_threads_store_at_the_same_time(
    bench: Bench, make_bench: Callable[..., Bench]
) -> None:
    """Batches of several threads get slots of their own, and all are published."""
    bench = make_bench(512, 64)
    keys = [example_key(number) for number in range(32)]
    blocks = bench.blocks(32)
    for key, block in zip(keys, blocks, strict=True):
        block[:] = block_bytes_of(key, 512)
    found: dict[int, Place] = {}
    gate = threading.Barrier(8)

    def work(first: int) -> None:
        gate.wait(10)
        stored, failures = bench.writer.store(keys[first : first + 4], blocks[first : first + 4])
        assert not failures
        for part in stored:
            for at, slot in enumerate(part.slots):
                found[first + part.start + at] = part.segment, slot, part.checksums[at]

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 32, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert {slot for _, slot, _ in found.values()} == set(range(32))
    assert bench.load([found[at] for at in range(32)], keys) == ([True] * 32, {})
    published = [key for frame in bench.frames("00000001.idx") for key in frame.split_keys()]
    assert sorted(published) == sorted(keys)


def test_the_next_segment_is_made_ahead(
    make_bench: Callable[..., Bench], many_keys: list[OffloadKey]
) -> None:
    """At half of a large segment the next is made on another thread, and then used."""
    bench = make_bench(1 << 20, 8)
    bench.store(many_keys[:4])
    assert bench.tasks == []
    bench.store(many_keys[4:5])
    bench.store(many_keys[5:6])
    (task,) = bench.tasks
    task()
    assert (bench.created, (bench.folder / "00000002.seg").stat().st_size) == (2, 8 << 20)
    bench.store(many_keys[6:9])
    assert (bench.created, len(bench.frames("00000002.idx"))) == (2, 1)


def test_a_segment_made_ahead_that_was_removed_is_not_used(
    make_bench: Callable[..., Bench], many_keys: list[OffloadKey]
) -> None:
    """Somebody has emptied the folder: the next store makes a new one, and does not fail."""
    bench = make_bench(1 << 20, 8)
    bench.store(many_keys[:5])
    (task,) = bench.tasks
    task()
    for path in bench.folder.iterdir():
        path.unlink()
    (place,) = bench.places(many_keys[5:6])
    assert place[0].name.number == 3
    assert place[0] in bench.segments.snapshot()
    assert bench.load([place], many_keys[5:6]) == ([True], {})


@pytest.mark.parametrize(
    ("bound_bytes", "expected"),
    [(None, 64), (1 << 40, 64), (32 << 22, 1), (64 << 22, 2), (1000, 1), (0, 1)],
)
def test_segments_are_a_share_of_the_bound(bound_bytes: int | None, expected: int) -> None:
    """A segment is a thirty-second part of what there can be, 256 MiB at most, a block at least."""
    assert slots_per_segment(4 << 20, bound_bytes) == expected


# -- what is removed ------------------------------------------------------------------------------


def test_removals_are_written_to_an_index_of_their_own(
    bench: Bench, many_keys: list[OffloadKey]
) -> None:
    """A removal names the segment and the slots, and outlives every segment."""
    places = bench.places(many_keys[:2])
    bench.writer.remove(places[1][0], many_keys[1:2], [places[1][1]])
    header = IndexHeader.decode((bench.folder / "00000000.idx").read_bytes())
    (frame,) = bench.frames("00000000.idx")
    assert (header.segment, header.num_slots) == (0, 0)
    assert (frame.kind, frame.writer, frame.segment) == (FrameKind.REMOVED, _WRITER, 1)
    assert (frame.split_keys(), frame.slots.tolist()) == (many_keys[1:2], [1])


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_new_index_of_removals_is_synced_with_its_name(
    make_bench: Callable[..., Bench],
    many_keys: list[OffloadKey],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is appended to it is lost with its name otherwise."""
    bench = make_bench(sync=True)
    (place,) = bench.places(many_keys[:1])
    named: list[list[str]] = []
    monkeypatch.setattr(
        _segment_file,
        "sync_folder",
        lambda _, folder: named.append(sorted(path.name for path in folder.glob("00000000.*"))),
    )
    monkeypatch.setattr(bench.writer._removals, "_compact_at_bytes", 1)
    bench.writer.remove(place[0], many_keys[:1], [place[1]])
    assert named == [["00000000.idx"], ["00000000.idx", "00000000.new"], ["00000000.idx"]]


def test_without_room_blocks_are_declined(bench: Bench, many_keys: list[OffloadKey]) -> None:
    """What still fits the current segment is stored, the rest is declined; later it fits."""
    bench.store(many_keys[:6])
    bench.full = True
    stored, failures = bench.store(many_keys[6:10])
    assert [list(part.slots) for part in stored] == [[6, 7]]
    assert sorted(failures) == [2, 3]
    assert isinstance(failures[3], BlockDeclinedError)
    bench.full = False
    assert bench.store(many_keys[8:10])[1] == {}


def test_a_failed_write_publishes_nothing(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks whose payload was not written are in no index, and the next ones are stored."""
    bench.store(many_keys[:1])

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        stored, failures = bench.store(many_keys[1:3])
    assert (stored, sorted(failures)) == ([], [0, 1])
    places = bench.places(many_keys[3:5])
    assert bench.load(places, many_keys[3:5]) == ([True, True], {})
    published = [frame.split_keys() for frame in bench.frames("00000001.idx")]
    assert published == [many_keys[:1], many_keys[3:5]]


def test_a_short_write_is_finished(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that moves a part only is gone on with, at any byte."""
    pwritev = os.pwritev

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return pwritev(descriptor, [buffers[0][: 1 + len(buffers[0]) // 2]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    places = bench.places(many_keys[:3])
    assert bench.load(places, many_keys[:3]) == ([True] * 3, {})


def test_a_short_read_is_finished(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that moves a part only is gone on with, at any byte."""
    places = bench.places(many_keys[:3])
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][: 1 + len(buffers[0]) // 2]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert bench.load(places, many_keys[:3]) == ([True] * 3, {})


def test_a_failed_append_is_overwritten(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an append that was cut short by a full disk, the index goes on whole."""
    bench.store(many_keys[:1])
    pwrite = os.pwrite
    calls = iter(range(2))

    def fill_up(descriptor: int, data: bytes, offset: int) -> int:
        if next(calls):
            raise OSError(errno.ENOSPC, "injected")
        return pwrite(descriptor, data[:50], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fill_up)
        stored, failures = bench.store(many_keys[1:3])
    assert (stored, sorted(failures)) == ([], [0, 1])
    bench.store(many_keys[3:5])
    published = [frame.split_keys() for frame in bench.frames("00000001.idx")]
    assert published == [many_keys[:1], many_keys[3:5]]


def test_a_failed_append_leaves_no_whole_frame(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process would believe the first of two, and miss all that is written in its place."""
    bench.store(many_keys[:1])
    index = bench.folder / "00000001.idx"
    follower = IndexReader(bench.folder, index)
    follower.read()
    size = index.stat().st_size
    short, long = many_keys[1], OffloadKey(many_keys[2] + b"longer")
    pwrite = os.pwrite
    calls = iter(range(2))

    def fill_up(descriptor: int, data: bytes, offset: int) -> int:
        if next(calls):
            raise OSError(errno.ENOSPC, "injected")
        return pwrite(descriptor, data[:-50], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fill_up)
        stored, failures = bench.store([short, long])
    assert (stored, sorted(failures)) == ([], [0, 1])
    assert index.stat().st_size == size
    assert follower.read() == []
    bench.store(many_keys[3:6])
    assert [frame.split_keys() for frame in follower.read()] == [many_keys[3:6]]


def test_a_disk_without_room_leaves_nothing(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a segment cannot be made, no file of it stays."""

    def full(descriptor: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(_segment_file, "_preallocate", full)
    _, failures = bench.store(many_keys[:2])
    assert [error.errno for error in failures.values() if isinstance(error, OSError)] == [28, 28]
    assert list(bench.folder.iterdir()) == []
    assert bench.segments.snapshot() == []


def test_a_flipped_bit_is_damage_of_one_block(bench: Bench, many_keys: list[OffloadKey]) -> None:
    """A wrong byte costs the block that has it, and no other of the same read (INT-1)."""
    places = bench.places(many_keys[:4])
    with open(bench.folder / "00000001.seg", "r+b") as file:
        file.seek(2 * 4096 + 100)
        file.write(b"x")
    right, failures = bench.load(places, many_keys[:4])
    assert right == [True, True, False, True]
    assert [type(error) for error in failures.values()] == [BlockDamagedError]
    assert list(failures) == [2]


def test_a_block_is_checked_in_place(
    make_bench: Callable[..., Bench], many_keys: list[OffloadKey]
) -> None:
    """Checking a block of any size finds damage at its end, and leaves intact ones in peace."""
    bench = make_bench((1 << 20) + 4096, 2)
    places = bench.places(many_keys[:2])
    with open(bench.folder / "00000001.seg", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    bench.reader.check(places[0], many_keys[0])
    with pytest.raises(BlockDamagedError, match="in slot 1 of"):
        bench.reader.check(places[1], many_keys[1])


def test_a_truncated_segment_is_damage_of_what_was_cut(
    bench: Bench, many_keys: list[OffloadKey]
) -> None:
    """Blocks behind the end of the file are damaged, those before it are not (DATA-10)."""
    places = bench.places(many_keys[:4])
    os.truncate(bench.folder / "00000001.seg", 4096 + 100)
    right, failures = bench.load(places, many_keys[:4])
    assert (right[0], sorted(failures)) == (True, [1, 2, 3])
    assert {type(error) for error in failures.values()} == {BlockDamagedError}


def test_a_removed_segment_is_missing(bench: Bench, many_keys: list[OffloadKey]) -> None:
    """Blocks of a file that is gone are missing, those of others are loaded."""
    places = bench.places(many_keys[:10])
    (bench.folder / "00000001.seg").unlink()
    right, failures = bench.load(places, many_keys[:10])
    assert right == [False] * 8 + [True] * 2
    assert {type(error) for error in failures.values()} == {BlockMissingError}


def test_a_segment_that_another_host_has_removed_is_missing(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ESTALE from a network file system says that the file is gone, not that the backend fails."""
    places = bench.places(many_keys[:2])

    def stale(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.ESTALE, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", stale)
        _, failures = bench.load(places, many_keys[:2])
    assert {type(error) for error in failures.values()} == {BlockMissingError}
    assert bench.load(places, many_keys[:2]) == ([True, True], {})


def test_a_symbolic_link_is_not_followed(
    bench: Bench, many_keys: list[OffloadKey], tmp_path: Path
) -> None:
    """A link in the place of a segment, or of a folder on the way, is a missing block."""
    places = bench.places(many_keys[:1])
    path = bench.folder / "00000001.seg"
    path.rename(tmp_path / "elsewhere.seg")
    path.symlink_to(tmp_path / "elsewhere.seg")
    assert isinstance(bench.load(places, many_keys[:1])[1][0], BlockMissingError)
    path.unlink()
    (tmp_path / "elsewhere.seg").rename(path)
    bench.folder.rename(tmp_path / "moved")
    bench.folder.symlink_to(tmp_path / "moved")
    assert isinstance(bench.load(places, many_keys[:1])[1][0], BlockMissingError)
    bench.folder.unlink()
    (tmp_path / "moved").rename(bench.folder)


def test_a_pipe_in_the_place_of_a_segment_stops_nobody(
    bench: Bench, many_keys: list[OffloadKey]
) -> None:
    """What is no regular file is a missing block, and is not waited for."""
    places = bench.places(many_keys[:1])
    path = bench.folder / "00000001.seg"
    path.unlink()
    os.mkfifo(path)
    assert isinstance(bench.load(places, many_keys[:1])[1][0], BlockMissingError)


def test_one_bad_place_costs_one_block(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a read of several fails, each is read alone."""
    places = bench.places(many_keys[:4])
    preadv = os.preadv

    def bad_place(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= 4096 < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "injected")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", bad_place)
    right, failures = bench.load(places, many_keys[:4])
    assert right == [True, False, True, True]
    assert [error.errno for error in failures.values() if isinstance(error, OSError)] == [5]


def test_descriptors_are_bounded(bench: Bench, many_keys: list[OffloadKey]) -> None:
    """However many segments are read, no more than the bound stay open."""
    places = bench.places(many_keys[:20]) + bench.places(many_keys[20:32])
    places += bench.places(many_keys[:16])
    keys = [*many_keys, *many_keys[:16]]
    for place, key in zip(places, keys, strict=True):
        bench.load([place], [key])
    descriptors = list(Path("/proc/self/fd").iterdir())
    links = [str(path.readlink()) for path in descriptors if path.is_symlink()]
    assert sum(link.startswith(str(bench.root)) for link in links) <= 4 + 2


def test_out_of_descriptors_idle_ones_are_closed(
    bench: Bench, many_keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EMFILE closes what nobody uses and tries again."""
    places = bench.places(many_keys[:10])
    bench.load(places[:1], many_keys[:1])
    real = SegmentFiles._open_once
    answers = iter([True, False])

    def scarce(files: SegmentFiles, segment: Segment) -> int:
        if next(answers):
            raise OSError(errno.EMFILE, "injected")
        return real(files, segment)

    monkeypatch.setattr(SegmentFiles, "_open_once", scarce)
    assert bench.load(places[8:9], many_keys[8:9]) == ([True], {})


def test_a_removed_segment_is_readable_while_it_is_open(
    bench: Bench, many_keys: list[OffloadKey]
) -> None:
    """A collector in another process never breaks a read from a segment that is open here."""
    places = bench.places(many_keys[:2])
    bench.load(places, many_keys[:2])
    (bench.folder / "00000001.seg").unlink()
    assert bench.load(places, many_keys[:2]) == ([True, True], {})
    bench.segments.discard(places[0][0])
    bench.files.forget(places[0][0])
    assert sorted(bench.load(places, many_keys[:2])[1]) == [0, 1]


def test_a_segment_that_is_gone_is_not_written_to(
    bench: Bench, many_keys: list[OffloadKey]
) -> None:
    """When somebody has removed the current segment, the next store makes a new one."""
    (place,) = bench.places(many_keys[:1])
    bench.segments.discard(place[0])
    (other,) = bench.places(many_keys[1:2])
    assert other[0].name.number == 2
