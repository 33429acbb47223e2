"""The folder tier: correct, with every seam at which a mutant can break it.

**Who owns what.** Pool threads call the block functions; the engine's thread calls ``touch``,
``delete`` and ``usage``, which do no I/O. ``_lock`` guards the dictionaries. The one thread of
``_sweeper`` removes deleted objects.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path  # noqa: TC003 - pydantic evaluates the annotation
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, SecretStr
from typing_extensions import override

from kv_conformance.reference._folder_store import FolderStore
from kv_core.contract import TierUsage
from kv_core.tierkit import ThreadedTier, TierKitConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_core.contract import OffloadKey, ReqContext

__all__ = ["FolderConfig", "FolderTier"]


class FolderConfig(TierKitConfig):
    """Settings of the folder tier."""

    root_dir: Path
    """Folder of the blocks."""
    capacity_blocks: int = Field(default=1_000_000, ge=1)
    """Most blocks of a namespace, over all processes; the least recently used goes first."""
    password: SecretStr = SecretStr("")
    """Of no use: a secret that must not be seen."""
    gate: str = ""
    """Name of the gate in front of the client, for the suite."""


class FolderTier(ThreadedTier):
    """Blocks in a folder."""

    emits_events = True
    store_type: ClassVar[type[FolderStore]] = FolderStore
    config: FolderConfig

    @override
    def open(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[OffloadKey, int] = {}
        self._deleted: set[OffloadKey] = set()
        self._reading: Counter[OffloadKey] = Counter()
        self._sweeper: ThreadPoolExecutor | None = None
        self._store: FolderStore | None = None
        self.store = self._connect()
        self._count = len(self.store.list_objects())
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="sweeper")

    def _connect(self) -> FolderStore:
        from kv_conformance.reference._folder_harness import GATES

        folder = self.config.root_dir / self.context.namespace.fingerprint
        store = self.store_type(folder)
        self._store = store
        gate = GATES.get(self.config.gate)
        if gate is None:
            return store
        store.allowed = gate.allowed
        return gate.guard(
            store,
            reads=("exists", "get", "list_objects", "locked"),
            writes=("put", "remove", "mark_used"),
        )

    @override
    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.shutdown(wait=True)
        if self._store is not None:
            self._store.close()

    # -- block functions ------------------------------------------------------------------------

    @override
    def exists(self, key: OffloadKey) -> bool:
        with self._lock:
            if key in self._deleted:
                return False
        return self.store.exists(key)

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        with self._lock:
            self._reading[key] += 1
        try:
            self.store.get(key, buffer)
            self.store.mark_used(key, time.time_ns())
        finally:
            with self._lock:
                self._reading[key] -= 1
                if not self._reading[key]:
                    del self._reading[key]

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        with self.store.locked():
            with self._lock:
                deleted = key in self._deleted
                self._deleted.discard(key)
            if deleted:
                if self.store.remove(key):
                    self.note_removed(key)
            elif self.is_valid(key, data):
                self.store.mark_used(key, time.time_ns())
                return 0
            others = [entry for entry in self._by_use() if entry != key]
            self._evict(others, len(others) + 1 - self.config.capacity_blocks)
            self.store.put(key, data)
            # First of all: whatever fails from here on, the block is there.
            self.note_stored(key)
            self._count = len(self.store.list_objects())
        return None

    def is_valid(self, key: OffloadKey, data: memoryview) -> bool:
        """Say whether the object of a key is there, and whole."""
        if not self.store.exists(key):
            return False
        try:
            self.store.get(key, memoryview(bytearray(len(data))))
        except Exception:  # noqa: BLE001 - whatever is wrong with it, it is written anew
            return False
        return True

    @override
    def retire(self, key: OffloadKey) -> None:
        with self.store.locked():
            if self.store.remove(key):
                self.note_removed(key)
            # Also when it was lost before: then it was counted until now.
            self._count = len(self.store.list_objects())

    # -- capacity -------------------------------------------------------------------------------

    def _by_use(self) -> list[OffloadKey]:
        """Return what is there, least recently used first."""
        objects = self.store.list_objects()
        with self._lock:
            used = dict(self._used)
        ranked = sorted(objects, key=lambda item: max(item[1], used.get(item[0], 0)))  # type: ignore[call-overload]
        return [key for key, _ in ranked]  # type: ignore[misc]

    def _evict(self, candidates: Iterable[OffloadKey], count: int) -> None:
        for key in candidates:
            if count <= 0:
                return
            with self._lock:
                if self._reading[key]:
                    continue
            if self.store.remove(key):
                count -= 1
                self.note_removed(key)

    # -- what is called on the engine's thread ----------------------------------------------------

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.check_process()
        now = time.time_ns()
        with self._lock:
            for number, key in enumerate(keys):
                # A prefix is evicted from its tail.
                self._used[key] = now - number

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        self.check_process()
        with self._lock:
            self._deleted.update(keys)
        for key in keys:
            # Answers that are remembered go now; the event comes when there is an object to go.
            self._lookups.removed(key, next(self._tickets))
        if self._sweeper is not None:
            self._sweeper.submit(self._sweep, tuple(keys))

    def _sweep(self, keys: tuple[OffloadKey, ...]) -> None:
        with self.store.locked():
            for key in keys:
                with self._lock:
                    if key not in self._deleted:
                        continue
                if self.store.remove(key):
                    self.note_removed(key)
                with self._lock:
                    self._deleted.discard(key)
            self._count = len(self.store.list_objects())

    @override
    def usage(self) -> TierUsage:
        self.check_process()
        return TierUsage(
            blocks=self._count,
            bytes=self._count * self.context.block_bytes,
            capacity_blocks=self.config.capacity_blocks,
        )
