"""The harness for a folder of this machine, and for what serves one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from kv_conformance.faults.fuse import FaultyFolder, require_fuse
from kv_conformance.harness import Corruption, Fault, HarnessError
from kv_core.tierkit.objects import ObjectNames
from kv_tier_fsspec import kv_core_register_tier
from kv_tier_fsspec._harness._base import ObjectHarness, key_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import OffloadKey

__all__ = ["FileHarness"]

# Beside the storages, whose names are plain words.
_MOUNTS: Final = ".mounts"


class FileHarness(ObjectHarness):
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
        return self.object_settings(opening, f"file://{root}")

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
            key = key_of(names, str(path), path.read_bytes())
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
