"""The harness of layout ``segments``: a block is a slot of a file that holds many.

A block has no object of its own that could be removed, cut off or extended, and the blocks around
it belong to others. So what the suite asks for is done to the bytes of its slot, as a disk or a
stray write would do it:

* *lost*: the bytes are gone, a hole is in their place. Where the block is alone in a segment that
  nobody writes to any more, the whole segment is removed, as whoever cleans up by hand would do.
* *empty*: a hole as well, in any case.
* *truncated*: the second half of the bytes is gone: the file ends there when nothing follows,
  otherwise a hole follows.
* *overlong*: a slot cannot grow. Four bytes too many come first, so that the end does not fit.
* *flipped*: one bit in the middle of the block.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_conformance.harness import Corruption
from kv_tier_fs import spec_of_layout
from kv_tier_fs._harness._base import LayoutHarness
from kv_tier_fs._harness._segment_scan import find_writers, list_places

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import OffloadKey
    from kv_tier_fs._harness._segment_scan import Place

__all__ = ["FsHarness"]

# FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE, for which Python has no call.
_PUNCH: Final = 0x01 | 0x02
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_SEALED_MODE: Final = 0o400
_TOO_MANY: Final = b"more"


@final
class FsHarness(LayoutHarness):
    """The harness of layout ``segments``."""

    spec = spec_of_layout("segments")
    layout = "segments"

    @override
    def settings(self, opening: Opening) -> Mapping[str, Any]:
        settings = {**super().settings(opening)}
        if opening.capacity_blocks is not None:
            settings["capacity_bytes"] = opening.capacity_blocks * opening.block_bytes
        return settings

    @override
    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Make a hole where the block was, or remove the segment that holds nothing else.

        Raises:
            KeyError: There is no such block.
        """
        places = self._places(subject)
        for place in self._present(places, key):
            alone = sum(other.path == place.path for others in places.values() for other in others)
            if alone == 1 and place.path.stat().st_mode & 0o777 == _SEALED_MODE:
                place.path.with_suffix(".idx").unlink()
                place.path.unlink()
            else:
                _punch(place, 0)

    @override
    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Damage the bytes of a block.

        Raises:
            KeyError: There is no such block.
        """
        places = self._places(subject)
        for place in self._present(places, key):
            if how is Corruption.TRUNCATED:
                last = max(
                    other.offset
                    for others in places.values()
                    for other in others
                    if other.path == place.path
                )
                if place.offset == last:
                    os.truncate(place.path, place.offset + place.size // 2)
                else:
                    _punch(place, place.size // 2)
            elif how is Corruption.EMPTY:
                _punch(place, 0)
            elif how is Corruption.OVERLONG:
                _overwrite(place, _TOO_MANY + place.read()[: -len(_TOO_MANY)])
            else:
                _overwrite(place, how.damage(place.read()))

    @override
    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys whose place in a segment holds bytes."""
        places = self._places(subject)
        return {
            key for key, found in places.items() if any(_is_there(place, key) for place in found)
        }

    @override
    def count_leftovers(self, subject: Subject) -> int:
        """Return how many files belong to no segment, or to no writer."""
        root = self.folder(subject.opening)
        count = 0
        for writer in find_writers(root, subject.namespace.fingerprint):
            names = {path.name for path in writer.iterdir()}
            segments = {name for name in names if name.endswith(".seg")}
            whole = {name for name in segments if f"{name[:-4]}.idx" in names}
            count += len(segments - whole)
        return count

    def _places(self, subject: Subject) -> Mapping[OffloadKey, list[Place]]:
        return list_places(self.folder(subject.opening), subject.namespace.fingerprint)

    def _present(self, places: Mapping[OffloadKey, list[Place]], key: OffloadKey) -> list[Place]:
        present = [place for place in places.get(key, ()) if _is_there(place, key)]
        if not present:
            raise KeyError(key)
        return present


def _is_there(place: Place, key: OffloadKey) -> bool:
    """Say whether anything is left of a block: a hole reads as zeros, and so do some blocks."""
    try:
        return any(place.read()) or place.is_intact(key)
    except FileNotFoundError:
        # Collected since it was listed.
        return False


def _punch(place: Place, start: int) -> None:
    """Make a hole from some byte of a block to its end."""
    with open(place.path, "r+b") as file:
        offset, size = place.offset + start, place.size - start
        if _fallocate(file.fileno(), _PUNCH, offset, size):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(place.path))


def _overwrite(place: Place, content: bytes) -> None:
    with open(place.path, "r+b") as file:
        os.pwrite(file.fileno(), content, place.offset)
