"""Segments as one process knows them: its own, and those of every other writer.

**Who owns what.** :class:`Segments` has a lock and may be called from any thread. Of a
:class:`Segment`, ``pins``, ``live_blocks``, ``entered_blocks`` and ``number_in_index`` belong to
the engine's thread, and others may look at them; ``published_blocks`` belongs to whoever writes or
follows the segment; ``leaving`` to whoever holds the lock of the root; ``is_own`` is set before the
segment can be sealed; ``gone`` and ``sealed`` only ever change from false to true, and ``used_at``
only grows, so that any thread may set them and none needs a lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

if TYPE_CHECKING:
    from pathlib import Path

    from kv_tier_fs.segments._format import WriterId

__all__ = ["INDEX_SUFFIX", "PAYLOAD_SUFFIX", "Segment", "SegmentName", "Segments", "segment_path"]

PAYLOAD_SUFFIX: Final = ".seg"
INDEX_SUFFIX: Final = ".idx"

NOT_INDEXED: Final = -1


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """Which segment, in any process.

    Attributes:
        writer: The process that writes or wrote it.
        number: Its number among those of that writer, from 1 on.
    """

    writer: WriterId
    number: int


def segment_path(writer_dir: Path, number: int) -> Path:
    """Return where the payloads of a segment are; its index is next to them."""
    return writer_dir / f"{number:08d}{PAYLOAD_SUFFIX}"


@final
class Segment:
    """One segment.

    Attributes:
        name: Which one.
        path: File of the payloads.
        num_slots: Most blocks that it holds.
        pins: Loads from it that are in flight.
        live_blocks: Blocks that the index finds in it.
        published_blocks: Blocks that its index has been told to hold, since removed ones included.
        entered_blocks: Those of them that are entered in ours. Fewer: the rest is younger than all
            that we know.
        number_in_index: Where the index has it; :data:`NOT_INDEXED` when it has no block of it.
        used_at: Use counter of the index at the latest use of any of its blocks.
        is_own: Whether this process writes it.
        touched_s: Time of the last use that its file bears, as far as is known; seconds since the
            epoch.
        sealed: Whether nothing will be added any more.
        leaving: Whether a thread of this process is about to remove it. That one sets this before
            it looks at the pins, and who pins looks at this afterwards: one of them gives way.
        gone: Whether it has been removed, or is about to be: nothing can be loaded from it.
    """

    __slots__ = (
        "entered_blocks",
        "gone",
        "is_own",
        "leaving",
        "live_blocks",
        "name",
        "num_slots",
        "number_in_index",
        "path",
        "pins",
        "published_blocks",
        "sealed",
        "touched_s",
        "used_at",
    )

    def __init__(self, name: SegmentName, path: Path, num_slots: int) -> None:
        self.name = name
        self.path = path
        self.num_slots = num_slots
        self.pins = 0
        self.live_blocks = 0
        self.published_blocks = 0
        self.entered_blocks = 0
        self.number_in_index = NOT_INDEXED
        self.used_at = 0
        self.is_own = False
        self.touched_s = 0.0
        self.sealed = False
        self.leaving = False
        self.gone = False

    @override
    def __repr__(self) -> str:
        """Return the name in a form for logs."""
        return f"<Segment {self.name.writer.hex()[:8]}/{self.name.number}>"

    @property
    def index_path(self) -> Path:
        """File of the index."""
        return self.path.with_suffix(INDEX_SUFFIX)

    @property
    def is_entered(self) -> bool:
        """Whether all that it is known to hold is entered in the index. Any thread."""
        return 0 < self.published_blocks <= self.entered_blocks


@final
class Segments:
    """All segments that are known and not gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[SegmentName, Segment] = {}

    def get(self, name: SegmentName) -> Segment | None:
        """Return a segment, or ``None`` when it is not known."""
        return self._by_name.get(name)

    def add(self, name: SegmentName, path: Path, num_slots: int) -> Segment:
        """Return the segment of that name, known by now."""
        with self._lock:
            known = self._by_name.get(name)
            if known is None:
                known = self._by_name[name] = Segment(name, path, num_slots)
            return known

    def discard(self, segment: Segment) -> bool:
        """Forget a segment and mark it as gone; ``False`` when that has been done before."""
        with self._lock:
            segment.gone = True
            if self._by_name.get(segment.name) is not segment:
                return False
            del self._by_name[segment.name]
            return True

    def snapshot(self) -> list[Segment]:
        """Return all of them, in no order."""
        with self._lock:
            return list(self._by_name.values())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._by_name)
