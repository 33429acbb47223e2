"""S3 through obstore, whose work is done in threads of Rust.

**Who owns what.** Everything here runs on the tier's loop. obstore keeps threads of its own for the
whole process, as extensions in Rust do; they hold nothing of a tier.
"""

from __future__ import annotations

import asyncio
import re
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final, final

import botocore.exceptions
import botocore.session
import obstore
from obstore.store import S3Store

from kv_tier_s3._config import DEFAULT_REGION
from kv_tier_s3._errors import S3Error, S3ErrorKind, kind_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kv_tier_s3._config import S3Config

__all__ = ["ObstoreStore"]

# obstore tells errors in words. What the store answered is quoted in them, and what had no answer
# has a kind in the part for programmers.
_STATUS: Final = re.compile(r"status code: ([1-5]\d\d)\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_KIND: Final = re.compile(r"\bkind: (Connect|Timeout|Request|Decode|Interrupted)\b")
_TLS: Final = re.compile(r"certificate|InvalidContentType|UnknownIssuer|tls", re.IGNORECASE)
_KINDS: Final = {
    "Connect": S3ErrorKind.NETWORK,
    "Timeout": S3ErrorKind.TIMEOUT,
    "Request": S3ErrorKind.NETWORK,
    "Decode": S3ErrorKind.NETWORK,
    "Interrupted": S3ErrorKind.NETWORK,
}
_FOR_PROGRAMMERS: Final = "Debug source:"

_ASK_AGAIN_AFTER: Final = timedelta(minutes=1)
"""The chain keeps credentials itself, and knows when they expire."""

_NO_SUCH_NAME: Final = "kv-core-asks-whether-there-is-a-bucket"


@final
class ObstoreStore:
    """A client of one bucket.

    Args:
        config: Settings of the tier.
    """

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._bucket = config.bucket
        self._store: S3Store | None = None

    async def open(self) -> None:
        """Find credentials and region."""
        # The chain may read files, run programs and ask servers.
        try:
            self._store = await asyncio.to_thread(_make_store, self._config)
        except botocore.exceptions.BotoCoreError as error:
            text = self._config.hide_secrets(str(error))
            raise S3Error(
                S3ErrorKind.DENIED, "open", self._bucket, None, "NoCredentials", text
            ) from None

    async def close(self) -> None:
        """Let go of the connections."""
        self._store = None

    async def check_bucket(self) -> None:
        """Ask for an object that nobody makes: the answer tells whether the bucket is there."""
        try:
            await self.get(_NO_SUCH_NAME)
        except S3Error as error:
            if error.kind is not S3ErrorKind.MISSING:
                raise

    async def length(self, name: str) -> int:
        """Return the length of an object."""
        try:
            found = await obstore.head_async(self._open_store(), name)
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error("head", name, error) from None
        return found["size"]

    async def get(self, name: str) -> Buffer:
        """Return a whole object, in memory of the library's own."""
        try:
            answer = await obstore.get_async(self._open_store(), name)
            return await answer.bytes_async()
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error("get", name, error) from None

    async def get_range(self, name: str, start: int, end: int) -> Buffer:
        """Return a range of an object."""
        try:
            return await obstore.get_range_async(self._open_store(), name, start=start, end=end)
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error("get", name, error) from None

    async def put(self, name: str, data: bytes) -> None:
        """Store an object in one request."""
        try:
            await obstore.put_async(self._open_store(), name, data, use_multipart=False)
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error("put", name, error) from None

    async def remove(self, name: str) -> None:
        """Remove an object."""
        try:
            await obstore.delete_async(self._open_store(), name)
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error("delete", name, error) from None

    def _open_store(self) -> S3Store:
        if self._store is None:
            raise AssertionError("requests are made between open() and close()")
        return self._store

    def _error(self, operation: str, name: str, error: BaseException) -> S3Error:
        text = str(error)
        status, code, kind = (
            found[1] if (found := pattern.search(text)) else None
            for pattern in (_STATUS, _CODE, _KIND)
        )
        if status is not None or code is not None:
            told = kind_of(None if status is None else int(status), code)
        elif _TLS.search(text):
            told = S3ErrorKind.TLS
        else:
            told = _KINDS.get(kind or "", S3ErrorKind.OTHER)
        detail = " ".join(self._config.hide_secrets(text.partition(_FOR_PROGRAMMERS)[0]).split())
        return S3Error(
            told,
            operation,
            f"{self._bucket}/{name}",
            None if status is None else int(status),
            code,
            detail,
        )


def _make_store(config: S3Config) -> S3Store:
    session = botocore.session.Session(profile=config.profile)
    options: Any = {"virtual_hosted_style_request": not config.uses_path_style}
    region = config.region or session.get_config_variable("region")
    options["region"] = region or DEFAULT_REGION
    if config.endpoint_url is not None:
        options["endpoint"] = config.endpoint_url
    if config.server_side_encryption is not None:
        options["server_side_encryption"] = config.server_side_encryption
    if config.sse_kms_key_id is not None:
        options["sse_kms_key_id"] = config.sse_kms_key_id
    provider: Any = None
    if config.access_key_id is not None and config.secret_access_key is not None:
        options["access_key_id"] = config.access_key_id.get_secret_value()
        options["secret_access_key"] = config.secret_access_key.get_secret_value()
        if config.session_token is not None:
            options["session_token"] = config.session_token.get_secret_value()
    else:
        # The chain of the other engine, so that both find the same credentials.
        provider = _Chain(session)
    client: Any = {
        "allow_http": (config.endpoint_url or "").startswith("http://"),
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        # Of a whole request here: the longest that a job waits anyway.
        "timeout": timedelta(seconds=config.job_deadline_s),
        "read_timeout": timedelta(seconds=config.read_timeout_s),
        "pool_max_idle_per_host": str(config.max_connections),
    }
    if config.ca_bundle is not None:
        client["root_certificate"] = config.ca_bundle.read_bytes()
    return S3Store(
        config.bucket,
        config=options,
        client_options=client,
        retry_config={
            "max_retries": config.max_attempts - 1,
            "retry_timeout": timedelta(seconds=config.job_deadline_s),
        },
        credential_provider=provider,
    )


@final
class _Chain:
    """Credentials from botocore's chain, which renews those that expire."""

    def __init__(self, session: botocore.session.Session) -> None:
        self._session = session
        self._credentials = session.get_credentials()
        if self._credentials is None:
            raise botocore.exceptions.NoCredentialsError

    async def __call__(self) -> dict[str, Any]:
        """Return what is valid now."""
        frozen = await asyncio.to_thread(self._credentials.get_frozen_credentials)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + _ASK_AGAIN_AFTER,
        }
