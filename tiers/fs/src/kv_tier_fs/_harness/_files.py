"""The harness of layout ``files``: every block is a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, final

from typing_extensions import override

from kv_conformance.harness import Corruption
from kv_core.contract import make_offload_key
from kv_tier_fs import spec_of_layout
from kv_tier_fs._harness._base import LayoutHarness
from kv_tier_fs.files._layout import FileLayout
from kv_tier_fs.files._trailer import TRAILER_BYTES, key_in_trailer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kv_conformance.harness import Subject
    from kv_core.contract import OffloadKey

__all__ = ["FilesHarness"]


@final
class FilesHarness(LayoutHarness):
    """The harness of layout ``files``."""

    spec = spec_of_layout("files")
    layout = "files"

    @override
    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove the file of a key.

        Raises:
            KeyError: There is none.
        """
        try:
            self._path(subject, key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None

    @override
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

    @override
    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys that have a file.

        A hash too long for a file name is in the trailer only, so a file under such a name whose
        trailer has been damaged is not listed.
        """
        return set(_keys_below(self._layout(subject).blocks_dir))

    @override
    def count_leftovers(self, subject: Subject) -> int:
        return sum(1 for _ in self._layout(subject).writers_dir.glob("*/*"))

    def _layout(self, subject: Subject) -> FileLayout:
        return FileLayout(self.folder(subject.opening), subject.namespace)

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
