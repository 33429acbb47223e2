"""How the conformance suite drives this tier, and reaches the files below it.

Needs the extra ``kv-tier-fs[conformance]``; the tier itself never imports this.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_conformance.faults.fuse import FaultyFolder, require_fuse
from kv_conformance.harness import BaseHarness, Corruption, Fault, HarnessError
from kv_core.contract import make_offload_key
from kv_tier_fs import spec_of_layout
from kv_tier_fs.files._layout import FileLayout
from kv_tier_fs.files._trailer import TRAILER_BYTES, key_in_trailer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import OffloadKey

__all__ = ["FilesHarness"]

# Beside the storages, whose names are plain words.
_MOUNTS: Final = ".mounts"

_MIN_FREE_BYTES: Final = 1 << 20
"""The suite stores little, and not only on machines with a lot of room."""


@final
class FilesHarness(BaseHarness):
    """The harness of layout ``files``: a storage is a folder.

    A tier that will see faults gets the folder through a :class:`FaultyFolder`, one for each
    storage, shared by all tiers opened on it and mounted until :meth:`stop`. What the suite does
    to the files, it does to the folder itself.
    """

    spec = spec_of_layout("files")
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
        root = self._folder(opening)
        if opening.faults:
            root = self._mount(opening).mountpoint
        return {
            "root_dir": str(root),
            "layout": "files",
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
        return {"root_dir": str(file / "root"), "layout": "files"}

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
        try:
            with open(self._path(subject, key), "r+b") as file:
                if how is Corruption.TRUNCATED:
                    file.truncate(os.fstat(file.fileno()).st_size // 2)
                elif how is Corruption.EMPTY:
                    file.truncate(0)
                elif how is Corruption.OVERLONG:
                    file.seek(0, os.SEEK_END)
                    file.write(b"more")
                else:
                    # The payload comes first, so that is where its middle is.
                    file.seek(subject.opening.block_bytes // 2)
                    (byte,) = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte ^ 0b100]))
        except FileNotFoundError:
            raise KeyError(key) from None

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys that have a file.

        A hash too long for a file name is in the trailer only, so a file under such a name whose
        trailer has been damaged is not listed.
        """
        return set(_keys_below(self._layout(subject).blocks_dir))

    @override
    def count_leftovers(self, subject: Subject) -> int:
        return sum(1 for _ in self._layout(subject).writers_dir.glob("*/*"))

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

    def _folder(self, opening: Opening) -> Path:
        return self.workdir / opening.storage

    def _mount(self, opening: Opening) -> FaultyFolder:
        mount = self._mounts.get(opening.storage)
        if mount is None:
            mountpoint = self.workdir / _MOUNTS / opening.storage
            mount = self._mounts[opening.storage] = FaultyFolder(self._folder(opening), mountpoint)
        return mount

    def _layout(self, subject: Subject) -> FileLayout:
        return FileLayout(self._folder(subject.opening), subject.namespace)

    def _path(self, subject: Subject, key: OffloadKey) -> Path:
        return Path(self._layout(subject).block_path(key))


def _keys_below(blocks_dir: Path) -> Iterator[OffloadKey]:
    for path in blocks_dir.glob("*/*_g*/*.bin"):
        try:
            block_hash = bytes.fromhex(path.stem)
        except ValueError:
            key = _key_inside(path)
            if key is not None:
                yield key
            continue
        yield make_offload_key(block_hash, int(path.parent.name.rpartition("_g")[2]))


def _key_inside(path: Path) -> OffloadKey | None:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TRAILER_BYTES))
        return key_in_trailer(file.read())
