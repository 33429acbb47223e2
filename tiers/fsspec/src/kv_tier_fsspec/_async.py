"""An asynchronous fsspec filesystem as an object store.

**Who owns what.** Everything here runs on the tier's loop, which owns the filesystem.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from kv_tier_fsspec._blocks import ABSENT_ERRORS
from kv_tier_fsspec._filesystem import make_filesystem, masked_logs
from kv_tier_fsspec._object_tier import ObjectTier
from kv_tier_fsspec._scatter import scatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_tier_fsspec._config import FsspecConfig
    from kv_tier_fsspec.store import ObjectStore

__all__ = ["AsyncFsspecTier", "FsspecObjectTier", "FsspecStore"]


@final
class FsspecStore:
    """A filesystem of the tier's own, on the running loop.

    Args:
        config: Settings of the tier.
    """

    def __init__(self, config: FsspecConfig) -> None:
        self.fs: Any = make_filesystem(config, asynchronous=True, loop=asyncio.get_running_loop())
        self._session: Any = None

    async def open(self) -> None:
        """Make the session that filesystems over HTTP have."""
        if hasattr(self.fs, "set_session"):
            self._session = await self.fs.set_session()

    async def close(self) -> None:
        """Close the session."""
        closing = getattr(self._session, "close", None)
        if closing is not None:
            ended = closing()
            if inspect.isawaitable(ended):
                await ended

    async def length(self, name: str) -> int:
        """Return the length of a file; a folder has none that a block could have."""
        found = await self.fs._info(name)
        return int(found["size"]) if found["type"] == "file" else -1

    async def get(self, name: str, most_bytes: int) -> bytes:
        """Return an object, or the beginning of a longer one."""
        return await self.get_range(name, 0, most_bytes)

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Read an object into several buffers; by way of memory, as all filesystems can."""
        # One byte more than there should be, so that a longer object shows.
        return scatter(await self.get_range(name, 0, sum(map(len, parts)) + 1), parts)

    async def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return a range of an object, as far as there is one."""
        found: bytes
        try:
            found = await self.fs._cat_file(name, start=start, end=end)
        except ABSENT_ERRORS:
            raise
        except Exception:
            # Each filesystem has an error of its own for an object that ends before the range.
            if not 0 <= await self.length(name) <= start:
                raise
            found = b""
        return found

    async def put(self, name: str, data: bytes | bytearray) -> None:
        """Store an object in one request."""
        # A copy: some filesystems take nothing but bytes, and some keep what they are given.
        await self.fs._pipe_file(name, bytes(data))

    async def put_new(self, name: str, data: bytes | bytearray) -> bool:
        """Store an object unless there is one. Asks before: few filesystems have a condition."""
        try:
            await self.fs._info(name)
        except ABSENT_ERRORS:
            await self.put(name, data)
            return True
        return False

    async def remove(self, name: str) -> None:
        """Remove an object."""
        with suppress(*ABSENT_ERRORS):
            await self.fs._rm_file(name)


class FsspecObjectTier(ObjectTier):
    """What the tiers ``fsspec`` over object stores have in common."""

    config: FsspecConfig

    @override
    async def open(self) -> None:
        self._logs = masked_logs(self.config)
        self._logs.begin()
        await super().open()
        # The loggers that the client has made for itself.
        self._logs.begin()

    @override
    async def close(self) -> None:
        try:
            await super().close()
        finally:
            logs = getattr(self, "_logs", None)
            if logs is not None:
                logs.end()


@final
class AsyncFsspecTier(FsspecObjectTier):
    """The tier ``fsspec`` over an asynchronous filesystem."""

    @override
    def make_store(self) -> ObjectStore:
        return FsspecStore(self.config)

    @override
    def root(self, store: ObjectStore) -> str:
        if not isinstance(store, FsspecStore):
            raise TypeError(f"expected a FsspecStore, found a {type(store).__name__}")
        return str(store.fs._strip_protocol(self.config.url))
