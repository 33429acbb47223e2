"""S3 through s3fs: its session and requests, without what it keeps and guesses.

**Who owns what.** Everything here runs on the tier's loop, which owns the filesystem.

s3fs turns what the store answered into errors of Python, and retries by itself. Here its requests
are made one level below that: each is exactly one operation of S3, retried by botocore alone, and
its error is that of botocore, which has status and code.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any, Final, final

import aiohttp
import botocore.exceptions as boto
import botocore.loaders
from aiobotocore.session import AioSession
from s3fs import S3FileSystem

from kv_tier_s3._config import DEFAULT_REGION
from kv_tier_s3._errors import S3Error, S3ErrorKind, kind_of
from kv_tier_s3._masked_logs import MaskedLogs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import SecretStr

    from kv_tier_s3._config import S3Config

__all__ = ["S3fsStore"]

# Reading them takes a tenth of a second of the processor. They never change.
_DESCRIPTIONS: Final = botocore.loaders.create_loader()

# What prints requests with their headers at level DEBUG. Session tokens are among those.
_LOGGERS: Final = ("botocore.auth", "botocore.endpoint", "botocore.hooks", "s3fs")

# From the special to the general: the first that fits.
_KINDS: Final = (
    (boto.SSLError, S3ErrorKind.TLS),
    (ssl.SSLError, S3ErrorKind.TLS),
    (boto.NoCredentialsError, S3ErrorKind.DENIED),
    (boto.PartialCredentialsError, S3ErrorKind.DENIED),
    (boto.CredentialRetrievalError, S3ErrorKind.EXPIRED),
    (boto.TokenRetrievalError, S3ErrorKind.EXPIRED),
    (boto.ConnectTimeoutError, S3ErrorKind.TIMEOUT),
    (boto.ReadTimeoutError, S3ErrorKind.TIMEOUT),
    (asyncio.TimeoutError, S3ErrorKind.TIMEOUT),
    (TimeoutError, S3ErrorKind.TIMEOUT),
    (boto.HTTPClientError, S3ErrorKind.NETWORK),
    (boto.ConnectionError, S3ErrorKind.NETWORK),
    (aiohttp.ClientError, S3ErrorKind.NETWORK),
    (ConnectionError, S3ErrorKind.NETWORK),
    (boto.IncompleteReadError, S3ErrorKind.NETWORK),
)


@final
class S3fsStore:
    """A client of one bucket.

    Args:
        config: Settings of the tier.
    """

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._bucket = config.bucket
        self._mask = MaskedLogs(_LOGGERS, config.hide_secrets)
        self._fs: Any = S3FileSystem(
            **_options(config),
            session=_make_session(config),
            asynchronous=True,
            loop=asyncio.get_running_loop(),
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        self._client: Any = None
        self._put_options: dict[str, Any] = {}
        if config.server_side_encryption is not None:
            self._put_options["ServerSideEncryption"] = config.server_side_encryption
        if config.sse_kms_key_id is not None:
            self._put_options["SSEKMSKeyId"] = config.sse_kms_key_id

    async def open(self) -> None:
        """Find credentials and make the session."""
        self._mask.begin()
        try:
            self._client = await self._fs.set_session()
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error("open", self._bucket, error) from None

    async def close(self) -> None:
        """Close the session and its connections."""
        client, self._client = self._client, None
        try:
            if client is not None:
                await client.close()
        finally:
            self._mask.end()

    async def check_bucket(self) -> None:
        """Ask for the bucket itself.

        Raises:
            S3Error: It is not there, or may not be asked for.
        """
        try:
            await self._client.head_bucket(Bucket=self._bucket)
        except Exception as error:  # noqa: BLE001 - told with its kind
            failure = self._error("head", self._bucket, error)
            if failure.kind is S3ErrorKind.MISSING:
                failure = self._error("head", self._bucket, error, S3ErrorKind.NO_BUCKET)
            raise failure from None

    async def length(self, name: str) -> int:
        """Return the length of an object."""
        answer = await self._ask("head", name, self._client.head_object)
        return int(answer["ContentLength"])

    async def get(self, name: str) -> bytes:
        """Return a whole object."""
        return await self._read(name)

    async def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return a range of an object."""
        return await self._read(name, Range=f"bytes={start}-{end - 1}")

    async def _read(self, name: str, **options: Any) -> bytes:
        answer = await self._ask("get", name, self._client.get_object, **options)
        try:
            async with answer["Body"] as body:
                found: bytes = await body.read()
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error("get", f"{self._bucket}/{name}", error) from None
        return found

    async def put(self, name: str, data: bytes) -> None:
        """Store an object in one request."""
        await self._ask("put", name, self._client.put_object, Body=data, **self._put_options)

    async def remove(self, name: str) -> None:
        """Remove an object."""
        await self._ask("delete", name, self._client.delete_object)

    async def _ask(self, operation: str, name: str, method: Any, **options: Any) -> Any:
        try:
            return await method(Bucket=self._bucket, Key=name, **options)
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error(operation, f"{self._bucket}/{name}", error) from None

    def _error(
        self, operation: str, name: str, error: BaseException, kind: S3ErrorKind | None = None
    ) -> S3Error:
        status, code, detail = None, None, error
        for link in _chain(error):
            if isinstance(link, boto.ClientError):
                status = link.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
                code = link.response.get("Error", {}).get("Code")
                detail = link
                if str(code).isdigit():
                    # What botocore puts where the answer had none.
                    code = None
                kind = kind or kind_of(status, code)
                break
        text = " ".join(self._config.hide_secrets(str(detail)).split())
        return S3Error(kind or _kind_of_failure(error), operation, name, status, code, text)


def _kind_of_failure(error: BaseException) -> S3ErrorKind:
    """Return the kind of a request that got no answer."""
    links = list(_chain(error))
    for error_type, kind in _KINDS:
        if any(isinstance(link, error_type) for link in links):
            return kind
    return S3ErrorKind.OTHER


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _make_session(config: S3Config) -> AioSession:
    """Return a session of the tier's own, which shares nothing but the descriptions of AWS."""
    session = AioSession(profile=config.profile)
    session.register_component("data_loader", _DESCRIPTIONS)
    return session


def _options(config: S3Config) -> dict[str, Any]:
    client: dict[str, Any] = {"region_name": config.region}
    if config.endpoint_url is not None and config.region is None:
        client["region_name"] = DEFAULT_REGION
    if config.ca_bundle is not None:
        client["verify"] = str(config.ca_bundle)
    return {
        "key": _plain(config.access_key_id),
        "secret": _plain(config.secret_access_key),
        "token": _plain(config.session_token),
        "endpoint_url": config.endpoint_url,
        "client_kwargs": {name: value for name, value in client.items() if value is not None},
        "config_kwargs": {
            "s3": {"addressing_style": "path" if config.uses_path_style else "virtual"},
            # "standard": growing pauses of random length, and a budget for all requests together.
            "retries": {"total_max_attempts": config.max_attempts, "mode": "standard"},
            "connect_timeout": config.connect_timeout_s,
            "read_timeout": config.read_timeout_s,
            "max_pool_connections": config.max_connections,
            # Every object has a checksum of its own. The library's refuses stores that know none.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    }


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
