"""Azure Blob Storage as an object store: adlfs for the account, Azure's own client for the data.

adlfs reads the options that its users know, finds credentials and makes the client. Its data path
is not used, for three reasons. It takes a container that does not exist for an object that does
not: an error would be a miss. It asks a second question, a listing, after each object that is
absent. And it retries after fifteen seconds, by which time a job has been given up for another
reason than the true one. Azure's client has all of it as documented parameters.

**Who owns what.** Everything here runs on the tier's loop, which owns the clients.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from azure.core import exceptions
from typing_extensions import override

from kv_core.errors import ConfigError
from kv_tier_fsspec._async import FsspecObjectTier
from kv_tier_fsspec._filesystem import make_filesystem
from kv_tier_fsspec._scatter import scatter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kv_tier_fsspec._config import FsspecConfig
    from kv_tier_fsspec.store import ObjectStore

__all__ = ["AzureFsspecTier", "AzureStore"]

ResultT = TypeVar("ResultT")

# The answers that mean "there is no such object"; a missing container has a code of its own.
_ABSENT_CODES: Final = frozenset({"BlobNotFound"})
_ABSENT_STATUS: Final = 404
_DENIED: Final = frozenset({401, 403})
_SHORT_STATUS: Final = 416
_TIMEOUTS: Final = (
    exceptions.ServiceRequestTimeoutError,
    exceptions.ServiceResponseTimeoutError,
)
_PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})

_PAUSES_S: Final = (0.05, 0.2)
"""Before the second and third attempt, give or take a half."""


class _TooShortError(OSError):
    """The blob ends before the range that was asked for."""


@final
class AzureStore:
    """The containers of one account, on the running loop.

    Args:
        config: Settings of the tier.
    """

    def __init__(self, config: FsspecConfig) -> None:
        _quieten()
        loop = asyncio.get_running_loop()
        try:
            self.fs: Any = make_filesystem(config, asynchronous=True, loop=loop)
        except ValueError as error:
            raise ConfigError(
                "'storage_options' name no account that can be used: "
                f"{config.hide_secrets(str(error))}. Give 'account_name' and a credential, or a "
                "'connection_string', or set AZURE_STORAGE_ACCOUNT_NAME and what belongs to it",
                setting="storage_options",
            ) from None
        _detach_finalizers(self.fs)
        self._service: Any = self.fs.service_client

    def strip(self, url: str) -> str:
        """Return container and prefix of a URL."""
        return str(self.fs._strip_protocol(url))

    async def open(self) -> None:
        """Do nothing: connections are made when they are needed."""

    async def close(self) -> None:
        """Close all connections, and those that fetch tokens."""
        await self._service.close()
        for name in ("credential", "sync_credential"):
            closing = getattr(getattr(self.fs, name, None), "close", None)
            if closing is not None:
                ended = closing()
                if asyncio.iscoroutine(ended):
                    await ended

    async def length(self, name: str) -> int:
        """Return the length of a blob."""
        properties = await self._ask(name, lambda blob: blob.get_blob_properties(**_request()))
        return int(properties.size)

    async def get(self, name: str, most_bytes: int) -> bytes:
        """Return a blob, or the beginning of a longer one."""
        return await self.get_range(name, 0, most_bytes)

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Read a blob into several buffers."""
        # One byte more than there should be, so that a longer blob shows.
        return scatter(await self.get_range(name, 0, sum(map(len, parts)) + 1), parts)

    async def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return a range of a blob, as far as there is one."""

        async def fetch(blob: Any) -> bytes:
            answer = await blob.download_blob(offset=start, length=end - start, **_request())
            found: bytes = await answer.readall()
            return found

        try:
            return await self._ask(name, fetch)
        except _TooShortError:
            return b""

    async def put(self, name: str, data: bytes | bytearray) -> None:
        """Store a blob: what needs several requests appears with the last of them."""
        body = bytes(data)
        await self._ask(
            name,
            lambda blob: blob.upload_blob(body, overwrite=True, max_concurrency=1, **_request()),
        )

    async def put_new(self, name: str, data: bytes | bytearray) -> bool:
        """Store a blob unless there is one, in a conditional request."""
        body = bytes(data)
        try:
            await self._ask(
                name,
                lambda blob: blob.upload_blob(
                    body, overwrite=False, max_concurrency=1, **_request()
                ),
            )
        except FileExistsError:
            return False
        return True

    async def listing(self, folder: str) -> list[Any]:
        """Return what lies below a folder: properties of blobs, prefixes of further folders."""
        container, _, path = folder.partition("/")
        below = f"{path}/" if path else ""

        async def walk(client: Any) -> list[Any]:
            found = client.walk_blobs(name_starts_with=below, **_request())
            return [item async for item in found]

        return await self._attempt(folder, self._service.get_container_client(container), walk)

    async def remove(self, name: str) -> None:
        """Remove a blob."""
        with suppress(FileNotFoundError):
            await self._ask(name, lambda blob: blob.delete_blob(**_request()))

    async def _ask(self, name: str, work: Callable[[Any], Awaitable[ResultT]]) -> ResultT:
        """Do something with a blob, again when the trouble may pass."""
        container, _, path = name.partition("/")
        return await self._attempt(name, self._service.get_blob_client(container, path), work)

    async def _attempt(
        self, name: str, client: Any, work: Callable[[Any], Awaitable[ResultT]]
    ) -> ResultT:
        for pause_s in _PAUSES_S:
            try:
                return await work(client)
            except exceptions.AzureError as error:
                if not _may_pass(error):
                    raise _translated(error, name) from None
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
        try:
            return await work(client)
        except exceptions.AzureError as error:
            raise _translated(error, name) from None


@final
class AzureFsspecTier(FsspecObjectTier):
    """The tier ``fsspec`` over Azure Blob Storage."""

    @override
    def make_store(self) -> ObjectStore:
        return AzureStore(self.config)

    @override
    def root(self, store: ObjectStore) -> str:
        if not isinstance(store, AzureStore):
            raise TypeError(f"expected an AzureStore, found a {type(store).__name__}")
        return store.strip(self.config.url)


def _request() -> dict[str, Any]:
    """Return what every request is given."""
    return {
        # The tier repeats requests itself, within its deadlines.
        "retry_total": 0,
        # Without one, the client asks for a UUID of the first version, and where libuuid makes
        # those it keeps a file open for each thread that ever did.
        "client_request_id": str(uuid.uuid4()),
    }


def _may_pass(error: exceptions.AzureError) -> bool:
    if isinstance(error, exceptions.HttpResponseError):
        return error.status_code is None or error.status_code in _PASSING
    return True


def _translated(error: exceptions.AzureError, name: str) -> Exception:
    """Return what the tier is told: the one table of Azure's errors."""
    status = getattr(error, "status_code", None)
    code = getattr(error, "error_code", None)
    told = " ".join(str(part) for part in (status, code) if part is not None)
    text = f"{name}: {told}: {_first_line(error)}" if told else f"{name}: {_first_line(error)}"
    if status == _ABSENT_STATUS and str(getattr(code, "value", code)) in _ABSENT_CODES:
        return FileNotFoundError(text)
    if status in _DENIED or isinstance(error, exceptions.ClientAuthenticationError):
        return PermissionError(text)
    if status == _SHORT_STATUS:
        return _TooShortError(text)
    if isinstance(error, exceptions.ResourceExistsError):
        return FileExistsError(text)
    if isinstance(error, _TIMEOUTS):
        return TimeoutError(text)
    if isinstance(error, (exceptions.ServiceRequestError, exceptions.ServiceResponseError)):
        return ConnectionError(text)
    return OSError(text)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _detach_finalizers(fs: Any) -> None:
    """Undo what adlfs has planned for the end of the process.

    It would close the client on a loop that is closed by then, which prints a traceback; and what
    is planned holds the filesystem, so that none is ever collected.
    """
    planned = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(planned):
        told = finalizer.peek()
        if told is not None and told[0] is fs:
            finalizer.detach()


def _quieten() -> None:
    """Keep the client's lines about each request out of logs that show everything."""
    logger = logging.getLogger("azure.core.pipeline.policies.http_logging_policy")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
