"""The harness of vLLM's tier ``fs``: a storage is a folder, an object a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_conformance.faults.fuse import FaultyFolder, require_fuse
from kv_conformance.harness import BaseHarness, Fault, HarnessError
from kv_core.contract import Capability, ContractVersion, TierSpec, make_offload_key
from kv_core.vllm.conformance._adapter import VllmTier, prepare_process
from kv_core.vllm.conformance._settings import UncheckedConfig, limits_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from kv_conformance.harness import Corruption, Opening, Subject
    from kv_core.contract import OffloadKey, TierContext

__all__ = ["SPEC", "FsHarness"]

# Beside the storages, whose names are plain words.
_MOUNTS: Final = ".mounts"


class FsConfig(UncheckedConfig):
    """The settings of vLLM's tier ``fs``, as its constructor names them."""

    root_dir: str
    n_read_threads: int = 16
    n_write_threads: int = 16
    enable_kv_events: bool = False
    locality: str | None = None


def _make(context: TierContext) -> VllmTier:
    return VllmTier(context, "fs")


SPEC: Final = TierSpec(
    type="vllm-fs",
    summary="vLLM's own file system tier, unmodified, behind an adapter.",
    contract=ContractVersion(1, 0),
    factory=_make,
    config_model=FsConfig,
    limits=limits_of,
    # What vLLM says of it: persistent across resets, shared through one root_dir.
    capabilities=frozenset({Capability.PERSISTENT, Capability.SHARED}),
)


@final
class FsHarness(BaseHarness):
    """The harness of vLLM's ``fs``.

    A tier that will see faults gets its folder through a :class:`FaultyFolder`, one for each
    storage. What the suite does to the files, it does to the folder itself.
    """

    spec = SPEC
    # A thread in a system call stays there.
    stall_can_be_interrupted = False
    faults = frozenset(Fault)

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self._mounts: dict[str, FaultyFolder] = {}

    @override
    def start(self) -> None:
        require_fuse()
        prepare_process("fs")

    @override
    def stop(self) -> None:
        while self._mounts:
            _, mount = self._mounts.popitem()
            mount.close()

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a storage; mount it first if faults will be injected."""
        root = self._mount(opening).mountpoint if opening.faults else self._folder(opening)
        return {
            "root_dir": str(root),
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
        }

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return settings whose root folder would be below a file."""
        file = self.workdir / f"{opening.storage}.file"
        file.touch()
        return {"root_dir": str(file / "root")}

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
        """Damage the file of a key, in place. It holds the row of the block and nothing else.

        Raises:
            KeyError: There is none.
        """
        path = self._path(subject, key)
        try:
            damaged = how.damage(path.read_bytes())
        except FileNotFoundError:
            raise KeyError(key) from None
        with open(path, "r+b") as file:
            file.write(damaged)
            file.truncate()

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys that have a file."""
        return {
            make_offload_key(bytes.fromhex(path.stem), int(path.parent.name.rpartition("_g")[2]))
            for path in self._base(subject).glob("*/*_g*/*.bin")
        }

    @override
    def count_leftovers(self, subject: Subject) -> int:
        return sum(1 for _ in self._base(subject).glob("*/*_g*/*.tmp"))

    def inject(self, subject: Subject, fault: Fault) -> None:
        """Make the mounted folder misbehave.

        Raises:
            HarnessError: The tier was not opened for faults.
        """
        mount = self._mounts.get(subject.opening.storage)
        if mount is None:
            raise HarnessError(
                f"the storage {subject.opening.storage!r} was not opened for faults: open it with "
                "faults=True"
            )
        mount.inject(fault)

    def heal(self, subject: Subject) -> None:
        """Make the mounted folder behave again. Idempotent."""
        mount = self._mounts.get(subject.opening.storage)
        if mount is not None:
            mount.heal()

    def _folder(self, opening: Opening) -> Path:
        return self.workdir / opening.storage

    def _mount(self, opening: Opening) -> FaultyFolder:
        mount = self._mounts.get(opening.storage)
        if mount is None:
            mountpoint = self.workdir / _MOUNTS / opening.storage
            mount = self._mounts[opening.storage] = FaultyFolder(self._folder(opening), mountpoint)
        return mount

    def _mapper(self, subject: Subject) -> Any:
        """Return what the tier names its files with."""
        if not isinstance(subject.tier, VllmTier):
            raise HarnessError(f"a VllmTier expected, found a {type(subject.tier).__name__}")
        return subject.tier.inner.file_mapper

    def _base(self, subject: Subject) -> Path:
        mapper = self._mapper(subject)
        return self._behind(subject, f"{mapper.base_path}_r{mapper.rank}")

    def _path(self, subject: Subject, key: OffloadKey) -> Path:
        return self._behind(subject, self._mapper(subject).get_file_name(key))

    def _behind(self, subject: Subject, path: str) -> Path:
        """Return a path of the tier's as it is without the mounted layer."""
        root = self._folder(subject.opening)
        mount = self._mounts.get(subject.opening.storage)
        seen = mount.mountpoint if subject.opening.faults and mount is not None else root
        return root / os.path.relpath(path, seen)
