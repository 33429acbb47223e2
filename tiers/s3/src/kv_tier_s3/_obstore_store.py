"""S3 through obstore, whose work is done in threads of Rust.

**Who owns what.** Everything here runs on the tier's loop. obstore keeps threads of its own for the
whole process, as extensions in Rust do; they hold nothing of a tier.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final, final
from urllib.parse import urlsplit

import botocore.exceptions
import botocore.session
import obstore
from obstore.store import S3Store

from kv_tier_fsspec.store import MaskedLogs, scatter
from kv_tier_s3._config import DEFAULT_REGION
from kv_tier_s3._credentials import chain_of
from kv_tier_s3._errors import S3Error, S3ErrorKind, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import SecretStr
    from typing_extensions import Buffer

    from kv_tier_s3._config import S3Config
    from kv_tier_s3._credentials import CredentialChain

__all__ = ["ObstoreStore"]

# obstore tells errors in words. What the store answered is quoted in them, and what had no answer
# has a kind in the part for programmers, where the names of places are quoted or have a scheme.
_STATUS: Final = re.compile(r"non-2xx status code: ([1-5]\d\d)\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_KIND: Final = re.compile(r"\bkind: (Connect|Timeout|Request|Decode|Interrupted)\b")
_PLACES: Final = re.compile(r"\w+://\S*|\"(?:[^\"\\]|\\.)*\"")
_TLS: Final = re.compile(
    r"\b(?:InvalidCertificate|InvalidMessage|AlertReceived|PeerIncompatible|PeerMisbehaved)\(.*?\)"
    r"|\bInvalidContentType\b",
    re.DOTALL,
)
_DNS: Final = re.compile(r"failed to lookup address information[^\"]*")
# What every text begins with: the address, which is known, and how often it was tried.
_LED_BY: Final = re.compile(
    r"^Generic S3 error: (?:Error performing [A-Z]+ \S+ in .*? - )?(?:HTTP error: )?", re.DOTALL
)
_REASON: Final = re.compile(r"message: \"([^\"]+)\"")
_KINDS: Final = {
    "Connect": S3ErrorKind.NETWORK,
    "Timeout": S3ErrorKind.TIMEOUT,
    "Request": S3ErrorKind.NETWORK,
    "Decode": S3ErrorKind.NETWORK,
    "Interrupted": S3ErrorKind.NETWORK,
}
_WORDS: Final = {
    # Who answers with success and none of what S3 says with it.
    "Received non-partial response when range requested": S3ErrorKind.NOT_S3,
    "Unable to extract metadata from headers": S3ErrorKind.NOT_S3,
    "Received redirect without LOCATION": S3ErrorKind.REDIRECTED,
}
_FOR_PROGRAMMERS: Final = "Debug source:"

# The chain's loggers: what servers of credentials answer is printed at level DEBUG.
_LOGGERS: Final = (
    *(f"botocore.{name}" for name in ("credentials", "endpoint", "parsers", "tokens", "utils")),
    *("botocore.auth", "botocore.hooks", "botocore.httpsession", "urllib3.connectionpool"),
)


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
        self.credentials = chain_of(config, config.hide_secrets)
        self._hide = config.hide_secrets if self.credentials is None else self.credentials.hide
        self._mask = MaskedLogs(_LOGGERS, self._hide)
        # obstore bounds only the connections that it keeps while nobody uses them.
        self._connections = asyncio.Semaphore(config.max_connections)

    async def open(self) -> None:
        """Find the region; connections are made by requests."""
        self._mask.begin()
        try:
            # Reads files.
            self._store = await asyncio.to_thread(_make_store, self._config, self.credentials)
        except botocore.exceptions.ProfileNotFound as error:
            raise S3Error(
                S3ErrorKind.NO_CREDENTIALS, "open", self._bucket, None, None, str(error)
            ) from None
        except (botocore.exceptions.BotoCoreError, OSError, ValueError) as error:
            raise self._error("open", "", error) from None

    async def close(self) -> None:
        """Let go of the connections."""
        self._store = None
        self._mask.end()

    async def length(self, name: str) -> int:
        """Return the length of an object."""
        found = await self._ask("head", name, obstore.head_async)
        return int(found["size"])

    async def get_range(self, name: str, start: int, end: int) -> Buffer:
        """Return a range of an object, as far as there is one."""
        found: Buffer = await self._ask("get", name, obstore.get_range_async, start=start, end=end)
        return found

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Read an object into several buffers; return its length, or more than they hold."""
        # One byte more than there should be, so that a longer object shows.
        found = await self.get_range(name, 0, sum(map(len, parts)) + 1)
        return scatter(found, parts)

    async def put(self, name: str, data: bytes | bytearray, *, only_new: bool = False) -> None:
        """Store an object in one request."""
        mode = "create" if only_new else "overwrite"
        await self._ask("put", name, obstore.put_async, data, use_multipart=False, mode=mode)

    async def remove(self, name: str) -> None:
        """Remove an object."""
        await self._ask("delete", name, obstore.delete_async)

    async def _ask(
        self, operation: str, name: str, function: Any, *arguments: Any, **options: Any
    ) -> Any:
        async with self._connections:
            try:
                return await function(self._open_store(), name, *arguments, **options)
            except Exception as error:  # noqa: BLE001 - told with its kind
                raise self._error(operation, name, error) from None

    def _open_store(self) -> S3Store:
        if self._store is None:
            raise AssertionError("requests are made between open() and close()")
        return self._store

    def _error(self, operation: str, name: str, error: BaseException) -> S3Error:
        words, _, rest = str(error).partition(_FOR_PROGRAMMERS)
        status, code, message = (
            found[1] if (found := pattern.search(words)) else None
            for pattern in (_STATUS, _CODE, _MESSAGE)
        )
        place = f"{self._bucket}/{name}" if name else self._bucket
        if status is not None or code is not None:
            number = None if status is None else int(status)
            kind = kind_of(number, code, has_body=operation != "head")
            return S3Error(kind, operation, place, number, code, self._line(message or ""))
        kind, reason = _without_answer(words, rest)
        words = _LED_BY.sub("", words).strip()
        detail = f"{words} ({reason})" if reason else words
        return S3Error(kind, operation, place, None, None, self._line(detail))

    def _line(self, text: str) -> str:
        return " ".join(self._hide(text).split()).rstrip(".")


