"""``kv-core fs fsck``: an index that is not as it was written, and one that is being written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.tierkit.testing import example_key
from kv_tier_fs._cli._index_damage import read_frames
from kv_tier_fs.segments._format import HEADER_BYTES
from kv_tier_fs.segments._index_reader import IndexReader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.tier_fs.cli.conftest import Cache

    from kv_core.contract import OffloadKey
    from kv_core.tierkit.testing import TierDriver

BLOCK_BYTES = 4096
# Of a block whose key has 36 bytes.
FRAME_BYTES = 48 + 12 + 36 + 8


def store_one_by_one(driver: TierDriver, count: int) -> list[OffloadKey]:
    """Store blocks, each with a frame of its own."""
    keys = [example_key(number) for number in range(count)]
    for key in keys:
        assert driver.store([key]).success
    return keys


def fill(cache: Cache, count: int) -> list[OffloadKey]:
    """Store blocks, each with a frame of its own, and close the tier."""
    with cache.open() as driver:
        return store_one_by_one(driver, count)


def index_file(cache: Cache, number: int = 1) -> Path:
    """Return the only index of that number."""
    (path,) = cache.root.rglob(f"{number:08d}.idx")
    return path


def resize(path: Path, size_bytes: int) -> None:
    """Cut a file, sealed or not, and keep its mode."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    os.truncate(path, size_bytes)
    path.chmod(mode)


def append(path: Path, data: bytes) -> None:
    """Write behind the end of a file, sealed or not, and keep its mode."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    with path.open("ab") as file:
        file.write(data)
    path.chmod(mode)


def unseal(cache: Cache) -> None:
    """Let it look as if the writer had died before it could seal its segment."""
    for path in (*cache.payload_files(), index_file(cache)):
        path.chmod(0o600)


def damage_of(found: Any) -> list[tuple[str, str]]:
    """Return file and problem of all damage, none of which was retired or is that of a block."""
    assert not any(damage["retired"] or damage["key"] for damage in found["damage"])
    return [(damage["path"], damage["problem"]) for damage in found["damage"]]


# -- sealed indexes -------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 16, 50, 80, FRAME_BYTES - 1])
@pytest.mark.parametrize(("frame", "lost"), [(0, 5), (2, 3), (4, 1)])
def test_one_flipped_byte_of_an_index_is_found(
    segments: Cache, at: int, frame: int, lost: int
) -> None:
    """Whatever it belongs to; blocks before it are checked, it and those behind it are lost."""
    keys = fill(segments, 5)
    path = index_file(segments)
    damaged_at = HEADER_BYTES + frame * FRAME_BYTES
    segments.flip(path, damaged_at + at)
    found = segments.json("fsck", status=1)
    assert found["checked_bytes"] == frame * BLOCK_BYTES
    ((damaged, problem),) = damage_of(found)
    assert damaged == str(path)
    assert problem == (
        f"the index is not what was written from byte {damaged_at} on; blocks that cannot be "
        f"found: {lost} of 5 at most"
    )
    with segments.open() as driver:
        assert driver.resolve(keys) == [number < frame for number in range(5)]


@pytest.mark.parametrize("left", [0, 1, 2 * FRAME_BYTES, 2 * FRAME_BYTES + 30])
def test_an_index_that_was_cut_is_found(segments: Cache, left: int) -> None:
    """At the end of a frame as well: the payloads tell that there was more."""
    fill(segments, 5)
    resize(index_file(segments), HEADER_BYTES + left)
    ((_, problem),) = damage_of(segments.json("fsck", status=1))
    assert problem.endswith(f"blocks that cannot be found: {5 - left // FRAME_BYTES} of 5 at most")


@pytest.mark.parametrize("size_bytes", [0, HEADER_BYTES - 1])
def test_a_sealed_index_without_a_header_is_found(segments: Cache, size_bytes: int) -> None:
    """Only a writer that has just begun has none."""
    fill(segments, 2)
    resize(index_file(segments), size_bytes)
    ((_, problem),) = damage_of(segments.json("fsck", status=1))
    assert problem == "the index has no header"


def test_an_index_without_its_payloads_says_what_it_can(segments: Cache) -> None:
    """Nothing tells how many there were; at least the frames behind the damage."""
    fill(segments, 5)
    segments.flip(index_file(segments), HEADER_BYTES + FRAME_BYTES)
    segments.payload_files()[0].unlink()
    first, second = segments.json("fsck", status=1)["damage"]
    assert first["problem"].endswith("blocks that cannot be found: 3 or more")
    assert second["key"] == example_key(0).hex()


def test_blocks_that_were_removed_are_not_lost(segments: Cache) -> None:
    """What the index does not say of them, nobody misses."""
    with segments.open() as driver:
        keys = store_one_by_one(driver, 5)
        driver.tier.delete(keys[3:])
    segments.flip(index_file(segments), HEADER_BYTES + FRAME_BYTES)
    ((_, problem),) = damage_of(segments.json("fsck", status=1))
    assert problem.endswith("blocks that cannot be found: 2 of 5 at most")


def test_damage_of_an_index_is_left_as_it_is(segments: Cache) -> None:
    """There is nothing to retire in it; a damaged block before it is retired."""
    fill(segments, 5)
    path = index_file(segments)
    segments.flip(path, HEADER_BYTES + 3 * FRAME_BYTES)
    segments.flip(segments.payload_files()[0], BLOCK_BYTES)
    before = path.read_bytes()
    found = segments.json("fsck", "--retire", status=1)["damage"]
    assert [(damage["key"], damage["retired"]) for damage in found] == [
        (None, False),
        (example_key(1).hex(), True),
    ]
    assert path.read_bytes() == before
    found = segments.json("fsck", status=1)
    assert found["checked_bytes"] == 2 * BLOCK_BYTES
    assert len(damage_of(found)) == 1


def test_the_blocks_can_be_stored_again(segments: Cache) -> None:
    """In another segment, while the damaged one waits for its end."""
    keys = fill(segments, 3)
    segments.flip(index_file(segments), HEADER_BYTES)
    with segments.open() as driver:
        assert driver.store(keys).success
        assert driver.load(keys).success
    assert segments.json("fsck", status=1)["checked_bytes"] == 3 * BLOCK_BYTES


# -- indexes that are being written ---------------------------------------------------------------


@pytest.mark.parametrize("torn", [1, 47, FRAME_BYTES - 1])
def test_a_frame_that_is_being_appended_is_no_damage(segments: Cache, torn: int) -> None:
    """A living writer may be in the middle of it."""
    with segments.open() as driver:
        store_one_by_one(driver, 3)
        path = index_file(segments)
        append(path, path.read_bytes()[-FRAME_BYTES:][:torn])
        assert segments.json("fsck") == {"checked_bytes": 3 * BLOCK_BYTES, "damage": []}
    assert segments.json("fsck") == {"checked_bytes": 3 * BLOCK_BYTES, "damage": []}


@pytest.mark.parametrize("torn", [1, 47, FRAME_BYTES - 1])
def test_what_a_dead_writer_did_not_finish_is_no_damage(segments: Cache, torn: int) -> None:
    """Nobody was told that it had stored that block."""
    fill(segments, 3)
    unseal(segments)
    path = index_file(segments)
    resize(path, path.stat().st_size - torn)
    assert segments.json("fsck") == {"checked_bytes": 2 * BLOCK_BYTES, "damage": []}


def test_a_writer_that_has_just_begun_is_no_damage(segments: Cache) -> None:
    """It has not written the whole header yet, or nothing behind it."""
    fill(segments, 3)
    unseal(segments)
    for size_bytes in (HEADER_BYTES, HEADER_BYTES - 1, 0):
        resize(index_file(segments), size_bytes)
        assert segments.json("fsck") == {"checked_bytes": 0, "damage": []}


@pytest.mark.parametrize("alive", [True, False])
def test_damage_before_whole_frames_is_found_in_an_index_that_is_not_sealed(
    segments: Cache, alive: bool
) -> None:
    """No append leaves a frame behind one that is not whole."""
    with segments.open() as driver:
        store_one_by_one(driver, 5)
        path = index_file(segments)
        segments.flip(path, HEADER_BYTES + FRAME_BYTES)
        if alive:
            found = segments.json("fsck", status=1)
    if not alive:
        unseal(segments)
        found = segments.json("fsck", status=1)
    ((damaged, problem),) = damage_of(found)
    assert damaged == str(path)
    assert problem.endswith("blocks that cannot be found: 3 or more")


def test_a_damaged_header_before_frames_is_found(segments: Cache) -> None:
    """A writer that has just begun has written nothing behind it."""
    fill(segments, 3)
    unseal(segments)
    segments.flip(index_file(segments), 50)
    ((_, problem),) = damage_of(segments.json("fsck", status=1))
    assert problem == "the index has no header"


def test_an_append_between_two_looks_is_no_damage(
    segments: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not whole at one look, is at the next, with more behind it."""
    fill(segments, 5)
    unseal(segments)
    path = index_file(segments)
    whole = path.read_bytes()
    sizes = [HEADER_BYTES + number * FRAME_BYTES - 9 for number in (1, 3, 5)]
    read_rest = IndexReader._read_rest

    def see_part(self: IndexReader) -> memoryview:
        path.write_bytes(whole[: sizes.pop(0)])
        return read_rest(self)

    monkeypatch.setattr(IndexReader, "_read_rest", see_part)
    reader = IndexReader(segments.root, path)
    assert sum(map(len, read_frames(reader))) == 2
    assert reader.end < reader.size_bytes
    assert reader.read_behind() == []
    assert sizes == []


