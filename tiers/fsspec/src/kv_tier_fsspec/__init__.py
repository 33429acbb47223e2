"""A tier on any filesystem that fsspec can reach: one object a block.

The module that the entry point names. It is imported whenever installed tiers are listed, so
what is heavy is imported inside the factory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import kv_core
from kv_core.contract import ContractVersion, TierLimits, TierSpec
from kv_tier_fsspec._config import FsspecConfig, ObjectConfig
from kv_tier_fsspec._protocols import protocol_named

if TYPE_CHECKING:
    from pathlib import Path

    import typer

    from kv_core.contract import SecondaryTierManager, TierContext

__all__ = [
    "FsspecConfig",
    "ObjectConfig",
    "kv_core_conformance_harness",
    "kv_core_register_commands",
    "kv_core_register_tier",
]

# The tier removes nothing but damaged objects, so every block stays findable.
_RETAINED_BLOCKS: Final = 1 << 40


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
    """Return the declaration for a URL: what its protocol keeps.

    Raises:
        ConfigError: Its filesystem cannot publish blocks as it is asked to.
        TierOpenError: There is no such filesystem.
    """
    from kv_tier_fsspec._filesystem import check_filesystem

    check_filesystem(config)
    capabilities = protocol_named(config.protocol).capabilities
    return replace(kv_core_register_tier(), capabilities=capabilities)


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
        capabilities=protocol_named("file").capabilities,
        refine=_refine,
    )


@kv_core.hookimpl
def kv_core_register_commands(app: typer.Typer) -> None:
    """Add ``kv-core object``."""
    from kv_tier_fsspec._cli import add_commands

    add_commands(app)


@kv_core.hookimpl
def kv_core_conformance_harness(workdir: Path) -> object:
    """Return what the conformance suite drives the tier with. Needs the extra ``conformance``."""
    from kv_tier_fsspec._harness import FileHarness

    return FileHarness(workdir)
