"""Appends blocks to the segments of this process.

**Who owns what.** Any thread may call anything but :meth:`SegmentWriter.close`. ``_lock`` guards
which segment is current, which of its slots are taken and how many writes are in flight; it is
held for a few instructions. ``_creating`` guards ``_spare`` and is held while a segment is made,
for which room may have to be found first: only stores that need a new segment wait for it.
``_publishing`` orders the appends to the indexes; who gets it publishes what all others who wait
for it have queued in ``_unpublished``. Whoever ends the last write to a full segment seals it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, final

from kv_core.errors import BlockDeclinedError
from kv_tier_fs.segments._format import IndexHeader, payload_checksum
from kv_tier_fs.segments._removals import RemovalIndex
from kv_tier_fs.segments._segment import INDEX_SUFFIX, SegmentName, segment_path
from kv_tier_fs.segments._segment_file import PayloadFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_tier_fs.segments._direct import DirectIO
    from kv_tier_fs.segments._format import WriterId
    from kv_tier_fs.segments._segment import Segment, Segments

__all__ = [
    "BOUND_SHARE",
    "MOST_SEGMENT_BYTES",
    "Room",
    "SegmentWriter",
    "Stored",
    "WriterPlace",
    "slots_per_segment",
]

logger = logging.getLogger(__name__)

MOST_SEGMENT_BYTES: Final = 256 << 20
"""A segment is never larger, unless a single block is."""

BOUND_SHARE: Final = 32
"""A segment takes at most this part of what there can be in all."""

_REMOVALS: Final = 0
"""Number of the index of removals, which has no payloads."""

_LEAST_SPARE_BYTES: Final = 8 << 20
"""Smaller segments are made fast, and belong to small capacities, of which one more is a lot."""


class Room(Protocol):
    """Whoever bounds the space that is taken."""

    def room(self, size_bytes: int) -> AbstractContextManager[Path | None]:
        """Hold so much room while a segment is made in it.

        Returns:
            A file of that length that may be renamed and written over, if there is one.

        Raises:
            BlockDeclinedError: There is none.
        """


def slots_per_segment(block_bytes: int, bound_bytes: int | None) -> int:
    """Return how many blocks a new segment has, at least one.

    Args:
        block_bytes: Payload bytes of a block.
        bound_bytes: Bytes that all segments may take together.
    """
    size = MOST_SEGMENT_BYTES
    if bound_bytes is not None:
        size = min(size, bound_bytes // BOUND_SHARE)
    return max(1, size // block_bytes)


@final
@dataclass(frozen=True, slots=True)
class WriterPlace:
    """Where a writer writes, and what.

    Attributes:
        root: Folder below which no symbolic link is followed.
        folder: Folder of the writer, below it.
        writer: Id of the writer.
        fingerprint: Fingerprint of the namespace.
        block_bytes: Payload bytes of every block.
        num_slots: Returns the number of blocks for the next segment.
        sync: Whether what is published is on the disk.
    """

    root: Path
    folder: Path
    writer: WriterId
    fingerprint: str
    block_bytes: int
    num_slots: Callable[[], int]
    sync: bool


@final
@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of a batch that are in one segment by now.

    Attributes:
        segment: The segment.
        start: Index in the batch of the first block.
        slots: Slot of each.
        checksums: Checksum of each.
    """

    segment: Segment
    start: int
    slots: range
    checksums: Sequence[int]


@final
class _Filling:
    """A segment that is being filled.

    Attributes:
        file: Its files.
        next_slot: Slots below are taken.
        published: No slot from here on has been published.
        users: Writes in flight.
        full: Whether no more slots are given out.
    """

    __slots__ = ("file", "full", "next_slot", "published", "users")

    def __init__(self, file: PayloadFile) -> None:
        self.file = file
        self.next_slot = 0
        self.published = 0
        self.users = 0
        self.full = False


@final
class _Publication:
    """Blocks that are written and not yet published.

    Attributes:
        filling: Their segment.
        keys: The blocks.
        part: Where they are.
        error: Why they could not be published.
        ended: Whether they have been, or could not be.
    """

    __slots__ = ("ended", "error", "filling", "keys", "part")

    def __init__(self, filling: _Filling, keys: Sequence[OffloadKey], part: Stored) -> None:
        self.filling = filling
        self.keys = keys
        self.part = part
        self.error: Exception | None = None
        self.ended = False


