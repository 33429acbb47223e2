"""Ctrl-C during a replay: held back to a safe place, once."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from kv_core.cli._interrupts import interrupts_held_back
from kv_core.workload import synthetic_trace
from kv_core.workload.replay import ReplayConfig, replay_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Handle interrupts as Python does, whatever this process was started with."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, previous)


def interrupt() -> None:
    """Do what Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def in_steps(*steps: Callable[[], None]) -> list[int]:
    """Run steps with interrupts held back, and return the numbers of those that went through."""
    done: list[int] = []
    with suppress(KeyboardInterrupt), interrupts_held_back() as check:
        for number, step in enumerate(steps):
            step()
            done.append(number)
            check()
        done.append(-1)
    return done


def nothing() -> None:
    """Do nothing."""


def test_an_interrupt_waits_for_the_check() -> None:
    """The step that is under way is finished; no other begins."""
    assert in_steps(nothing, interrupt, nothing) == [0, 1]
    assert in_steps(nothing, nothing) == [0, 1, -1]


def test_a_second_interrupt_does_not_wait() -> None:
    """Whoever insists gets out at once."""

    def twice() -> None:
        interrupt()
        interrupt()

    assert in_steps(nothing, twice) == [0]


def test_an_interrupt_after_the_last_check_is_not_lost() -> None:
    """The end of the block raises it."""
    with pytest.raises(KeyboardInterrupt), interrupts_held_back():
        interrupt()


def test_an_error_is_not_replaced() -> None:
    """What the block raises comes first."""

    def fail() -> None:
        interrupt()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        in_steps(fail)


def test_ignored_interrupts_stay_ignored() -> None:
    """A background job of a shell must not be stopped by the shell's Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_held_back() as check:
        interrupt()
        check()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_leave_signals_alone() -> None:
    """Only the main thread can have handlers."""
    checked = []

    def run() -> None:
        with interrupts_held_back() as check:
            check()
            checked.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert checked == [signal.default_int_handler]


@pytest.mark.parametrize("step", [1, 2, 5, 20])
def test_a_replay_ends_between_steps(step: int, tmp_path: Path) -> None:
    """Whatever is in flight is brought to an end, and the region is gone."""
    threads = threading.enumerate()
    trace = synthetic_trace("chat", seed=0, num_requests=50)
    steps = 0

    def replay() -> None:
        with interrupts_held_back() as check:

            def between_steps() -> None:
                nonlocal steps
                steps += 1
                if steps == step:
                    interrupt()
                check()

            replay_trace(trace, config, between_steps=between_steps)

    config = ReplayConfig(secondary_tiers=[{"type": "example"}], shm_dir=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        replay()
    assert steps == step
    assert threading.enumerate() == threads
    assert list(tmp_path.iterdir()) == []
