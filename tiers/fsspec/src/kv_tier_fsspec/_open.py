"""Chooses the tier for a filesystem: threads for a blocking one, a loop for an asynchronous one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kv_core.errors import ConfigError
from kv_tier_fsspec._filesystem import filesystem_class, publication_of
from kv_tier_fsspec._protocols import Publication

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
    publication = publication_of(config)
    if not filesystem_class(config.protocol).async_impl:
        from kv_tier_fsspec._blocking import BlockingFsspecTier

        return BlockingFsspecTier(context)
    if publication is Publication.RENAME:
        raise ConfigError(
            f"'publication' is 'rename', but filesystems of protocol {config.protocol!r} store an "
            "object in one request; leave it out, or set it to 'put'",
            setting="publication",
        )
    if config.protocol in {"az", "abfs", "abfss"}:
        from kv_tier_fsspec._azure import AzureFsspecTier

        return AzureFsspecTier(context)
    from kv_tier_fsspec._async import AsyncFsspecTier

    return AsyncFsspecTier(context)
