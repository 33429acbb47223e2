"""A tier on S3, or on any object store that speaks its language.

The module that the entry point names. It is imported whenever installed tiers are listed, so
what is heavy is imported inside the factory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import kv_core
from kv_core.contract import Capability, ContractVersion, TierLimits, TierSpec
from kv_tier_s3._config import BucketConfig, Engine, S3Config

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.contract import SecondaryTierManager, TierContext

__all__ = [
    "BucketConfig",
    "Engine",
    "S3Config",
    "kv_core_conformance_harness",
    "kv_core_register_tier",
]

# The tier removes nothing but damaged objects, so every block stays findable.
_RETAINED_BLOCKS: Final = 1 << 40


def _make_tier(context: TierContext) -> SecondaryTierManager:
    from kv_tier_s3._tier import S3Tier

    return S3Tier(context)


def _limits(config: S3Config) -> TierLimits:
    return config.limits(
        min_retained_blocks=_RETAINED_BLOCKS,
        max_block_bytes=config.most_block_bytes,
        staging_bytes=config.staging_bytes,
        # A bucket has no end that could be seen from here; lifecycle rules bound it.
        min_free_bytes=1,
    )


@kv_core.hookimpl
def kv_core_register_tier() -> TierSpec:
    """Describe the tier type ``s3``."""
    return TierSpec(
        type="s3",
        summary="Blocks as objects, in S3 or a store that speaks its language.",
        contract=ContractVersion(1, 0),
        factory=_make_tier,
        config_model=S3Config,
        limits=_limits,
        capabilities=frozenset(
            {
                Capability.INTEGRITY,
                Capability.PERSISTENT,
                Capability.SHARED,
                Capability.WITHDRAWS_IO,
            }
        ),
    )


@kv_core.hookimpl
def kv_core_conformance_harness(workdir: Path) -> object:
    """Return what the conformance suite drives the tier with. Needs the extra ``conformance``."""
    from kv_tier_s3._harness import S3Harness

    return S3Harness(workdir)
