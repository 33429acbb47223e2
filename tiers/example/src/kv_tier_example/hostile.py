"""The tier type ``hostile``: the example tier behind a wall of scripted faults.

For testing engines, configurations and dashboards, never for use. What it breaks is drawn from a
seed, so a run can be repeated. It keeps the one promise without which no engine could be right: a
slot is not touched any more once its job has been reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

import kv_core
from kv_core.contract import Capability, ContractVersion, TierLimits, TierSpec
from kv_tier_example._config import ExampleConfig

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.contract import SecondaryTierManager, TierContext

__all__ = ["HostileConfig", "kv_core_conformance_harness", "kv_core_register_tier"]


class HostileConfig(ExampleConfig):
    """How often each thing goes wrong: shares of calls or jobs, 0 to 1."""

    seed: int = 0
    """Makes a run repeatable, as far as the timing of threads allows."""
    raise_rate: float = Field(default=0.0, ge=0, le=1)
    """Calls of any method that raise."""
    fail_rate: float = Field(default=0.0, ge=0, le=1)
    """Jobs that are reported as failed although they were carried out."""
    partial_rate: float = Field(default=0.0, ge=0, le=1)
    """Jobs that are reported with every other key only."""
    late_rate: float = Field(default=0.0, ge=0, le=1)
    """Jobs whose result is held back."""
    late_polls: int = Field(default=50, ge=1)
    """Polls that a late result misses."""
    lose_rate: float = Field(default=0.0, ge=0, le=1)
    """Jobs whose result never comes."""
    duplicate_rate: float = Field(default=0.0, ge=0, le=1)
    """Results that come twice."""
    unknown_rate: float = Field(default=0.0, ge=0, le=1)
    """Polls that also bring the result of a job that never was."""
    lie_rate: float = Field(default=0.0, ge=0, le=1)
    """Lookups of absent blocks that are answered with "present"."""
    forget_rate: float = Field(default=0.0, ge=0, le=1)
    """Lookups that are answered with "unknown", whatever the tier knows."""


def _make_tier(context: TierContext) -> SecondaryTierManager:
    from kv_tier_example._hostile_tier import HostileTier

    return HostileTier(context)


def _limits(config: HostileConfig) -> TierLimits:
    return config.limits()


@kv_core.hookimpl
def kv_core_register_tier() -> TierSpec:
    """Describe the tier type ``hostile``."""
    return TierSpec(
        type="hostile",
        summary="The example tier with scripted faults, to test engines with.",
        contract=ContractVersion(1, 0),
        factory=_make_tier,
        config_model=HostileConfig,
        limits=_limits,
        # Its faults are in what it says; what it keeps is up to the example tier.
        capabilities=frozenset({Capability.BOUNDED}),
    )


@kv_core.hookimpl
def kv_core_conformance_harness(workdir: Path) -> object:
    """Return what the conformance suite drives the tier with, all faults off."""
    from kv_tier_example._harness import hostile

    return hostile(workdir)