@final
class SegmentWriter:
    """Stores blocks in segments of its own.

    The next segment is made ready when the current one is half full, lest stores wait for it.

    Args:
        place: Where and what.
        segments: Told of every new segment.
        room: Asked before every new segment.
        direct: Whether to bypass the page cache.
        created: Called after a segment was made.
        soon: Runs something on another thread.
        move: Called when the folder is no longer there, to empty the cache perhaps: returns where
            to write from now on.
    """

    def __init__(
        self,
        place: WriterPlace,
        segments: Segments,
        room: Room,
        direct: DirectIO,
        created: Callable[[], None],
        soon: Callable[[Callable[[], None]], None],
        move: Callable[[], WriterPlace] | None = None,
    ) -> None:
        self._place = place
        self._move = move
        self._segments = segments
        self._room = room
        self._direct = direct
        self._created = created
        self._soon = soon
        self._lock = threading.Lock()
        self._creating = threading.Lock()
        self._publishing = threading.Lock()
        self._current: _Filling | None = None
        self._spare: PayloadFile | None = None
        self._spare_wanted = False
        self._closed = False
        self._unpublished: deque[_Publication] = deque()
        self._last_number = _REMOVALS
        self._removals = _removal_index(place)

    # -- stores ---------------------------------------------------------------------------------

    def store(
        self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> tuple[list[Stored], dict[int, BaseException]]:
        """Write some blocks and publish them.

        Args:
            keys: The blocks.
            blocks: Their payloads: flat views of ``block_bytes`` bytes.

        Returns:
            What is stored, and what went wrong with the rest, by index.
        """
        checksums = [payload_checksum(*pair) for pair in zip(blocks, keys, strict=True)]
        stored: list[Stored] = []
        failures: dict[int, BaseException] = {}
        start, tried_again = 0, False
        while start < len(keys):
            try:
                filling, slots = self._take(len(keys) - start)
            except Exception as error:  # noqa: BLE001 - each block without a slot has this error
                failures.update(dict.fromkeys(range(start, len(keys)), error))
                break
            stop = start + len(slots)
            part = Stored(filling.file.segment, start, slots, checksums[start:stop])
            try:
                filling.file.write(slots.start, blocks[start:stop])
                self._publish(filling, keys[start:stop], part)
            except FileNotFoundError as error:
                # Removed under us, to empty the cache perhaps. There is a new one, as a rule.
                part.segment.gone = True
                if tried_again:
                    failures.update(dict.fromkeys(range(start, stop), error))
                else:
                    tried_again, stop = True, start
            except Exception as error:  # noqa: BLE001 - each block of the part has this error
                failures.update(dict.fromkeys(range(start, stop), error))
            else:
                stored.append(part)
            finally:
                self._give_back(filling)
            start = stop
        return stored, failures

    def _publish(self, filling: _Filling, keys: Sequence[OffloadKey], part: Stored) -> None:
        publication = _Publication(filling, keys, part)
        self._unpublished.append(publication)
        with self._publishing:
            if not publication.ended:
                self._publish_all()
        if publication.error is not None:
            raise publication.error

    def _publish_all(self) -> None:
        """Publish what is queued, with one append to each index. ``_publishing`` held."""
        by_segment: dict[_Filling, list[_Publication]] = {}
        while self._unpublished:
            publication = self._unpublished.popleft()
            by_segment.setdefault(publication.filling, []).append(publication)
        for filling, group in by_segment.items():
            error: Exception | None = None
            try:
                filling.file.publish([(it.keys, it.part.slots, it.part.checksums) for it in group])
            except Exception as failure:  # noqa: BLE001 - whoever waits for it is told
                error = failure
            else:
                last = max(it.part.slots.stop for it in group)
                filling.published = max(filling.published, last)
                filling.file.segment.published_blocks += sum(len(it.keys) for it in group)
            for publication in group:
                publication.error = error
                publication.ended = True

    def _take(self, wanted: int) -> tuple[_Filling, range]:
        """Take slots, at least one and at most so many, in the current segment or a new one."""
        while True:
            with self._lock:
                current = self._current
                if current is not None and not (current.full or current.file.segment.gone):
                    slots = self._take_in(current, wanted)
                    want_spare = not self._spare_wanted and self._is_half_full(current)
                    self._spare_wanted |= want_spare
                    break
            with self._creating:
                if self._current is not current:
                    continue
                file = self._take_spare() or self._create()
                with self._lock:
                    self._current = _Filling(file)
                    self._spare_wanted = False
                if current is not None:
                    self._retire(current)
        if want_spare:
            self._soon(self._make_spare)
        return current, slots

    def _is_half_full(self, filling: _Filling) -> bool:
        num_slots = filling.file.segment.num_slots
        size = num_slots * self._place.block_bytes
        return size >= _LEAST_SPARE_BYTES and 2 * filling.next_slot > num_slots

    def _make_spare(self) -> None:
        with self._creating:
            if self._spare is None and not self._closed:
                try:
                    self._spare = self._create()
                except (BlockDeclinedError, OSError) as error:
                    # Whoever needs it tries again, and reports what comes of it.
                    logger.debug("no segment could be made ahead: %s", error)

    def _take_spare(self) -> PayloadFile | None:
        """Return the segment that was made ahead, if it is still there. ``_creating`` held."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.is_removed():
            self._segments.discard(spare.segment)
            spare.remove()
            return None
        return spare

    def _take_in(self, filling: _Filling, wanted: int) -> range:
        start = filling.next_slot
        stop = min(start + wanted, filling.file.segment.num_slots)
        filling.next_slot = stop
        filling.full = stop == filling.file.segment.num_slots
        filling.users += 1
        return range(start, stop)

    def _give_back(self, filling: _Filling) -> None:
        with self._lock:
            filling.users -= 1
            if filling.users or not filling.full:
                return
            if self._current is filling:
                self._current = None
        self._seal(filling)

    def _retire(self, filling: _Filling) -> None:
        """Give out no more slots of a segment that has been replaced."""
        with self._lock:
            if filling.full:
                # Whoever ends the last write to it seals it, or has done so.
                return
            filling.full = True
            if filling.users:
                return
        self._seal(filling)

    def _seal(self, filling: _Filling) -> None:
        segment = filling.file.segment
        try:
            if not filling.published:
                self._segments.discard(segment)
            filling.file.seal(filling.published)
        except OSError as error:
            # It stays as long as it was: whoever adopts it after our end cuts it.
            logger.warning("segment %s cannot be sealed: %s", segment.path, error)

    def _create(self) -> PayloadFile:
        """Make a segment. ``_creating`` held."""
        try:
            return self._create_here()
        except FileNotFoundError:
            if self._move is None or self._place.folder.exists():
                raise
        place = self._move()
        with self._publishing:
            self._removals.close()
            self._place, self._removals = place, _removal_index(place)
        self._last_number = _REMOVALS
        return self._create_here()

    def _create_here(self) -> PayloadFile:
        place = self._place
        number = self._last_number + 1
        name = SegmentName(place.writer, number)
        path = segment_path(place.folder, number)
        num_slots = place.num_slots()
        header = IndexHeader(place.writer, number, num_slots, place.block_bytes, place.fingerprint)
        with self._room.room(num_slots * place.block_bytes) as reuse:
            self._last_number = number
            segment = self._segments.add(name, path, num_slots)
            segment.is_own = True
            try:
                file = PayloadFile(
                    place.root, segment, header, self._direct, sync=place.sync, reuse=reuse
                )
            except BaseException:
                self._segments.discard(segment)
                raise
        self._created()
        return file

    # -- removals -------------------------------------------------------------------------------

    def remove(self, segment: Segment, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Publish that some slots of a segment, of any writer, do not count any more.

        Raises:
            OSError: That could not be written down.
        """
        with self._publishing:
            self._removals.append(segment.name, keys, slots)

    # -- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Seal the current segment and close all files. Nothing may be in flight. Idempotent."""
        with self._creating:
            self._closed = True
            spare, self._spare = self._spare, None
        with self._lock:
            current, self._current = self._current, None
        for filling in (current, _Filling(spare) if spare is not None else None):
            if filling is not None:
                self._retire(filling)
        with self._publishing:
            self._removals.close()


def _removal_index(place: WriterPlace) -> RemovalIndex:
    header = IndexHeader(place.writer, _REMOVALS, 0, place.block_bytes, place.fingerprint)
    path = segment_path(place.folder, _REMOVALS).with_suffix(INDEX_SUFFIX)
    return RemovalIndex(place.root, path, header, sync=place.sync)
