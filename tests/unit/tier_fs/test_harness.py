"""The harness that the conformance suite drives the tier with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kv_conformance.harness import Corruption, Deadlines, Fault, Harness, HarnessError, Opening
from kv_conformance.harness import Subject as HarnessSubject
from kv_core.contract import JobErrorKind, make_offload_key, parse_tier_config
from kv_core.errors import TierOpenError
from kv_core.tierkit.testing import TierDriver, example_key, example_namespace
from kv_tier_fs import kv_core_conformance_harness, kv_core_register_tier
from kv_tier_fs._harness import FilesHarness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from kv_core.contract import OffloadKey

    Open = Callable[..., tuple[TierDriver, HarnessSubject]]

BLOCK_BYTES = 4096

needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[FilesHarness]:
    """Return a harness; what it mounts is unmounted at the end."""
    made = FilesHarness(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def opened(harness: FilesHarness) -> Iterator[Open]:
    """Return a function that opens a tier the way the suite does."""
    drivers: list[TierDriver] = []

    def run(storage: str = "first", *, faults: bool = False) -> tuple[TierDriver, HarnessSubject]:
        opening = Opening(storage=storage, block_bytes=BLOCK_BYTES, faults=faults)
        driver = drive(harness.settings(opening))
        drivers.append(driver)
        namespace = example_namespace(BLOCK_BYTES)
        return driver, HarnessSubject(tier=driver.tier, opening=opening, namespace=namespace)

    yield run
    for driver in drivers:
        driver.close()


def drive(settings: Mapping[str, object]) -> TierDriver:
    """Open a tier with these settings."""
    spec = kv_core_register_tier()
    config = parse_tier_config("fs", spec.config_model, dict(settings))
    return TierDriver(spec.factory, config, block_bytes=BLOCK_BYTES, tier_name="fs")


def test_the_hook_returns_a_harness(tmp_path: Path) -> None:
    """What the entry point module offers is what the suite asks for."""
    harness = kv_core_conformance_harness(tmp_path)
    assert isinstance(harness, Harness)
    assert harness.spec.type == "fs"
    assert harness.faults == frozenset(Fault)
    assert list(tmp_path.iterdir()) == []


def test_deadlines_become_limits(harness: FilesHarness) -> None:
    """The tier declares the limits that the suite asked for."""
    deadlines = Deadlines(job_s=3.0, lookup_s=2.0, error_backoff_s=0.5)
    opening = Opening(storage="first", block_bytes=BLOCK_BYTES, deadlines=deadlines)
    spec = harness.spec
    config = parse_tier_config("fs", spec.config_model, dict(harness.settings(opening)))
    limits = spec.limits(config)
    assert limits.job_deadline_s == 3.0
    assert limits.lookup_deadline_s == 2.0
    assert limits.error_backoff_s == 0.5


def test_unusable_settings_are_valid_and_cannot_be_opened(harness: FilesHarness) -> None:
    """The root is below a file, whatever the user may write to."""
    opening = Opening(storage="first", block_bytes=BLOCK_BYTES)
    with pytest.raises(TierOpenError, match="is not a directory"):
        drive(harness.unusable_settings(opening))


def test_storages_are_separate(opened: Open, harness: FilesHarness, keys: list[OffloadKey]) -> None:
    """A block stored in one storage is not in another."""
    first, first_subject = opened("first")
    second, second_subject = opened("second")
    assert first.store(keys[:1]).success
    assert second.resolve(keys[:1]) == [False]
    assert list(harness.list_keys(first_subject)) == keys[:1]
    assert list(harness.list_keys(second_subject)) == []


def test_all_keys_are_listed(opened: Open, harness: FilesHarness) -> None:
    """Keys of several groups, with hashes of any length, come back from the file names."""
    keys = {
        example_key(1),
        example_key(1, group_idx=7),
        make_offload_key(b"\x00", 0),
        make_offload_key(b"\xff" * 100, 2),
        make_offload_key(b"\xab" * 101, 3),
        make_offload_key(b"\xab" * 300, 3),
    }
    driver, subject = opened()
    assert driver.store(sorted(keys)).success
    assert harness.list_keys(subject) == keys


def test_a_lost_key_is_gone(opened: Open, harness: FilesHarness, keys: list[OffloadKey]) -> None:
    """The file is removed; the others stay."""
    driver, subject = opened()
    driver.store(keys[:2])
    harness.lose(subject, keys[0])
    assert list(harness.list_keys(subject)) == keys[1:2]
    result = driver.load(keys[:2])
    assert result.successful_keys == (keys[1],)
    assert result.error is not None
    assert result.error.kind is JobErrorKind.MISSING


@pytest.mark.parametrize("how", Corruption)
def test_a_corrupt_block_is_found_damaged(
    opened: Open, harness: FilesHarness, keys: list[OffloadKey], how: Corruption
) -> None:
    """Each kind of damage is one that the tier notices, and the damaged file is listed."""
    driver, subject = opened()
    driver.store(keys[:2])
    harness.corrupt(subject, keys[0], how)
    assert harness.list_keys(subject) == set(keys[:2])
    result = driver.load(keys[:2])
    assert result.successful_keys == (keys[1],)
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DAMAGED


def test_a_flip_changes_one_bit_of_the_payload(
    opened: Open, harness: FilesHarness, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """Length and trailer are those of an intact file."""
    driver, subject = opened()
    driver.store(keys[:1])
    (path,) = (tmp_path / "first").rglob("*.bin")
    before = path.read_bytes()
    harness.corrupt(subject, keys[0], Corruption.FLIPPED)
    after = path.read_bytes()
    assert len(after) == len(before)
    flipped = [index for index in range(len(after)) if after[index] != before[index]]
    assert len(flipped) == 1
    assert flipped[0] < BLOCK_BYTES
    assert (after[flipped[0]] ^ before[flipped[0]]).bit_count() == 1


def test_what_is_not_there_cannot_be_damaged(
    opened: Open, harness: FilesHarness, keys: list[OffloadKey]
) -> None:
    """Losing and corrupting a key without a file raise KeyError."""
    _, subject = opened()
    with pytest.raises(KeyError):
        harness.lose(subject, keys[0])
    for how in Corruption:
        with pytest.raises(KeyError):
            harness.corrupt(subject, keys[0], how)
    assert list(harness.list_keys(subject)) == []


def test_leftovers_are_files_of_unfinished_stores(
    opened: Open, harness: FilesHarness, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """Neither blocks nor locks of writers count, a temporary file does."""
    driver, subject = opened()
    driver.store(keys)
    assert harness.count_leftovers(subject) == 0
    (writer,) = (path for path in tmp_path.rglob("writers/*") if path.is_dir())
    (writer / "77.tmp").touch()
    assert harness.count_leftovers(subject) == 1


def test_faults_need_a_layer_to_happen_in(opened: Open, harness: FilesHarness) -> None:
    """A tier on the plain folder cannot be made to fail; healing it is fine."""
    _, subject = opened()
    with pytest.raises(HarnessError, match="Open it with faults=True"):
        harness.inject(subject, Fault.ERROR)
    harness.heal(subject)


@pytest.mark.privileged
@needs_mounts
def test_one_mount_serves_a_storage(
    opened: Open, harness: FilesHarness, keys: list[OffloadKey]
) -> None:
    """Tiers with faults and without share the blocks of a storage, and those with, the fault."""
    plain, _ = opened()
    assert plain.store(keys[:1]).success
    first, subject = opened(faults=True)
    second, _ = opened(faults=True)
    assert [driver.load(keys[:1]).success for driver in (plain, first, second)] == [True] * 3
    harness.inject(subject, Fault.ERROR)
    assert [driver.load(keys[:1]).success for driver in (plain, first, second)] == [
        True,
        False,
        False,
    ]
    assert list(harness.list_keys(subject)) == keys[:1]
    harness.heal(subject)
    assert first.load(keys[:1]).success


@pytest.mark.privileged
@needs_mounts
def test_a_full_storage_declines_and_keeps_nothing(
    opened: Open, harness: FilesHarness, keys: list[OffloadKey]
) -> None:
    """ENOSPC is no failure of the tier; the temporary files are removed (DATA-11)."""
    driver, subject = opened(faults=True)
    harness.inject(subject, Fault.FULL)
    result = driver.store(keys)
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DECLINED
    assert harness.count_leftovers(subject) == 0
    harness.heal(subject)
    assert driver.store(keys).success
    assert driver.load(keys).success


@pytest.mark.privileged
@needs_mounts
def test_short_counts_move_everything_in_the_end(
    opened: Open, harness: FilesHarness, keys: list[OffloadKey]
) -> None:
    """Reads and writes that move half of what was asked are repeated (DATA-11)."""
    driver, subject = opened(faults=True)
    harness.inject(subject, Fault.SHORT)
    assert driver.store(keys).success
    assert driver.load(keys).success
    assert driver.loaded(keys) == keys
    harness.heal(subject)
    assert driver.load(keys).success


@pytest.mark.privileged
@needs_mounts
def test_a_stalled_storage_cannot_hold_the_shutdown(harness: FilesHarness) -> None:
    """An idle tier ends within its deadline, and gives its lock up when the storage is back."""
    deadlines = Deadlines(job_s=0.3)
    opening = Opening(storage="s", block_bytes=BLOCK_BYTES, deadlines=deadlines, faults=True)
    driver = drive(harness.settings(opening))
    namespace = example_namespace(BLOCK_BYTES)
    subject = HarnessSubject(tier=driver.tier, opening=opening, namespace=namespace)
    harness.inject(subject, Fault.STALL)
    assert tuple(driver.tier.shutdown()) == ()
    harness.heal(subject)
    driver.close()
