"""How the conformance suite drives this tier, and reaches what lies below it.

Needs the extra ``kv-tier-fsspec[conformance]``; the tier itself never imports this.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from fsspec import register_implementation
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem
from typing_extensions import override

from kv_conformance.faults import FaultGate
from kv_conformance.faults.fuse import FaultyFolder, require_fuse
from kv_conformance.harness import BaseHarness, Corruption, Fault, HarnessError
from kv_core.tierkit.objects import TRAILER_BYTES, ObjectNames, read_trailer
from kv_tier_fsspec import IN_PROCESS, kv_core_register_tier

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import OffloadKey, SecondaryTierManager

__all__ = ["AsyncMemoryHarness", "FileHarness", "MemoryHarness"]

_MIN_FREE_BYTES: Final = 1 << 20
"""The suite stores little, and not only on machines with a lot of room."""

_ASYNC_MEMORY: Final = "asyncmemory"

# Beside the storages, whose names are plain words.
_MOUNTS: Final = ".mounts"


class _Harness(BaseHarness):
    """What all kinds of storage have in common: objects of this format, under their names."""

    def _settings(self, opening: Opening, url: str) -> dict[str, Any]:
        return {
            "url": url,
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
            "min_free_bytes": _MIN_FREE_BYTES,
        }


def _key_of(names: ObjectNames, name: str, content: bytes) -> OffloadKey | None:
    """Return the key of an object: by its name, or, where that is a digest, by its trailer."""
    key = names.key_of(name)
    if key is None:
        trailer = read_trailer(content[-TRAILER_BYTES:])
        key = trailer.key if trailer is not None else None
    return key


@final
class FileHarness(_Harness):
    """A folder of this machine; one that will see faults, through a file system that has them."""

    spec = kv_core_register_tier()
    # A thread in a system call stays there.
    stall_can_be_interrupted = False
    faults = frozenset(Fault)

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self._mounts: dict[str, FaultyFolder] = {}

    @override
    def start(self) -> None:
        require_fuse()

    @override
    def stop(self) -> None:
        while self._mounts:
            _, mount = self._mounts.popitem()
            mount.close()

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a folder; mount it first if faults will be injected."""
        root = self.workdir / opening.storage
        if opening.faults:
            mount = self._mounts.get(opening.storage)
            if mount is None:
                mountpoint = self.workdir / _MOUNTS / opening.storage
                mount = self._mounts[opening.storage] = FaultyFolder(root, mountpoint)
            root = mount.mountpoint
        return self._settings(opening, f"file://{root}")

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return settings whose folder would be below a file."""
        file = self.workdir / f"{opening.storage}.file"
        file.touch()
        return {"url": f"file://{file}/root"}

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove the file of a key.

        Raises:
            KeyError: There is none.
        """
        try:
            self._path(subject, key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Damage the file of a key.

        Raises:
            KeyError: There is none.
        """
        path = self._path(subject, key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None
        path.write_bytes(how.damage(content))

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys that have a file."""
        names = self._names(subject)
        found = set()
        for path in Path(names.blocks).rglob("*.kv"):
            key = _key_of(names, str(path), path.read_bytes())
            if key is not None:
                found.add(key)
        return found

    @override
    def count_leftovers(self, subject: Subject) -> int:
        return sum(1 for _ in Path(self._names(subject).folder, "unfinished").glob("*"))

    def inject(self, subject: Subject, fault: Fault) -> None:
        """Make the mounted folder misbehave.

        Raises:
            HarnessError: The tier was not opened for faults.
        """
        mount = self._mounts.get(subject.opening.storage)
        if mount is None:
            raise HarnessError(
                f"the storage {subject.opening.storage!r} was not opened for faults: the folder "
                "has no layer underneath that could misbehave. Open it with faults=True"
            )
        mount.inject(fault)

    def heal(self, subject: Subject) -> None:
        """Make the mounted folder behave again. Idempotent."""
        mount = self._mounts.get(subject.opening.storage)
        if mount is not None:
            mount.heal()

    def _names(self, subject: Subject) -> ObjectNames:
        return ObjectNames(str(self.workdir / subject.opening.storage), subject.namespace)

    def _path(self, subject: Subject, key: OffloadKey) -> Path:
        return Path(self._names(subject).block(key))


class MemoryHarness(_Harness):
    """fsspec's filesystem in memory. Faults are a gate between it and the tier."""

    stall_can_be_interrupted = False
    faults = frozenset({Fault.STALL, Fault.ERROR, Fault.FULL})

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        # Also of the one behind coroutines, which no package brings.
        self.spec = replace(kv_core_register_tier(), capabilities=IN_PROCESS, refine=None)
        self._gates: weakref.WeakKeyDictionary[SecondaryTierManager, FaultGate] = (
            weakref.WeakKeyDictionary()
        )

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a folder in memory."""
        return self._settings(opening, f"memory://{opening.storage}")

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove the object of a key.

        Raises:
            KeyError: There is none.
        """
        self._object(subject, key)
        del self.memory(subject).store[_names_of(subject).block(key)]

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Replace the object of a key by a damaged one.

        Raises:
            KeyError: There is none.
        """
        damaged = how.damage(self._object(subject, key))
        self.memory(subject).pipe_file(_names_of(subject).block(key), damaged)

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys that have an object."""
        names = _names_of(subject)
        found = set()
        for name, file in list(self.memory(subject).store.items()):
            if name.startswith(f"{names.blocks}/"):
                key = _key_of(names, name, file.getvalue())
                if key is not None:
                    found.add(key)
        return found

    def inject(self, subject: Subject, fault: Fault) -> None:
        """Put a gate between the tier and its filesystem, and set it."""
        gate = self._gates.get(subject.tier)
        if gate is None:
            gate = self._gates[subject.tier] = FaultGate()
            self.guard(subject, gate)
        gate.inject(fault)

    def heal(self, subject: Subject) -> None:
        """Open the gate again. Idempotent."""
        gate = self._gates.get(subject.tier)
        if gate is not None:
            gate.heal()

    def memory(self, subject: Subject) -> Any:
        """Return the filesystem below the tier. Its listings pass no gate."""
        tier: Any = subject.tier
        return tier._fs

    def guard(self, subject: Subject, gate: FaultGate) -> None:
        """Put a gate in front of the filesystem."""
        tier: Any = subject.tier
        tier._fs = gate.guard(tier._fs, reads=("info", "cat_file"), writes=("pipe_file", "rm_file"))

    def _object(self, subject: Subject, key: OffloadKey) -> bytes:
        try:
            found: bytes = self.memory(subject).store[_names_of(subject).block(key)].getvalue()
        except KeyError:
            raise KeyError(key) from None
        return found


def _names_of(subject: Subject) -> ObjectNames:
    tier: Any = subject.tier
    names: ObjectNames = tier._blocks.names
    return names


class _AsyncMemory(AsyncFileSystemWrapper):  # type: ignore[misc]  # fsspec has no types
    """A filesystem in memory, behind coroutines."""

    protocol = _ASYNC_MEMORY
    cachable = False

    def __init__(self, **options: Any) -> None:
        memory = MemoryFileSystem(skip_instance_cache=True)
        memory.store, memory.pseudo_dirs = {}, [""]
        super().__init__(fs=memory, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace(_ASYNC_MEMORY, "memory")))


@final
class AsyncMemoryHarness(MemoryHarness):
    """The asynchronous tier, over a filesystem that needs no server."""

    stall_can_be_interrupted = True

    @override
    def start(self) -> None:
        register_implementation(_ASYNC_MEMORY, _AsyncMemory, clobber=True)

    @override
    def settings(self, opening: Opening) -> Mapping[str, Any]:
        url = f"{_ASYNC_MEMORY}://{opening.storage}"
        return {**self._settings(opening, url), "publication": "put"}

    @override
    def memory(self, subject: Subject) -> Any:
        tier: Any = subject.tier
        return tier._store.fs.sync_fs

    @override
    def guard(self, subject: Subject, gate: FaultGate) -> None:
        tier: Any = subject.tier
        tier._store.fs = gate.guard(
            tier._store.fs, reads=("_info", "_cat_file"), writes=("_pipe_file", "_rm_file")
        )
