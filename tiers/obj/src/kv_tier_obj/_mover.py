"""A thread that owns an agent of NIXL: it begins transfers, polls them, and tells of their ends.

There is one for loads and one for stores: NIXL serves requests in the order in which they came, and
a load would wait for all stores before it.

**Who owns what.** The agent, its handles and everything that begins with ``_`` belong to the
thread, except ``_queue``, ``_stopping`` and ``_has_room``, guarded by the lock of ``_changed``. A
:class:`Transfer` belongs to the thread from :meth:`Mover.submit` until it is in a call of
``deliver``, which comes exactly once for each.

**What NIXL does.** An agent is not thread-safe, and some of its calls keep the interpreter's lock:
with an agent that others block in, all of Python would stand still. Releasing a handle does not end
a transfer: the memory goes on being used. So a handle is released after NIXL has said that the
transfer has ended, one way or the other; its slot is free after the release has succeeded; and what
goes wrong with the release costs the slot, not the result.

A transfer is one object: of one with several, the failure of one object is the failure of all, and
does not say which. It costs nothing (1 MiB objects, 32 at a time: 422 MB/s alone and 397 MB/s
together to read, 105 and 80 MB/s to write, on the same server).
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, final

from kv_tier_obj._nixl import PLUGIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_tier_obj._nixl import Agent
    from kv_tier_obj._staging import Staging

__all__ = ["READ", "WRITE", "Mover", "Transfer", "TransferError"]

_LOGGER: Final = logging.getLogger(__name__)

READ: Final = "READ"
WRITE: Final = "WRITE"

_DONE: Final = "DONE"
_RUNNING: Final = "PROC"
_BACKENDS: Final = (PLUGIN,)
_LOCAL: Final = "NIXL_INIT_AGENT"

_SHORTEST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.004
"""Between two looks at what runs: about the time that lately passed from one end to the next. Each
look costs; NIXL has work enough meanwhile, but a job waits for the last of its blocks."""

_ENDS_A_LOOK: Final = 2
"""How many transfers are awaited between two looks, while more are to be begun than NIXL can be at
together."""

_UNSEEN_ENDS: Final = 2
"""Transfers that may have ended since the last look."""

_HANGING_AFTER_S: Final = 1.0
_HANGING_PAUSE_S: Final = 0.02
"""The same when nothing has ended for a while."""

_MORE_LOOKED_AT: Final = 4
"""Transfers behind those that NIXL can be at, of which a few are looked at each time, in turn."""

_MOST_UNRELEASED_TRIES: Final = 100
"""Attempts to release a handle, before it is given up together with its slot."""

_KEPT: Final[list[object]] = []
"""What NIXL has not let go of at the end of a tier. Only appended to."""


class TransferError(Exception):
    """NIXL could not move an object; it does not say why."""


@final
class Transfer:
    """One object to be moved between its slot and the store.

    Attributes:
        name: Name of the object.
        slot: Slot of the staging memory.
        error: What became of it, once it has been delivered; ``None``: NIXL says that it was moved.
    """

    __slots__ = ("_handle", "_names", "_side", "_tries", "error", "name", "slot")

    def __init__(self, name: str, slot: int) -> None:
        self.name = name
        self.slot = slot
        self.error: TransferError | None = None
        self._handle: Any = None
        self._names: Any = None
        self._side: Any = None
        self._tries = 0


@final
class Mover:
    """A thread with an agent of its own.

    Args:
        open_agent: Opens the agent; called on the thread.
        staging: The memory. The thread leaves it when its agent is gone.
        operation: :data:`READ` or :data:`WRITE`.
        length_bytes: How many bytes of a slot are moved, or at most.
        threads: How many transfers NIXL is at together; it takes them in order.
        deliver: Called on the thread with the transfers that have ended and the slots that NIXL has
            let go of. Must not raise.
        name: Name of the thread.

    Attributes:
        opened: Done when the agent is open; fails when it cannot be opened.
    """

    def __init__(
        self,
        open_agent: Callable[[], Agent],
        staging: Staging,
        *,
        operation: str,
        length_bytes: int,
        threads: int,
        deliver: Callable[[list[Transfer], list[int]], None],
        name: str,
    ) -> None:
        self.opened: Future[None] = Future()
        self._open_agent = open_agent
        self._staging = staging
        self._operation = operation
        self._length_bytes = length_bytes
        self._threads = threads
        self._deliver = deliver
        self._changed = threading.Condition(threading.Lock())
        self._queue: list[Transfer] = []
        self._stopping = False
        self._has_room = True
        self._agent: Agent | None = None
        self._memory: Any = None
        self._slots: Any = None
        self._turn = 0
        self._running: list[Transfer] = []
        self._unreleased: list[Transfer] = []
        self._lost: list[Transfer] = []
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    # -- any thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; it opens the agent."""
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer soon. Returns at once."""
        with self._changed:
            self._queue.append(transfer)
            if self._has_room:
                self._changed.notify()

    def stop(self) -> None:
        """Begin no further transfer, and end when those that run have ended. Returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def is_alive(self) -> bool:
        """Say whether the thread runs."""
        return self._thread.is_alive()

    # -- the thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        if not self.opened.set_running_or_notify_cancel():
            self._dispose()
            return
        try:
            self._open()
        except BaseException as error:  # noqa: BLE001 - told to whoever waits for the opening
            self._dispose()
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)
        try:
            self._serve()
        finally:
            self._dispose()

    def _open(self) -> None:
        agent = self._agent = self._open_agent()
        staging, backends = self._staging, list(_BACKENDS)
        size = staging.slot_bytes * staging.slots
        self._memory = agent.register_memory([(staging.base, size, 0, "")], "DRAM", backends)
        slots = [
            (staging.base + slot * staging.slot_bytes, self._length_bytes, 0)
            for slot in range(staging.slots)
        ]
        self._slots = agent.prep_xfer_dlist(_LOCAL, slots, "DRAM", backends)

    def _serve(self) -> None:
        pause_s, gap_s = _SHORTEST_PAUSE_S, 0.0
        ended_at = time.monotonic()
        while True:
            with self._changed:
                # What comes while NIXL has more than it can be at is begun after the next look: to
                # be woken costs as much as to begin it.
                self._has_room = len(self._running) < self._threads + _UNSEEN_ENDS
                if not self._queue and not self._stopping:
                    busy = self._running or self._unreleased
                    self._changed.wait(pause_s if busy else None)
                elif not self._queue:
                    # Only what runs is waited for now.
                    self._changed.wait(pause_s)
                taken, self._queue = self._queue, []
                stopping = self._stopping
            if taken and not self._running:
                # The time without work says nothing.
                pause_s, ended_at = _SHORTEST_PAUSE_S, time.monotonic()
            ended: list[Transfer] = []
            freed: list[int] = []
            for transfer in taken:
                if stopping:
                    transfer.error = TransferError("the tier is shut down")
                    ended.append(transfer)
                    freed.append(transfer.slot)
                else:
                    self._begin(transfer, ended, freed)
            self._poll(ended, freed)
            self._release_again(freed)
            if ended or freed:
                self._deliver(ended, freed)
                now = time.monotonic()
                gap_s += ((now - ended_at) / max(1, len(ended)) - gap_s) / 4
                ended_at = now
                # Nobody waits yet for what ends while more is to be begun.
                ends = 1 if len(self._running) <= self._threads else _ENDS_A_LOOK
                pause_s = min(max(ends * gap_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            elif time.monotonic() - ended_at > _HANGING_AFTER_S:
                pause_s = _HANGING_PAUSE_S
            if stopping and not self._running:
                return

    def _begin(self, transfer: Transfer, ended: list[Transfer], freed: list[int]) -> None:
        try:
            state = self._post(transfer)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            # Of one object only: what could not be posted does not run.
            transfer.error = _error(error)
            self._end(transfer, ended, freed)
            return
        if state == _RUNNING:
            self._running.append(transfer)
            return
        if state != _DONE:
            transfer.error = TransferError(f"NIXL answers {state}")
        self._end(transfer, ended, freed)

    def _post(self, transfer: Transfer) -> str:
        agent, slot, backends = self._open_one(), transfer.slot, list(_BACKENDS)
        length = self._length_bytes
        # NIXL finds the name of an object by its device: that of a slot is nobody else's.
        device = slot + 1
        transfer._names = agent.register_memory(
            [(0, length, device, transfer.name)], PLUGIN, backends
        )
        transfer._side = agent.prep_xfer_dlist(agent.name, [(0, length, device)], PLUGIN, backends)
        transfer._handle = agent.make_prepped_xfer(
            self._operation, self._slots, [slot], transfer._side, [0]
        )
        return agent.transfer(transfer._handle)

    def _poll(self, ended: list[Transfer], freed: list[int]) -> None:
        # A look costs as much as a small copy. What NIXL has not begun cannot have ended.
        at, behind = self._running[: self._threads], self._running[self._threads :]
        self._turn = (self._turn + _MORE_LOOKED_AT) % max(1, len(behind))
        over: set[Transfer] = set()
        for transfer in at + behind[self._turn : self._turn + _MORE_LOOKED_AT]:
            try:
                state = self._open_one().check_xfer_state(transfer._handle)
            except Exception as error:  # noqa: BLE001 - how NIXL tells that a transfer failed
                transfer.error = _error(error)
            else:
                if state == _RUNNING:
                    continue
                if state != _DONE:
                    transfer.error = TransferError(f"NIXL answers {state}")
            over.add(transfer)
            self._end(transfer, ended, freed)
        if over:
            self._running = [transfer for transfer in self._running if transfer not in over]

    def _end(self, transfer: Transfer, ended: list[Transfer], freed: list[int]) -> None:
        ended.append(transfer)
        if self._release(transfer):
            freed.append(transfer.slot)
        else:
            self._unreleased.append(transfer)

    def _release(self, transfer: Transfer) -> bool:
        """Give back what a transfer has of NIXL; ``False``: something is left."""
        agent, backends = self._open_one(), list(_BACKENDS)
        transfer._tries += 1
        try:
            if transfer._handle is not None:
                agent.release_xfer_handle(transfer._handle)
                transfer._handle = None
            if transfer._side is not None:
                agent.release_dlist_handle(transfer._side)
                transfer._side = None
            if transfer._names is not None:
                agent.deregister_memory(transfer._names, backends)
                transfer._names = None
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            if transfer._tries == 1:
                _LOGGER.warning(
                    "NIXL does not let go of the transfer of %s (%s); its staging memory stays out "
                    "of use until it does",
                    transfer.name,
                    type(error).__name__,
                )
            return False
        return True

    def _release_again(self, freed: list[int]) -> None:
        unreleased = []
        for transfer in self._unreleased:
            if self._release(transfer):
                freed.append(transfer.slot)
            elif transfer._tries < _MOST_UNRELEASED_TRIES:
                unreleased.append(transfer)
            else:
                self._lost.append(transfer)
        self._unreleased = unreleased

    def _dispose(self) -> None:
        """Give everything back; on this thread, because the end of an agent waits for its own."""
        agent, self._agent = self._agent, None
        if self._slots is not None:
            _contain(agent, "release_dlist_handle", self._slots)
        if self._memory is not None:
            _contain(agent, "deregister_memory", self._memory, list(_BACKENDS))
        self._slots = self._memory = None
        if self._unreleased or self._lost:
            # NIXL may still use the memory, which is unmapped when nobody refers to it any more.
            _KEPT.append((agent, self._staging, self._unreleased, self._lost))
            return
        del agent
        self._staging.leave()

    def _open_one(self) -> Agent:
        if self._agent is None:
            raise AssertionError("transfers are moved between the opening and the end")
        return self._agent


def _contain(agent: Agent | None, method: str, *arguments: Any) -> None:
    try:
        getattr(agent, method)(*arguments)
    except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
        _LOGGER.warning("NIXL: %s failed at the end (%s)", method, type(error).__name__)


def _error(error: Exception) -> TransferError:
    # The text of NIXL's errors is the name of a status.
    return TransferError(f"{type(error).__name__}: {error}")
