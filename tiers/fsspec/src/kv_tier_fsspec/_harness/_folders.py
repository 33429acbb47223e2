"""The harness for a folder of this machine, and for what serves one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kv_conformance.faults.folders import FolderFaults
from kv_core.tierkit.objects import ObjectNames
from kv_tier_fsspec import kv_core_register_tier
from kv_tier_fsspec._harness._base import ObjectHarness, key_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kv_conformance.harness import Corruption, Opening, Subject
    from kv_core.contract import OffloadKey

__all__ = ["FileHarness"]


class FileHarness(ObjectHarness, FolderFaults):
    """A folder of this machine; one that will see faults, through a file system that has them."""

    spec = kv_core_register_tier()

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a folder; mount it first if faults will be injected."""
        return self.object_settings(opening, f"file://{self.root(opening)}")

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return settings whose folder would be below a file."""
        return {"url": f"file://{self.unusable_root(opening)}"}

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

    def _names(self, subject: Subject) -> ObjectNames:
        return ObjectNames(str(self.folder(subject.opening)), subject.namespace)

    def _path(self, subject: Subject, key: OffloadKey) -> Path:
        return Path(self._names(subject).block(key))
