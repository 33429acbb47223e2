"""What is known of each protocol: the one table.

A tier promises what the storage below it keeps. How a whole block appears at once, whether blocks
outlive the process, and whether other processes see them, is a property of the protocol that no
filesystem can be asked for, so it is written down here. Whoever adds a line that says "tested" adds
a test on the real thing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, final

from kv_core.contract import Capability

__all__ = ["AZURE_PROTOCOLS", "LOCAL_PROTOCOLS", "Protocol", "Publication", "protocol_named"]


class Publication(enum.Enum):
    """How a block appears, so that no reader ever sees a part of it."""

    AUTO = "auto"
    """What is known of the protocol; a protocol that nothing is known of is refused."""
    PUT = "put"
    """The whole object in one request, as object stores do it."""
    RENAME = "rename"
    """A temporary file, renamed: on filesystems whose rename replaces atomically."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What is known of a protocol.

    Attributes:
        publication: How a whole block appears at once; ``None`` where that is not known.
        is_persistent: Whether blocks outlive the tier.
        is_shared: Whether other processes see them.
        is_tested: Whether this package is tested on the real thing.
        extra: Extra of this package that brings the driver; empty if there is none.
        clients: Packages below the driver whose loggers may repeat what is secret.
        refusal: Why blocks cannot be kept there at all; empty if they can.
    """

    publication: Publication | None
    is_persistent: bool = True
    is_shared: bool = True
    is_tested: bool = False
    extra: str = ""
    clients: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the tier declares on this protocol."""
        found = {Capability.INTEGRITY}
        if self.is_persistent:
            found.add(Capability.PERSISTENT)
        if self.is_shared:
            found.add(Capability.SHARED)
        return frozenset(found)


LOCAL_PROTOCOLS: Final = frozenset({"file", "local"})
AZURE_PROTOCOLS: Final = frozenset({"az", "abfs", "abfss"})

_FILE: Final = Protocol(publication=Publication.RENAME, is_tested=True)
_SFTP: Final = Protocol(
    publication=Publication.RENAME, is_tested=True, extra="sftp", clients=("paramiko",)
)
_S3: Final = Protocol(
    publication=Publication.PUT,
    is_tested=True,
    extra="s3",
    clients=("aiobotocore", "aiohttp", "botocore", "urllib3"),
)
_AZURE: Final = Protocol(
    publication=Publication.PUT,
    is_tested=True,
    extra="az",
    clients=("aiohttp", "azure", "msal", "requests", "urllib3"),
)
_UNTESTED_OBJECTS: Final = Protocol(
    publication=Publication.PUT, clients=("aiohttp", "google", "requests", "urllib3")
)
_MEMORY: Final = Protocol(
    publication=Publication.PUT, is_persistent=False, is_shared=False, is_tested=True
)
_UNKNOWN: Final = Protocol(publication=None)


def _refused(why: str) -> Protocol:
    return Protocol(publication=None, is_persistent=False, is_shared=False, refusal=why)


_READ_ONLY: Final = _refused("it can only be read")
_WRAPPER: Final = _refused(
    "it is a view of another filesystem, and what it remembers would be taken for what is stored"
)

_PROTOCOLS: Final = {
    "file": _FILE,
    "local": _FILE,
    "memory": _MEMORY,
    "sftp": _SFTP,
    "ssh": _SFTP,
    "s3": _S3,
    "s3a": _S3,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "gs": _UNTESTED_OBJECTS,
    "gcs": _UNTESTED_OBJECTS,
    "http": _READ_ONLY,
    "https": _READ_ONLY,
    "data": _READ_ONLY,
    "git": _READ_ONLY,
    "github": _READ_ONLY,
    "tar": _READ_ONLY,
    "zip": _refused("a block in an archive cannot be replaced, nor the archive shared"),
    "blockcache": _WRAPPER,
    "cached": _WRAPPER,
    "dir": _WRAPPER,
    "filecache": _WRAPPER,
    "reference": _WRAPPER,
    "simplecache": _WRAPPER,
}


def protocol_named(name: str) -> Protocol:
    """Return what is known of a protocol, which may be nothing."""
    return _PROTOCOLS.get(name, _UNKNOWN)
