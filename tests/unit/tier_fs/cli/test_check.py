"""``kv-core fs fsck``: every damaged block is found, and only those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.errors import TierOpenError
from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from tests.unit.tier_fs.cli.conftest import Cache

BLOCK_BYTES = 4096


def test_what_is_whole_is_not_reported(cache: Cache) -> None:
    """All payload bytes are read, and nothing is wrong with them."""
    cache.fill(5)
    assert cache.json("fsck") == {"checked_bytes": 5 * BLOCK_BYTES, "damage": []}


def test_one_flipped_byte_is_found(cache: Cache) -> None:
    """One block is damaged, and stays so without --retire; the status says it."""
    cache.fill(5)
    cache.flip(cache.payload_files()[0], 100)
    for _ in range(2):
        found = cache.json("fsck", status=1)
        (damage,) = found["damage"]
        assert damage["path"] == str(cache.payload_files()[0])
        assert not damage["retired"]


def test_the_report_names_the_key(segments: Cache) -> None:
    """The key of a damaged block comes from the index."""
    keys = segments.fill(5)
    segments.flip(segments.payload_files()[0], 3 * BLOCK_BYTES + 17)
    (damage,) = segments.json("fsck", status=1)["damage"]
    assert damage["key"] == keys[3].hex()


def test_retired_blocks_are_absent_and_can_be_stored_again(cache: Cache) -> None:
    """Retiring loses the damaged block only, and only until it is stored anew."""
    keys = cache.fill(5)
    cache.flip(cache.payload_files()[0], 100)
    (damage,) = cache.json("fsck", "--retire")["damage"]
    assert damage["retired"]
    assert cache.json("fsck")["damage"] == []
    with cache.open() as driver:
        found = driver.resolve(keys)
        assert found.count(False) == 1
        assert driver.store(keys).success
        assert driver.load(keys).success
        assert driver.loaded(keys) == keys


def test_an_engine_that_runs_sees_what_was_retired(segments: Cache) -> None:
    """Removals are followed like those of any other engine."""
    with segments.open() as driver:
        keys = [example_key(number) for number in range(4)]
        assert driver.store(keys).success
        (path,) = (p for p in segments.payload_files() if p.stat().st_blocks)
        with path.open("r+b") as file:
            file.seek(2 * BLOCK_BYTES)
            file.write(b"damage")
        (damage,) = segments.json("fsck", "--retire")["damage"]
        assert damage["key"] == keys[2].hex()
        segments.wait_for_lookups(driver, keys, "1101")


def test_a_truncated_file_is_found(cache: Cache) -> None:
    """Blocks behind the end are damaged."""
    cache.fill(4)
    path = cache.payload_files()[0]
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5000)
    damage = cache.json("fsck", status=1)["damage"]
    assert len(damage) == (2 if cache.layout == "segments" else 1)


def test_files_that_were_swapped_are_found(cache: Cache) -> None:
    """Good bytes under another name are as wrong as any."""
    if cache.layout == "segments":
        cache.fill(1)
        cache.fill(1, first=1)
    else:
        cache.fill(2)
    one, other = cache.payload_files()
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    assert len(cache.json("fsck", status=1)["damage"]) == 2


def test_a_missing_payload_file_is_damage(segments: Cache) -> None:
    """An index that promises blocks of a segment that is not there is not left unmentioned."""
    segments.fill(2)
    segments.payload_files()[0].unlink()
    assert len(segments.json("fsck", status=1)["damage"]) == 2


def test_an_index_of_another_version_is_left_alone(segments: Cache) -> None:
    """It is reported, and stays as it is."""
    segments.fill(2)
    (index,) = segments.root.rglob("*.idx")
    segments.flip(index, 8)
    before = index.read_bytes()
    (damage,) = segments.json("fsck", "--retire", status=1)["damage"]
    assert "another version" in damage["problem"]
    assert index.read_bytes() == before


def test_blocks_that_were_removed_are_not_checked(segments: Cache) -> None:
    """Damage to what does not count is no damage."""
    keys = segments.fill(2)
    segments.flip(segments.payload_files()[0], 0)
    segments.run("fsck", "--retire")
    assert segments.json("fsck")["checked_bytes"] == (len(keys) - 1) * BLOCK_BYTES


def test_people_are_told_what_to_read(cache: Cache) -> None:
    """The text names the file, what is wrong and the sum."""
    cache.fill(2)
    cache.flip(cache.payload_files()[0], 9)
    text = cache.run("fsck", status=1)
    assert str(cache.payload_files()[0]) in text
    assert "8 KiB checked, 1 damaged, 0 retired" in text


def test_a_root_that_others_can_write_is_not_repaired(cache: Cache) -> None:
    """Looking is allowed anywhere, changing is not."""
    cache.fill(1)
    cache.root.chmod(0o777)
    assert cache.json("fsck")["damage"] == []
    with pytest.raises(TierOpenError, match="every user can write"):
        cache.run("fsck", "--retire")
