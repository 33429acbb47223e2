"""The gate in front of a client library."""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import TYPE_CHECKING

import pytest

from kv_conformance.faults import FaultGate, GateError
from kv_conformance.harness import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 20.0


class Client:
    """A client library with one call of each kind."""

    def __init__(self) -> None:
        self.timeout_s = 1.0
        self.written: list[str] = []

    def get(self, name: str) -> str:
        """Return a text made of the name."""
        return f"<{name}>"

    def put(self, name: str) -> None:
        """Note the name."""
        self.written.append(name)

    async def get_async(self, name: str) -> str:
        """Return a text made of the name."""
        return f"<{name}>"

    def describe(self) -> str:
        """Say what this is, without asking the storage."""
        return "a client"


@pytest.fixture
def gate() -> FaultGate:
    """Return an open gate."""
    return FaultGate()


@pytest.fixture
def client(gate: FaultGate) -> Client:
    """Return a client behind the gate."""
    return gate.guard(Client(), reads=("get", "get_async"), writes=("put",))


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Start a call on a thread of its own; what it returns ends up in the list."""
    outcome: list[object] = []
    thread = threading.Thread(target=lambda: outcome.append(call()))
    thread.start()
    return thread, outcome


def test_an_open_gate_changes_nothing(client: Client) -> None:
    """Calls, their arguments and their results pass."""
    client.put("a")
    assert client.get(name="b") == "<b>"
    assert client.written == ["a"]


def test_attributes_are_those_of_the_client(gate: FaultGate) -> None:
    """What is set on the stand-in is set on the client, and the other way round."""
    real = Client()
    guarded = gate.guard(real, reads=("get",))
    guarded.timeout_s = 5.0
    assert real.timeout_s == 5.0
    real.timeout_s = 7.0
    assert guarded.timeout_s == 7.0


def test_a_stalled_call_goes_on_when_healed(gate: FaultGate, client: Client) -> None:
    """A call is held while the gate is closed, and then does what it was called for."""
    gate.inject(Fault.STALL)
    thread, outcome = in_thread(lambda: client.get("a"))
    thread.join(0.02)
    assert thread.is_alive()
    assert outcome == []
    gate.heal()
    thread.join(WAIT_S)
    assert outcome == ["<a>"]


def test_a_failing_gate_fails_reads_and_writes(gate: FaultGate, client: Client) -> None:
    """Every guarded call raises an I/O error and does not reach the client."""
    gate.inject(Fault.ERROR)
    for call in (client.get, client.put):
        with pytest.raises(GateError) as caught:
            call("a")
        assert caught.value.errno == errno.EIO
    assert client.written == []


def test_a_full_gate_fails_writes_only(gate: FaultGate, client: Client) -> None:
    """A full storage can be read."""
    gate.inject(Fault.FULL)
    with pytest.raises(GateError) as caught:
        client.put("a")
    assert caught.value.errno == errno.ENOSPC
    assert client.get("a") == "<a>"


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.ERROR])
def test_calls_that_are_not_named_pass(gate: FaultGate, client: Client, fault: Fault) -> None:
    """What does not reach the storage does not meet its faults."""
    gate.inject(fault)
    assert client.describe() == "a client"


def test_healing_is_idempotent(gate: FaultGate, client: Client) -> None:
    """An open gate can be opened, and a closed one opened twice."""
    gate.heal()
    gate.inject(Fault.ERROR)
    gate.heal()
    gate.heal()
    assert client.get("a") == "<a>"


def test_one_gate_closes_for_all_its_clients(gate: FaultGate) -> None:
    """Several clients share the fault."""
    clients = [gate.guard(Client(), reads=("get",)) for _ in range(2)]
    gate.inject(Fault.ERROR)
    for guarded in clients:
        with pytest.raises(GateError):
            guarded.get("a")


def test_a_stalled_coroutine_leaves_its_loop_alone(gate: FaultGate, client: Client) -> None:
    """Only the coroutine waits; it goes on when another thread heals the fault."""

    async def run() -> str:
        gate.inject(Fault.STALL)
        held = asyncio.ensure_future(client.get_async("a"))
        await asyncio.sleep(0)
        assert not held.done()
        healer = threading.Thread(target=gate.heal)
        healer.start()
        answer = await asyncio.wait_for(held, WAIT_S)
        healer.join()
        return answer

    assert asyncio.run(run()) == "<a>"


def test_a_held_coroutine_can_be_cancelled(gate: FaultGate, client: Client) -> None:
    """As a call of a real asynchronous client can, and healing comes too late for it."""

    async def run() -> None:
        gate.inject(Fault.STALL)
        held = asyncio.ensure_future(client.get_async("a"))
        await asyncio.sleep(0)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        gate.heal()
        assert await client.get_async("b") == "<b>"

    asyncio.run(run())
    gate.inject(Fault.ERROR)
    with pytest.raises(GateError):
        asyncio.run(client.get_async("c"))
