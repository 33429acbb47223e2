"""A loop is woken by any thread, in order, and nobody is let in by the way."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kv_core.tierkit import _doorbell
from kv_core.tierkit._doorbell import Doorbell

if TYPE_CHECKING:
    from collections.abc import Iterator

LINUX = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="there are eventfds on Linux only")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Return a loop that does not run."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(params=["eventfd", "socket"])
def bell(
    request: pytest.FixtureRequest,
    loop: asyncio.AbstractEventLoop,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Doorbell]:
    """Return a bell of each kind."""
    if request.param == "socket":
        monkeypatch.setattr(_doorbell, "_WRITE", None)
    bell = Doorbell(loop)
    yield bell
    bell.close()


def run(loop: asyncio.AbstractEventLoop, bell: Doorbell) -> None:
    """Run the loop until what has been rung for was called."""
    bell.ring(loop.stop)
    loop.run_forever()


def test_what_is_rung_for_is_called_in_order(
    loop: asyncio.AbstractEventLoop, bell: Doorbell
) -> None:
    """Each once, also when several rings come before the loop looks."""
    called: list[int] = []
    for number in range(3):
        bell.ring(lambda number=number: called.append(number))  # type: ignore[misc]
    assert called == []
    run(loop, bell)
    assert called == [0, 1, 2]


def test_a_waiting_loop_is_woken(loop: asyncio.AbstractEventLoop, bell: Doorbell) -> None:
    """By another thread, and the call is made on the loop's own."""
    where: list[int] = []
    runs = threading.Event()

    def ring() -> None:
        runs.wait(10)
        bell.ring(lambda: where.append(threading.get_ident()))
        bell.ring(loop.stop)

    thread = threading.Thread(target=ring)
    thread.start()
    loop.call_soon(runs.set)
    loop.run_forever()
    thread.join(10)
    assert where == [threading.get_ident()]


def test_a_call_that_raises_hinders_no_other(
    loop: asyncio.AbstractEventLoop, bell: Doorbell
) -> None:
    """As with any other callback of a loop."""
    called: list[str] = []
    raised: list[object] = []
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    error = ValueError("on purpose")

    def fail() -> None:
        raise error

    bell.ring(fail)
    bell.ring(lambda: called.append("after"))
    run(loop, bell)
    assert (called, raised) == (["after"], [error])


def test_nothing_happens_after_the_end(loop: asyncio.AbstractEventLoop, bell: Doorbell) -> None:
    """Neither a call nor an error, however often it is closed."""
    called: list[str] = []
    bell.close()
    bell.close()
    bell.ring(lambda: called.append("late"))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert called == []


@LINUX
def test_a_late_ring_touches_no_file_of_others(loop: asyncio.AbstractEventLoop) -> None:
    """The number of a closed eventfd is soon that of something else."""
    bell = Doorbell(loop)
    bell.close()
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(8)]
    try:
        bell.ring(lambda: None)
        for other in others:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(other)
    finally:
        for other in others:
            os.close(other)


@LINUX
def test_whoever_rings_keeps_the_interpreter(loop: asyncio.AbstractEventLoop) -> None:
    """The loop has a processor and something to do, and still does not come first."""
    bell = Doorbell(loop)
    called: list[int] = []
    runs = threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    bell.ring(runs.set)
    assert runs.wait(10)
    interval = sys.getswitchinterval()
    # Nobody is interrupted now: another thread runs only where this one lets it.
    sys.setswitchinterval(1000)
    try:
        for number in range(100):
            bell.ring(lambda number=number: called.append(number))  # type: ignore[misc]
            for _ in range(1000):
                pass
        seen = len(called)
    finally:
        sys.setswitchinterval(interval)
        bell.ring(loop.stop)
        thread.join(10)
        bell.close()
    assert seen == 0
    assert called == list(range(100))


@LINUX
def test_no_descriptor_is_left(loop: asyncio.AbstractEventLoop) -> None:
    """Of a bell that was closed."""
    before = _descriptors()
    bell = Doorbell(loop)
    bell.ring(lambda: None)
    bell.close()
    assert _descriptors() == before


def _descriptors() -> set[str]:
    # Without the one that the folder is read through, which may have any free number.
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}
