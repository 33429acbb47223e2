"""The harness of vLLM's tier ``fs``: a storage is a folder, an object a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_conformance.faults.folders import FolderFaults
from kv_conformance.harness import HarnessError
from kv_core.contract import Capability, ContractVersion, TierSpec, make_offload_key
from kv_core.vllm.conformance._adapter import VllmTier, prepare_process
from kv_core.vllm.conformance._settings import UncheckedConfig, limits_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from kv_conformance.harness import Corruption, Opening, Subject
    from kv_core.contract import OffloadKey, TierContext

__all__ = ["SPEC", "FsHarness"]


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
class FsHarness(FolderFaults):
    """The harness of vLLM's ``fs``."""

    spec = SPEC

    @override
    def start(self) -> None:
        super().start()
        prepare_process("fs")

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a storage; mount it first if faults will be injected."""
        return {
            "root_dir": str(self.root(opening)),
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
        }

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return settings whose root folder would be below a file."""
        return {"root_dir": str(self.unusable_root(opening))}

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
        return self.folder(subject.opening) / os.path.relpath(path, self.root(subject.opening))
