"""Follows what other writers of the namespace store and remove.

**Who owns what.** Before :meth:`Follower.start`, whoever opens the tier calls
:meth:`Follower.look`; afterwards only the follower's own thread does, and it owns everything here.
What it finds goes to the engine's thread through the index's queue.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final, final

from kv_core.tierkit import Occasionally
from kv_tier_fs.segments._format import FrameKind
from kv_tier_fs.segments._index_reader import IndexReader
from kv_tier_fs.segments._listing import REMOVALS_NUMBER, list_writer, list_writers
from kv_tier_fs.segments._segment import PAYLOAD_SUFFIX, SegmentName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kv_tier_fs.segments._folder import NamespaceFolder
    from kv_tier_fs.segments._format import Frame, WriterId
    from kv_tier_fs.segments._index import BlockIndex
    from kv_tier_fs.segments._listing import Listing
    from kv_tier_fs.segments._segment import Segment, Segments
    from kv_tier_fs.segments._watch import Watch

__all__ = ["Follower", "News"]

logger = logging.getLogger(__name__)

# A change of a folder so short before it was listed may have been followed by another one with
# the same time.
_SETTLED_S: Final = 2.0


@final
@dataclass(slots=True)
class News:
    """What has happened since the last look, besides stores.

    Attributes:
        removed: Blocks that do not count any more.
        gone: Segments that are not there any more.
    """

    removed: list[Frame] = field(default_factory=list)
    gone: list[Segment] = field(default_factory=list)


class _Index:
    """One index that is followed.

    Attributes:
        reader: Reads it.
        state: Inode, length and time of the file when it was read last.
        found: The same when it was looked at last.
        sealed: Whether it was sealed then.
        segment: The segment; ``None`` for the index of removals, and for one to be ignored.
        complete: Whether nothing will come any more.
    """

    __slots__ = ("complete", "found", "reader", "sealed", "segment", "state")

    def __init__(self, reader: IndexReader) -> None:
        self.reader = reader
        self.state: tuple[int, int, float] | None = None
        self.found: tuple[int, int, float] | None = None
        self.sealed = False
        self.segment: Segment | None = None
        self.complete = False


class _Writer:
    """A writer that is followed.

    Attributes:
        listed_at_ns: Time of the change of its folder that the listing knows of.
        settled: Whether no later change can have the same time.
        indexes: Its indexes, by number of the segment.
        own_seen: Of the writer that we are ourselves: segments that have been seen.
    """

    __slots__ = ("indexes", "listed_at_ns", "own_seen", "settled")

    def __init__(self) -> None:
        self.listed_at_ns = -1
        self.settled = False
        self.indexes: dict[int, _Index] = {}
        self.own_seen: set[int] = set()


@final
class Follower:
    """Finds out what other processes do.

    Args:
        folder: Folder of the namespace.
        block_bytes: Payload bytes of a block.
        segments: Told of every segment.
        index: Told of every change.
        gone: Called with every segment that is not there any more.
        own: Our own id as a writer, if we are one: of that one, only removals are news.
        trust_times: Whether the times of folders can be trusted to show every change, as on a
            local file system.
        is_member: Says whether we count as somebody who has the namespace open. Before that,
            others may write over what they remove, and nothing is looked at.
    """

    def __init__(
        self,
        folder: NamespaceFolder,
        block_bytes: int,
        segments: Segments,
        index: BlockIndex,
        gone: Callable[[Segment], None],
        *,
        own: WriterId | None,
        trust_times: bool,
        is_member: Callable[[], bool] = lambda: True,
    ) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self._segments = segments
        self._index = index
        self._gone = gone
        self._trust_times = trust_times
        self._is_member = is_member
        # By name of the folder. A writer whose folder was removed begins anew under another name.
        self._own = set() if own is None else {own.hex()}
        self._writers: dict[Path, _Writer] = {}
        self._late: list[Frame] = []
        self._warn = Occasionally(time.monotonic)
        self._stopping = threading.Event()
        # Set by the thread, for whoever stops it.
        self._watch: Watch | None = None
        self._thread: threading.Thread | None = None

    # -- one look -------------------------------------------------------------------------------

    def look(self, stored: Callable[[Segment, list[Frame]], None]) -> News:
        """Find out what has happened since the last look.

        What cannot be read now is left for the next look.

        Args:
            stored: Called with what was stored in a segment; the index that was written to
                longest ago comes first.
        """
        news = News()
        if not self._is_member():
            return news
        folders = list_writers(self._folder.path)
        for folder in folders:
            with self._left_for_later(folder):
                self._list(folder, news)
        for folder in self._writers.keys() - set(folders):
            self._take_listing(self._writers.pop(folder), list_writer(folder), news)
        for _, number, index in sorted(self._changed(), key=itemgetter(0)):
            with self._left_for_later(index.reader.path):
                self._read(number, index, stored, news)
        return news

    @contextmanager
    def _left_for_later(self, path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            # Removed meanwhile, as the next look will tell.
            pass
        except OSError as error:
            logger.debug("%s cannot be followed now: %s", path, error)

    def _list(self, folder: Path, news: News) -> None:
        writer = self._writers.setdefault(folder, _Writer())
        changed_at_ns = folder.stat().st_mtime_ns
        if not (self._trust_times and writer.settled and writer.listed_at_ns == changed_at_ns):
            # Its time was taken before the listing: what comes in between is listed again.
            writer.settled = time.time() - changed_at_ns / 1e9 > _SETTLED_S
            writer.listed_at_ns = changed_at_ns
            self._take_listing(writer, list_writer(folder), news)

    def _changed(self) -> Iterator[tuple[float, int, _Index]]:
        """Return when indexes that have changed since they were read were written to."""
        for writer in self._writers.values():
            for number, index in writer.indexes.items():
                if index.complete:
                    continue
                with self._left_for_later(index.reader.path):
                    status = os.lstat(index.reader.path)
                    state = (status.st_ino, status.st_size, status.st_mtime)
                    index.sealed = not status.st_mode & stat.S_IWUSR
                    if state != index.state or index.sealed:
                        is_new = index.state is not None and index.state[0] != status.st_ino
                        if is_new or status.st_size < index.reader.end:
                            # An index of removals that was made anew, without what is moot; made
                            # anew twice since, it may have the inode that it had.
                            index.reader = IndexReader(self._folder.root_dir, index.reader.path)
                        index.found = state
                        yield status.st_mtime, number, index

    def _take_listing(self, writer: _Writer, listing: Listing, news: News) -> None:
        if listing.folder.name in self._own:
            # Only what others remove is news. A segment is made known before its files are.
            present = set(listing.indexes)
            for number in writer.own_seen - present:
                segment = self._segments.get(SegmentName(listing.writer, number))
                if segment is not None:
                    news.gone.append(segment)
            writer.own_seen = present
            return
        for number in writer.indexes.keys() - listing.indexes.keys():
            segment = writer.indexes.pop(number).segment
            if segment is not None:
                news.gone.append(segment)
        readable = listing.payloads.keys() | {REMOVALS_NUMBER}
        for number in listing.indexes.keys() & readable - writer.indexes.keys():
            reader = IndexReader(self._folder.root_dir, listing.indexes[number].path)
            writer.indexes[number] = _Index(reader)

    def _read(
        self,
        number: int,
        index: _Index,
        stored: Callable[[Segment, list[Frame]], None],
        news: News,
    ) -> None:
        frames = index.reader.read()
        index.state = index.found
        header = index.reader.header
        if header is None:
            index.complete = index.sealed or index.reader.is_of_another_version
            return
        if not self._is_ours(index.reader, number):
            index.complete = True
            return
        if number == REMOVALS_NUMBER:
            news.removed.extend(frame for frame in frames if frame.kind == FrameKind.REMOVED)
            return
        if index.segment is None:
            path = index.reader.path.with_suffix(PAYLOAD_SUFFIX)
            name = SegmentName(header.writer, number)
            index.segment = self._segments.add(name, path, header.num_slots)
        index.segment.sealed |= index.sealed
        index.complete = index.sealed
        good = [
            frame
            for frame in frames
            if frame.kind == FrameKind.STORED
            and (frame.writer, frame.segment) == (header.writer, number)
            and int(frame.slots.max()) < header.num_slots
        ]
        if good:
            index.segment.published_blocks += sum(map(len, good))
            stored(index.segment, good)

    def _is_ours(self, reader: IndexReader, number: int) -> bool:
        """Say whether an index is what its place says: files may have been swapped or copied."""
        header = reader.header
        return header is not None and (
            header.writer.hex() == reader.path.parent.name
            and header.segment == number
            and header.fingerprint == self._folder.fingerprint
            and header.block_bytes == self._block_bytes
        )

    def add_own(self, writer: WriterId) -> None:
        """Note a further id of ours. Before its first segment is made; any thread."""
        self._own.add(writer.hex())

    # -- the thread -----------------------------------------------------------------------------

    def tell(self) -> None:
        """Look, and queue what there is for the engine's thread."""
        news = self.look(self._post)
        for frame in (*self._late, *news.removed):
            target = self._segments.get(SegmentName(frame.writer, frame.segment))
            if target is not None:
                self._index.post(target, frame)
        # A removal may have been read before the store that it is of: once more, after the next.
        self._late = news.removed
        for segment in news.gone:
            if self._segments.discard(segment):
                self._index.post_drop(segment)
                self._gone(segment)

    def _post(self, segment: Segment, frames: list[Frame]) -> None:
        for frame in frames:
            self._index.post(segment, frame)

    def start(
        self,
        open_watch: Callable[[], Watch],
        *,
        interval_s: float,
        name: str,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to follow in the background.

        Args:
            open_watch: Returns what waits for changes.
            interval_s: How often to look when nothing is heard of changes.
            name: Name of the thread.
            then: Called after every look.
        """
        thread = threading.Thread(
            target=self._run, args=(open_watch, interval_s, then), name=name, daemon=True
        )
        thread.start()
        self._thread = thread

    def _run(
        self, open_watch: Callable[[], Watch], interval_s: float, then: Callable[[], None]
    ) -> None:
        with open_watch() as watch:
            self._watch = watch
            while not self._stopping.is_set():
                watch.wait(interval_s, self._others(), self._stopping)
                if not self._stopping.is_set():
                    self._tell_guarded(then)

    def _others(self) -> list[Path]:
        # Of our own stores we need not be told; what others remove is seen with the next look.
        return [folder for folder in self._writers if folder.name not in self._own]

    def _tell_guarded(self, then: Callable[[], None]) -> None:
        try:
            self.tell()
            then()
        except Exception as error:  # noqa: BLE001 - without the thread, nothing is ever seen again
            if self._warn.due():
                logger.warning(
                    "other writers in %s cannot be followed: %s", self._folder.path, error
                )

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread; ``False`` when it is stuck in I/O. Idempotent."""
        self._stopping.set()
        if self._watch is not None:
            self._watch.wake()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
