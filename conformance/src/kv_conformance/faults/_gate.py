"""A gate in front of a client library.

**Who owns what.** The suite's thread opens and closes the gate; any thread and any coroutine of the
tier passes it. ``_changed`` guards ``_fault`` and ``_held``, the coroutines that wait; their
futures belong to their loops.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

from typing_extensions import override

from kv_conformance.harness import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["FaultGate", "GateError"]

ClientT = TypeVar("ClientT")


class GateError(OSError):
    """What calls through a gate raise while it is set to fail."""


@final
class FaultGate:
    """Lets calls of a client through, holds them, or makes them fail.

    A gate may stand in front of several clients at once. Give :meth:`guard` the methods that
    would reach the storage, and those that write to it. Coroutine functions wait without blocking
    their event loop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._fault: Fault | None = None
        self._held: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def inject(self, fault: Fault) -> None:
        """Hold every call, or make it fail, from now on."""
        with self._changed:
            self._fault = fault

    def heal(self) -> None:
        """Let calls through again, those that are held first. Idempotent."""
        with self._changed:
            self._fault = None
            self._changed.notify_all()
            held, self._held = self._held, []
        for loop, passed in held:
            with suppress(RuntimeError):  # the loop is closed, and its coroutines are gone
                loop.call_soon_threadsafe(_wake, passed)

    def enter(self, *, writing: bool) -> None:
        """Pass the gate: return, wait or raise.

        Raises:
            GateError: The gate is set to fail.
        """
        with self._changed:
            while self._fault is Fault.STALL:
                self._changed.wait()
            fault = self._fault
        _fail(fault, writing=writing)

    def allowed(self, count: int) -> int:
        """Return how many of so many bytes a call may move: fewer while transfers are short."""
        return -(-count // 2) if self._fault is Fault.SHORT else count

    async def enter_async(self, *, writing: bool) -> None:
        """Pass the gate from a coroutine, which is all that waits.

        Raises:
            GateError: The gate is set to fail.
        """
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                fault = self._fault
                if fault is not Fault.STALL:
                    break
                passed = loop.create_future()
                self._held.append((loop, passed))
            await passed
        _fail(fault, writing=writing)

    def guard(
        self, client: ClientT, *, reads: Iterable[str] = (), writes: Iterable[str] = ()
    ) -> ClientT:
        """Return a stand-in for a client whose named methods pass this gate first.

        Everything else is handed on as it is, attributes included.
        """
        return cast("ClientT", _Guarded(client, self, frozenset(reads), frozenset(writes)))


def _fail(fault: Fault | None, *, writing: bool) -> None:
    if fault is Fault.ERROR:
        raise GateError(errno.EIO, "the storage fails, as the suite asked it to")
    if fault is Fault.FULL and writing:
        raise GateError(errno.ENOSPC, "the storage is full, as the suite asked it to be")


def _wake(passed: asyncio.Future[None]) -> None:
    if not passed.done():
        passed.set_result(None)


@final
class _Guarded:
    def __init__(
        self, client: object, gate: FaultGate, reads: frozenset[str], writes: frozenset[str]
    ) -> None:
        self.__dict__.update(_client=client, _gate=gate, _reads=reads, _writes=writes)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        if name not in self._reads and name not in self._writes:
            return attribute
        return _passing(self._gate, attribute, writing=name in self._writes)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._client, name, value)


def _passing(gate: FaultGate, method: Callable[..., Any], *, writing: bool) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            await gate.enter_async(writing=writing)
            return await method(*args, **kwargs)

        return call_async

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        gate.enter(writing=writing)
        return method(*args, **kwargs)

    return call