def _without_answer(words: str, rest: str) -> tuple[S3ErrorKind, str]:
    """Return the kind of a request that got no answer of S3, and why, as far as that is told."""
    for text, kind in _WORDS.items():
        if text in words:
            return kind, ""
    found = _TLS.search(_PLACES.sub("", rest))
    if found is not None:
        return S3ErrorKind.TLS, "".join(found[0].split()).replace(",", "")
    found = _DNS.search(rest)
    if found is not None:
        return S3ErrorKind.DNS, found[0]
    reason = _REASON.search(rest)
    found = _KIND.search(rest)
    kind = _KINDS[found[1]] if found is not None else S3ErrorKind.OTHER
    return kind, "" if reason is None else reason[1]


def _address(config: S3Config) -> tuple[str | None, bool]:
    """Return the endpoint as obstore wants it, and whether the bucket is in its host name.

    obstore leaves it to the caller to put it there: else the bucket would be nowhere in a request.
    """
    if config.uses_path_style or config.endpoint_url is None:
        return config.endpoint_url, not config.uses_path_style
    parts = urlsplit(config.endpoint_url)
    with suppress(ValueError):
        ipaddress.ip_address(parts.hostname or "")
        # An address has no names below it; the other engine leaves the bucket in the path then.
        return config.endpoint_url, False
    return f"{parts.scheme}://{config.bucket}.{parts.netloc}", True


def _make_store(config: S3Config, chain: CredentialChain | None) -> S3Store:
    session = botocore.session.Session(profile=config.profile)
    endpoint_url, is_virtual = _address(config)
    # What it does not find here, obstore takes from the environment.
    options: Any = {
        "virtual_hosted_style_request": is_virtual,
        "skip_signature": False,
        "conditional_put": "etag",
    }
    region = config.region or session.get_config_variable("region")
    options["region"] = region or DEFAULT_REGION
    if endpoint_url is not None:
        options["endpoint"] = endpoint_url
    if config.server_side_encryption is not None:
        options["server_side_encryption"] = config.server_side_encryption
    if config.sse_kms_key_id is not None:
        options["sse_kms_key_id"] = config.sse_kms_key_id
    if config.sse_customer_key is not None:
        options["server_side_encryption"] = "sse-c"
        options["sse_customer_key_base64"] = config.sse_customer_key.get_secret_value()
    provider: Any = _Fixed(config) if chain is None else _FromChain(chain)
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
class _Fixed:
    """The key of the settings. Not as options, which obstore mixes with the environment's."""

    def __init__(self, config: S3Config) -> None:
        self._answer = {
            "access_key_id": _plain(config.access_key_id),
            "secret_access_key": _plain(config.secret_access_key),
            "token": _plain(config.session_token),
            "expires_at": None,
        }

    def __call__(self) -> dict[str, Any]:
        """Return it."""
        return self._answer


@final
class _FromChain:
    """What the chain says now: it keeps credentials itself, so obstore is to keep none."""

    def __init__(self, chain: CredentialChain) -> None:
        self._chain = chain

    async def __call__(self) -> dict[str, Any]:
        """Return what is valid now."""
        frozen = await self._chain.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc),
        }


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
