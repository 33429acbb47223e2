"""The storage: the part that a real tier takes from somebody else's client library.

It knows nothing of tiers, and the tier reaches its blocks through these methods only. That is
what lets the conformance suite put a layer between the two that stalls and fails.
"""

from __future__ import annotations

from typing import final

__all__ = ["MemoryStore"]


@final
class MemoryStore:
    """Objects by name, in a dictionary. Every method is one step of it, and so thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[bytes, bytes] = {}

    def contains(self, name: bytes) -> bool:
        """Say whether there is an object of this name."""
        return name in self._objects

    def get(self, name: bytes) -> bytes | None:
        """Return an object, or ``None`` if there is none."""
        return self._objects.get(name)

    def put(self, name: bytes, content: bytes) -> None:
        """Write an object, all of it or nothing, over an older one if need be."""
        self._objects[name] = content

    def remove(self, name: bytes) -> bool:
        """Remove an object; say whether there was one."""
        return self._objects.pop(name, None) is not None

    def names(self) -> list[bytes]:
        """Return the names of all objects."""
        return list(self._objects)
