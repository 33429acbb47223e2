"""Watches the calls of a tier for what would make the calling thread wait.

Two instruments, because neither sees everything. An audit hook sees files, sockets and processes
being opened on the calling thread, but neither ``stat`` nor a wait for a lock. The time that a call
takes minus the time for which its thread had a processor is the time it waited, whatever for; but
a busy machine makes threads wait, too, so the median of many calls counts, and only when it is far
above what scheduling costs.

**Who owns what.** The suite's thread owns everything but ``_began``, which it replaces and the
rescuer reads, and ``_hung``, which the rescuer fills before it ends the fault and the suite's
thread reads afterwards.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast, final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from kv_conformance.rig._rig import Rig
    from kv_core.contract import SecondaryTierManager

__all__ = ["CallFinding", "CallWatch", "watch_calls"]

# Beginnings of the names of audit events that mean a system call which may take long. Not among
# them: what the interpreter says of itself (import, compile, object.*, sys.*, code.*), starts of
# threads, and short system calls on the process itself.
_BLOCKING_EVENTS: Final = (
    "fcntl.",
    "ftplib.",
    "glob.",
    "http.client.",
    "mmap.",
    "open",
    "os.",
    "shutil.",
    "socket.",
    "sqlite3.",
    "subprocess.",
    "tempfile.",
    "time.sleep",
    "urllib.",
)
_HARMLESS_EVENTS: Final = frozenset(
    {"os.putenv", "os.unsetenv", "socket.__new__", "socket.gethostname"}
)

# A median above this is no scheduling: a call that is not made to wait is over in microseconds,
# so that most calls are over before anything else gets the processor.
_WAITING_S: Final = 0.01

# A call that takes longer while the storage is stalled will not end by itself.
_HANGING_S: Final = 5.0

# Once is a lazy import or the start of something; what a method does each time, it does twice.
_TWICE: Final = 2

# Measurements of time that must agree before they are held against a tier.
_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class CallFinding:
    """A method that makes its caller wait.

    Attributes:
        method: Its name.
        message: What was seen.
        is_certain: ``False`` for a measurement of time, which should be made again before it
            is held against the tier.
    """

    method: str
    message: str
    is_certain: bool


# -- the audit hook: it cannot be removed, so there is one for the process, with a switch ----------


@final
class _Ear:
    """What the hook reports to while a watched call runs.

    Attributes:
        thread: The thread whose events count; 0 for none.
        events: Events of the running call.
    """

    __slots__ = ("events", "is_installed", "thread")

    def __init__(self) -> None:
        self.thread = 0
        self.events: list[str] = []
        self.is_installed = False

    def install(self) -> None:
        if not self.is_installed:
            self.is_installed = True
            sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if (
            self.thread
            and threading.get_ident() == self.thread
            and event.startswith(_BLOCKING_EVENTS)
            and event not in _HARMLESS_EVENTS
        ):
            # An event such as open tells most by its first argument.
            subject = repr(args[0])[:80] if args else ""
            self.events.append(f"{event}({subject})")


_EAR: Final = _Ear()


# -- the watch -----------------------------------------------------------------------------------


@final
class _Watched:
    """Stands in for a tier and measures each call."""

    def __init__(self, tier: SecondaryTierManager, watch: CallWatch) -> None:
        self._tier = tier
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._tier, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any) -> Any:
            return self._watch.measure(name, attribute, args)

        return call


@final
class CallWatch:
    """Measures every call of a rig's tier while it is entered.

    A call that hangs in a stalled storage is rescued: the fault is healed on another thread, and
    the method is noted.

    Args:
        rig: The rig. Its tier is replaced by a stand-in meanwhile.
        hanging_s: Seconds after which a call is rescued, before scaling.
    """

    def __init__(self, rig: Rig, *, hanging_s: float = _HANGING_S) -> None:
        self._rig = rig
        self._tier = rig.tier
        self._hanging_s = hanging_s * rig.budget.scale
        self._waits: dict[str, list[float]] = {}
        self._events: dict[str, Counter[str]] = {}
        self._examples: dict[tuple[str, str], str] = {}
        self._began: tuple[str, float] | None = None
        self._hung: list[str] = []
        self._over = threading.Event()
        self._rescuer = threading.Thread(target=self._rescue, name="rescuer", daemon=True)

    def __enter__(self) -> Self:
        _EAR.install()
        self._rig.tier = cast("SecondaryTierManager", _Watched(self._tier, self))
        self._rescuer.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._rig.tier = self._tier
        self._over.set()
        self._rescuer.join()

    def measure(self, name: str, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a method and note what it did and how long it waited."""
        _EAR.events = []
        self._began = (name, time.monotonic())
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        _EAR.thread = threading.get_ident()
        try:
            return method(*args)
        finally:
            _EAR.thread = 0
            waited_s = (time.perf_counter() - wall_s) - (time.thread_time() - cpu_s)
            self._began = None
            self._waits.setdefault(name, []).append(waited_s)
            heard = {event.partition("(")[0]: event for event in _EAR.events}
            self._events.setdefault(name, Counter()).update(heard.keys())
            for event, example in heard.items():
                self._examples.setdefault((name, event), example)

    def _rescue(self) -> None:
        """On the rescuer's thread: end the fault when a call does not come back."""
        while not self._over.wait(0.05):
            began = self._began
            if began is not None and time.monotonic() - began[1] > self._hanging_s:
                self._hung.append(began[0])
                self._rig.heal()
                return

    # -- what was seen --------------------------------------------------------------------------

    @property
    def hung(self) -> tuple[str, ...]:
        """Methods that had to be rescued."""
        return tuple(self._hung)

    def findings(self) -> list[CallFinding]:
        """Return the methods that make their caller wait."""
        found = [
            CallFinding(
                name,
                f"{name} did not return within {self._hanging_s:g} s while the storage was stalled",
                is_certain=True,
            )
            for name in self._hung
        ]
        for name, counts in self._events.items():
            found += [
                CallFinding(
                    name,
                    f"{name} did {self._examples[name, event]} on the calling thread, in {count} "
                    f"of {len(self._waits[name])} calls",
                    is_certain=True,
                )
                for event, count in counts.items()
                if count >= _TWICE
            ]
        for name, waits in self._waits.items():
            if (median_s := statistics.median(waits)) > _WAITING_S and name not in self._hung:
                found.append(
                    CallFinding(
                        name,
                        f"{name} waited for {median_s * 1000:.0f} ms, in the median of "
                        f"{len(waits)} calls",
                        is_certain=False,
                    )
                )
        return found


def watch_calls(rig: Rig, exercise: Callable[[], None]) -> list[CallFinding]:
    """Watch the calls that an exercise makes, again and again where time alone speaks against one.

    Args:
        rig: The rig that the exercise uses.
        exercise: Makes several calls of each method of interest.

    Returns:
        Methods that make their caller wait; a suspicion must have been confirmed each time.
    """
    suspects: set[str] | None = None
    for _ in range(_ROUNDS):
        with CallWatch(rig) as watch:
            exercise()
        found = watch.findings()
        if any(finding.is_certain for finding in found):
            return [finding for finding in found if finding.is_certain]
        slow = {finding.method for finding in found}
        suspects = slow if suspects is None else suspects & slow
        if not suspects:
            return []
    return [finding for finding in found if finding.method in (suspects or ())]
