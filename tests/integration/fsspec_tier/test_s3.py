"""The fsspec tier with ``s3://`` on a real object store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_s3 import kv_core_register_tier as register_s3

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_tier_s3._harness import S3Access

    Drive = Callable[..., TierDriver]

KEYS = [example_key(number) for number in range(16)]


def test_blocks_outlive_the_tier(drive: Drive, s3: dict[str, Any]) -> None:
    """A reopened tier finds them, and loads what was stored."""
    first = drive(s3)
    assert first.resolve(KEYS) == [False] * 16
    assert first.store(KEYS).success
    first.close()
    second = drive(s3)
    assert second.resolve(KEYS) == [True] * 16
    assert second.load(KEYS).success
    assert second.loaded(KEYS) == KEYS


def test_the_tier_of_another_package_reads_the_blocks(
    drive: Drive, s3: dict[str, Any], s3_access: S3Access
) -> None:
    """One bucket, one format: what this tier stored, the tier ``s3`` loads."""
    assert drive(s3).store(KEYS).success
    bucket, _, prefix = s3["url"].removeprefix("s3://").partition("/")
    spec = register_s3()
    settings = {**s3_access.settings(bucket), "prefix": prefix}
    config = parse_tier_config("cold", spec.config_model, settings)
    with TierDriver(spec.factory, config, block_bytes=4096, tier_name="cold") as driver:
        assert driver.resolve(KEYS) == [True] * 16
        assert driver.load(KEYS).success
        assert driver.loaded(KEYS) == KEYS
