"""Chooses the tier for a filesystem: threads for a blocking one, a loop for an asynchronous one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kv_tier_fsspec._filesystem import check_filesystem, filesystem_class, warn_of_assumption
from kv_tier_fsspec._protocols import AZURE_PROTOCOLS

if TYPE_CHECKING:
    from kv_core.contract import SecondaryTierManager, TierContext
    from kv_tier_fsspec._config import FsspecConfig

__all__ = ["make_tier"]


def make_tier(context: TierContext) -> SecondaryTierManager:
    """Open the tier.

    Raises:
        ConfigError: The filesystem cannot publish a block as it is asked to.
        TierOpenError: The storage cannot be used.
    """
    config = cast("FsspecConfig", context.config)
    check_filesystem(config)
    warn_of_assumption(config)
    if not filesystem_class(config.protocol).async_impl:
        from kv_tier_fsspec._blocking import BlockingFsspecTier

        return BlockingFsspecTier(context)
    if config.protocol in AZURE_PROTOCOLS:
        from kv_tier_fsspec._azure import AzureFsspecTier

        return AzureFsspecTier(context)
    from kv_tier_fsspec._async import AsyncFsspecTier

    return AsyncFsspecTier(context)
