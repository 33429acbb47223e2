"""NIXL and a store in memory: what the tier calls of both, and every fault that a test sets.

One :class:`World` is the store, seen by NIXL's agents and by the client for everything else. The
agents move bytes by address, as NIXL does, and keep to what NIXL's OBJ plugin was seen to do: an
object that is too short leaves the rest of the memory as it was, one that is too long fills it, and
a failed read leaves the document of the error there. Whatever no agent should be asked to do is
noted in :attr:`World.violations`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import TYPE_CHECKING, Any

from kv_tier_s3.bucket import S3Error, S3ErrorKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_tier_s3._credentials import CredentialChain

WAIT_S = 20.0


class NixlError(Exception):
    """What NIXL raises; its errors have no base of their own."""


def document(code: str, message: str = "as the test asked") -> bytes:
    """Return what a store sends instead of an object."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    ).encode()


class World:
    """A store, and what is set and seen of those who use it.

    Attributes:
        objects: Contents by name.
        documents: Answers to reads of these names, instead of objects; empty: no answer at all.
        refused: Names that cannot be stored.
        client_errors: What the client for everything else is told, by operation.
        stuck: Names whose transfers do not end until :meth:`let_go`.
        raises: How often a call of NIXL raises, by method.
        query_gate: Set when questions about objects are answered.
        agents: Agents that were opened, by what they are for.
        live: Handles and registrations that have not been given back.
        devices: Every device that was ever registered.
        most_queried: Most names in one question.
        queries: Number of questions.
        violations: What should not have happened.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.documents: dict[str, bytes] = {}
        self.refused: set[str] = set()
        self.client_errors: dict[str, S3Error] = {}
        self.stuck: set[str] = set()
        self.raises: dict[str, int] = {}
        self.query_gate = threading.Event()
        self.query_gate.set()
        self.query_error: Exception | None = None
        self.querying = threading.Event()
        self.agents: dict[str, FakeAgent] = {}
        self.live: set[object] = set()
        self.devices: set[int] = set()
        self.queries = 0
        self.most_queried = 0
        self.query_threads: set[str] = set()
        self.moved: list[tuple[str, str]] = []
        self.violations: list[str] = []

    def open_agent(
        self, name: str, parameters: Mapping[str, str], **environments: Mapping[str, str]
    ) -> FakeAgent:
        """Stand in for the function that loads NIXL."""
        self.may_raise("open_agent")
        agent = FakeAgent(name, self)
        self.agents[name.rpartition("-")[2]] = agent
        return agent

    def let_go(self) -> None:
        """Let all transfers end that are stuck."""
        self.stuck.clear()

    def may_raise(self, method: str) -> None:
        """Raise if a test has asked for it."""
        if self.raises.get(method, 0):
            self.raises[method] -= 1
            raise NixlError(f"NIXL_ERR_BACKEND in {method}")


class Handle:
    """Something that NIXL has given out."""

    def __init__(self, kind: str, content: Any) -> None:
        self.kind = kind
        self.content = content


class FakeAgent:
    """An agent of NIXL."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self._thread = threading.get_ident()
        self._names: dict[int, str] = {}

    def register_memory(self, reg_list: Any, mem_type: str, backends: list[str]) -> Any:
        """Register memory or names."""
        self._check("register_memory")
        if mem_type == "OBJ":
            for _, _, device, name in reg_list:
                if device in self._names:
                    self.world.violations.append(f"device {device} stands for two objects")
                self._names[device] = name
                self.world.devices.add(device)
        return self._give("registration", (mem_type, list(reg_list)))

    def deregister_memory(self, dereg_list: Any, backends: list[str]) -> None:
        """Undo a registration."""
        self._check("deregister_memory")
        mem_type, items = dereg_list.content
        if mem_type == "OBJ":
            for _, _, device, _ in items:
                del self._names[device]
        self._take_back(dereg_list)

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str
    ) -> list[dict[str, str] | None]:
        """Say which objects are there."""
        world = self.world
        self._check("query_memory")
        world.queries += 1
        world.most_queried = max(world.most_queried, len(reg_list))
        world.query_threads.add(threading.current_thread().name)
        world.querying.set()
        if not world.query_gate.wait(WAIT_S):
            world.violations.append("a question waited for ever")
        if world.query_error is not None:
            raise world.query_error
        return [{} if name in world.objects else None for _, _, _, name in reg_list]

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str, backends: list[str]
    ) -> Any:
        """Prepare one side."""
        self._check("prep_xfer_dlist")
        if mem_type == "OBJ" and agent_name != self.name:
            self.world.violations.append(f"objects prepared for agent {agent_name!r}")
        return self._give("side", list(xfer_list))

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: Sequence[int],
        remote_xfer_side: Any,
        remote_indices: Sequence[int],
    ) -> Any:
        """Make a transfer."""
        self._check("make_prepped_xfer")
        (local,), (remote,) = local_indices, remote_indices
        address, length, _ = local_xfer_side.content[local]
        _, remote_length, device = remote_xfer_side.content[remote]
        if length != remote_length:
            self.world.violations.append(f"{length} bytes from {remote_length}")
        return self._give("transfer", (operation, address, length, self._names[device]))

    def transfer(self, handle: Any) -> str:
        """Begin a transfer."""
        self._check("transfer")
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        """Move the bytes, unless the transfer is stuck."""
        operation, address, length, name = handle.content
        world = self.world
        if name in world.stuck:
            self._check("")
            return "PROC"
        # Whatever has become of it: the memory is written now.
        world.moved.append((operation, name))
        failed = (self._read if operation == "READ" else self._write)(address, length, name)
        self._check("check_xfer_state")
        if failed:
            raise NixlError("NIXL_ERR_BACKEND")
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        """Let go of a transfer."""
        self._check("release_xfer_handle")
        if handle.content[3] in self.world.stuck:
            self.world.violations.append(f"{handle.content[3]} released while it runs")
        self._take_back(handle)

    def release_dlist_handle(self, handle: Any) -> None:
        """Let go of a side."""
        self._check("release_dlist_handle")
        self._take_back(handle)

    def _read(self, address: int, length: int, name: str) -> bool:
        world = self.world
        content = world.documents.get(name)
        failed = content is not None or not world.objects.get(name)
        if content is None:
            missing = document("NoSuchKey" if name not in world.objects else "InvalidRange")
            content = world.objects.get(name) or missing
        ctypes.memmove(address, content, min(length, len(content)))
        return failed

    def _write(self, address: int, length: int, name: str) -> bool:
        if name in self.world.refused:
            return True
        self.world.objects[name] = ctypes.string_at(address, length)
        return False

    def _check(self, method: str) -> None:
        if threading.get_ident() != self._thread:
            self.world.violations.append(f"{method} was called on another thread")
        self.world.may_raise(method)

    def _give(self, kind: str, content: Any) -> Handle:
        handle = Handle(kind, content)
        self.world.live.add(handle)
        return handle

    def _take_back(self, handle: Any) -> None:
        if handle not in self.world.live:
            self.world.violations.append(f"a {handle.kind} was given back twice")
        self.world.live.discard(handle)


