"""A base for the harnesses of tiers that keep their blocks in a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kv_conformance.faults.fuse import FaultyFolder, require_fuse
from kv_conformance.harness import BaseHarness, Fault, HarnessError

if TYPE_CHECKING:
    from pathlib import Path

    from kv_conformance.harness import Opening, Subject

__all__ = ["FolderFaults"]

# Beside the storages, whose names are plain words.
_MOUNTS: Final = ".mounts"


class FolderFaults(BaseHarness):
    """A harness whose storages are folders, with all faults.

    A tier that will see faults gets its folder through a
    :class:`~kv_conformance.faults.fuse.FaultyFolder`, one for each storage, shared by all tiers
    that are opened on it and mounted until :meth:`stop`. What the suite does to the files, it does
    to the folder itself. To be written: ``spec``, ``settings`` (with :meth:`root`), ``lose``,
    ``corrupt`` and ``list_keys`` (with :meth:`folder`).
    """

    # A thread in a system call stays there.
    stall_can_be_interrupted = False
    faults = frozenset(Fault)

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self._mounts: dict[str, FaultyFolder] = {}

    @override
    def start(self) -> None:
        """Check that folders can be mounted here.

        Raises:
            HarnessError: They cannot.
        """
        require_fuse()

    @override
    def stop(self) -> None:
        """Unmount everything. Idempotent."""
        while self._mounts:
            _, mount = self._mounts.popitem()
            mount.close()

    def root(self, opening: Opening) -> Path:
        """Return the folder that the tier is to be given; mounted, if faults will be injected."""
        if not opening.faults:
            return self.folder(opening)
        mount = self._mounts.get(opening.storage)
        if mount is None:
            mountpoint = self.workdir / _MOUNTS / opening.storage
            mount = self._mounts[opening.storage] = FaultyFolder(self.folder(opening), mountpoint)
        return mount.mountpoint

    def folder(self, opening: Opening) -> Path:
        """Return the folder behind a storage, which no fault touches."""
        return self.workdir / opening.storage

    def unusable_root(self, opening: Opening) -> Path:
        """Return a folder that nobody can make: it would be below a file."""
        file = self.workdir / f"{opening.storage}.file"
        file.touch()
        return file / "root"

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
