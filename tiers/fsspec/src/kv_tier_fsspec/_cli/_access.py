"""Listing, reading and removing, the same on every filesystem, as coroutines.

**Who owns what.** Everything here runs on the command's event loop, which owns what is
asynchronous. Blocking filesystems are called on threads of the loop's pool.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_core.errors import ConfigError
from kv_tier_fsspec._filesystem import filesystem_class, make_filesystem, masked_logs
from kv_tier_fsspec._protocols import AZURE_PROTOCOLS
from kv_tier_fsspec._sharing import share_filesystem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kv_tier_fsspec._azure import AzureStore
    from kv_tier_fsspec._config import FsspecConfig
    from kv_tier_fsspec._sharing import Filesystems

__all__ = ["Access", "BlockingAccess", "Entry", "open_access"]

# What filesystems call the time of the last change.
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "created")


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """What a folder holds.

    Attributes:
        name: The whole name, as the filesystem writes it.
        size_bytes: Bytes of a file; ``None`` of a folder.
        changed_s: When it was written, in seconds since 1970; ``None`` where nobody says.
    """

    name: str
    size_bytes: int | None
    changed_s: float | None

    @property
    def stem(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("/")[2]


class Access(ABC):
    """A filesystem, for the commands. Missing files raise :class:`FileNotFoundError`."""

    @abstractmethod
    async def entries(self, folder: str) -> list[Entry]:
        """Return what a folder holds, by name.

        Raises:
            FileNotFoundError: There is none. Object stores have no empty folders.
        """

    async def entries_if_any(self, folder: str) -> list[Entry]:
        """Return what a folder holds; nothing if there is none."""
        try:
            return await self.entries(folder)
        except FileNotFoundError:
            return []

    @abstractmethod
    async def length(self, name: str) -> int:
        """Return the length of a file in bytes, as it is now."""

    @abstractmethod
    async def read(self, name: str) -> bytes:
        """Return a whole file."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """Remove a file."""


@final
class BlockingAccess(Access):
    """A blocking filesystem.

    Args:
        files: What hands out filesystems.
    """

    def __init__(self, files: Filesystems) -> None:
        self._files = files

    @override
    async def entries(self, folder: str) -> list[Entry]:
        def work(fs: Any) -> Any:
            return fs.ls(folder, detail=True)

        return _entries(await asyncio.to_thread(self._files.run, work), folder)

    @override
    async def length(self, name: str) -> int:
        def work(fs: Any) -> int:
            return int(fs.info(name)["size"])

        return await asyncio.to_thread(self._files.run, work)

    @override
    async def read(self, name: str) -> bytes:
        def work(fs: Any) -> bytes:
            found: bytes = fs.cat_file(name)
            return found

        return await asyncio.to_thread(self._files.run, work)

    @override
    async def remove(self, name: str) -> None:
        def work(fs: Any) -> None:
            fs.rm_file(name)

        await asyncio.to_thread(self._files.run, work)


@final
class _AsyncAccess(Access):
    """An asynchronous filesystem."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    @override
    async def entries(self, folder: str) -> list[Entry]:
        return _entries(await self._fs._ls(folder, detail=True), folder)

    @override
    async def length(self, name: str) -> int:
        return int((await self._fs._info(name))["size"])

    @override
    async def read(self, name: str) -> bytes:
        found: bytes = await self._fs._cat_file(name)
        return found

    @override
    async def remove(self, name: str) -> None:
        await self._fs._rm_file(name)


@final
class _AzureAccess(Access):
    """Azure Blob Storage by the tier's own client: adlfs waits 85 s for one that is not there."""

    def __init__(self, store: AzureStore) -> None:
        self._store = store

    @override
    async def entries(self, folder: str) -> list[Entry]:
        container = folder.partition("/")[0]
        entries = []
        for item in await self._store.listing(folder):
            name = f"{container}/{item.name.rstrip('/')}"
            size = None if item.name.endswith("/") else int(item.size)
            changed = None if size is None else item.last_modified.timestamp()
            # Some programs leave a blob with the name of the folder itself.
            if name != folder:
                entries.append(Entry(name, size, changed))
        if not entries and folder != container:
            raise FileNotFoundError(folder)
        return sorted(entries, key=lambda entry: entry.name)

    @override
    async def length(self, name: str) -> int:
        return await self._store.length(name)

    @override
    async def read(self, name: str) -> bytes:
        length = await self._store.length(name)
        # There is no range of nothing.
        return await self._store.get(name, length) if length else b""

    @override
    async def remove(self, name: str) -> None:
        await self._store.remove(name)


@asynccontextmanager
async def open_access(config: FsspecConfig) -> AsyncIterator[tuple[Access, str]]:
    """Open the filesystem of a URL; give it and the folder that the URL names.

    Raises:
        ConfigError: What the URL names ends with the process that made it.
        TierOpenError: The filesystem refuses its options, or is not installed.
    """
    if config.is_in_process:
        raise ConfigError(
            f"'{config.protocol}://' ends with the tier that opened it, and nobody else can look "
            "into it. Name a storage that lasts",
            setting="URL",
        )
    logs = masked_logs(config)
    logs.begin()
    try:
        async with _opened(config) as (access, root):
            # The loggers that the client has made for itself.
            logs.begin()
            yield access, root
    finally:
        logs.end()


@asynccontextmanager
async def _opened(config: FsspecConfig) -> AsyncIterator[tuple[Access, str]]:
    is_asynchronous = filesystem_class(config.protocol).async_impl
    if config.protocol in AZURE_PROTOCOLS:
        from kv_tier_fsspec._azure import AzureStore

        store = AzureStore(config)
        try:
            yield _AzureAccess(store), store.strip(config.url).rstrip("/")
        finally:
            await store.close()
    elif is_asynchronous:
        async with _asynchronous(config) as (fs, root):
            yield _AsyncAccess(fs), root
    else:
        files = await asyncio.to_thread(share_filesystem, config)
        try:
            yield BlockingAccess(files), files.strip(config.url).rstrip("/")
        finally:
            await asyncio.to_thread(files.close)


@asynccontextmanager
async def _asynchronous(config: FsspecConfig) -> AsyncIterator[tuple[Any, str]]:
    fs: Any = make_filesystem(config, asynchronous=True, loop=asyncio.get_running_loop())
    session: Any = await fs.set_session() if hasattr(fs, "set_session") else None
    try:
        yield fs, str(fs._strip_protocol(config.url)).rstrip("/")
    finally:
        ended = getattr(session, "close", _nothing)()
        if inspect.isawaitable(ended):
            await ended


def _nothing() -> None:
    pass


def _entries(found: list[dict[str, Any]], folder: str) -> list[Entry]:
    entries = []
    for entry in found:
        name = str(entry["name"]).rstrip("/")
        # Object stores may list a marker of the folder itself.
        if name != folder:
            size = None if entry["type"] == "directory" else int(entry["size"])
            entries.append(Entry(name, size, _time_of(entry)))
    return sorted(entries, key=lambda entry: entry.name)


def _time_of(entry: dict[str, Any]) -> float | None:
    for key in _TIMES:
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None
