"""Settings of the fsspec tier."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, Secret, field_validator, model_validator
from typing_extensions import override

from kv_core.errors import ConfigError
from kv_core.tierkit import TierKitConfig
from kv_core.units import parse_bytes
from kv_tier_fsspec._protocols import LOCAL_PROTOCOLS, Publication, protocol_named

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FsspecConfig", "ObjectConfig"]

_MASK: Final = "**********"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_IPV6: Final = re.compile(r"\[[0-9A-Fa-f:.%]*\]")
_SECRET_NAME: Final = re.compile(
    r"key|secret|token|pass|pwd|sas|cred|connection_string|signature|auth", re.IGNORECASE
)

# Names of options that only look like that.
_NO_SECRETS: Final = frozenset({"host_key_policy", "key_filename", "look_for_keys"})
_SFTP: Final = frozenset({"sftp", "ssh"})
_HOST_KEY_POLICIES: Final = ("reject", "warning", "auto_add")

# A store holds a block and its copy; a client library that assembles what it receives, two.
_COPIES: Final = 3


class ObjectConfig(TierKitConfig):
    """What an operator can set of every tier over object storage."""

    staging_bytes: int = Field(default=2**28, ge=2**16)
    """Most memory for copies of blocks in flight; a third of it is the largest block. Bytes, or
    text such as '256MiB'.
    """

    @property
    def is_local(self) -> bool:
        """Whether the blocks lie in a folder of this machine."""
        return False

    @property
    def most_block_bytes(self) -> int:
        """Largest block whose transfer stays within ``staging_bytes``."""
        return self.staging_bytes // _COPIES

    def most_transfers(self, object_bytes: int) -> int:
        """Return how many objects may be in flight for their copies to fit ``staging_bytes``."""
        return max(1, self.staging_bytes // (_COPIES * object_bytes))

    @field_validator("staging_bytes", mode="before")
    @classmethod
    def _read_staging(cls, value: Any) -> int:
        return parse_bytes(value, setting="staging_bytes")


class FsspecConfig(ObjectConfig):
    """What an operator can set of the tier ``fsspec``."""

    url: str
    """Where the blocks lie: 'file:///mnt/kv', 's3://bucket/prefix', 'sftp://host/path', ... No
    credentials in here; they belong into 'storage_options'.
    """
    storage_options: Secret[dict[str, Any]] = Field(default_factory=lambda: Secret({}))
    """Options of the filesystem, as its documentation names them. Shown nowhere."""
    publication: Publication = Publication.AUTO
    """How blocks appear: 'put' (the whole object in one request), 'rename' (a temporary file,
    renamed), or 'auto'.
    """
    min_free_bytes: int = Field(default=2**30, ge=1)
    """With 'file://' only: stores are declined while the file system has less free than this."""

    @property
    def protocol(self) -> str:
        """The scheme of the URL, in lower case."""
        return self._split()[0]

    @property
    def path(self) -> str:
        """What follows the scheme, as written."""
        return self._split()[1]

    @property
    @override
    def is_local(self) -> bool:
        return self.protocol in LOCAL_PROTOCOLS

    @property
    def is_in_process(self) -> bool:
        """Whether the blocks end with the tier."""
        return not protocol_named(self.protocol).is_persistent

    @override
    def hide_secrets(self, text: str) -> str:
        hidden = super().hide_secrets(text)
        leaves = set(_secret_leaves(self.storage_options.get_secret_value(), ""))
        # The longest first: one secret may be a part of another.
        for secret in sorted(leaves, key=len, reverse=True):
            hidden = hidden.replace(secret, _MASK)
        return hidden

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if "::" in _IPV6.sub("", url):
            raise _bad_url(
                "chains several filesystems ('::'), and what a cache in between remembers would be "
                "taken for what is stored; name one filesystem"
            )
        match = _SCHEME.fullmatch(url)
        if match is None:
            raise _bad_url(
                "must begin with a protocol, as in 'file:///mnt/kv' or 's3://bucket/prefix'"
            )
        protocol, path = match[1].lower(), match[2]
        refusal = protocol_named(protocol).refusal
        if refusal:
            raise _bad_url(
                f"has the protocol {protocol!r}, which cannot keep blocks: {refusal}. Name a "
                "filesystem that can be written to, such as 'file://', 's3://' or 'sftp://'"
            )
        host = path.partition("/")[0]
        if protocol not in LOCAL_PROTOCOLS and ":" in host.rpartition("@")[0]:
            raise _bad_url(
                "holds a password, which would be shown wherever the URL is; put it into "
                "'storage_options'"
            )
        _check_place(protocol, path)
        # As fsspec tells protocols apart: by small letters.
        return f"{protocol}://{path}"

    @model_validator(mode="after")
    def _check_options(self) -> FsspecConfig:
        if self.protocol in _SFTP:
            policy = self.storage_options.get_secret_value().get("host_key_policy", "reject")
            if policy not in _HOST_KEY_POLICIES:
                raise ConfigError(
                    f"'host_key_policy' in 'storage_options' is {policy!r}; expected 'reject', "
                    "'warning' or 'auto_add'",
                    setting="storage_options",
                )
        return self

    @field_validator("min_free_bytes", mode="before")
    @classmethod
    def _read_floor(cls, value: Any) -> int:
        return parse_bytes(value, setting="min_free_bytes")

    def _split(self) -> tuple[str, str]:
        protocol, _, path = self.url.partition("://")
        return protocol.lower(), path


def _bad_url(problem: str) -> ConfigError:
    return ConfigError(f"'url' {problem}", setting="url")


def _check_place(protocol: str, path: str) -> None:
    """See that the part behind the protocol names a place, and the one that is meant.

    Raises:
        ConfigError: It does not.
    """
    is_local, is_sftp = protocol in LOCAL_PROTOCOLS, protocol in _SFTP
    if not path.strip("/"):
        what = "a folder" if is_local else "a bucket or folder"
        raise _bad_url(f"names no place; add {what} behind '://'")
    if is_local and not path.startswith(("/", "~")):
        raise _bad_url(
            f"names the relative folder {path!r}, another one for every process that is started "
            f"elsewhere; write '{protocol}:///{path}', with three slashes, or the whole path"
        )
    host, _, folder = path.partition("/")
    if is_sftp and not folder.strip("/"):
        raise _bad_url(
            f"names no folder on the server; add one: '{protocol}://{host}/srv/kv-cache'"
        )
    port = host.rpartition("@")[2].rpartition("]")[2].partition(":")[2]
    if is_sftp and port and not port.isdecimal():
        raise _bad_url(f"has the port {port!r}; expected a number")
    if "?" in path and not is_local and not is_sftp:
        raise _bad_url(
            "has a query (what follows '?'), which is no part of a place; a token that gives "
            "access belongs into 'storage_options'"
        )


def _secret_leaves(value: object, name: str) -> Iterator[str]:
    """Yield the texts below an option whose name says that it is a secret."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in _NO_SECRETS:
                yield from _secret_leaves(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secret_leaves(item, name)
    elif isinstance(value, str) and value and _SECRET_NAME.search(name):
        yield value
        # A connection string: libraries repeat its parts rather than all of it.
        for part in value.split(";"):
            inner, is_pair, secret = part.partition("=")
            if is_pair and secret and _SECRET_NAME.search(inner):
                yield secret
