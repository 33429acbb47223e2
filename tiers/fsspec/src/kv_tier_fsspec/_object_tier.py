"""The tier over an object store.

**Who owns what.** Everything here runs on the loop's thread, which owns the store and the task that
keeps the description. What a client library starts for itself, its store ends in ``close``.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

from typing_extensions import override

from kv_core.errors import KVCoreError
from kv_core.tierkit import AsyncioTier
from kv_core.tierkit.objects import check_description, describe_namespace
from kv_tier_fsspec._blocks import ABSENT_ERRORS, Blocks, open_error
from kv_tier_fsspec._staging import Staging

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey
    from kv_tier_fsspec._config import ObjectConfig
    from kv_tier_fsspec.store import ObjectStore

__all__ = ["ObjectTier"]

_LOGGER: Final = logging.getLogger(__name__)

_WRITTEN_ANEW_S: Final = 86_400.0
"""How old a description becomes while a tier is open. Rules that remove by age count in days."""

# Kilobytes in truth. Whatever lies there must not fill the memory.
_MOST_DESCRIPTION_BYTES: Final = 1 << 20


class ObjectTier(AsyncioTier):
    """One checksummed object a block, stored in one request. Write :meth:`make_store`.

    A slot is only ever copied from and to between two awaits, so a transfer that is cancelled has
    let go of it: derived tiers declare ``Capability.WITHDRAWS_IO``.
    """

    withdraws_io: ClassVar[bool] = True

    config: ObjectConfig

    @abstractmethod
    def make_store(self) -> ObjectStore:
        """Return the client, not open yet. Called on the event loop."""

    @abstractmethod
    def root(self, store: ObjectStore) -> str:
        """Return what the names of all objects begin with, as the store wants it."""

    @override
    async def open(self) -> None:
        self._store: ObjectStore = self.make_store()
        self._blocks = Blocks.of(self.context, self.root(self._store))
        object_bytes = self._blocks.format.object_bytes
        self._staging = Staging(object_bytes, self.config.most_transfers(object_bytes))
        name = self._blocks.names.description
        try:
            await self._store.open()
            await self._settle(name)
        except KVCoreError:
            raise
        except Exception as error:  # noqa: BLE001 - libraries raise anything; it is told, not hidden
            raise open_error(self.config, error, f"reading and writing {name!r}") from None
        self._keeping = asyncio.create_task(self._keep_description(name))

    async def _settle(self, name: str) -> None:
        """Check the description that is there, or publish ours: the first read and write."""
        namespace = self.context.namespace
        try:
            found = await self._store.get(name, _MOST_DESCRIPTION_BYTES)
        except ABSENT_ERRORS:
            await self._store.put(name, describe_namespace(namespace))
            found = await self._store.get(name, _MOST_DESCRIPTION_BYTES)
        check_description(bytes(found), namespace, where=name)

    async def _write_description(self) -> None:
        """Write the description with what it says already, so that rules by age do not take it."""
        name = self._blocks.names.description
        await self._store.put(name, describe_namespace(self.context.namespace))

    async def _keep_description(self, name: str) -> None:
        while True:
            await self._wait_a_day()
            try:
                await self._settle(name)
                await self._write_description()
            except Exception as error:  # noqa: BLE001 - no block needs it, and it is tried again
                _LOGGER.info(
                    "tier %r: the description of the namespace was not written anew: %s",
                    self.context.tier_name,
                    self._describe(error),
                )

    async def _wait_a_day(self) -> None:
        await asyncio.sleep(_WRITTEN_ANEW_S)

    async def _stop_keeping_description(self) -> None:
        """Write the description no more. Idempotent."""
        keeping = getattr(self, "_keeping", None)
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait((keeping,))

    @override
    async def close(self) -> None:
        await self._stop_keeping_description()
        store = getattr(self, "_store", None)
        if store is not None:
            await store.close()

    @override
    async def exists(self, key: OffloadKey) -> bool:
        try:
            length = await self._store.length(self._blocks.names.block(key))
        except ABSENT_ERRORS:
            return False
        return length == self._blocks.format.object_bytes

    @override
    async def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        async with self._staging.turn():
            try:
                await self._blocks.read(key, self._store, buffer)
            except ABSENT_ERRORS:
                raise self._blocks.missing(key) from None

    @override
    async def write_block(self, key: OffloadKey, data: memoryview) -> int:
        name = self._blocks.names.block(key)
        async with self._staging.buffer() as whole:
            self._blocks.give_into(key, data, whole)
            if not await self._store.put_new(name, whole):
                # What is there may be damaged, or half of what it should be.
                if await self._is_stored(key, name):
                    return 0
                await self._store.put(name, whole)
        return len(data)

    async def _is_stored(self, key: OffloadKey, name: str) -> bool:
        start, end = self._blocks.tail_range()
        try:
            tail = await self._store.get_range(name, start, end)
        except ABSENT_ERRORS:
            return False
        return self._blocks.is_tail(key, bytes(tail))

    @override
    async def retire(self, key: OffloadKey) -> None:
        await self._store.remove(self._blocks.names.block(key))
