"""A way to a server that can be cut: what passes is not looked at.

**Who owns what.** One thread runs an event loop, which owns all connections. The suite's thread
sets the fault by posting to the loop and waits until it holds.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["ConnectionGate"]

_CHUNK_BYTES: Final = 1 << 18


@final
class ConnectionGate:
    """Passes TCP connections on to a port of this machine, unless it is shut.

    Args:
        server_port: The port.

    Attributes:
        port: Where the gate listens, on loopback.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._is_shut = False
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="connection-gate", daemon=True
        )
        self._thread.start()
        self._listener: asyncio.Server = self._run(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self.port: int = self._listener.sockets[0].getsockname()[1]

    def shut(self) -> None:
        """Break off all connections; new ones end at once."""
        self._run(self._set(is_shut=True))

    def open(self) -> None:
        """Let connections pass again. Idempotent."""
        self._run(self._set(is_shut=False))

    def close(self) -> None:
        """End all connections and the thread."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    # -- the loop's thread ------------------------------------------------------------------------

    async def _set(self, *, is_shut: bool) -> None:
        self._is_shut = is_shut
        if is_shut:
            await self._break_off()

    async def _end(self) -> None:
        self._listener.close()
        await self._break_off()

    async def _break_off(self) -> None:
        tasks = tuple(self._connections)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("a connection is served by a task")
        self._connections.add(task)
        try:
            if not self._is_shut:
                await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        ways = [
            asyncio.ensure_future(_pass(reader, server_writer)),
            asyncio.ensure_future(_pass(server_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            server_writer.close()
            await asyncio.gather(*ways, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
