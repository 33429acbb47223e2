"""The client libraries without a tier, used as their documentation advises.

The same bytes in the same memory, from one event loop with as many requests in flight as the tier
has. What a library returns is copied to where it belongs, and what it cannot take as it lies is
copied for it; nothing is checked.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar, final

import obstore
from _object_bench._contenders import GETS, HEADS, PUTS, new_prefix
from obstore.store import S3Store
from s3fs import S3FileSystem
from typing_extensions import override

from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from _fs_bench._memory import Batch, Memory
    from _object_bench._place import Place

__all__ = ["BareClient", "BareObstore", "BareS3fs"]

ResultT = TypeVar("ResultT")


class BareClient(ABC):
    """An asynchronous client library.

    Args:
        name: In reports.
        place: The bucket.
        memory: What is stored from and loaded into.
    """

    def __init__(self, name: str, place: Place, memory: Memory) -> None:
        self.name = name
        self._place = place
        self._memory = memory

    def open(self, block_bytes: int) -> None:
        """Make a loop and a client."""
        self._block_bytes = block_bytes
        self._prefix = new_prefix(self.name)
        self._all = memoryview(self._memory.mapping)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._connect())

    def put(self, batches: Sequence[Batch]) -> float:
        """Store all, and return the seconds."""
        seconds, _ = self._run([self._put(*pair) for pair in _pairs(batches)], PUTS)
        return seconds

    def get(self, batches: Sequence[Batch]) -> float:
        """Load all, and return the seconds."""
        seconds, _ = self._run([self._get(*pair) for pair in _pairs(batches)], GETS)
        return seconds

    def find(self, keys: Sequence[int]) -> tuple[float, int]:
        """Look keys up; return the seconds, and how many are there."""
        seconds, found = self._run([self._exists(key) for key in keys], HEADS)
        return seconds, sum(found)

    def close(self) -> None:
        """End all connections."""
        self._loop.run_until_complete(self._disconnect())
        self._loop.close()
        self._all.release()

    @abstractmethod
    async def _connect(self) -> None:
        """Make the client."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """End it."""

    @abstractmethod
    async def _put(self, key: int, slot: int) -> None:
        """Store one block."""

    @abstractmethod
    async def _get(self, key: int, slot: int) -> None:
        """Load one block."""

    @abstractmethod
    async def _exists(self, key: int) -> bool:
        """Ask for one object."""

    def _slot(self, slot: int) -> memoryview:
        return self._all[slot * self._block_bytes : (slot + 1) * self._block_bytes]

    def _object(self, key: int) -> str:
        # As long as the names of the tier, and spread in the same way.
        digits = example_key(key).hex()
        return f"{self._prefix}/model_0123456789ab/r0/{digits[:3]}/{digits}.kv"

    def _run(
        self, work: list[Coroutine[Any, Any, ResultT]], in_flight: int
    ) -> tuple[float, list[ResultT]]:
        turns = asyncio.Semaphore(in_flight)

        async def in_turn(one: Coroutine[Any, Any, ResultT]) -> ResultT:
            async with turns:
                return await one

        async def everything() -> list[ResultT]:
            return await asyncio.gather(*map(in_turn, work))

        start = time.perf_counter()
        found = self._loop.run_until_complete(everything())
        return time.perf_counter() - start, found


@final
class BareS3fs(BareClient):
    """s3fs in its asynchronous mode."""

    @override
    async def _connect(self) -> None:
        access = self._place.access
        client: dict[str, Any] = {"region_name": access.region}
        if access.ca_file is not None:
            client["verify"] = str(access.ca_file)
        self._fs: Any = S3FileSystem(
            key=access.access_key,
            secret=access.secret_key,
            endpoint_url=access.endpoint_url,
            asynchronous=True,
            loop=asyncio.get_running_loop(),
            skip_instance_cache=True,
            use_listings_cache=False,
            client_kwargs=client,
            config_kwargs={
                "s3": {"addressing_style": "path"},
                "max_pool_connections": GETS,
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        )
        self._session = await self._fs.set_session()

    @override
    async def _disconnect(self) -> None:
        await self._session.close()

    @override
    async def _put(self, key: int, slot: int) -> None:
        # It takes no views.
        await self._fs._pipe_file(f"{self._place.bucket}/{self._object(key)}", self._bytes(slot))

    @override
    async def _get(self, key: int, slot: int) -> None:
        self._slot(slot)[:] = await self._fs._cat_file(f"{self._place.bucket}/{self._object(key)}")

    @override
    async def _exists(self, key: int) -> bool:
        found: bool = await self._fs._exists(f"{self._place.bucket}/{self._object(key)}")
        return found

    def _bytes(self, slot: int) -> bytes:
        return bytes(self._slot(slot))


@final
class BareObstore(BareClient):
    """obstore."""

    @override
    async def _connect(self) -> None:
        access = self._place.access
        client: Any = {"allow_http": access.endpoint_url.startswith("http://")}
        if access.ca_file is not None:
            client["root_certificate"] = access.ca_file.read_bytes()
        self._store: Any = S3Store(
            self._place.bucket,
            endpoint=access.endpoint_url,
            access_key_id=access.access_key,
            secret_access_key=access.secret_key,
            region=access.region,
            virtual_hosted_style_request=False,
            client_options=client,
        )

    @override
    async def _disconnect(self) -> None:
        del self._store

    @override
    async def _put(self, key: int, slot: int) -> None:
        # Straight out of the memory.
        await obstore.put_async(
            self._store, self._object(key), self._slot(slot), use_multipart=False
        )

    @override
    async def _get(self, key: int, slot: int) -> None:
        answer = await obstore.get_async(self._store, self._object(key))
        self._slot(slot)[:] = memoryview(await answer.bytes_async())

    @override
    async def _exists(self, key: int) -> bool:
        try:
            await obstore.head_async(self._store, self._object(key))
        except FileNotFoundError:
            return False
        return True


def _pairs(batches: Sequence[Batch]) -> list[tuple[int, int]]:
    return [pair for batch in batches for pair in zip(batch.keys, batch.slots, strict=True)]
