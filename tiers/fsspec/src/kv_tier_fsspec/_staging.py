"""Memory for the copies of blocks in flight: bounded, and used again.

**Who owns what.** Everything here runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Staging"]


@final
class Staging:
    """Turns for transfers, and a buffer of one object for those that need it.

    Args:
        object_bytes: Bytes of a buffer.
        most_transfers: How many transfers may be in flight.
    """

    def __init__(self, object_bytes: int, most_transfers: int) -> None:
        self._object_bytes = object_bytes
        self._turns = asyncio.Semaphore(most_transfers)
        self._idle: list[bytearray] = []

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, for a transfer whose memory the client library brings."""
        async with self._turns:
            yield

    @asynccontextmanager
    async def buffer(self) -> AsyncIterator[bytearray]:
        """Wait for a turn, and lend a buffer for it.

        New memory costs as much as the copy into it, so a buffer is kept for the next transfer;
        but not when this one fails or is cancelled: then a client library may still be sending it.
        """
        async with self._turns:
            buffer = self._idle.pop() if self._idle else bytearray(self._object_bytes)
            yield buffer
            self._idle.append(buffer)
