"""A client that never waits: what cannot be done now is refused with BlockingIOError.

The model of a client library with non-blocking calls. No thread; belongs to its caller's.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, final

from kv_conformance.harness import Fault

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey

__all__ = ["DictStore"]


@final
class DictStore:
    """Objects in a dictionary.

    Every operation raises BlockingIOError while the store is stalled: it has not begun, and may be
    tried again. While the store fails every operation raises OSError, while it is full those that
    write do.

    Attributes:
        objects: What is stored, for the harness.
        fault: What is wrong with the store, set by the harness.
    """

    def __init__(self) -> None:
        self.objects: dict[OffloadKey, bytes] = {}
        self.fault: Fault | None = None

    def _enter(self, *, writing: bool = False) -> None:
        if self.fault is Fault.STALL:
            raise BlockingIOError(errno.EAGAIN, "the store does not answer now")
        if self.fault is Fault.ERROR:
            raise OSError(errno.EIO, "the store fails")
        if self.fault is Fault.FULL and writing:
            raise OSError(errno.ENOSPC, "the store is full")

    def exists(self, key: OffloadKey) -> bool:
        """Say whether there is an object."""
        self._enter()
        return key in self.objects

    def put(self, key: OffloadKey, data: memoryview) -> None:
        """Copy an object into the store, in place of an older one."""
        self._enter(writing=True)
        self.objects[key] = bytes(data)

    def get(self, key: OffloadKey) -> bytes | None:
        """Return an object, or ``None`` when there is none."""
        self._enter()
        return self.objects.get(key)

    def remove(self, key: OffloadKey) -> None:
        """Remove an object. Removing none is fine."""
        self._enter(writing=True)
        self.objects.pop(key, None)
