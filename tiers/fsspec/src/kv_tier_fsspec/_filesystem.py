"""Makes the filesystem of a URL, without what fsspec keeps between callers.

fsspec shares instances between all who ask for the same options, remembers listings in them, and
runs asynchronous ones on one loop of the whole process. A tier wants none of that: what another
process stored must be seen, two tiers must not share a connection, and a shutdown must end what
it started. So the class is called directly, caches off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fsspec.registry import get_filesystem_class

from kv_core.errors import ConfigError, TierOpenError
from kv_tier_fsspec._config import Publication

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from kv_tier_fsspec._config import FsspecConfig

__all__ = ["filesystem_class", "make_filesystem", "publication_of"]

# Which filesystem publishes how. Whoever adds one adds a test on the real thing.
_PUBLICATIONS: Final = {
    "file": Publication.RENAME,
    "local": Publication.RENAME,
    "memory": Publication.PUT,
    "sftp": Publication.RENAME,
    "ssh": Publication.RENAME,
    "s3": Publication.PUT,
    "s3a": Publication.PUT,
    "az": Publication.PUT,
    "abfs": Publication.PUT,
    "abfss": Publication.PUT,
    "gs": Publication.PUT,
    "gcs": Publication.PUT,
}

_NO_CACHES: Final = {"skip_instance_cache": True, "use_listings_cache": False}


def publication_of(config: FsspecConfig) -> Publication:
    """Return how blocks are published.

    Raises:
        ConfigError: The protocol is not known, and the settings do not say.
    """
    if config.publication is not Publication.AUTO:
        return config.publication
    known = _PUBLICATIONS.get(config.protocol)
    if known is None:
        raise ConfigError(
            f"it is not known how a filesystem of protocol {config.protocol!r} makes a whole block "
            "appear at once. Set 'publication' to 'put' if it stores an object in one request, or "
            "to 'rename' if its rename replaces a file atomically; with one that does neither, "
            "readers would see parts of blocks",
            setting="publication",
        )
    return known


def filesystem_class(protocol: str) -> type[AbstractFileSystem]:
    """Return the class of a protocol.

    Raises:
        TierOpenError: fsspec does not know it, or the package that has it is not installed.
    """
    try:
        found: type[AbstractFileSystem] = get_filesystem_class(protocol)
    except (ValueError, ImportError) as error:
        # fsspec says which package to install.
        raise TierOpenError(
            f"there is no filesystem for the protocol {protocol!r}: {error}. Install what it "
            "needs, or correct 'url'"
        ) from error
    return found


def make_filesystem(config: FsspecConfig, **extra: Any) -> AbstractFileSystem:
    """Return a filesystem of the tier's own.

    Args:
        config: Settings of the tier.
        extra: Options that the tier decides about.

    Raises:
        TierOpenError: The filesystem refuses its options.
    """
    options = {**config.storage_options.get_secret_value(), **_NO_CACHES, **extra}
    try:
        filesystem = filesystem_class(config.protocol)(**options)
    except TypeError as error:
        raise TierOpenError(
            f"the filesystem {config.protocol!r} refuses its 'storage_options': "
            f"{config.hide_secrets(str(error))}"
        ) from None
    if config.is_in_process:
        # All of these share one store, which nobody ever empties. The tier's own ends with it.
        filesystem.store, filesystem.pseudo_dirs = {}, [""]
    return filesystem
