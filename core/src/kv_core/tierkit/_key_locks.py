"""One lock per key that is in use, for as long as it is in use.

**Who owns what.** ``_mutex`` guards the table and is held for a few instructions. The lock of a
key is held by the pool thread that stores or retires that key, across its I/O.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey

__all__ = ["KeyLocks"]


@final
class _KeyLock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


@final
class KeyLocks:
    """Mutual exclusion per key. Pool threads only: a holder may be inside I/O."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._locks: dict[OffloadKey, _KeyLock] = {}

    def acquire(self, key: OffloadKey, timeout_s: float) -> bool:
        """Take the lock of a key, waiting at most ``timeout_s`` seconds. Not reentrant."""
        with self._mutex:
            entry = self._locks.get(key)
            if entry is None:
                entry = self._locks[key] = _KeyLock()
            entry.users += 1
        if entry.lock.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
            return True
        self._leave(key, entry)
        return False

    def release(self, key: OffloadKey) -> None:
        """Give the lock of a key back."""
        entry = self._locks[key]
        entry.lock.release()
        self._leave(key, entry)

    def _leave(self, key: OffloadKey, entry: _KeyLock) -> None:
        with self._mutex:
            entry.users -= 1
            if not entry.users:
                del self._locks[key]
