"""``kv-core fs ls`` and ``du``: what is there, also while it changes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from kv_core.errors import ConfigError
from kv_core.tierkit.testing import example_key, example_namespace

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.tier_fs.cli.conftest import Cache

BLOCK_BYTES = 4096


def test_ls_counts_blocks_and_bytes_of_each_namespace(cache: Cache) -> None:
    """Two namespaces of one root are two entries with their own sums."""
    cache.fill(3, "a")
    cache.fill(5, "b")
    listed = {entry["description"]["model"]: entry for entry in cache.json("ls")}
    assert {model: entry["blocks"] for model, entry in listed.items()} == {"a": 3, "b": 5}
    assert listed["b"]["payload_bytes"] == 5 * BLOCK_BYTES
    assert listed["b"]["disk_bytes"] >= 5 * BLOCK_BYTES
    assert listed["b"]["layout"] == cache.layout


def test_ls_shows_every_field_of_the_namespace(cache: Cache) -> None:
    """The description is the one that the namespace was made from."""
    cache.fill(1, "a")
    expected = example_namespace(BLOCK_BYTES, model="a", model_fingerprint="a").describe()
    (entry,) = cache.json("ls")
    assert entry["description"] == {**expected, "groups": [dict(g) for g in expected["groups"]]}
    text = cache.run("ls")
    assert all(field in text for field in expected)


def test_a_block_stored_twice_is_one_block(segments: Cache) -> None:
    """Two processes that stored the same key have one block between them."""
    keys = [example_key(number) for number in range(3)]
    with segments.open() as one, segments.open() as other:
        jobs = [one.submit_store(keys), other.submit_store(keys)]
        assert all(d.wait(job).success for d, job in zip((one, other), jobs, strict=True))
        (entry,) = segments.json("ls")
    assert entry["blocks"] == 3


def test_removed_blocks_do_not_count(segments: Cache) -> None:
    """What was deleted is gone from the listing, though its bytes are still there."""
    keys = segments.fill(4)
    with segments.open() as driver:
        driver.tier.delete(keys[:3])
        driver.tier.drain_jobs()
        driver.poll()
    (entry,) = segments.json("ls")
    assert (entry["blocks"], entry["payload_bytes"]) == (1, BLOCK_BYTES)


def test_a_writer_is_alive_while_its_tier_is_open(cache: Cache) -> None:
    """Writers are told apart by their locks, and looking leaves the locks alone."""
    cache.fill(1)
    with cache.open() as driver:
        assert driver.store([example_key(7)]).success
        assert cache.json("ls")[0]["live_writers"] == 1
        assert cache.json("ls")[0]["live_writers"] == 1
        assert driver.store([example_key(8)]).success
    assert cache.json("ls")[0]["live_writers"] == 0


def test_ages_are_those_of_the_files(cache: Cache) -> None:
    """Written times come from the files, and people read them in units of time."""
    cache.fill(1)
    written_s = time.time() - 7200
    for path in cache.root.rglob("*"):
        if path.is_file():
            os.utime(path, (written_s, written_s))
    (entry,) = cache.json("ls")
    assert entry["latest_write_s"] == pytest.approx(written_s)
    assert "2 h ago" in cache.run("ls")


def test_segments_record_uses_and_files_do_not(cache: Cache) -> None:
    """A layout without records of uses says so, instead of giving the time of the write."""
    cache.fill(1)
    (entry,) = cache.json("ls")
    assert (entry["latest_use_s"] is None) == (cache.layout == "files")


def test_one_namespace_can_be_asked_for(cache: Cache) -> None:
    """A name or its digits select; a name that is not there is an error that says where to look."""
    cache.fill(1, "a")
    cache.fill(2, "b")
    name = next(e["namespace"] for e in cache.json("ls") if e["description"]["model"] == "b")
    for wanted in (name, "b_", name.rpartition("_")[2]):
        (entry,) = cache.json("ls", "--namespace", wanted)
        assert entry["blocks"] == 2
    with pytest.raises(ConfigError, match="kv-core fs ls"):
        cache.run("ls", "--namespace", "nobody")


def test_a_folder_without_a_description_is_listed_with_the_reason(cache: Cache) -> None:
    """What cannot be read is not left out."""
    cache.fill(2)
    (path,) = cache.root.rglob("config.json")
    path.write_text("{")
    (entry,) = cache.json("ls")
    assert "config.json" in entry["problem"]
    assert entry["description"] == {}


def test_du_adds_up(cache: Cache) -> None:
    """The sum of all namespaces, and what the file system has left."""
    cache.fill(3, "a")
    cache.fill(5, "b")
    usage = cache.json("du")
    assert sum(entry["blocks"] for entry in usage["namespaces"]) == 8
    on_disk = sum(
        max(path.stat().st_size, path.stat().st_blocks * 512)
        for path in cache.root.rglob("*")
        if path.suffix in (".seg", ".idx", ".bin")
    )
    assert sum(entry["disk_bytes"] for entry in usage["namespaces"]) == on_disk
    assert usage["free_bytes"] > 0
    assert "all" in cache.run("du")


def test_preallocated_space_counts(segments: Cache) -> None:
    """A segment that is being written takes all of its space from the beginning."""
    with segments.open(capacity_bytes=64 * 16 * BLOCK_BYTES) as driver:
        assert driver.store([example_key(0)]).success
        (entry,) = segments.json("du")["namespaces"]
    assert entry["payload_bytes"] == BLOCK_BYTES
    assert entry["disk_bytes"] >= 2 * 16 * BLOCK_BYTES


def test_an_empty_root_says_so(cache: Cache) -> None:
    """A folder without namespaces is no error; one that is not there is."""
    with pytest.raises(ConfigError, match="no folder"):
        cache.run("ls")
    cache.root.mkdir()
    assert "holds no namespace" in cache.run("ls")
    assert "holds no namespace" in cache.run("du")
    assert cache.json("ls") == []


def test_links_are_not_followed(cache: Cache, tmp_path: Path) -> None:
    """A link that looks like a namespace leads nowhere."""
    cache.fill(1)
    (folder,) = (path for path in cache.root.iterdir() if "_r" not in path.name and path.is_dir())
    folder.with_name("other_000000000000").symlink_to(folder)
    assert len(cache.json("ls")) == 1
