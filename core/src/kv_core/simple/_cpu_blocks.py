"""Blocks of CPU memory: which hold what, who uses them, and which go next."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, final

from kv_core.contract import OffloadingEvent
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from kv_core.keys import OffloadKey

__all__ = ["CpuBlockPool"]


@final
class CpuBlockPool:
    """The prefix map of CPU memory, with least recently used eviction.

    A block is free, being stored (known, but not to be found), or readable; a readable one is
    pinned or may be evicted. :meth:`clear` takes the keys of all blocks away; those that a
    transfer uses are free when it has ended. All calls come from the scheduler's thread.

    Attributes:
        num_blocks: Number of blocks.
        num_evicted: Blocks evicted so far.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_freed: Callable[[int], None] | None = None,
        record_events: bool = False,
    ) -> None:
        """Start empty.

        Args:
            num_blocks: Number of blocks.
            block_freed: Told of every block whose content is given up, at once.
            record_events: Whether :meth:`take_events` returns anything.
        """
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._block_freed = block_freed
        self._record_events = record_events
        self._free = list(range(num_blocks - 1, -1, -1))
        self._pins = [0] * num_blocks
        self._key_by_block: dict[int, OffloadKey] = {}
        self._readable: dict[OffloadKey, int] = {}
        self._being_stored: dict[OffloadKey, int] = {}
        # Those that lost their keys meanwhile are among them.
        self._num_being_stored = 0
        # Readable blocks without pins, cold end first.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._events: list[OffloadingEvent] = []

    @property
    def num_available(self) -> int:
        """Blocks that can be reserved: free ones and those that may be evicted."""
        return len(self._free) + len(self._evictable)

    @property
    def num_readable(self) -> int:
        """Blocks that lookups find."""
        return len(self._readable)

    @property
    def num_pinned(self) -> int:
        """Blocks that somebody holds to read them."""
        return self.num_blocks - self.num_available - self._num_being_stored

    def find(self, key: OffloadKey) -> int | None:
        """Return the block that holds a key and can be read."""
        return self._readable.get(key)

    def is_known(self, key: OffloadKey) -> bool:
        """Say whether a key is readable or being stored: there is no need to store it."""
        return key in self._readable or key in self._being_stored

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note a use of readable keys, in prefix order: the first outlives the last."""
        for key in reversed(keys):
            block_id = self._readable.get(key)
            if block_id is not None and block_id in self._evictable:
                self._evictable.move_to_end(block_id)

    def pin(self, block_ids: Iterable[int]) -> None:
        """Keep readable blocks from being evicted, until :meth:`unpin`, once for each pin."""
        for block_id in block_ids:
            self._pins[block_id] += 1
            self._evictable.pop(block_id, None)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Take one pin from each block, given in prefix order. A use as well.

        Raises:
            EngineStateError: A block has no pin.
        """
        for block_id in reversed(block_ids):
            if self._pins[block_id] <= 0:
                raise EngineStateError(f"CPU block {block_id} is not pinned")
            self._pins[block_id] -= 1
            if self._pins[block_id] == 0:
                if block_id in self._key_by_block:
                    self._evictable[block_id] = None
                else:
                    self._give_up(block_id)

    def reserve(
        self, keys: Sequence[OffloadKey], protected: AbstractSet[OffloadKey] = frozenset()
    ) -> list[int]:
        """Take blocks for keys that are to be stored, evicting others for them.

        Args:
            keys: Distinct keys that are not known.
            protected: Keys that are not evicted for these: the prefix that they continue, which
                counts as used.

        Returns:
            A block for each of the first keys, as many as there is room for.
        """
        self._evict(len(keys) - len(self._free), protected)
        block_ids = []
        for key in keys[: len(self._free)]:
            block_id = self._free.pop()
            self._being_stored[key] = block_id
            self._key_by_block[block_id] = key
            block_ids.append(block_id)
        self._num_being_stored += len(block_ids)
        return block_ids

    def _evict(self, count: int, protected: AbstractSet[OffloadKey]) -> None:
        """Free so many blocks, or as many as may go."""
        removed: list[OffloadKey] = []
        spared: list[int] = []
        while self._evictable and len(removed) < count:
            block_id, _ = self._evictable.popitem(last=False)
            key = self._key_by_block[block_id]
            if key in protected:
                spared.append(block_id)
                continue
            del self._readable[key]
            removed.append(key)
            self._give_up(block_id)
        # To the recent end, or the next eviction would have to pass them again.
        self._evictable.update(dict.fromkeys(spared))
        if removed:
            self.num_evicted += len(removed)
            self._note(removed, removed=True)

    def publish(self, block_ids: Sequence[int]) -> None:
        """Make blocks readable whose store has ended, given in prefix order."""
        self._num_being_stored -= len(block_ids)
        keys = []
        for block_id in block_ids:
            key = self._key_by_block.get(block_id)
            if key is None:
                self._give_up(block_id)
                continue
            self._readable[key] = self._being_stored.pop(key)
            self._evictable[block_id] = None
            keys.append(key)
        if not keys:
            return
        self.touch(keys)
        self._note(keys, removed=False)

    def discard(self, block_ids: Sequence[int]) -> None:
        """Free blocks whose store has failed."""
        self._num_being_stored -= len(block_ids)
        for block_id in block_ids:
            key = self._key_by_block.get(block_id)
            if key is not None:
                del self._being_stored[key]
            self._give_up(block_id)

    def clear(self) -> None:
        """Forget what every block holds. Those that are read or written are free afterwards."""
        removed = tuple(self._readable)
        self._readable.clear()
        self._being_stored.clear()
        self._key_by_block.clear()
        evictable = tuple(self._evictable)
        self._evictable.clear()
        for block_id in evictable:
            self._give_up(block_id)
        if removed:
            self._note(removed, removed=True)

    def _give_up(self, block_id: int) -> None:
        self._key_by_block.pop(block_id, None)
        self._free.append(block_id)
        if self._block_freed is not None:
            self._block_freed(block_id)

    def _note(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        if self._record_events:
            self._events.append(OffloadingEvent(tuple(keys), "CPU", removed))

    def get_stats(self) -> dict[str, float]:
        """Return the state of the blocks; free, evictable, pinned and writing ones are all."""
        return {
            "blocks_total": self.num_blocks,
            "blocks_free": len(self._free),
            "blocks_cached": len(self._readable),
            "blocks_evictable": len(self._evictable),
            "blocks_pinned": self.num_pinned,
            "blocks_writing": self._num_being_stored,
            "blocks_evicted": self.num_evicted,
        }

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
