"""The tutorial tier keeps what it declares."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import Capability, ReqContext, parse_tier_config
from kv_core.errors import ConfigError, TierClosedError
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_example import ExampleConfig, kv_core_register_tier

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey

KEYS = [example_key(number) for number in range(8)]


def drive(**settings: Any) -> TierDriver:
    """Return a driver of the tier with some settings."""
    spec = kv_core_register_tier()
    config = parse_tier_config("example", spec.config_model, settings)
    return TierDriver(spec.factory, config, tier_name="example")


def present(driver: TierDriver) -> list[OffloadKey]:
    """Return the keys that lookups find."""
    request = ReqContext("listing")
    answers = driver.resolve(KEYS, request)
    driver.tier.on_request_finished(request)
    return [key for key, answer in zip(KEYS, answers, strict=True) if answer]


def replay(driver: TierDriver, listing: set[OffloadKey]) -> set[OffloadKey]:
    """Apply the tier's events to a listing."""
    for event in driver.tier.take_events():
        assert event.medium == "example"
        for key in event.keys:
            assert (key in listing) is event.removed
            (listing.remove if event.removed else listing.add)(key)
    return listing


def test_the_spec_is_light() -> None:
    """Asking for the spec imports neither numpy's neighbours nor the tier itself."""
    code = (
        "import sys, kv_tier_example; kv_tier_example.kv_core_register_tier();"
        "print('kv_tier_example._tier' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_spec_says_what_the_tier_is() -> None:
    """Type, version, limits and capabilities."""
    spec = kv_core_register_tier()
    assert (spec.type, tuple(spec.contract)) == ("example", (1, 0))
    assert spec.limits(ExampleConfig(max_blocks=7)).min_retained_blocks == 7
    assert spec.limits(ExampleConfig()).staging_bytes == 0
    assert Capability.BOUNDED in spec.capabilities
    assert Capability.PERSISTENT not in spec.capabilities


@pytest.mark.parametrize("settings", [{"max_blocks": 0}, {"size": 3}])
def test_bad_settings_are_named(settings: dict[str, Any]) -> None:
    """Invalid and unknown settings are refused by name (CONF-1)."""
    with pytest.raises(ConfigError, match=f"'{next(iter(settings))}'"):
        drive(**settings)


@pytest.mark.parametrize("simulate_async", [False, True])
def test_bytes_are_copied(simulate_async: bool) -> None:
    """What was stored comes back, although the slots have changed since (DATA-1)."""
    with drive(simulate_async=simulate_async) as driver:
        driver.store(KEYS)
        for slot in range(8):
            driver.poison(slot)
        assert driver.load(KEYS).success
        assert driver.loaded(KEYS) == KEYS


def test_lookups_answer_at_once() -> None:
    """Without simulate_async no lookup is ever unknown."""
    with drive() as driver:
        assert driver.tier.lookup_many(KEYS[:2], driver.request) == [False, False]
        driver.store(KEYS[:1])
        assert driver.tier.lookup_many(KEYS[:2], driver.request) == [True, False]


def test_lookups_can_be_unknown_first() -> None:
    """With simulate_async the first answer is unknown, a later one true or false."""
    with drive(simulate_async=True) as driver:
        driver.store(KEYS[:1])
        assert driver.tier.lookup_many(KEYS[:2], driver.request) == [None, None]
        assert driver.resolve(KEYS[:2]) == [True, False]


def test_the_least_recently_used_goes_first() -> None:
    """Stores, loads and touches are uses (CAP-1, CAP-2, TOUCH-1)."""
    with drive(max_blocks=4) as driver:
        for key in KEYS[:4]:
            driver.store([key])
        driver.load(KEYS[:1])
        driver.store(KEYS[1:2])
        driver.tier.touch(KEYS[2:3], driver.request)
        driver.store(KEYS[4:5])
        assert present(driver) == [*KEYS[:3], KEYS[4]]


def test_a_touched_prefix_goes_from_its_tail() -> None:
    """Of keys touched together the last is evicted first."""
    with drive(max_blocks=3) as driver:
        driver.store(KEYS[:3])
        driver.tier.touch(KEYS[:3], driver.request)
        driver.store(KEYS[3:4])
        assert present(driver) == [KEYS[0], KEYS[1], KEYS[3]]


def test_the_limit_holds_within_one_job() -> None:
    """A job of more blocks than fit leaves as many as fit, and no lookup promises more (CAP-1)."""
    with drive(max_blocks=3, simulate_async=True) as driver:
        assert driver.resolve(KEYS) == [False] * 8
        assert driver.store(KEYS).success
        assert sum(driver.resolve(KEYS)) == 3
        assert len(present(driver)) == 3
        assert driver.tier.usage().blocks == 3


def test_events_replay_to_the_listing() -> None:
    """What became present and what left is told in order, evictions included (EVT-1, EVT-2)."""
    with drive(max_blocks=3) as driver:
        listing = replay(driver, set())
        driver.store(KEYS)
        driver.store(KEYS[7:])
        driver.tier.delete(present(driver)[:1])
        listing = replay(driver, listing)
        assert sorted(listing) == sorted(present(driver))
        assert list(driver.tier.take_events()) == []


def test_deleted_blocks_are_absent_and_free_their_space() -> None:
    """Delete answers at once, for unknown keys, too (DEL-1)."""
    with drive() as driver:
        driver.store(KEYS)
        driver.tier.delete([*KEYS[:3], example_key(99)])
        assert present(driver) == KEYS[3:]
        assert not driver.load(KEYS[:1]).success
        assert driver.tier.usage().blocks == 5


def test_usage_equals_the_listing() -> None:
    """Blocks, bytes and capacity (USE-1)."""
    with drive(max_blocks=6) as driver:
        driver.store(KEYS)
        usage = driver.tier.usage()
        assert (usage.blocks, usage.bytes) == (6, 6 * 512)
        assert (usage.capacity_blocks, usage.capacity_bytes) == (6, None)


def test_many_cycles_leave_nothing() -> None:
    """Accounting does not drift over stores and deletions (CAP-4, LMCache#4546)."""
    with drive(max_blocks=4) as driver:
        for round_ in range(50):
            driver.store([KEYS[round_ % 8]])
            driver.tier.delete([KEYS[round_ % 8]])
        assert driver.tier.usage().blocks == 0


def test_a_block_of_another_size_is_damaged() -> None:
    """An object of the wrong length fails to load and is retired (DATA-10)."""
    with drive() as driver:
        driver.store(KEYS[:1])
        driver.tier.store.put(KEYS[0], b"short")  # type: ignore[attr-defined]
        result = driver.load(KEYS[:1])
        assert result.error is not None
        assert result.error.kind.value == "damaged"
        assert present(driver) == []
        assert replay(driver, set()) == set()
        driver.store(KEYS[:1])
        assert driver.load(KEYS[:1]).success


@pytest.mark.parametrize("method", ["touch", "delete", "usage"])
def test_a_fork_is_refused_by_every_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork the lock may be held for ever by a thread that is not there (LIFE-6)."""
    with drive() as driver:
        arguments = {
            "touch": ([example_key(0)], driver.request),
            "delete": ([example_key(0)],),
            "usage": (),
        }
        with monkeypatch.context() as patch, driver.tier._lock:  # type: ignore[attr-defined]
            # What a fork finds: another process, made after the tier was opened.
            patch.setattr(os, "getpid", lambda: -1)
            patch.setattr(driver.tier, "_opened_in", -1)
            with pytest.raises(TierClosedError, match="cannot be used in its fork -1"):
                getattr(driver.tier, method)(*arguments[method])


def test_instances_share_nothing() -> None:
    """Two tiers of one process are two memories (LIFE-5)."""
    with drive() as one, drive() as two:
        one.store(KEYS)
        assert present(two) == []
