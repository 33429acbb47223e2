"""``kv-core fs gc``: what goes, what stays, and that engines do not mind."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from kv_core.errors import ConfigError, TierOpenError
from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from tests.unit.tier_fs.cli.conftest import Cache

BLOCK_BYTES = 4096


def _age(cache: Cache, model: str, days: float) -> None:
    """Make everything of a model look as if it was written so long ago."""
    then_s = time.time() - days * 86400
    for folder in cache.root.glob(f"{model}_*"):
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (then_s, then_s))


def test_the_least_recently_used_goes_first(cache: Cache) -> None:
    """Down to a capacity, over all namespaces, the oldest first."""
    cache.fill(4, "new")
    cache.fill(4, "old")
    _age(cache, "old", 2)
    sizes = {e["namespace"].split("_")[0]: e for e in cache.json("du")["namespaces"]}
    capacity = sizes["new"]["disk_bytes"]
    done = cache.json("gc", "--capacity", capacity)
    assert done["freed_bytes"] == sizes["old"]["disk_bytes"]
    assert done["disk_bytes"] == capacity
    left = {e["namespace"].split("_")[0]: e["blocks"] for e in cache.json("ls")}
    assert left == {"new": 4, "old": 0}


def test_a_dry_run_says_the_same_and_removes_nothing(cache: Cache) -> None:
    """The figures of a dry run are those of the run that follows."""
    cache.fill(4, "new")
    cache.fill(4, "old")
    _age(cache, "old", 2)
    would = cache.json("gc", "--capacity", 1, "--ttl", "1d", "--dry-run")
    assert sum(entry["blocks"] for entry in cache.json("ls")) == 8
    done = cache.json("gc", "--capacity", 1, "--ttl", "1d")
    assert {**would, "dry_run": False} == done


def test_namespaces_that_nobody_uses_go_as_a_whole(cache: Cache) -> None:
    """Nothing is left of them, and the others keep every block."""
    cache.fill(4, "new")
    cache.fill(4, "old")
    _age(cache, "old", 31)
    done = cache.json("gc", "--ttl", "30d")
    assert [name.split("_")[0] for name in done["namespaces"]] == ["old"]
    assert not list(cache.root.glob("old_*"))
    (entry,) = cache.json("ls")
    assert entry["blocks"] == 4


def test_a_namespace_in_use_does_not_age(cache: Cache) -> None:
    """An engine that has it open keeps it, however old its blocks are."""
    cache.fill(2, "old")
    with cache.open("old") as driver:
        _age(cache, "old", 31)
        assert cache.json("gc", "--ttl", "1d")["namespaces"] == []
        keys = [example_key(0), example_key(1)]
        assert driver.load(keys).success


def test_a_namespace_that_is_only_read_is_in_use(segments: Cache) -> None:
    """An engine that opened it for loading only keeps it, too."""
    segments.fill(2, "old")
    with segments.open("old", read_only=True) as driver:
        _age(segments, "old", 31)
        assert segments.json("gc", "--ttl", "1d")["namespaces"] == []
        assert driver.load([example_key(0), example_key(1)]).success
    _age(segments, "old", 31)
    assert len(segments.json("gc", "--ttl", "1d")["namespaces"]) == 1


def test_what_is_being_written_stays(segments: Cache) -> None:
    """Collecting everything takes sealed segments only; the engine goes on with its own."""
    segments.fill(4)
    with segments.open() as driver:
        keys = [example_key(number) for number in range(10, 14)]
        assert driver.store(keys).success
        segments.run("gc", "--capacity", 1)
        assert driver.load(keys).success
        assert driver.loaded(keys) == keys
        assert driver.store([example_key(20)]).success
    assert segments.json("ls")[0]["blocks"] == 5


def test_an_engine_learns_what_was_collected(segments: Cache) -> None:
    """Blocks that went are absent for engines that run, and can be stored again."""
    keys = segments.fill(4)
    with segments.open() as driver:
        assert driver.resolve(keys) == [True] * 4
        segments.run("gc", "--capacity", 1)
        segments.wait_for_lookups(driver, keys, "0000")
        assert driver.store(keys).success
        assert driver.resolve(keys) == [True] * 4


def test_what_dead_writers_left_is_put_in_order(segments: Cache) -> None:
    """Payloads that no index speaks of go, with or without options."""
    segments.fill(1)
    (path,) = segments.payload_files()
    orphan = path.with_name("00000009.seg")
    orphan.write_bytes(bytes(BLOCK_BYTES))
    segments.run("gc")
    assert not orphan.exists()
    assert segments.json("ls")[0]["blocks"] == 1


def test_a_namespace_can_be_collected_alone(cache: Cache) -> None:
    """The others are not touched, though they are older."""
    cache.fill(2, "one")
    cache.fill(2, "other")
    _age(cache, "other", 2)
    cache.run("gc", "--capacity", 1, "--namespace", "one_")
    left = {e["namespace"].split("_")[0]: e["blocks"] for e in cache.json("ls")}
    assert left == {"one": 0, "other": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--ttl", "30"), "is no duration"), (("--capacity", "many"), "is no size")],
)
def test_options_that_mean_nothing_are_refused(
    cache: Cache, arguments: tuple[str, str], message: str
) -> None:
    """A number without a unit could be anything; nothing is removed for it."""
    cache.fill(1)
    with pytest.raises(ConfigError, match=message):
        cache.run("gc", *arguments)
    assert cache.json("ls")[0]["blocks"] == 1


def test_a_root_that_others_can_write_is_not_collected(cache: Cache) -> None:
    """Whoever can write there could make this remove something else."""
    cache.fill(1)
    cache.root.chmod(0o777)
    with pytest.raises(TierOpenError, match="every user can write"):
        cache.run("gc", "--capacity", 1)


def test_people_are_told_what_went(cache: Cache) -> None:
    """The text has the count and both sizes."""
    cache.fill(1)
    text = cache.run("gc", "--capacity", 1)
    assert text.startswith("1 files went, ")
    assert text.endswith("0 B left\n")