class FakeClient:
    """The client for everything beside the blocks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: list[str] = []

    @property
    def credentials(self) -> CredentialChain | None:
        """Return none: they are settings."""
        return None

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def length(self, name: str) -> int:
        """Answer HEAD."""
        return len(self._content("head", name))

    async def get_range(self, name: str, start: int, end: int) -> bytes:
        """Answer a ranged GET."""
        content = self._content("get", name)
        if start >= len(content):
            raise S3Error(S3ErrorKind.RANGE, "get", name, 416, "InvalidRange", "")
        return content[start:end]

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Answer GET, into buffers."""
        content = self._content("get", name)
        start = 0
        for part in parts:
            piece = content[start : start + len(part)]
            part[: len(piece)] = piece
            start += len(part)
        return len(content)

    async def put(self, name: str, data: bytes | bytearray, *, only_new: bool = False) -> None:
        """Answer PUT."""
        self._raise("put")
        if only_new and name in self.world.objects:
            raise S3Error(S3ErrorKind.PRECONDITION, "put", name, 412, "PreconditionFailed", "")
        self.world.objects[name] = bytes(data)

    async def remove(self, name: str) -> None:
        """Answer DELETE."""
        self._raise("delete")
        self.world.objects.pop(name, None)

    def _content(self, operation: str, name: str) -> bytes:
        self.asked.append(operation)
        self._raise(operation)
        if name not in self.world.objects:
            raise S3Error(S3ErrorKind.MISSING, operation, name, 404, "NoSuchKey", "")
        return self.world.objects[name]

    def _raise(self, operation: str) -> None:
        error = self.world.client_errors.get(operation)
        if error is not None:
            raise error


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is true.

    Raises:
        TimeoutError: It does not come true.
    """
    pause = threading.Event()
    for _ in itertools.repeat(None, int(WAIT_S / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    raise TimeoutError("it did not come true")
