"""Mutants of the PERS clauses."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderStore, FolderTier, folder_spec
from kv_core.contract import Capability
from kv_core.errors import BlockMissingError

if TYPE_CHECKING:
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import OffloadKey

_ALL_BUT_WITHDRAWAL: Final = frozenset(Capability) - {Capability.WITHDRAWS_IO}
# Long against everything else a store does: whoever looks finds it in the middle.
_PAUSE_S: Final = 0.02


class _IndexInMemory(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._index: set[OffloadKey] = set()

    @override
    def exists(self, key: OffloadKey) -> bool:
        return key in self._index and super().exists(key)

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        moved = super().write_block(key, data)
        self._index.add(key)
        return moved


@mutant(
    "PERS-1",
    breaks="Keeps its index in memory only: the files are there, and nothing finds them.",
    source="the index of a log or slab store that is written at an orderly end, or never",
    also=frozenset({"NS-2"}),
)
def index_in_memory(workdir: Path) -> Harness:
    """Make the harness."""
    capabilities = _ALL_BUT_WITHDRAWAL - {Capability.SHARED}
    return FolderHarness(workdir, folder_spec(_IndexInMemory, capabilities=capabilities))


class _TidiesUp(FolderTier):
    @override
    def close(self) -> None:
        super().close()
        shutil.rmtree(self.config.root_dir, ignore_errors=True)


@mutant(
    "PERS-1",
    breaks="Removes its folder at shutdown, as it would a cache of its own process.",
    source="temporary folders of caches that became persistent later",
    also=frozenset({"NS-2"}),
)
def tidies_up_at_shutdown(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_TidiesUp))


class _WritesInPlace(FolderStore):
    @override
    def put(self, key: bytes, data: memoryview) -> None:
        path = self.path(key)
        path.write_bytes(data[: len(data) // 2])
        time.sleep(_PAUSE_S)
        super().put(key, data)


class _TornAfterKill(FolderTier):
    store_type = _WritesInPlace


@mutant(
    "PERS-2",
    breaks="Writes an object in its place: a kill in the middle leaves half of it.",
    source="vllm-ascend#12094 and others: publication that is not atomic",
    also=frozenset({"DATA-9", "LOOK-8", "SHARE-1"}),
)
def torn_after_a_kill(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_TornAfterKill))


class _Preallocates(FolderStore):
    """Makes the file as long as it will be, then fills it; nobody in this process sees it."""

    @override
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._filling: set[bytes] = set()

    @override
    def put(self, key: bytes, data: memoryview) -> None:
        self._filling.add(key)
        try:
            path = self.path(key)
            if not path.exists():
                super().put(key, memoryview(bytes(len(data))))
                time.sleep(_PAUSE_S)
            super().put(key, data)
        finally:
            self._filling.discard(key)

    @override
    def exists(self, key: bytes) -> bool:
        return key not in self._filling and super().exists(key)

    @override
    def get(self, key: bytes, buffer: memoryview) -> None:
        if key in self._filling:
            raise BlockMissingError("it is being written")
        super().get(key, buffer)


class _ZerosAfterKill(FolderTier):
    store_type = _Preallocates

    @override
    def is_valid(self, key: OffloadKey, data: memoryview) -> bool:
        return False


@mutant(
    "PERS-2",
    breaks="Reserves the space of an object before it fills it: a kill leaves zeros that load.",
    source="fallocate and write: the file is whole by its length",
    also=frozenset({"DATA-9", "SHARE-1", "SHARE-2"}),
)
def zeros_after_a_kill(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ZerosAfterKill))


class _SlowToPublish(FolderStore):
    """Takes its time between the writing of an object and its publication."""

    @override
    def write_all(self, descriptor: int, data: memoryview) -> None:
        super().write_all(descriptor, data)
        time.sleep(_PAUSE_S / 2)


class _KeepsLeftoversStore(_SlowToPublish):
    @override
    def reclaim(self) -> None:
        """Leave everything where it is."""


class _KeepsLeftovers(FolderTier):
    store_type = _KeepsLeftoversStore


@mutant(
    "PERS-3",
    breaks="Never removes what dead writers have left.",
    source="Mooncake#1139: orphans for ever after a crash",
)
def keeps_leftovers(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_KeepsLeftovers))


class _SweepsEverythingStore(_SlowToPublish):
    @override
    def reclaim(self) -> None:
        super().reclaim()
        for writer in (self.folder / "writers").iterdir():
            if writer == self._temporary:
                continue
            with suppress(OSError):
                for entry in writer.iterdir():
                    if entry.name != "alive":
                        entry.unlink()


class _SweepsEverything(FolderTier):
    store_type = _SweepsEverythingStore


@mutant(
    "PERS-3",
    breaks="Removes all temporary files when it opens, those of live writers, too.",
    source="a start that cleans a folder it takes for its own",
    also=frozenset({"LIFE-5", "DATA-9"}),
)
def sweeps_live_writers(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_SweepsEverything))
