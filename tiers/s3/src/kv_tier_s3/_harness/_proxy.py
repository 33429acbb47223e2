"""A proxy in front of a server, that stalls, fails and cuts answers short.

**Who owns what.** One thread runs an event loop, which owns all connections. The suite's thread
sets the fault by posting to the loop and waits until it holds, so that nothing passes afterwards.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from kv_conformance.harness import Fault

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

__all__ = ["FaultProxy"]

_CHUNK_BYTES: Final = 1 << 18
_REFUSAL: Final = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/xml\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s"
)
_BODY: Final = b"<Error><Code>InternalError</Code><Message>as the suite asked</Message></Error>"


@final
class FaultProxy:
    """Passes TCP connections on to a server, unless a fault is set.

    Args:
        host: The server.
        port: Its port.
        tls: Whether TLS passes through. Then what fails is a connection that breaks off, as the
            proxy cannot answer inside of it.

    Attributes:
        port: Where the proxy listens, on loopback.
    """

    def __init__(self, host: str, port: int, *, tls: bool = False) -> None:
        self._server = (host, port)
        self._tls = tls
        self._fault: Fault | None = None
        self._healed = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")
        self._thread.daemon = True
        self._thread.start()
        self._listener = self._run(self._listen())
        self.port: int = self._listener.sockets[0].getsockname()[1]

    def inject(self, fault: Fault) -> None:
        """Set a fault. It holds when this returns."""
        self._run(self._set(fault))

    def heal(self) -> None:
        """End the fault: what hung goes on."""
        self._run(self._set(None))

    def close(self) -> None:
        """End all connections and the thread."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    # -- the loop's thread ------------------------------------------------------------------------

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _set(self, fault: Fault | None) -> None:
        self._fault = fault
        if fault is Fault.STALL:
            self._healed.clear()
        else:
            self._healed.set()
        if fault is Fault.ERROR:
            # What is under way fails, too.
            for task in tuple(self._connections):
                task.cancel()

    async def _end(self) -> None:
        self._listener.close()
        for task in tuple(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(tuple(self._connections))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("a connection is served by a task")
        self._connections.add(task)
        try:
            if self._fault is Fault.ERROR:
                if not self._tls:
                    await _refuse(reader, writer)
            else:
                await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._server)
        ways = [
            asyncio.ensure_future(self._pass(reader, server_writer)),
            asyncio.ensure_future(self._pass(server_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            server_writer.close()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            data = await reader.read(_CHUNK_BYTES)
            if self._fault is Fault.STALL:
                await self._healed.wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request with an error of the server."""
    with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        await reader.readuntil(b"\r\n\r\n")
    writer.write(_REFUSAL % (len(_BODY), _BODY))
    await writer.drain()
