"""The harness of the folder tier, and of every mutant made from it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_conformance.faults import FaultGate
from kv_conformance.harness import BaseHarness, Corruption, Fault
from kv_conformance.reference._folder_store import FolderStore
from kv_conformance.reference._folder_tier import FolderConfig, FolderTier
from kv_core.contract import (
    Capability,
    ContractVersion,
    OffloadKey,
    TierContext,
    TierLimits,
    TierSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import SecondaryTierManager

__all__ = ["GATES", "FolderHarness", "folder_spec"]

GATES: Final[dict[str, FaultGate]] = {}
"""Gates by name: settings are plain values."""

ALL_BUT_WITHDRAWAL: Final = frozenset(Capability) - {Capability.WITHDRAWS_IO}


def _limits(config: FolderConfig) -> TierLimits:
    return config.limits(min_retained_blocks=config.capacity_blocks)


def folder_spec(
    factory: Callable[[TierContext], SecondaryTierManager] = FolderTier,
    *,
    name: str = "folder",
    capabilities: frozenset[Capability] = ALL_BUT_WITHDRAWAL,
    config_model: type[FolderConfig] = FolderConfig,
    limits: Callable[[Any], TierLimits] = _limits,
) -> TierSpec:
    """Return the declaration of the folder tier, or of a variant of it."""
    return TierSpec(
        type=name,
        summary="Blocks in a folder, to test the conformance suite with.",
        contract=ContractVersion(1, 0),
        factory=factory,
        config_model=config_model,
        limits=limits,
        capabilities=capabilities,
    )


class FolderHarness(BaseHarness):
    """Acts on the files of the folder, and on the gate in front of the client.

    Args:
        workdir: Folder of the run.
        spec: The tier or a variant of it.
    """

    faults = frozenset(Fault)

    def __init__(self, workdir: Path, spec: TierSpec | None = None) -> None:
        super().__init__(workdir)
        self.spec = spec or folder_spec()

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings of a storage."""
        gate = ""
        if opening.faults:
            gate = str(self.workdir / opening.storage)
            GATES.setdefault(gate, FaultGate())
        settings = {
            "root_dir": str(self.workdir / opening.storage),
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
            "password": "correct horse battery staple",
            "gate": gate,
        }
        if opening.capacity_blocks is not None:
            settings["capacity_blocks"] = opening.capacity_blocks
        return settings

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any] | None:
        file = self.workdir / f"{opening.storage}-file"
        file.write_text("in the way")
        return {**self.settings(opening), "root_dir": str(file / "below")}

    def _store(self, subject: Subject) -> _Files:
        return _Files(self.workdir / subject.opening.storage / subject.namespace.fingerprint)

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove the file."""
        if not self._store(subject).remove(key):
            raise KeyError(key.hex())

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Change the file."""
        path = self._store(subject).path(key)
        if not path.exists():
            raise KeyError(key.hex())
        size = path.stat().st_size
        if how is Corruption.TRUNCATED:
            os.truncate(path, size - 100)
        elif how is Corruption.EMPTY:
            os.truncate(path, 0)
        elif how is Corruption.OVERLONG:
            with path.open("ab") as file:
                file.write(b"more")
        else:
            with path.open("r+b") as file:
                file.seek(subject.opening.block_bytes // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 0x10]))

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Read the keys off the files."""
        return [OffloadKey(key) for key, _ in self._store(subject).list_objects()]

    @override
    def count_leftovers(self, subject: Subject) -> int:
        return self._store(subject).count_leftovers()

    def inject(self, subject: Subject, fault: Fault) -> None:
        """Set the gate."""
        GATES[str(self.workdir / subject.opening.storage)].inject(fault)

    def heal(self, subject: Subject) -> None:
        """Open the gate."""
        GATES[str(self.workdir / subject.opening.storage)].heal()


@final
class _Files(FolderStore):
    """Looks at a store without being one of its writers."""

    @override
    def __init__(self, folder: Path) -> None:
        self.folder = folder
