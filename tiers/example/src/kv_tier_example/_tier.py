"""The tier itself: an index of what is stored, and a store that may be slow.

**Who owns what.** Pool threads call the block functions and the sweeper's one thread removes what
was deleted; only they reach the store. The engine's thread calls ``touch``, ``delete``, ``usage``
and, without ``simulate_async``, ``exists``; it never waits for the store. ``_lock`` guards the
index and orders the events, and is held for a few instructions. ``_changing`` is held by whoever
changes the store, however long that takes, so the engine's thread never takes it.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, final

from typing_extensions import override

from kv_core.contract import TierUsage
from kv_core.errors import BlockDamagedError, BlockDeclinedError, BlockMissingError
from kv_core.tierkit import ThreadedTier
from kv_tier_example._store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.contract import OffloadKey, ReqContext
    from kv_tier_example._config import ExampleConfig

__all__ = ["ExampleTier"]


@final
class ExampleTier(ThreadedTier):
    """Blocks in a store that holds a limited number of them, least recently used first.

    Attributes:
        store: Where the blocks are.
    """

    emits_events = True
    config: ExampleConfig
    store: MemoryStore

    @override
    def open(self) -> None:
        self.store = MemoryStore()
        self.answers_at_once = not self.config.simulate_async
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        # What is there, least recently used first. A set that remembers an order.
        self._index: OrderedDict[OffloadKey, None] = OrderedDict()
        self._readers: Counter[OffloadKey] = Counter()
        # What is still in the store and must not be found any more.
        self._deleted: set[OffloadKey] = set()
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="kv-example-sweeper")

    @override
    def close(self) -> None:
        self._sweeper.shutdown()

    # The three functions every tier writes, and the one for objects that turn out bad.

    @override
    def exists(self, key: OffloadKey) -> bool:
        with self._lock:
            if key not in self._index:
                return False
        return self.answers_at_once or self.store.contains(key)

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        with self._lock:
            if key not in self._index:
                raise BlockMissingError(f"no block {key.hex()} in memory: it was evicted")
            self._index.move_to_end(key)
            self._readers[key] += 1
        try:
            block = self.store.get(key)
        finally:
            with self._lock:
                self._readers[key] -= 1
                if not self._readers[key]:
                    del self._readers[key]
        if block is None:
            raise BlockMissingError(f"no block {key.hex()} in memory, though there should be")
        if len(block) != len(buffer):
            raise BlockDamagedError(
                f"block {key.hex()} has {len(block)} bytes, expected {len(buffer)}"
            )
        buffer[:] = block

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> None:
        block = bytes(data)
        with self._changing:
            self._sweep()
            self._make_room(key)
            self.store.put(key, block)
            with self._lock:
                if key not in self._index:
                    self.note_stored(key)
                self._index[key] = None
                self._index.move_to_end(key)

    @override
    def retire(self, key: OffloadKey) -> None:
        with self._changing:
            self._remove(key)

    # What changes the store, with `_changing` held.

    def _make_room(self, key: OffloadKey) -> None:
        """Evict until a block fits that is not there yet."""
        while True:
            with self._lock:
                if key in self._index or len(self._index) < self.config.max_blocks:
                    return
                victim = next((old for old in self._index if old not in self._readers), None)
            if victim is None:
                raise BlockDeclinedError("every block is being read")
            self._remove(victim)

    def _remove(self, key: OffloadKey) -> None:
        # From the store first: if that fails, the index still says what is there.
        self.store.remove(key)
        with self._lock:
            self._forget(key)

    def _sweep(self) -> None:
        """Remove what was deleted."""
        with self._lock:
            deleted = list(self._deleted)
        for key in deleted:
            self.store.remove(key)
            with self._lock:
                self._deleted.discard(key)

    # What the declared capabilities promise: TOUCH, DELETE and USAGE.

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.check_process()
        with self._lock:
            # Last key first, so that a prefix is evicted from its tail.
            for key in reversed(keys):
                if key in self._index:
                    self._index.move_to_end(key)

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        self.check_process()
        with self._lock:
            self._deleted.update(key for key in keys if self._forget(key))
        self._sweeper.submit(self._sweep_later)

    def _forget(self, key: OffloadKey) -> bool:
        """Drop a key from the index, with `_lock` held; say whether it was there."""
        if key not in self._index:
            return False
        del self._index[key]
        self.note_removed(key)
        return True

    def _sweep_later(self) -> None:
        # When it fails, the next store tries again.
        with self._changing:
            self._sweep()

    @override
    def usage(self) -> TierUsage:
        self.check_process()
        with self._lock:
            blocks = len(self._index)
        return TierUsage(
            blocks=blocks,
            bytes=blocks * self.context.block_bytes,
            capacity_blocks=self.config.max_blocks,
        )
