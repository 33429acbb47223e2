"""The tier over an asynchronous filesystem: object stores, mostly.

**Who owns what.** Everything here runs on the loop's thread, which owns the filesystem. What a
client library starts for itself, it ends in :meth:`AsyncFsspecTier.close`.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, final

from typing_extensions import override

from kv_core.errors import BlockMissingError, KVCoreError
from kv_core.tierkit import AsyncioTier
from kv_core.tierkit.objects import check_description, describe_namespace
from kv_tier_fsspec._blocks import ABSENT_ERRORS, Blocks, open_error
from kv_tier_fsspec._filesystem import make_filesystem

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey
    from kv_tier_fsspec._config import FsspecConfig

__all__ = ["AsyncFsspecTier"]


@final
class AsyncFsspecTier(AsyncioTier):
    """One checksummed object a block, stored in one request.

    A slot is only ever copied from and to between two awaits, so a transfer that is cancelled has
    let go of it.
    """

    withdraws_io: ClassVar[bool] = True

    config: FsspecConfig

    @override
    async def open(self) -> None:
        self._fs: Any = make_filesystem(
            self.config, asynchronous=True, loop=asyncio.get_running_loop()
        )
        self._session: Any = None
        self._blocks = Blocks.of(self.context, self._fs._strip_protocol(self.config.url))
        object_bytes = self._blocks.format.object_bytes
        most = max(1, self.config.staging_bytes // (self.config.copies * object_bytes))
        self._staging = asyncio.Semaphore(most)
        name = self._blocks.names.description
        try:
            if hasattr(self._fs, "set_session"):
                self._session = await self._fs.set_session()
            await self._settle(name)
        except KVCoreError:
            raise
        except Exception as error:  # noqa: BLE001 - libraries raise anything; it is told, not hidden
            raise open_error(self.config, error, f"reading and writing {name!r}") from None

    async def _settle(self, name: str) -> None:
        """Check the description that is there, or publish ours: the first read and write."""
        namespace = self.context.namespace
        try:
            found = await self._fs._cat_file(name)
        except ABSENT_ERRORS:
            await self._fs._pipe_file(name, describe_namespace(namespace))
            found = await self._fs._cat_file(name)
        check_description(found, namespace, where=name)

    @override
    async def close(self) -> None:
        closing = getattr(self._session, "close", None)
        if closing is not None:
            ended = closing()
            if inspect.isawaitable(ended):
                await ended

    @override
    async def exists(self, key: OffloadKey) -> bool:
        try:
            found = await self._fs._info(self._blocks.names.block(key))
        except ABSENT_ERRORS:
            return False
        return bool(found["type"] == "file" and found["size"] == self._blocks.format.object_bytes)

    @override
    async def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        async with self._staging:
            try:
                found = await self._fs._cat_file(self._blocks.names.block(key))
            except ABSENT_ERRORS:
                raise self._blocks.missing(key) from None
            self._blocks.take(key, found, buffer)

    @override
    async def write_block(self, key: OffloadKey, data: memoryview) -> int:
        name = self._blocks.names.block(key)
        async with self._staging:
            if await self._is_stored(key, name):
                return 0
            await self._fs._pipe_file(name, self._blocks.give(key, data))
        return len(data)

    async def _is_stored(self, key: OffloadKey, name: str) -> bool:
        start, end = self._blocks.tail_range()
        try:
            tail = await self._fs._cat_file(name, start=start, end=end)
        except ABSENT_ERRORS:
            return False
        except (OSError, ValueError):
            # An object too short for the range is answered with an error; what is more serious,
            # the store that follows meets as well.
            return False
        return self._blocks.is_tail(key, tail)

    @override
    async def retire(self, key: OffloadKey) -> None:
        try:
            await self._fs._rm_file(self._blocks.names.block(key))
        except (*ABSENT_ERRORS, BlockMissingError):
            pass
