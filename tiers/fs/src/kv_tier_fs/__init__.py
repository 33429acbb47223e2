"""A tier on a file system: one checksummed file a block.

The module that the entry point names. It is imported whenever installed tiers are listed, so
what is heavy is imported inside the factory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import kv_core
from kv_core.contract import Capability, ContractVersion, TierLimits, TierSpec
from kv_tier_fs._config import FsConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import typer

    from kv_core.contract import SecondaryTierManager, TierContext
    from kv_tier_fs._config import Layout

__all__ = [
    "FsConfig",
    "kv_core_conformance_harness",
    "kv_core_register_commands",
    "kv_core_register_tier",
    "spec_of_layout",
]

# Without a capacity, every block stays findable: layout files removes nothing but damaged objects,
# and layout segments only what would take the file system below its floor of free space.
_RETAINED_BLOCKS: Final = 1 << 40

# Of a capacity, half is free of segments that are being filled and of blocks that are copied, for
# blocks of any size and some writers.
_RETAINED_SHARE: Final = 2
_LARGEST_BLOCK_BYTES: Final = 64 << 20

# Others' stores are looked for four times a second, and entered with the next call.
_VISIBILITY_DELAY_S: Final = 1.0

# Blocks in use are copied through so much memory when their segment goes: 4 MiB, or one block where
# that is more. A fifth of the slots of a segment is copied at most, so of the largest blocks with
# copies, five fill the largest segment. Each thread has some memory to look whether what is to be
# stored is there already, and intact.
_STAGING_BYTES: Final = 52 << 20
_STAGING_BYTES_PER_THREAD: Final = 1 << 20

_CAPABILITIES: Final[Mapping[Layout, frozenset[Capability]]] = {
    "files": frozenset({Capability.INTEGRITY, Capability.PERSISTENT, Capability.SHARED}),
    "segments": frozenset(
        {
            Capability.BOUNDED,
            Capability.DELETE,
            Capability.EVENTS,
            Capability.INTEGRITY,
            Capability.PERSISTENT,
            Capability.SHARED,
            Capability.USAGE,
        }
    ),
}


def _make_tier(context: TierContext) -> SecondaryTierManager:
    config: Any = context.config
    if config.layout == "files":
        from kv_tier_fs.files._tier import FsTier

        return FsTier(context)
    from kv_tier_fs.segments._tier import SegmentTier

    return SegmentTier(context)


def _limits(config: FsConfig) -> TierLimits:
    if config.layout == "files":
        return config.limits(
            min_retained_blocks=_RETAINED_BLOCKS, min_free_bytes=config.min_free_bytes
        )
    retained_blocks = _RETAINED_BLOCKS
    if config.capacity_bytes is not None:
        retained_blocks = config.capacity_bytes // _RETAINED_SHARE // _LARGEST_BLOCK_BYTES
    return config.limits(
        min_retained_blocks=max(1, retained_blocks),
        min_free_bytes=config.min_free_bytes,
        visibility_delay_s=_VISIBILITY_DELAY_S,
        staging_bytes=_STAGING_BYTES + config.io_threads * _STAGING_BYTES_PER_THREAD,
    )


def spec_of_layout(layout: Layout) -> TierSpec:
    """Describe the tier as it is with one layout."""
    return TierSpec(
        type="fs",
        summary="Blocks as files, on a local disk or a shared file system.",
        contract=ContractVersion(1, 0),
        factory=_make_tier,
        config_model=FsConfig,
        limits=_limits,
        capabilities=_CAPABILITIES[layout],
    )


def _refine(config: FsConfig) -> TierSpec:
    return spec_of_layout(config.layout)


@kv_core.hookimpl
def kv_core_register_tier() -> TierSpec:
    """Describe the tier type ``fs``: capabilities are those of the default layout."""
    default: Layout = FsConfig.model_fields["layout"].default
    return replace(spec_of_layout(default), refine=_refine)


@kv_core.hookimpl
def kv_core_register_commands(app: typer.Typer) -> None:
    """Add ``kv-core fs``."""
    from kv_tier_fs._cli import add_commands

    add_commands(app)


@kv_core.hookimpl
def kv_core_conformance_harness(workdir: Path) -> object:
    """Return what the conformance suite drives the tier with. Needs the extra ``conformance``."""
    from kv_tier_fs._harness import FsHarness

    return FsHarness(workdir)
