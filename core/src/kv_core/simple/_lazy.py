"""Finds the blocks that the GPU is about to evict."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kv_core.keys import OffloadKey
    from kv_core.simple._protocol import GpuBlockPoolView

__all__ = ["FreeQueueCursor"]


@final
class FreeQueueCursor:
    """Walks the GPU's free queue from its head, as far as blocks are close to eviction.

    Blocks before the cursor need nothing: they hold nothing that has a name, or CPU memory has
    it. They are counted, so that a step looks only at as many new ones as left the head of the
    queue. Blocks that are being stored have left the queue for the time, and return to its head;
    they are of no use to the next step, so the slower copies are, the further ahead of eviction
    blocks are taken.
    """

    def __init__(self, pool: GpuBlockPoolView, target_free: int) -> None:
        """Start at the head.

        Args:
            pool: The pool with the queue.
            target_free: Blocks at the head of the queue that ought to need nothing.
        """
        self._pool = pool
        self._target_free = target_free
        self._cursor: int | None = None
        self._ready: set[int] = set()
        self._being_stored: set[int] = set()

    @property
    def num_being_stored(self) -> int:
        """Blocks taken whose store has not ended."""
        return len(self._being_stored)

    @property
    def position(self) -> int | None:
        """The last block of the queue that was looked at; ``None`` before its head."""
        return self._cursor

    def note_used(self, block_ids: Collection[int]) -> None:
        """Take note of blocks that got a user: they may be in the queue again, at its end."""
        self._ready.difference_update(block_ids)
        if self._cursor is not None and self._cursor in block_ids:
            self.restart()

    def take(self, limit: int, wants: Callable[[OffloadKey], bool]) -> list[tuple[int, OffloadKey]]:
        """Go on to blocks that ought to be stored.

        Args:
            limit: Most blocks to return. The cursor stays before what would be one more.
            wants: Says whether a block is to be stored, given what it holds.

        Returns:
            Blocks with their keys, in the order in which they would be evicted. The caller
            acquires them, and reports the end of their store by :meth:`stored`.
        """
        pool = self._pool
        if self._cursor is not None and not pool.is_free(self._cursor):
            self.restart()
        taken: list[tuple[int, OffloadKey]] = []
        last = self._cursor
        while len(self._ready) + len(taken) < self._target_free:
            block_id = pool.first_free() if last is None else pool.next_free(last)
            if block_id is None:
                break
            key = pool.block_key(block_id)
            if key is not None and wants(key):
                if len(taken) >= limit:
                    break
                taken.append((block_id, key))
                self._being_stored.add(block_id)
            else:
                self._ready.add(block_id)
                self._cursor = block_id
            last = block_id
        return taken

    def stored(self, block_ids: Collection[int]) -> None:
        """Take note of stores that ended, before their blocks are released."""
        self._being_stored.difference_update(block_ids)

    def returned(self, block_ids: Collection[int]) -> None:
        """Take note of stored blocks that were released, to the head of the queue."""
        if self._cursor is not None:
            # Not those that were found by a request, and used, while they were being stored.
            self._ready.update(block_id for block_id in block_ids if self._pool.is_free(block_id))

    def restart(self) -> None:
        """Begin at the head again: what is known of the blocks before the cursor is void."""
        self._cursor = None
        self._ready.clear()
