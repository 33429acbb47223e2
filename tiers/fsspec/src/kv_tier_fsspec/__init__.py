"""A tier on any filesystem that fsspec can reach: one object a block.

The module that the entry point names. It is imported whenever installed tiers are listed, so
what is heavy is imported inside the factory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import kv_core
from kv_core.contract import Capability, ContractVersion, TierLimits, TierSpec
from kv_tier_fsspec._config import FsspecConfig, ObjectConfig

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.contract import SecondaryTierManager, TierContext

__all__ = [
    "IN_PROCESS",
    "FsspecConfig",
    "ObjectConfig",
    "kv_core_conformance_harness",
    "kv_core_register_tier",
]

# The tier removes nothing but damaged objects, so every block stays findable.
_RETAINED_BLOCKS: Final = 1 << 40

IN_PROCESS: Final = frozenset({Capability.INTEGRITY})
"""What a filesystem whose blocks end with the tier promises."""

_OUTSIDE: Final = IN_PROCESS | {Capability.PERSISTENT, Capability.SHARED}


def _make_tier(context: TierContext) -> SecondaryTierManager:
    from kv_tier_fsspec._open import make_tier

    return make_tier(context)


def _limits(config: FsspecConfig) -> TierLimits:
    return config.limits(
        min_retained_blocks=_RETAINED_BLOCKS,
        max_block_bytes=config.most_block_bytes,
        staging_bytes=config.staging_bytes,
        # Elsewhere space has no end that could be seen from here.
        min_free_bytes=config.min_free_bytes if config.is_local else 1,
    )


def _refine(config: FsspecConfig) -> TierSpec:
    """Return the declaration for a URL: what lives in this process ends with it."""
    spec = kv_core_register_tier()
    return replace(spec, capabilities=IN_PROCESS) if config.is_in_process else spec


@kv_core.hookimpl
def kv_core_register_tier() -> TierSpec:
    """Describe the tier type ``fsspec``."""
    return TierSpec(
        type="fsspec",
        summary="Blocks as objects, on any filesystem that fsspec can reach.",
        contract=ContractVersion(1, 0),
        factory=_make_tier,
        config_model=FsspecConfig,
        limits=_limits,
        capabilities=_OUTSIDE,
        refine=_refine,
    )


@kv_core.hookimpl
def kv_core_conformance_harness(workdir: Path) -> object:
    """Return what the conformance suite drives the tier with. Needs the extra ``conformance``."""
    from kv_tier_fsspec._harness import FileHarness

    return FileHarness(workdir)
