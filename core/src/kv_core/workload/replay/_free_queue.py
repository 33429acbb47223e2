"""The free blocks of a pool, in the order in which they are handed out."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["FreeQueue"]


@final
class FreeQueue:
    """Block ids in a doubly linked list: both ends, and any place within, at constant cost.

    Block 0 is no member. It closes the list to a ring, before the head and behind the end.
    """

    def __init__(self, num_blocks: int) -> None:
        """Queue the blocks from 1 to ``num_blocks - 1``."""
        last = num_blocks - 1
        self._next: list[int] = [*range(1, num_blocks), 0]
        self._previous = [last, *range(last)]
        self._is_member = [False] + [True] * last
        self._length = last

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block_id: int) -> bool:
        return self._is_member[block_id]

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[0]
        while block_id:
            yield block_id
            block_id = self._next[block_id]

    def first(self) -> int | None:
        """Return the head; ``None`` when the queue is empty."""
        return self._next[0] or None

    def after(self, block_id: int) -> int | None:
        """Return the block behind a member; ``None`` behind the last."""
        return self._next[block_id] or None

    def append(self, block_id: int) -> None:
        """Add a block that is no member at the end."""
        self._insert(block_id, before=0)

    def extend_front(self, block_ids: Iterable[int]) -> None:
        """Add blocks that are no members before the head, in the given order."""
        head = self._next[0]
        for block_id in block_ids:
            self._insert(block_id, before=head)

    def _insert(self, block_id: int, *, before: int) -> None:
        previous = self._previous[before]
        self._previous[block_id], self._next[block_id] = previous, before
        self._next[previous] = self._previous[before] = block_id
        self._is_member[block_id] = True
        self._length += 1

    def pop(self) -> int:
        """Take the head of a queue that is not empty."""
        block_id = self._next[0]
        self.remove(block_id)
        return block_id

    def remove(self, block_id: int) -> None:
        """Take a member out, wherever it is."""
        previous, following = self._previous[block_id], self._next[block_id]
        self._next[previous], self._previous[following] = following, previous
        self._is_member[block_id] = False
        self._length -= 1
