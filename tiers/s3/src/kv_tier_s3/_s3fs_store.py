"""S3 through s3fs: its session and requests, without what it keeps and guesses.

**Who owns what.** Everything here runs on the tier's loop, which owns the filesystem.

s3fs turns what the store answered into errors of Python, and retries by itself. Here its requests
are made one level below that: each is exactly one operation of S3, retried by botocore alone, and
its error is that of botocore, which has status and code.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any, Final, final

import aiohttp
import botocore.exceptions as boto
import botocore.loaders
from aiobotocore.session import AioSession
from s3fs import S3FileSystem

from kv_tier_fsspec.store import MaskedLogs, copy_bytes
from kv_tier_s3._config import DEFAULT_REGION
from kv_tier_s3._credentials import chain_of
from kv_tier_s3._errors import S3Error, S3ErrorKind, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic import SecretStr

    from kv_tier_s3._config import S3Config
    from kv_tier_s3._credentials import CredentialChain

__all__ = ["S3fsStore"]

# Reading them takes a tenth of a second of the processor. They never change.
_DESCRIPTIONS: Final = botocore.loaders.create_loader()

# What prints requests and answers at level DEBUG: session tokens are in headers, and keys in what
# servers of credentials answer.
_LOGGERS: Final = (
    *(f"botocore.{name}" for name in ("auth", "client", "credentials", "endpoint", "hooks")),
    *(f"botocore.{name}" for name in ("httpsession", "loaders", "parsers", "regions")),
    *(f"botocore.{name}" for name in ("retryhandler", "session", "tokens", "utils")),
    *(f"aiobotocore.{name}" for name in ("endpoint", "httpsession", "parsers", "utils")),
    *("aiobotocore.regions", "s3fs", "urllib3.connectionpool"),
)

# What the library has received by then comes without being put together first.
_PIECE_BYTES: Final = 2**18

# From the special to the general: the first that fits.
_KINDS: Final = (
    (boto.SSLError, S3ErrorKind.TLS),
    (ssl.SSLError, S3ErrorKind.TLS),
    (boto.NoCredentialsError, S3ErrorKind.NO_CREDENTIALS),
    (boto.PartialCredentialsError, S3ErrorKind.NO_CREDENTIALS),
    (boto.CredentialRetrievalError, S3ErrorKind.NO_CREDENTIALS),
    (boto.TokenRetrievalError, S3ErrorKind.NO_CREDENTIALS),
    (boto.ProfileNotFound, S3ErrorKind.NO_CREDENTIALS),
    (socket.gaierror, S3ErrorKind.DNS),
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


class _FileSystem(S3FileSystem):  # type: ignore[misc]  # the library has no types
    """Ends with the store that made it, and not when it is collected."""

    @staticmethod
    def close_session(loop: object, s3: object) -> None:
        """Do nothing.

        s3fs calls this from a finalizer, in every process that has a copy of the object. In a fork
        it would take the connections of this process out of the selector that both share.
        """


@final
class S3fsStore:
    """A client of one bucket.

    Args:
        config: Settings of the tier.
    """

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._bucket = config.bucket
        self.credentials = chain_of(config, config.hide_secrets)
        self._hide = config.hide_secrets if self.credentials is None else self.credentials.hide
        self._mask = MaskedLogs(_LOGGERS, self._hide)
        self._fs: Any = _FileSystem(
            **_options(config),
            session=_make_session(config, self.credentials),
            asynchronous=True,
            loop=asyncio.get_running_loop(),
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        self._client: Any = None
        # Of every request about an object, and those that only a store has besides.
        self._options: dict[str, Any] = {}
        self._put_options: dict[str, Any] = {}
        if config.sse_customer_key is not None:
            key = base64.b64decode(config.sse_customer_key.get_secret_value())
            self._options = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
        if config.server_side_encryption is not None:
            self._put_options["ServerSideEncryption"] = config.server_side_encryption
        if config.sse_kms_key_id is not None:
            self._put_options["SSEKMSKeyId"] = config.sse_kms_key_id

    async def open(self) -> None:
        """Make the session; connections are made by requests."""
        self._mask.begin()
        try:
            self._client = await self._fs.set_session()
        except S3Error:
            raise
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error("open", self._bucket, error) from None
        if self._config.endpoint_url is not None:
            self._client.meta.events.register("before-call.s3", _stay_here)

    async def close(self) -> None:
        """Close the session and its connections."""
        client, self._client = self._client, None
        try:
            if client is not None:
                await client.close()
        finally:
            self._mask.end()

    async def length(self, name: str) -> int:
        """Return the length of an object."""
        answer = await self._ask("head", name, self._client.head_object, **self._options)
        return int(answer["ContentLength"])

    async def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return a range of an object, as far as there is one."""
        wanted = f"bytes={start}-{end - 1}"
        options = {**self._options, "Range": wanted}
        answer = await self._ask("get", name, self._client.get_object, **options)
        place = f"{self._bucket}/{name}"
        found: bytes | None = None
        try:
            async with answer["Body"] as body:
                if answer["ContentLength"] <= end - start:
                    found = await body.read()
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error("get", place, error) from None
        if found is None:
            detail = "a range was asked for, and something longer is answered"
            raise S3Error(S3ErrorKind.NOT_S3, "get", place, None, None, detail)
        return found

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Read an object into several buffers; return its length. Nothing of one too long."""
        answer = await self._ask("get", name, self._client.get_object, **self._options)
        length = int(answer["ContentLength"])
        try:
            async with answer["Body"] as body:
                if length <= sum(map(len, parts)):
                    length = await _fill(body, parts)
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error("get", f"{self._bucket}/{name}", error) from None
        return length

    async def put(self, name: str, data: bytes | bytearray, *, only_new: bool = False) -> None:
        """Store an object in one request."""
        options = {**self._options, **self._put_options}
        if only_new:
            options["IfNoneMatch"] = "*"
        await self._ask("put", name, self._client.put_object, Body=data, **options)

    async def remove(self, name: str) -> None:
        """Remove an object."""
        await self._ask("delete", name, self._client.delete_object)

    async def _ask(self, operation: str, name: str, method: Any, **options: Any) -> Any:
        try:
            return await method(Bucket=self._bucket, Key=name, **options)
        except Exception as error:  # noqa: BLE001 - told with its kind
            raise self._error(operation, f"{self._bucket}/{name}", error) from None

    def _error(self, operation: str, name: str, error: BaseException) -> S3Error:
        for link in _chain(error):
            if isinstance(link, S3Error):
                return link
            if isinstance(link, boto.ClientError):
                status = link.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
                code = link.response.get("Error", {}).get("Code")
                # Where the answer had no code, botocore puts the status, or nothing.
                code = None if not code or str(code).isdigit() else code
                kind = kind_of(status, code, has_body=operation != "head")
                detail = link.response.get("Error", {}).get("Message") or ""
                return S3Error(kind, operation, name, status, code, self._line(str(detail)))
        kind = _kind_of_failure(error)
        return S3Error(kind, operation, name, None, None, self._line(_text_of_failure(error)))

    def _line(self, text: str) -> str:
        return " ".join(self._hide(text).split()).rstrip(".")


async def _fill(body: Any, parts: Sequence[memoryview]) -> int:
    """Read a body into buffers, piece by piece as it comes; return its length."""
    total = 0
    for part in parts:
        done = 0
        while done < len(part):
            piece = await body.read(min(_PIECE_BYTES, len(part) - done))
            if not piece:
                return total + done
            with part[done : done + len(piece)] as target:
                copy_bytes(target, piece)
            done += len(piece)
        total += done
    return total


def _kind_of_failure(error: BaseException) -> S3ErrorKind:
    """Return the kind of a request that got no answer."""
    links = list(_chain(error))
    for error_type, kind in _KINDS:
        if any(isinstance(link, error_type) for link in links):
            return kind
    return S3ErrorKind.OTHER


def _text_of_failure(error: BaseException) -> str:
    """Return what the system said, which the library does not repeat, or what the library said."""
    # What led to the others is the last.
    for link in reversed(list(_chain(error))):
        if isinstance(link, ssl.SSLError):
            return str(link)
        if isinstance(link, socket.gaierror):
            return link.strerror or "no address"
        if isinstance(link, OSError) and link.errno is not None:
            return os.strerror(link.errno)
    return str(error) or type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _stay_here(context: dict[str, Any], **_: object) -> None:
    """Have botocore believe that a request was redirected once.

    It would look for the region of the bucket by asking the endpoint that has just sent it away,
    and that of its answer again. Only AWS has regions to be looked for.
    """
    context.setdefault("s3_redirect", {})["redirected"] = True


def _make_session(config: S3Config, chain: CredentialChain | None) -> AioSession:
    """Return a session of the tier's own, which shares nothing but the descriptions of AWS."""
    session = AioSession(profile=config.profile)
    session.register_component("data_loader", _DESCRIPTIONS)
    if chain is not None:
        session.register_component("credential_provider", _Provider(chain))
    return session


@final
class _Provider:
    """Gives a session the tier's own chain in place of a chain of its own."""

    def __init__(self, chain: CredentialChain) -> None:
        self._chain = chain

    async def load_credentials(self) -> CredentialChain:
        """Return what botocore asks for what to sign a request with."""
        return self._chain


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
