"""Mutants of the SHARE clauses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderStore, FolderTier, folder_spec

if TYPE_CHECKING:
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import OffloadKey

_PAUSE_S: Final = 0.01


class _RemembersAbsence(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._absent: set[OffloadKey] = set()

    @override
    def exists(self, key: OffloadKey) -> bool:
        if key not in self._absent and super().exists(key):
            return True
        self._absent.add(key)
        return False

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        moved = super().write_block(key, data)
        self._absent.discard(key)
        return moved


@mutant(
    "SHARE-1",
    breaks="Remembers for ever that a key was absent, unless it stores the key itself.",
    source="negative caches over a shared store",
)
def never_looks_again(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_RemembersAbsence))


class _ListsOnce(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._known = {key for key, _ in self.store.list_objects()}

    @override
    def exists(self, key: OffloadKey) -> bool:
        return key in self._known and super().exists(key)

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        moved = super().write_block(key, data)
        self._known.add(key)
        return moved


@mutant(
    "SHARE-1",
    breaks="Reads the listing when it opens and knows only its own stores from then on.",
    source="the index that makes lookups cheap",
    also=frozenset({"LIFE-5", "LOOK-9", "SHARE-2"}),
)
def lists_at_opening_only(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ListsOnce))


class _Unlocked(FolderTier):
    """Writes without the lock that orders the writers of a folder."""

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        if self.is_valid(key, data):
            self.store.mark_used(key, time.time_ns())
            return 0
        time.sleep(_PAUSE_S)
        others = [entry for entry in self._by_use() if entry != key]
        self._evict(others, len(others) + 1 - self.config.capacity_blocks)
        self.store.put(key, data)
        self._count = len(self.store.list_objects())
        self.note_stored(key)
        return None


class _OneTemporaryNameStore(FolderStore):
    @override
    def put(self, key: bytes, data: memoryview) -> None:
        path = self.path(key)
        temporary = self.folder / "writers" / path.name
        with temporary.open("xb") as file:
            time.sleep(_PAUSE_S)
            file.write(self._sealed(key, data))
        temporary.replace(path)

    def _sealed(self, key: bytes, data: memoryview) -> bytes:
        # The parent's format, through its own code.
        super().put(key, data)
        path = self.path(key)
        content = path.read_bytes()
        path.unlink()
        return content


class _OneTemporaryName(_Unlocked):
    store_type = _OneTemporaryNameStore


@mutant(
    "SHARE-2",
    breaks="Derives the name of the temporary file from the key alone: two writers collide.",
    source="LMCache#2517, LMCache#2674: one of two instances fails to store the same key",
    also=frozenset({"CAP-1", "CAP-3", "DATA-9", "PERS-2", "USE-1", "ZC-1"}),
)
def one_temporary_name(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OneTemporaryName))


class _FirstWriterOnlyStore(FolderStore):
    @override
    def put(self, key: bytes, data: memoryview) -> None:
        claim = self.folder / f"claim-{self.path(key).name}"
        claim.touch(exist_ok=False)
        try:
            time.sleep(_PAUSE_S)
            super().put(key, data)
        finally:
            claim.unlink()


class _FirstWriterOnly(_Unlocked):
    store_type = _FirstWriterOnlyStore


@mutant(
    "SHARE-2",
    breaks="Fails a store when another writer is storing the same key.",
    source="an exclusive claim on a key, whose loser reports a failure",
    also=frozenset({"CAP-1", "CAP-3", "DATA-9", "DEL-1", "PERS-2", "USE-1"}),
)
def first_writer_only(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_FirstWriterOnly))
