"""The tier itself.

**Who owns what.** Pool threads call the block functions, the engine's thread calls ``touch``,
``delete``, ``usage`` and, without ``simulate_async``, ``exists``. ``_lock`` guards ``_blocks``
and orders the events; bytes are copied outside of it, so nobody ever waits for a copy.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, final

from typing_extensions import override

from kv_core.contract import TierUsage
from kv_core.errors import BlockDamagedError, BlockMissingError
from kv_core.tierkit import ThreadedTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.contract import OffloadKey, ReqContext
    from kv_tier_example._config import ExampleConfig

__all__ = ["ExampleTier"]


@final
class ExampleTier(ThreadedTier):
    """Blocks in a dictionary, least recently used first."""

    emits_events = True
    config: ExampleConfig

    @override
    def open(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[OffloadKey, bytes] = OrderedDict()
        self.answers_at_once = not self.config.simulate_async

    @override
    def close(self) -> None:
        self._blocks.clear()

    # The three functions every tier writes, and the one for objects that turn out bad.

    @override
    def exists(self, key: OffloadKey) -> bool:
        with self._lock:
            return key in self._blocks

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                raise BlockMissingError(f"no block {key.hex()} in memory: it was evicted")
            self._blocks.move_to_end(key)
        # Evicting the block meanwhile is harmless: this reference keeps its bytes alive.
        if len(block) != len(buffer):
            raise BlockDamagedError(
                f"block {key.hex()} has {len(block)} bytes, expected {len(buffer)}"
            )
        buffer[:] = block

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> None:
        block = bytes(data)
        with self._lock:
            if key in self._blocks:
                self._blocks[key] = block
                self._blocks.move_to_end(key)
                return
            while len(self._blocks) >= self.config.max_blocks:
                self._drop(next(iter(self._blocks)))
            self._blocks[key] = block
            self.note_stored(key)

    @override
    def retire(self, key: OffloadKey) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: OffloadKey) -> None:
        if self._blocks.pop(key, None) is not None:
            self.note_removed(key)

    # What the declared capabilities promise: TOUCH, DELETE and USAGE.

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.check_process()
        with self._lock:
            # Last key first, so that a prefix is evicted from its tail.
            for key in reversed(keys):
                if key in self._blocks:
                    self._blocks.move_to_end(key)

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        self.check_process()
        with self._lock:
            for key in keys:
                self._drop(key)

    @override
    def usage(self) -> TierUsage:
        self.check_process()
        with self._lock:
            blocks = len(self._blocks)
        return TierUsage(
            blocks=blocks,
            bytes=blocks * self.context.block_bytes,
            capacity_blocks=self.config.max_blocks,
        )
