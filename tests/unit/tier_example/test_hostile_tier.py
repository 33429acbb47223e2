"""What the hostile tier declares, and keeps, whatever it says."""

from __future__ import annotations

from kv_core.contract import Capability, ReqContext
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_example.hostile import HostileConfig, kv_core_register_tier


def test_it_declares_a_capacity_and_no_more() -> None:
    """An engine may store to it, and promises nothing to others because of it."""
    spec = kv_core_register_tier()
    assert spec.capabilities == {Capability.BOUNDED}
    assert spec.limits(HostileConfig()).min_free_bytes == 0


def test_it_keeps_its_capacity_whatever_it_reports() -> None:
    """Stores that are reported as failed count as well, and the least recently used goes first."""
    config = HostileConfig(max_blocks=3, fail_rate=1.0, io_threads=2)
    keys = [example_key(number) for number in range(8)]
    with TierDriver(kv_core_register_tier().factory, config) as driver:
        for key in keys:
            assert not driver.store([key]).success
        answers = driver.resolve(keys, ReqContext("later"))
    assert answers == [False] * 5 + [True] * 3
