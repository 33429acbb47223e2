"""The tutorial tier: blocks in a dictionary. Everything a tier package needs, and no more.

This module is what the entry point names. It is imported whenever somebody lists the installed
tiers, so it stays light: what is heavy is imported inside the factory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import kv_core
from kv_core.contract import Capability, ContractVersion, TierLimits, TierSpec
from kv_tier_example._config import ExampleConfig

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.contract import SecondaryTierManager, TierContext

__all__ = ["ExampleConfig", "kv_core_conformance_harness", "kv_core_register_tier"]


def _make_tier(context: TierContext) -> SecondaryTierManager:
    from kv_tier_example._tier import ExampleTier

    return ExampleTier(context)


def _limits(config: ExampleConfig) -> TierLimits:
    # What is stored last is evicted last, so as many blocks as fit stay findable.
    return config.limits(min_retained_blocks=config.max_blocks)


@kv_core.hookimpl
def kv_core_register_tier() -> TierSpec:
    """Describe the tier type ``example``."""
    return TierSpec(
        type="example",
        summary="Blocks in the memory of the process, for tutorials and tests.",
        contract=ContractVersion(1, 0),
        factory=_make_tier,
        config_model=ExampleConfig,
        limits=_limits,
        capabilities=frozenset(
            {
                Capability.BOUNDED,
                Capability.DELETE,
                Capability.EVENTS,
                Capability.TOUCH,
                Capability.USAGE,
            }
        ),
    )


@kv_core.hookimpl
def kv_core_conformance_harness(workdir: Path) -> object:
    """Return what the conformance suite drives the tier with. Needs the extra ``conformance``."""
    from kv_tier_example._harness import ExampleHarness

    return ExampleHarness(workdir)
