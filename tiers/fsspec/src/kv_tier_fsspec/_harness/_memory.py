"""The harnesses for fsspec's filesystem in memory, as it is and behind coroutines."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

from fsspec import register_implementation
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem
from typing_extensions import override

from kv_conformance.faults import FaultGate
from kv_conformance.harness import Corruption, Fault
from kv_tier_fsspec import kv_core_register_tier
from kv_tier_fsspec._harness._base import ObjectHarness, key_of
from kv_tier_fsspec._protocols import protocol_named

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import OffloadKey, SecondaryTierManager
    from kv_core.tierkit.objects import ObjectNames

__all__ = ["AsyncMemoryHarness", "MemoryHarness"]

_ASYNC_MEMORY: Final = "asyncmemory"


class MemoryHarness(ObjectHarness):
    """fsspec's filesystem in memory. Faults are a gate between it and the tier."""

    stall_can_be_interrupted = False
    faults = frozenset({Fault.STALL, Fault.ERROR, Fault.FULL})

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        # Also of the one behind coroutines, which no package brings.
        self.spec = replace(
            kv_core_register_tier(), capabilities=protocol_named("memory").capabilities, refine=None
        )
        self._gates: weakref.WeakKeyDictionary[SecondaryTierManager, FaultGate] = (
            weakref.WeakKeyDictionary()
        )

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a folder in memory."""
        return self.object_settings(opening, f"memory://{opening.storage}")

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
                key = key_of(names, name, file.getvalue())
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
        return tier._files.fs

    def guard(self, subject: Subject, gate: FaultGate) -> None:
        """Put a gate in front of the filesystem."""
        tier: Any = subject.tier
        tier._files.fs = gate.guard(
            tier._files.fs, reads=("info", "cat_file"), writes=("pipe_file", "rm_file")
        )

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
        return {**self.object_settings(opening, url), "publication": "put"}

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
