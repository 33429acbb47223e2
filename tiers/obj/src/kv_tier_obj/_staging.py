"""The staging memory: slots of one object each, registered with NIXL once.

A slot has up to two holders: the coroutine that moves a block, and NIXL, from before it is told of
a request until it has let go of it. It is lent again when it has none. So a request that was given
up, and that nobody can withdraw, goes on writing into memory that is nobody else's; if it never
ends, that slot is out of use for as long.

Stores hold at most half of the slots, so that what they leave hanging keeps no load from moving.

**Who owns what.** Everything here runs on the tier's loop, except :meth:`Staging.leave`, which the
threads of the movers call when their agents are gone (``_lock`` guards what it changes), and the
addresses, which never change.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Staging"]


@final
class Staging:
    """Slots of staging memory.

    Args:
        slot_bytes: Bytes of a slot.
        slots: Number of slots, at least two.
        users: How many call :meth:`leave` before the memory is given back.

    Attributes:
        slot_bytes: Bytes of a slot.
        slots: Number of slots.
        base: Address of the first one.
    """

    def __init__(self, slot_bytes: int, slots: int, users: int = 1) -> None:
        if slots < 2:
            raise ValueError(f"a load needs a slot that no store has: {slots} slot(s) are too few")
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._users = users
        self._lock = threading.Lock()
        self._map = mmap.mmap(-1, slot_bytes * slots, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # The first use of a large block is otherwise a thousand faults.
            with suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        # A number, not an array: an array would stay an export of the mapping.
        self.base = int(np.frombuffer(self._view, np.uint8).ctypes.data)
        # The one that was used last first: the processor may still have it at hand.
        self._free = list(range(slots))
        self._holders = [0] * slots
        self._storing = [False] * slots
        self._stores = 0
        self._most_stores = slots // 2
        self._loads_waiting: deque[asyncio.Future[int]] = deque()
        self._stores_waiting: deque[asyncio.Future[int]] = deque()

    @property
    def free(self) -> int:
        """How many slots nobody holds."""
        return len(self._free)

    def view(self, slot: int) -> memoryview:
        """Return the memory of a slot. The caller releases it."""
        start = slot * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    @asynccontextmanager
    async def slot(self, *, stores: bool) -> AsyncIterator[int]:
        """Wait for a slot, loads first, and lend it."""
        slot = await self._take(stores)
        try:
            yield slot
        finally:
            self.drop(slot)

    def hold(self, slot: int) -> None:
        """Note another holder of a slot that is lent."""
        self._holders[slot] += 1

    def drop(self, slot: int) -> None:
        """Note that a holder has let go."""
        self._holders[slot] -= 1
        if self._holders[slot]:
            return
        self._free.append(slot)
        if self._storing[slot]:
            self._stores -= 1
        self._grant()

    async def _take(self, stores: bool) -> int:
        if not stores and self._free and not self._loads_waiting:
            return self._lend(stores=False)
        waiting = self._stores_waiting if stores else self._loads_waiting
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._grant()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.drop(turn.result())
            else:
                with suppress(ValueError):
                    waiting.remove(turn)
            raise

    def _grant(self) -> None:
        while self._free:
            stores = not self._loads_waiting
            waiting = self._stores_waiting if stores else self._loads_waiting
            if not waiting or (stores and self._stores >= self._most_stores):
                return
            turn = waiting.popleft()
            if turn.cancelled():
                continue
            turn.set_result(self._lend(stores=stores))

    def _lend(self, *, stores: bool) -> int:
        slot = self._free.pop()
        self._holders[slot] = 1
        self._storing[slot] = stores
        self._stores += stores
        return slot

    def leave(self) -> None:
        """Use no slot any more. The last to leave gives the memory back."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        with suppress(BufferError):
            # A view that somebody still has keeps the memory for as long.
            self._view.release()
            self._map.close()
