"""The harness that drives layout ``segments``: what it does to blocks, and what it sees of them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from kv_conformance.harness import Corruption, Fault, Harness, Opening
from kv_conformance.harness import Subject as HarnessSubject
from kv_core.contract import Capability, JobErrorKind, make_offload_key, parse_tier_config
from kv_core.tierkit.testing import TierDriver, block_bytes_of, example_key, example_namespace
from kv_tier_fs import kv_core_conformance_harness
from kv_tier_fs._harness import FsHarness
from kv_tier_fs._harness._segment_scan import list_places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kv_core.contract import OffloadKey

    Open = Callable[..., tuple[TierDriver, HarnessSubject]]

BLOCK_BYTES = 4096


@pytest.fixture
def harness(tmp_path: Path) -> FsHarness:
    """Return a harness."""
    return FsHarness(tmp_path)


@pytest.fixture
def opened(harness: FsHarness) -> Iterator[Open]:
    """Return a function that opens a tier the way the suite does."""
    drivers: list[TierDriver] = []

    def run(
        storage: str = "first", *, capacity_blocks: int | None = None
    ) -> tuple[TierDriver, HarnessSubject]:
        opening = Opening(storage=storage, block_bytes=BLOCK_BYTES, capacity_blocks=capacity_blocks)
        spec = harness.spec
        config = parse_tier_config("fs", spec.config_model, dict(harness.settings(opening)))
        driver = TierDriver(spec.factory, config, block_bytes=BLOCK_BYTES, tier_name="fs")
        drivers.append(driver)
        namespace = example_namespace(BLOCK_BYTES)
        return driver, HarnessSubject(tier=driver.tier, opening=opening, namespace=namespace)

    yield run
    for driver in drivers:
        driver.close()


def soon(condition: Callable[[], bool]) -> bool:
    """Wait for a thread of the tier; say whether the condition came true."""
    pause = threading.Event()
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            return False
        pause.wait(0.002)
    return True


def test_the_hook_returns_the_harness_of_the_default(tmp_path: Path) -> None:
    """What is installed is tested with what operators get: all capabilities but TOUCH."""
    harness = kv_core_conformance_harness(tmp_path)
    assert isinstance(harness, Harness)
    assert isinstance(harness, FsHarness)
    assert Capability.BOUNDED in harness.spec.capabilities
    assert harness.faults == frozenset(Fault)
    assert list(tmp_path.iterdir()) == []


def test_the_listing_is_what_was_stored(opened: Open, harness: FsHarness) -> None:
    """Keys of all lengths and groups are read from the indexes; deleted ones are not."""
    keys = {
        example_key(1),
        example_key(1, group_idx=7),
        make_offload_key(b"\x00", 0),
        make_offload_key(b"\xff" * 100, 2),
    }
    driver, subject = opened()
    assert harness.list_keys(subject) == set()
    assert driver.store(sorted(keys)).success
    assert harness.list_keys(subject) == keys
    gone = min(keys)
    driver.tier.delete([gone])
    # Written down beside what the caller does.
    assert soon(lambda: harness.list_keys(subject) == keys - {gone})
    assert driver.store([gone]).success
    assert harness.list_keys(subject) == keys


def test_the_scan_reads_the_bytes_that_were_stored(
    opened: Open, harness: FsHarness, keys: list[OffloadKey]
) -> None:
    """Places and checksums of the indexes, read by other code than the tier's."""
    driver, subject = opened()
    assert driver.store(keys).success
    places = list_places(harness.folder(subject.opening), subject.namespace.fingerprint)
    assert places.keys() == set(keys)
    for key, [place] in places.items():
        assert place.read() == block_bytes_of(key, BLOCK_BYTES)
        assert place.is_intact(key)
        assert not place.is_intact(example_key(99))


def test_blocks_of_another_namespace_are_not_listed(
    opened: Open, harness: FsHarness, keys: list[OffloadKey]
) -> None:
    """The header of an index says whose it is."""
    driver, subject = opened()
    assert driver.store(keys).success
    other = example_namespace(BLOCK_BYTES, revision="other")
    theirs = HarnessSubject(tier=driver.tier, opening=subject.opening, namespace=other)
    assert harness.list_keys(theirs) == set()


def test_a_lost_block_is_gone_and_its_neighbours_stay(
    opened: Open, harness: FsHarness, keys: list[OffloadKey]
) -> None:
    """There is a hole where it was."""
    driver, subject = opened()
    driver.store(keys)
    harness.lose(subject, keys[2])
    assert harness.list_keys(subject) == {*keys} - {keys[2]}
    result = driver.load(keys)
    assert set(result.successful_keys) == {*keys} - {keys[2]}
    assert driver.loaded(keys) == [key for key in keys if key != keys[2]]
    with pytest.raises(KeyError):
        harness.lose(subject, keys[2])


def test_a_block_alone_in_a_finished_segment_goes_with_it(
    opened: Open, harness: FsHarness, tmp_path: Path, keys: list[OffloadKey]
) -> None:
    """Nobody misses the files: the load says that the block is missing."""
    first, subject = opened()
    first.store(keys[:1])
    first.close()
    driver, subject = opened()
    assert len(list(tmp_path.rglob("*.seg"))) == 1
    harness.lose(subject, keys[0])
    assert list(tmp_path.rglob("*.seg")) == []
    result = driver.load(keys[:1])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.MISSING


@pytest.mark.parametrize("how", Corruption)
@pytest.mark.parametrize("victim", [2, 7])
def test_a_corrupt_block_is_found_damaged(
    opened: Open, harness: FsHarness, keys: list[OffloadKey], how: Corruption, victim: int
) -> None:
    """In the middle of a segment and at its end; no other block is hit, and a store repairs."""
    driver, subject = opened()
    driver.store(keys)
    harness.corrupt(subject, keys[victim], how)
    result = driver.load(keys)
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DAMAGED
    assert set(result.successful_keys) == {*keys} - {keys[victim]}
    assert driver.store(keys).success
    assert driver.load(keys).success
    assert driver.loaded(keys) == keys
    assert harness.list_keys(subject) == set(keys)


@pytest.mark.parametrize("how", Corruption)
def test_what_is_not_there_cannot_be_damaged(
    opened: Open, harness: FsHarness, keys: list[OffloadKey], how: Corruption
) -> None:
    """A key without a block raises KeyError."""
    _, subject = opened()
    with pytest.raises(KeyError):
        harness.corrupt(subject, keys[0], how)


def test_payloads_without_an_index_are_leftovers(
    opened: Open, harness: FsHarness, tmp_path: Path, keys: list[OffloadKey]
) -> None:
    """Neither whole segments nor locks nor indexes of removals count."""
    driver, subject = opened()
    driver.store(keys)
    driver.tier.delete(keys[:1])
    assert soon(lambda: any(tmp_path.rglob("00000000.idx")))
    assert harness.count_leftovers(subject) == 0
    [segment] = tmp_path.rglob("*.seg")
    segment.with_name("00000099.seg").touch()
    assert harness.count_leftovers(subject) == 1


def test_a_capacity_is_passed_on(opened: Open) -> None:
    """In bytes, as the tier wants it."""
    driver, _ = opened(capacity_blocks=12)
    assert driver.tier.usage().capacity_bytes == 12 * BLOCK_BYTES
