"""Settings of the s3 tier."""

from __future__ import annotations

import base64
import enum
import re
from importlib.util import find_spec
from pathlib import Path  # noqa: TC003 - pydantic evaluates the annotation
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from kv_core.errors import ConfigError
from kv_tier_fsspec import ObjectConfig

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DEFAULT_REGION", "BucketConfig", "Engine", "S3Config"]

DEFAULT_REGION: Final = "us-east-1"
"""What stores that know no regions sign with."""

_CUSTOMER_KEY_BYTES: Final = 32

_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


class Engine(enum.Enum):
    """The client library that moves the objects. The tier behaves the same with each."""

    AUTO = "auto"
    """obstore where it is installed, s3fs elsewhere."""
    S3FS = "s3fs"
    """s3fs, on aiobotocore; always installed."""
    OBSTORE = "obstore"
    """obstore, in Rust: faster; ``pip install 'kv-tier-s3[obstore]'``."""


class BucketConfig(ObjectConfig):
    """What an operator can set of every tier in a bucket, whatever moves the objects."""

    bucket: str
    """The bucket. It must exist; the tier never makes one."""
    prefix: str = ""
    """What the names of all objects begin with, for a bucket that holds other things as well."""
    endpoint_url: str | None = None
    """Address of a store that is not AWS: 'https://minio.example:9000'."""
    region: str | None = None
    """Region of the bucket. By default what the environment or the profile says, and 'us-east-1'
    with an 'endpoint_url'.
    """
    profile: str | None = None
    """Profile of the AWS configuration files to take credentials and region from."""
    access_key_id: SecretStr | None = None
    """Together with 'secret_access_key'. Without them the usual chain is asked: environment,
    profile, container and instance roles; what expires there is renewed.
    """
    secret_access_key: SecretStr | None = None
    """See 'access_key_id'."""
    session_token: SecretStr | None = None
    """Of temporary credentials. Better leave all three out, so that they are renewed."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket is in the path or in the host name; 'auto' is 'path' with an
    'endpoint_url'.
    """
    ca_bundle: Path | None = None
    """File of the certificates to trust, for stores with certificates of their own."""
    io_threads: int = Field(default=32, ge=2, le=256)
    """Transfers at a time, of which at most half are stores: a store over a network is mostly
    waited for.
    """
    max_attempts: int = Field(default=3, ge=1, le=20)
    """Attempts of a request that failed for a reason that passes, with growing, random pauses."""

    @property
    def uses_path_style(self) -> bool:
        """Whether the bucket is in the path of a request."""
        if self.addressing_style == "auto":
            return self.endpoint_url is not None
        return self.addressing_style == "path"

    @property
    def where(self) -> str:
        """The store, for messages."""
        return self.endpoint_url or "AWS"

    @field_validator("bucket")
    @classmethod
    def _check_bucket(cls, bucket: str) -> str:
        if "/" in bucket:
            raise ConfigError(
                "'bucket' holds a slash; give the name only, and the rest as 'prefix'",
                setting="bucket",
            )
        if _BUCKET.fullmatch(bucket) is None:
            raise ConfigError(
                "'bucket' must be 2 to 255 letters, digits, dots, hyphens and underscores, "
                "beginning with a letter or digit",
                setting="bucket",
            )
        return bucket

    @field_validator("prefix")
    @classmethod
    def _strip_prefix(cls, prefix: str) -> str:
        return prefix.strip("/")

    @field_validator("endpoint_url")
    @classmethod
    def _check_endpoint(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(
                "'endpoint_url' must begin with 'http://' or 'https://' and name a host, as in "
                "'https://minio.example:9000'",
                setting="endpoint_url",
            )
        if "@" in parts.netloc:
            raise ConfigError(
                "'endpoint_url' holds credentials, which would be shown wherever it is; use "
                "'access_key_id' and 'secret_access_key'",
                setting="endpoint_url",
            )
        if parts.path.strip("/") or parts.query:
            raise ConfigError(
                "'endpoint_url' names more than a host; give the bucket as 'bucket' and the rest "
                "as 'prefix'",
                setting="endpoint_url",
            )
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_credentials(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            missing = "secret_access_key" if self.secret_access_key is None else "access_key_id"
            raise ConfigError(
                f"{missing!r} is missing: give both parts of a key, or none, for the usual chain",
                setting=missing,
            )
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigError(
                "'session_token' belongs to an 'access_key_id', which is missing",
                setting="session_token",
            )
        return self


class S3Config(BucketConfig):
    """What an operator can set of the tier ``s3``."""

    server_side_encryption: Literal["AES256", "aws:kms"] | None = None
    """What the store is to encrypt with, if it does not by itself."""
    sse_kms_key_id: str | None = None
    """The key for 'aws:kms', if it is not the account's default."""
    sse_customer_key: SecretStr | None = None
    """A key of your own for the store to encrypt with (SSE-C): 32 bytes in base64. All engines that
    share the blocks need the same one. Stores take it over 'https://' only.
    """
    connect_timeout_s: float = Field(default=5.0, gt=0, le=600, allow_inf_nan=False)
    """Longest time for a connection to be made."""
    read_timeout_s: float = Field(default=20.0, gt=0, le=3600, allow_inf_nan=False)
    """Longest silence of the store in the middle of an answer."""
    max_connections: int = Field(default=64, ge=1, le=1024)
    """Connections at a time. More than 'io_threads', or lookups wait for transfers to end."""
    engine: Engine = Engine.AUTO
    """The client library: 's3fs', 'obstore', or 'auto', which is obstore where it is installed."""

    @property
    def chosen_engine(self) -> Engine:
        """The client library that 'auto' stands for here."""
        if self.engine is not Engine.AUTO:
            return self.engine
        return Engine.S3FS if find_spec("obstore") is None else Engine.OBSTORE

    @model_validator(mode="after")
    def _check_encryption(self) -> Self:
        if self.sse_kms_key_id is not None and self.server_side_encryption != "aws:kms":
            raise ConfigError(
                "'sse_kms_key_id' needs 'server_side_encryption' to be 'aws:kms'",
                setting="sse_kms_key_id",
            )
        if self.sse_customer_key is not None and self.server_side_encryption is not None:
            raise ConfigError(
                "'sse_customer_key' is a way of encryption of its own; leave out "
                "'server_side_encryption'",
                setting="sse_customer_key",
            )
        return self

    @field_validator("sse_customer_key")
    @classmethod
    def _check_customer_key(cls, key: SecretStr | None) -> SecretStr | None:
        try:
            decoded = (
                b"" if key is None else base64.b64decode(key.get_secret_value(), validate=True)
            )
        except ValueError:
            decoded = b""
        if key is not None and len(decoded) != _CUSTOMER_KEY_BYTES:
            raise ConfigError(
                f"'sse_customer_key' must be {_CUSTOMER_KEY_BYTES} bytes in base64, as 'openssl "
                f"rand -base64 {_CUSTOMER_KEY_BYTES}' makes them",
                setting="sse_customer_key",
            )
        return key
