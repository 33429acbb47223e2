"""A proxy that understands HTTP: notes every request, and spoils the answers that a test names.

:class:`FaultProxy` breaks connections. This one answers in place of the server, cuts answers short,
lets them trickle and changes them, and it shows what was on the wire.

**Who owns what.** One thread runs an event loop, which owns all connections. ``rule`` and
``requests`` are shared with the test's thread: a reference that is replaced as a whole, and a list
that the loop only appends to.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from typing_extensions import Self

__all__ = ["Answer", "Cut", "Meddler", "Request", "Rewrite", "Slow", "error_answer"]

_PIECE_BYTES: Final = 1 << 16
_NO_BODY: Final = frozenset({204, 304})


@final
@dataclass(frozen=True, slots=True)
class Request:
    """One request, as it came.

    Attributes:
        method: ``GET``, ``PUT``, ...
        path: With the query.
        headers: Names in lower case.
        at: When, on the monotonic clock.
        connections: Connections that were open then, this one included.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    at: float
    connections: int


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """Answer in place of the server.

    Attributes:
        status: HTTP status.
        body: Of the answer; not sent to HEAD.
        headers: More headers.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """Send the head of the answer and so many bytes of its body; then close the connection."""

    body_bytes: int


@final
@dataclass(frozen=True, slots=True)
class Slow:
    """Send the body of the answer in pieces, with pauses."""

    piece_bytes: int
    pause_s: float


@final
@dataclass(frozen=True, slots=True)
class Rewrite:
    """Change the body of a good answer, and its length with it."""

    change: Callable[[bytes], bytes]


def error_answer(status: int, code: str) -> Answer:
    """Return an error as S3 answers it."""
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>as asked</Message></Error>'
    return Answer(status, text.encode(), {"Content-Type": "application/xml"})


@final
class Meddler:
    """Passes HTTP on to a server, unless the rule says otherwise. A context manager.

    Args:
        host: The server.
        port: Its port.

    Attributes:
        rule: Called with each request, on the loop: ``None`` passes it on and its answer back,
            anything else is what to do. Replace it at any time.
        requests: Every request so far.
        port: Where the proxy listens, on loopback.
        most_connections: Most connections that were open at a time.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self.rule: Callable[[Request], Answer | Cut | Slow | Rewrite | None] = lambda _: None
        self.requests: list[Request] = []
        self.most_connections = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meddler", daemon=True)
        self._thread.start()
        self._listener = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._listener.sockets[0].getsockname()[1]

    @property
    def endpoint_url(self) -> str:
        """Address of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and the thread."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    # -- the loop's thread ------------------------------------------------------------------------

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
        self.most_connections = max(self.most_connections, len(self._connections))
        upstream = _Upstream(self._server)
        try:
            while await self._exchange(reader, writer, upstream):
                pass
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            upstream.close()
            writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: _Upstream
    ) -> bool:
        """Serve one request; say whether the connection may be used again."""
        head = await reader.readuntil(b"\r\n\r\n")
        line, headers = _parse(head)
        method, path, _ = line.split(" ", 2)
        request = Request(method, path, headers, time.monotonic(), len(self._connections))
        self.requests.append(request)
        what = self.rule(request)
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if isinstance(what, Answer):
            writer.write(_render(what, method))
            await writer.drain()
            return True
        answer_head, answer = await upstream.ask(head, body, method)
        return await _hand_back(writer, answer_head, answer, what)


class _Upstream:
    """The connection to the server that belongs to one connection of a client."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def ask(self, head: bytes, body: bytes, method: str) -> tuple[bytes, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._server)
        reader, writer = self._streams
        # The client has been told to go on; the server need not.
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:")]
        writer.write(b"\r\n".join(lines) + body)
        await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        line, headers = _parse(answer)
        status = int(line.split(" ", 2)[1])
        found = b""
        if method == "HEAD" or status in _NO_BODY:
            pass
        elif "chunked" in headers.get("transfer-encoding", ""):
            while size := int((await reader.readline()).split(b";")[0], 16):
                found += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
            answer = _with_length(answer, len(found))
        else:
            found = await reader.readexactly(int(headers.get("content-length", "0")))
        return answer, found


async def _hand_back(
    writer: asyncio.StreamWriter,
    head: bytes,
    body: bytes,
    what: Cut | Slow | Rewrite | None,
) -> bool:
    if isinstance(what, Rewrite):
        body = what.change(body)
        head = _with_length(head, len(body))
    writer.write(head)
    if isinstance(what, Cut):
        writer.write(body[: what.body_bytes])
        with suppress(OSError):
            await writer.drain()
        return False
    step = what.piece_bytes if isinstance(what, Slow) else _PIECE_BYTES
    for start in range(0, len(body), step):
        writer.write(body[start : start + step])
        await writer.drain()
        if isinstance(what, Slow):
            await asyncio.sleep(what.pause_s)
    await writer.drain()
    return True


def _parse(head: bytes) -> tuple[str, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return lines[0], {name.strip().lower(): value.strip() for name, _, value in pairs}


def _with_length(head: bytes, length: int) -> bytes:
    drop = (b"content-length:", b"transfer-encoding:")
    lines = head.rstrip(b"\r\n").split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith(drop)]
    return b"\r\n".join((*kept, b"Content-Length: %d" % length, b"", b""))


def _render(answer: Answer, method: str) -> bytes:
    lines = [f"HTTP/1.1 {answer.status} As Asked", f"Content-Length: {len(answer.body)}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    head = "\r\n".join((*lines, "", "")).encode()
    return head if method == "HEAD" else head + answer.body
