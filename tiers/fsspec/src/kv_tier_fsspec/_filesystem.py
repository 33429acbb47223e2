"""Makes the filesystem of a URL, without what fsspec keeps between callers.

fsspec shares instances between all who ask for the same options, remembers listings in them, and
runs asynchronous ones on one loop of the whole process. A tier wants none of that: what another
process stored must be seen, two tiers must not share a connection, and a shutdown must end what
it started. So the class is called directly, caches off.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from fsspec.registry import get_filesystem_class

from kv_core.errors import ConfigError, TierOpenError
from kv_tier_fsspec._masked_logs import MaskedLogs, hide_what_looks_secret
from kv_tier_fsspec._protocols import Publication, protocol_named

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from kv_tier_fsspec._config import FsspecConfig

__all__ = [
    "check_filesystem",
    "filesystem_class",
    "make_filesystem",
    "masked_logs",
    "options_of",
    "publication_of",
    "warn_of_assumption",
]

logger = logging.getLogger(__name__)

_NO_CACHES: Final = {"skip_instance_cache": True, "use_listings_cache": False}


def check_filesystem(config: FsspecConfig) -> None:
    """See that there is a filesystem for the settings, and that it can publish blocks.

    Raises:
        ConfigError: It cannot as it is asked to, or the settings do not say how.
        TierOpenError: There is none.
    """
    kind = filesystem_class(config.protocol)
    if publication_of(config) is Publication.RENAME and kind.async_impl:
        raise ConfigError(
            f"'publication' is 'rename', but filesystems of protocol {config.protocol!r} store an "
            "object in one request; leave it out, or set it to 'put'",
            setting="publication",
        )


def publication_of(config: FsspecConfig) -> Publication:
    """Return how blocks are published.

    Raises:
        ConfigError: The protocol is not known, and the settings do not say.
    """
    if config.publication is not Publication.AUTO:
        return config.publication
    known = protocol_named(config.protocol).publication
    if known is None:
        raise ConfigError(
            f"it is not known how a filesystem of protocol {config.protocol!r} makes a whole block "
            "appear at once. Set 'publication' to 'put' if it stores an object in one request, or "
            "to 'rename' if its rename replaces a file atomically; with one that does neither, "
            "readers would see parts of blocks",
            setting="publication",
        )
    return known


def warn_of_assumption(config: FsspecConfig) -> None:
    """Say in the log what is only assumed of the filesystem."""
    if protocol_named(config.protocol).publication is None:
        logger.warning(
            "nothing is known of how a filesystem of protocol %r makes a whole block appear at "
            "once; 'publication' says %r. If that is not so, readers see parts of blocks, "
            "which count as damaged",
            config.protocol,
            config.publication.value,
        )


def filesystem_class(protocol: str) -> type[AbstractFileSystem]:
    """Return the class of a protocol.

    Raises:
        TierOpenError: fsspec does not know it, or the package that has it is not installed.
    """
    try:
        found: type[AbstractFileSystem] = get_filesystem_class(protocol)
    except (ValueError, ImportError) as error:
        # fsspec says which package to install.
        extra = protocol_named(protocol).extra
        command = f" (pip install 'kv-tier-fsspec[{extra}]')" if extra else ""
        raise TierOpenError(
            f"there is no filesystem for the protocol {protocol!r}: {error}. Install what it "
            f"needs{command}, or correct 'url'"
        ) from error
    return found


def options_of(config: FsspecConfig) -> dict[str, Any]:
    """Return the options of the filesystem: what the URL says, and what the settings say."""
    said = filesystem_class(config.protocol)._get_kwargs_from_urls(config.url)
    return {**said, **config.storage_options.get_secret_value()}


def make_filesystem(config: FsspecConfig, **extra: Any) -> AbstractFileSystem:
    """Return a filesystem of the tier's own.

    Args:
        config: Settings of the tier.
        extra: Options that the tier decides about.

    Raises:
        TierOpenError: The filesystem refuses its options.
    """
    kind = filesystem_class(config.protocol)
    options = {**options_of(config), **_NO_CACHES, **extra}
    try:
        filesystem = kind(**options)
    except TypeError as error:
        raise TierOpenError(
            f"the filesystem {config.protocol!r} refuses its 'storage_options': "
            f"{config.hide_secrets(str(error))}"
        ) from None
    if config.is_in_process:
        # All of these share one store, which nobody ever empties. The tier's own ends with it.
        filesystem.store, filesystem.pseudo_dirs = {}, [""]
    return filesystem


def masked_logs(config: FsspecConfig) -> MaskedLogs:
    """Return what keeps the secrets of the settings out of the logs of all that is below the tier.

    Raises:
        TierOpenError: There is no such filesystem.
    """
    driver = filesystem_class(config.protocol).__module__.partition(".")[0]
    # The environment has credentials as well, which nobody has told.
    return MaskedLogs(
        (),
        lambda text: hide_what_looks_secret(config.hide_secrets(text)),
        packages=("fsspec", driver, *protocol_named(config.protocol).clients),
    )