# -- removals -------------------------------------------------------------------------------------


def removals_of(cache: Cache) -> Path:
    """Store three blocks and remove them one by one; return the file that says so."""
    with cache.open() as driver:
        keys = store_one_by_one(driver, 4)
        for key in keys[:3]:
            driver.tier.delete([key])
    return index_file(cache, 0)


def test_damage_of_the_index_of_removals_is_found(segments: Cache) -> None:
    """Blocks that were removed are found again because of it."""
    path = removals_of(segments)
    segments.flip(path, HEADER_BYTES + FRAME_BYTES)
    found = segments.json("fsck", "--retire", status=1)
    assert found["checked_bytes"] == 3 * BLOCK_BYTES
    ((damaged, problem),) = damage_of(found)
    assert damaged == str(path)
    assert problem == (
        f"the index is not what was written from byte {HEADER_BYTES + FRAME_BYTES} on; removals "
        "that do not count: 1 or more"
    )
    segments.flip(path, 50)
    ((_, problem),) = damage_of(segments.json("fsck", status=1))
    assert problem == "the index has no header"


def test_a_removal_that_was_not_finished_is_no_damage(segments: Cache) -> None:
    """That index is never sealed."""
    path = removals_of(segments)
    resize(path, path.stat().st_size - 1)
    assert segments.json("fsck") == {"checked_bytes": 2 * BLOCK_BYTES, "damage": []}
