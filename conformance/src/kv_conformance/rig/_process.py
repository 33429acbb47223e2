"""What a process owns: threads, child processes and descriptors, as the kernel counts them.

``threading`` knows the threads of Python only, so Linux' ``/proc`` is asked; elsewhere the answer
is what Python knows, and no descriptors.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Footprint",
    "adopt_orphans",
    "child_processes",
    "command_lines",
    "failing_thread",
    "few_descriptors",
]

_TASKS: Final = Path("/proc/self/task")
_DESCRIPTORS: Final = Path("/proc/self/fd")
_PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Become the parent of whatever a child leaves behind: it can be seen, and ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def child_processes() -> frozenset[int]:
    """Return the ids of all children, zombies included. Empty where there is no ``/proc``."""
    found: set[int] = set()
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError):
                found.update(map(int, (task / "children").read_text().split()))
    return frozenset(found)


def command_lines() -> list[str]:
    """Return the command lines of all children."""
    found = []
    for pid in child_processes():
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            found.append(line.replace(chr(0), " "))
    return found


@final
@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process owns at one moment. Two of them tell what came.

    Attributes:
        items: One text for each thread, process and descriptor, unique while it lives.
    """

    items: frozenset[str]

    @classmethod
    def now(cls) -> Footprint:
        """Return what is there now; what is merely not collected yet does not count."""
        gc.collect()
        return cls(frozenset((*_threads(), *_processes(), *_descriptors())))

    def since(self, before: Footprint) -> Footprint:
        """Return what is here and was not there before."""
        return Footprint(self.items - before.items)

    def still_there(self) -> frozenset[str]:
        """Return what has not ended yet."""
        return self.items & Footprint.now().items if self.items else self.items


def _threads() -> Iterator[str]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    native_ids = {*names}
    with suppress(OSError):
        native_ids = {int(task.name) for task in _TASKS.iterdir()}
    for native_id in native_ids - {None}:
        name = names.get(native_id)
        if name is None:
            name = "outside of Python"
            with suppress(OSError):
                name = (
                    f"outside of Python, {(_TASKS / str(native_id) / 'comm').read_text().strip()}"
                )
        yield f"thread {native_id} ({name})"


def _processes() -> Iterator[str]:
    for pid in child_processes():
        command = ""
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        # Nothing more than the program: arguments may hold secrets.
        yield f"process {pid} ({command.partition(chr(0))[0] or 'ended, but not waited for'})"


def _descriptors() -> Iterator[str]:
    try:
        entries = list(_DESCRIPTORS.iterdir())
    except OSError:
        return
    for entry in entries:
        # One of them is the listing itself.
        with suppress(OSError):
            yield f"descriptor {entry.name} ({entry.readlink()})"


# -- scarcity -------------------------------------------------------------------------------


@contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """Let this process open so many descriptors more, and then no other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The kernel hands out the lowest free number: the limit is the first one too many.
    with ExitStack() as stack:
        for _ in range(count + 1):
            limit = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@final
class _Countdown:
    def __init__(self, number: int) -> None:
        self.remaining = number

    @property
    def was_hit(self) -> bool:
        """Whether the start that fails has come."""
        return self.remaining <= 0


@contextmanager
def failing_thread(number: int) -> Iterator[_Countdown]:
    """Let the ``number``-th thread that is started fail to start, as at a limit of threads.

    Starts by the calling thread do not count: on it runs the suite, and the engine's code that
    gives a constructor a thread of its own.
    """
    caller, start = threading.current_thread(), threading.Thread.start
    countdown = _Countdown(number)

    def counted_start(self: threading.Thread) -> None:
        if threading.current_thread() is not caller:
            countdown.remaining -= 1
            if countdown.remaining == 0:
                raise RuntimeError("can't start new thread")
        start(self)

    threading.Thread.start = counted_start  # type: ignore[method-assign]
    try:
        yield countdown
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
