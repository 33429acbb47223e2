"""Mutants of the CAP and TOUCH clauses."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderTier, folder_spec
from kv_core.errors import BlockDeclinedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import JobMetadata, OffloadKey, ReqContext


class _EvictsNowAndThen(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._rounds = itertools.count(1)

    @override
    def _evict(self, candidates: Iterable[OffloadKey], count: int) -> None:
        if next(self._rounds) % 16 == 0:
            super()._evict(candidates, count)


@mutant(
    "CAP-1",
    breaks="Evicts in batches, and holds more than its capacity until the next one.",
    source="vllm#54779: space is freed by something that runs now and then",
    also=frozenset({"CAP-3", "USE-1"}),
)
def evicts_now_and_then(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_EvictsNowAndThen))


class _LooksBeforeItLeaps(FolderTier):
    """Looks for room without a lock, and makes room for one block, its own."""

    @override
    def open(self) -> None:
        super().open()
        self._together = threading.Barrier(4)

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        full = len(self.store.list_objects()) >= self.config.capacity_blocks
        # What chance does on a busy machine: all that have seen room go on together.
        with suppress(threading.BrokenBarrierError):
            self._together.wait(0.02)
        if self._together.broken:
            self._together.reset()
        with self.store.locked():
            if full and not self.store.exists(key):
                others = [entry for entry in self._by_use() if entry != key]
                self._evict(others, 1)
            with self._lock:
                self._deleted.discard(key)
            self.store.put(key, data)
            self._count = len(self.store.list_objects())
            self.note_stored(key)
        return None


@mutant(
    "CAP-1",
    breaks="Looks for room and takes it in two steps: concurrent stores share one free place.",
    source="LMCache#4725: 14 TB in use with a limit of 4",
    also=frozenset({"CAP-4", "USE-1"}),
)
def looks_before_it_leaps(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LooksBeforeItLeaps))


class _InOrderOfArrival(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._order: dict[OffloadKey, None] = {}

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        self._order.setdefault(key, None)
        return super().write_block(key, data)

    @override
    def _by_use(self) -> list[OffloadKey]:
        rank = {key: number for number, key in enumerate(self._order)}
        return sorted(super()._by_use(), key=lambda key: rank.get(key, -1))


@mutant(
    "CAP-2",
    breaks="Evicts in the order of arrival, whatever was used since.",
    source="a queue in the place of an order of use",
    also=frozenset({"TOUCH-1"}),
)
def in_order_of_arrival(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_InOrderOfArrival))


class _NewestFirst(FolderTier):
    @override
    def _by_use(self) -> list[OffloadKey]:
        return super()._by_use()[::-1]


@mutant(
    "CAP-2",
    breaks="Sorts the wrong way round and evicts what was used last.",
    source="a heap with the wrong sign",
    also=frozenset({"TOUCH-1", "LOOK-3"}),
)
def newest_first(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_NewestFirst))


class _StartsFromZero(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._mine: set[OffloadKey] = set()

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        moved = super().write_block(key, data)
        self._mine.add(key)
        return moved

    @override
    def _by_use(self) -> list[OffloadKey]:
        return [key for key in super()._by_use() if key in self._mine]


@mutant(
    "CAP-3",
    breaks="Counts and evicts only what it has stored since it was opened.",
    source="LMCache#4564, LMCache#1454: after a restart the limit holds for what is new",
)
def starts_from_zero(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_StartsFromZero))


class _Account(FolderTier):
    """Keeps an account of its own beside the files."""

    @override
    def open(self) -> None:
        super().open()
        self._taken = self._count

    def book(self, blocks: int) -> None:
        with self._lock:
            self._taken += blocks
            if self._taken > 2 * self.config.capacity_blocks:
                raise BlockDeclinedError("by the account there is no room left")


class _FailuresTakeRoom(_Account):
    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        self.book(1)
        moved = super().write_block(key, data)
        # Only a success is settled against what the folder says.
        with self._lock:
            self._taken = self._count
        return moved


@mutant(
    "CAP-4",
    breaks="Reserves room before a store and does not give it back when the store fails.",
    source="LMCache#4546: accounting that only grows",
)
def failures_take_room(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_FailuresTakeRoom))


class _EvictionsFreeNothing(_Account):
    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        with self._lock:
            if self._taken > 50 * self.config.capacity_blocks:
                raise BlockDeclinedError("by the account there is no room left")
        moved = super().write_block(key, data)
        if moved is None:
            with self._lock:
                self._taken += 1
        return moved


@mutant(
    "CAP-4",
    breaks="Adds every block to its account and never takes one off.",
    source="LMCache#4546: all puts are dropped while the disk is empty",
)
def evictions_free_nothing(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_EvictionsFreeNothing))


class _TouchIsIgnored(FolderTier):
    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing."""


@mutant(
    "TOUCH-1",
    breaks="Declares TOUCH and has only the empty default.",
    source="a capability that was copied along with the rest of a declaration",
)
def touch_is_ignored(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_TouchIsIgnored))


class _TouchForOwnRequest(FolderTier):
    """Counts a touch only for the request that stored the block."""

    @override
    def open(self) -> None:
        super().open()
        self._owners: dict[OffloadKey, str] = {}

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._owners.update(dict.fromkeys(job.keys, job.req_context.req_id))
        super().submit_store(job)

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        own = [key for key in keys if self._owners.get(key) == req_context.req_id]
        super().touch(own, req_context)


@mutant(
    "TOUCH-1",
    breaks="Ignores touches by other requests than the one that stored the block.",
    source="state that is kept per request where it belongs to the block",
)
def touch_by_owner_only(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_TouchForOwnRequest))
