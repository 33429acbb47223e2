"""What the harnesses of all layouts have in common: folders, settings, and faults through FUSE."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from kv_conformance.faults.fuse import FaultyFolder, require_fuse
from kv_conformance.harness import BaseHarness, Corruption, Fault, HarnessError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import OffloadKey, TierSpec
    from kv_tier_fs._config import Layout

__all__ = ["LayoutHarness"]

# Beside the storages, whose names are plain words.
_MOUNTS: Final = ".mounts"

_MIN_FREE_BYTES: Final = 1 << 20
"""The suite stores little, and not only on machines with a lot of room."""


class LayoutHarness(BaseHarness, ABC):
    """A harness whose storages are folders.

    A tier that will see faults gets the folder through a :class:`FaultyFolder`, one for each
    storage, shared by all tiers opened on it and mounted until :meth:`stop`. What the suite does
    to the files, it does to the folder itself.

    Attributes:
        layout: The layout under test.
    """

    spec: TierSpec
    layout: ClassVar[Layout]
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
        """Return the settings for a storage; mount it first if faults will be injected."""
        root = self.folder(opening)
        if opening.faults:
            root = self._mount(opening).mountpoint
        return {
            "root_dir": str(root),
            "layout": self.layout,
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
            "min_free_bytes": _MIN_FREE_BYTES,
        }

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return settings whose root folder would be below a file."""
        file = self.workdir / f"{opening.storage}.file"
        file.touch()
        return {"root_dir": str(file / "root"), "layout": self.layout}

    @abstractmethod
    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove a block."""

    @abstractmethod
    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Damage a block."""

    @abstractmethod
    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys of the blocks that are there."""

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

    def folder(self, opening: Opening) -> Path:
        """Return the folder behind a storage, which no fault touches."""
        return self.workdir / opening.storage

    def _mount(self, opening: Opening) -> FaultyFolder:
        mount = self._mounts.get(opening.storage)
        if mount is None:
            mountpoint = self.workdir / _MOUNTS / opening.storage
            mount = self._mounts[opening.storage] = FaultyFolder(self.folder(opening), mountpoint)
        return mount
