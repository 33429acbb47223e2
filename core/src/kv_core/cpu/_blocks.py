"""The slots of the primary tier: which are in use, and in which state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["BEING_WRITTEN", "BlockTable"]

BEING_WRITTEN: Final = -1
"""Reference count of a slot that is allocated but whose bytes are not there yet."""


@final
class BlockTable:
    """State by slot id, in flat lists: no object per block, nothing for the garbage collector.

    Slots that were never used are handed out first, in ascending order; then the ones freed
    last. The lists are public for the hot paths of the manager, which owns the table.

    Attributes:
        num_blocks: Number of slots.
        ref_counts: :data:`BEING_WRITTEN`, 0 (evictable) or the number of pins. Meaningless for
            free slots, where it is 0.
        generations: How often each slot was allocated. A slot id with its generation names one
            use of the slot, so that a late message about an earlier use is recognized.
        slot_holds: How many holds on the slot are given back by slot id rather than by key: one
            for each cascade read, one for a promotion that writes. Included in ``ref_counts``.
    """

    __slots__ = (
        "_free_list",
        "_high_water",
        "generations",
        "num_blocks",
        "ref_counts",
        "slot_holds",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.generations = [0] * num_blocks
        self.slot_holds = [0] * num_blocks
        self._high_water = 0
        self._free_list: list[int] = []

    @property
    def num_free(self) -> int:
        """Slots that can be allocated."""
        return self.num_blocks - self._high_water + len(self._free_list)

    def allocate(self, count: int) -> list[int]:
        """Take free slots; each begins a new generation and is being written.

        Args:
            count: At most :attr:`num_free`.
        """
        fresh = min(count, self.num_blocks - self._high_water)
        block_ids = list(range(self._high_water, self._high_water + fresh))
        self._high_water += fresh
        recycled = count - fresh
        if recycled:
            block_ids += self._free_list[: -recycled - 1 : -1]
            del self._free_list[-recycled:]
        ref_counts, generations = self.ref_counts, self.generations
        for block_id in block_ids:
            ref_counts[block_id] = BEING_WRITTEN
            generations[block_id] += 1
        return block_ids

    def allocate_one(self) -> int:
        """Take one free slot, as :meth:`allocate` does. There must be one."""
        block_id = self._high_water
        if block_id < self.num_blocks:
            self._high_water = block_id + 1
        else:
            block_id = self._free_list.pop()
        self.ref_counts[block_id] = BEING_WRITTEN
        self.generations[block_id] += 1
        return block_id

    def free(self, block_ids: Iterable[int]) -> None:
        """Give slots back, whatever their state."""
        free_list, ref_counts = self._free_list, self.ref_counts
        for block_id in block_ids:
            ref_counts[block_id] = 0
            free_list.append(block_id)
