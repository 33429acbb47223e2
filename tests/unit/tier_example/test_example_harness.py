"""The harness acts on the store below the tier's code, and the tier meets it like a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_conformance.harness import Corruption, Fault, HarnessError, Opening, Subject
from kv_core.contract import JobErrorKind, parse_tier_config
from kv_core.tierkit.testing import TierDriver, example_key, example_namespace
from kv_tier_example._harness import ExampleHarness, async_mode, at_once, hostile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEYS = [example_key(number) for number in range(4)]


def open_subject(harness: ExampleHarness) -> tuple[TierDriver, Subject]:
    """Open the tier as the suite does."""
    opening = Opening(storage="storage", block_bytes=512, capacity_blocks=100)
    config = parse_tier_config("example", harness.spec.config_model, harness.settings(opening))
    driver = TierDriver(harness.spec.factory, config)
    return driver, Subject(driver.tier, opening, example_namespace(512))


@pytest.mark.parametrize("make", [at_once, async_mode, hostile])
def test_what_is_lost_is_missing(make: Callable[[Path], ExampleHarness], tmp_path: Path) -> None:
    """In both modes and behind the wall: the load fails, and the other blocks stay."""
    harness = make(tmp_path)
    driver, subject = open_subject(harness)
    with driver:
        driver.store(KEYS)
        harness.lose(subject, KEYS[0])
        assert set(harness.list_keys(subject)) == set(KEYS[1:])
        result = driver.load(KEYS)
        assert result.error is not None
        assert result.error.kind is JobErrorKind.MISSING
        assert set(result.successful_keys) == set(KEYS[1:])
        with pytest.raises(KeyError):
            harness.lose(subject, KEYS[0])


@pytest.mark.parametrize("how", list(Corruption))
def test_an_object_is_damaged_as_asked(how: Corruption, tmp_path: Path) -> None:
    """Wrong lengths are found; a flipped bit is not, and the tier does not declare INTEGRITY."""
    harness = at_once(tmp_path)
    driver, subject = open_subject(harness)
    with driver:
        driver.store(KEYS[:1])
        harness.corrupt(subject, KEYS[0], how)
        result = driver.load(KEYS[:1])
        assert result.success is (how is Corruption.FLIPPED)
        assert driver.loaded(KEYS[:1]) == []
        with pytest.raises(KeyError):
            harness.corrupt(subject, KEYS[1], how)


@pytest.mark.parametrize(
    ("fault", "kind"), [(Fault.ERROR, JobErrorKind.FAILED), (Fault.FULL, JobErrorKind.DECLINED)]
)
def test_a_fault_reaches_the_tier_until_it_is_healed(
    fault: Fault, kind: JobErrorKind, tmp_path: Path
) -> None:
    """The store raises what a broken or full backend raises."""
    harness = at_once(tmp_path)
    driver, subject = open_subject(harness)
    with driver:
        harness.heal(subject)
        harness.inject(subject, fault)
        result = driver.store(KEYS[:1])
        assert result.error is not None
        assert result.error.kind is kind
        harness.heal(subject)
        assert driver.store(KEYS[:1]).success


def test_a_stall_holds_the_store_and_not_the_engine(tmp_path: Path) -> None:
    """Lookups, touches, deletes and usage come from the index; jobs go on when it is over."""
    harness = at_once(tmp_path)
    driver, subject = open_subject(harness)
    with driver:
        driver.store(KEYS[:2])
        harness.inject(subject, Fault.STALL)
        job = driver.submit_store(KEYS[2:])
        assert driver.poll() == []
        assert driver.tier.lookup_many(KEYS[:2], driver.request) == [True, True]
        driver.tier.touch(KEYS[:1], driver.request)
        driver.tier.delete(KEYS[:1])
        assert driver.tier.lookup(KEYS[0], driver.request) is False
        assert driver.tier.usage().blocks == 1
        harness.heal(subject)
        assert driver.wait(job).success
        assert driver.resolve(KEYS) == [False, True, True, True]


def test_another_tier_is_refused(tmp_path: Path) -> None:
    """A harness that reached into a tier it does not know would test nothing."""
    subject = Subject(
        object(),  # type: ignore[arg-type]  # that is the point
        Opening(storage="storage", block_bytes=512),
        example_namespace(512),
    )
    with pytest.raises(HarnessError, match="found a object"):
        at_once(tmp_path).lose(subject, KEYS[0])
