"""Layout ``segments`` as the commands see it: from the files alone, as a follower would.

Nothing of a running tier is disturbed: indexes and payloads are read, the lock of a writer is
tried and given up at once, and removals go into an index of this process, which engines follow
like that of any other writer.
"""

from __future__ import annotations

import mmap
import shutil
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, final

import numpy as np
from typing_extensions import override

from kv_tier_fs._cli._index_damage import (
    describe_lost_blocks,
    describe_lost_removals,
    read_frames,
)
from kv_tier_fs._cli._stores import LOCK_TIMEOUT_S, Damage, Report, Store, Victim, is_locked
from kv_tier_fs.segments._direct import DirectIO
from kv_tier_fs.segments._folder import LOCK_NAME, NamespaceFolder
from kv_tier_fs.segments._format import HEADER_BYTES, FrameKind, IndexHeader
from kv_tier_fs.segments._index_reader import IndexReader
from kv_tier_fs.segments._leftovers import reclaim_leftovers
from kv_tier_fs.segments._listing import (
    LAYOUT_FOLDER,
    REMOVALS_NUMBER,
    list_writer,
    list_writers,
)
from kv_tier_fs.segments._membership import MEMBERS_LOCK_NAME
from kv_tier_fs.segments._reader import SegmentFiles, SegmentReader
from kv_tier_fs.segments._segment import Segment, SegmentName, segment_path
from kv_tier_fs.segments._segment_file import IndexFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_tier_fs._config import Layout
    from kv_tier_fs.segments._folder import WriterFolder
    from kv_tier_fs.segments._format import Frame
    from kv_tier_fs.segments._listing import FileEntry, Listing

__all__ = ["SegmentStore"]

_READ_BYTES: Final = 8 << 20
_PAGE_BYTES: Final = 4096
_NO_CHECKSUM: Final = 0


@final
@dataclass(frozen=True, slots=True)
class _StoredSegment:
    """A segment, with what its index says.

    Attributes:
        name: Which one.
        payload: File of the payloads; ``None`` when there is none.
        index: File of the index.
        header: Header of the index; ``None`` when it cannot be read.
        problem: Why it cannot be read.
        loss: What its index should say and does not; ``None`` when it is as it was written.
        frames: Stores.
        removed: Slots that do not count any more.
    """

    name: SegmentName
    payload: FileEntry | None
    index: FileEntry
    header: IndexHeader | None
    problem: str | None
    loss: str | None
    frames: list[Frame]
    removed: frozenset[int]

    def live(self) -> Iterator[tuple[OffloadKey, int, int]]:
        """Yield key, slot and checksum of every block that counts."""
        for frame in self.frames:
            rows = zip(
                frame.split_keys(), frame.slots.tolist(), frame.checksums.tolist(), strict=True
            )
            yield from (row for row in rows if row[1] not in self.removed)


@final
class SegmentStore(Store):
    """The segments of one namespace."""

    layout: ClassVar[Layout] = "segments"

    def __init__(self, root: Path, folder: Path) -> None:
        self._layout_folder = folder / LAYOUT_FOLDER
        super().__init__(root, folder, self._layout_folder / "config.json")
        self._writer: WriterFolder | None = None
        self._removals: IndexFile | None = None

    # -- looking --------------------------------------------------------------------------------

    @override
    def report(self) -> Report:
        listings = self._listings()
        keys: defaultdict[int, list[bytes]] = defaultdict(list)
        payload_bytes = 0
        for segment in self._segments(listings):
            if segment.payload is None or segment.header is None:
                continue
            for frame in segment.frames:
                live = frame.keys
                if segment.removed:
                    slots = frame.slots.tolist()
                    pairs = zip(frame.split_keys(), slots, strict=True)
                    live = b"".join(key for key, slot in pairs if slot not in segment.removed)
                keys[frame.key_bytes].append(live)
                payload_bytes += len(live) // frame.key_bytes * segment.header.block_bytes
        blocks = sum(
            len(np.unique(np.frombuffer(b"".join(parts), np.dtype((np.void, length)))))
            for length, parts in keys.items()
        )
        files = [file for listing in listings for file in listing.payloads.values()]
        used = [used_s for _, _, used_s in self._uses(listings)]
        written = [file.modified_s for file in files]
        alive = [self._is_alive(listing.folder) for listing in listings]
        return Report(
            blocks=blocks,
            payload_bytes=payload_bytes,
            disk_bytes=sum(listing.size_bytes for listing in listings),
            files=len(files),
            live_writers=alive.count(True),
            dead_writers=alive.count(False),
            oldest_write_s=min(written, default=None),
            latest_write_s=max(written, default=None),
            coldest_use_s=min(used, default=None),
            latest_use_s=max(used, default=None),
        )

    @override
    def is_open(self) -> bool:
        # Readers are members, too.
        members = self._layout_folder / MEMBERS_LOCK_NAME
        return is_locked(self.root, members, shared=True) or any(
            map(self._is_alive, list_writers(self._layout_folder))
        )

    def _listings(self) -> list[Listing]:
        return [list_writer(folder) for folder in sorted(list_writers(self._layout_folder))]

    def _uses(self, listings: list[Listing]) -> Iterator[tuple[FileEntry, FileEntry, float]]:
        for listing in listings:
            for _, payload, index in listing.segments():
                yield payload, index, max(payload.modified_s, index.modified_s)

    def _is_alive(self, writer_dir: Path) -> bool:
        return is_locked(self.root, writer_dir / LOCK_NAME)

    def _segments(self, listings: list[Listing]) -> Iterator[_StoredSegment]:
        """Yield every segment with an index; those that vanish meanwhile are left out."""
        removed = self._removed(listings)
        for listing in listings:
            for number, index in sorted(listing.indexes.items()):
                if number == REMOVALS_NUMBER:
                    continue
                name = SegmentName(listing.writer, number)
                payload = listing.payloads.get(number)
                slots = frozenset(removed.get(name, ()))
                reader = IndexReader(self.root, index.path)
                try:
                    frames = [f for f in read_frames(reader) if f.kind == FrameKind.STORED]
                    problem = _header_problem(reader, index, listing)
                    loss = None
                    if reader.header is not None and problem is None:
                        loss = describe_lost_blocks(reader, index, payload, frames, slots)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    yield _StoredSegment(name, payload, index, None, str(error), None, [], slots)
                    continue
                yield _StoredSegment(
                    name, payload, index, reader.header, problem, loss, frames, slots
                )

    def _removed(self, listings: list[Listing]) -> dict[SegmentName, set[int]]:
        removed: defaultdict[SegmentName, set[int]] = defaultdict(set)
        for listing in listings:
            index = listing.indexes.get(REMOVALS_NUMBER)
            if index is None:
                continue
            with suppress(FileNotFoundError):
                for frame in IndexReader(self.root, index.path).read():
                    if frame.kind == FrameKind.REMOVED:
                        name = SegmentName(frame.writer, frame.segment)
                        removed[name].update(frame.slots.tolist())
        return removed

    # -- checking -------------------------------------------------------------------------------

    @override
    def check(self, advance: Callable[[int], None]) -> Iterator[Damage]:
        listings = self._listings()
        yield from self._check_removals(listings)
        for segment in self._segments(listings):
            # Nothing to retire in either case: what an index does not say, nobody finds.
            if segment.problem is not None:
                yield Damage(segment.index.path, None, segment.problem)
            elif segment.header is not None:
                if segment.loss is not None:
                    yield Damage(segment.index.path, None, segment.loss)
                yield from self._check_segment(segment, segment.header, advance)

    def _check_removals(self, listings: list[Listing]) -> Iterator[Damage]:
        for listing in listings:
            index = listing.indexes.get(REMOVALS_NUMBER)
            if index is None:
                continue
            with suppress(FileNotFoundError):
                # From its begin once more, as it may have been made anew while it was read.
                if self._removals_problem(index, listing) and (
                    problem := self._removals_problem(index, listing)
                ):
                    yield Damage(index.path, None, problem)

    def _removals_problem(self, index: FileEntry, listing: Listing) -> str | None:
        reader = IndexReader(self.root, index.path)
        read_frames(reader)
        problem = _header_problem(reader, index, listing)
        if reader.header is not None and problem is None:
            problem = describe_lost_removals(reader)
        return problem

    def _check_segment(
        self, stored: _StoredSegment, header: IndexHeader, advance: Callable[[int], None]
    ) -> Iterator[Damage]:
        size = header.block_bytes
        path = segment_path(stored.index.path.parent, stored.name.number)
        segment = Segment(stored.name, path, header.num_slots)
        direct = DirectIO(size, wanted=size % _PAGE_BYTES == 0)
        files = SegmentFiles(self.root, direct, most_open=1)
        reader = SegmentReader(files, direct, size, lambda _: None)
        blocks = sorted(stored.live(), key=lambda block: block[1])
        step = max(1, _READ_BYTES // size)
        with mmap.mmap(-1, step * size) as memory, memoryview(memory) as flat:
            views = [flat[at * size : (at + 1) * size] for at in range(step)]
            try:
                for start in range(0, len(blocks), step):
                    some = blocks[start : start + step]
                    failures = reader.load(
                        [(segment, slot, checksum) for _, slot, checksum in some],
                        [key for key, _, _ in some],
                        views[: len(some)],
                    )
                    advance(len(some) * size)
                    for at, error in sorted(failures.items()):
                        key, slot, _ = some[at]
                        if self._still_counts(stored, slot):
                            yield Damage(
                                path,
                                key,
                                str(error),
                                self._retirement(stored.name, size, key, slot),
                            )
            finally:
                files.close()
                for view in views:
                    view.release()

    def _still_counts(self, stored: _StoredSegment, slot: int) -> bool:
        """Say whether a block that failed was not collected or retired in the meantime."""
        if not stored.index.path.exists():
            # Its payloads may have been written over by now.
            return False
        return slot not in self._removed(self._listings()).get(stored.name, ())

    def _retirement(
        self, name: SegmentName, block_bytes: int, key: OffloadKey, slot: int
    ) -> Callable[[], None] | None:
        if self.namespace is None:
            return None

        def retire() -> None:
            removals = self._removals_of_ours(block_bytes)
            removals.append(FrameKind.REMOVED, name, [([key], [slot], [_NO_CHECKSUM])])

        return retire

    def _removals_of_ours(self, block_bytes: int) -> IndexFile:
        if self._removals is None:
            if self.namespace is None:
                raise AssertionError("nothing is retired in a folder that nobody can read")
            folder = NamespaceFolder(self.root, self.namespace)
            folder.open(read_only=False, timeout_s=LOCK_TIMEOUT_S)
            self._writer = folder.become_writer(LOCK_TIMEOUT_S)
            header = IndexHeader(
                self._writer.writer, REMOVALS_NUMBER, 0, block_bytes, folder.fingerprint
            )
            path = segment_path(self._writer.path, REMOVALS_NUMBER).with_suffix(".idx")
            self._removals = IndexFile(self.root, path, header, sync=True)
        return self._removals

    @override
    def close(self) -> None:
        removals, self._removals = self._removals, None
        if removals is not None:
            removals.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    # -- collecting: all under the lock of the root ----------------------------------------------

    @override
    def disk_bytes(self) -> int:
        return sum(listing.size_bytes for listing in self._listings())

    @override
    def latest_touch_s(self) -> float:
        times = [self._layout_folder.stat().st_mtime]
        for listing in self._listings():
            times += [file.modified_s for file in listing.payloads.values()]
            times += [file.modified_s for file in listing.indexes.values()]
        return max(times)

    @override
    def reclaim(self) -> None:
        reclaim_leftovers(self.root, self._layout_folder)

    @override
    def victims(self) -> Iterator[Victim]:
        for payload, index, used_s in self._uses(self._listings()):
            # What is not sealed is being written, or was when its writer died.
            if payload.sealed:
                yield Victim(
                    used_s, payload.size_bytes + index.size_bytes, _removal(index, payload)
                )

    @override
    def remove(self) -> None:
        for payload, index, _ in self._uses(self._listings()):
            _removal(index, payload)()
        shutil.rmtree(self._layout_folder)
        with suppress(OSError):
            # Unless the other layout has something there.
            self.folder.rmdir()


def _removal(index: FileEntry, payload: FileEntry) -> Callable[[], None]:
    def remove() -> None:
        # Payloads without an index are leftovers; an index without payloads would promise.
        index.path.unlink(missing_ok=True)
        payload.path.unlink(missing_ok=True)

    return remove


def _header_problem(reader: IndexReader, index: FileEntry, listing: Listing) -> str | None:
    if reader.is_of_another_version:
        return "an index of another version of the format; left as it is"
    if reader.header is None:
        # A writer that has just begun; what a dead one leaves is reclaimed at the next opening.
        has_just_begun = not index.sealed and reader.size_bytes <= HEADER_BYTES
        return None if has_just_begun else "the index has no header"
    if reader.header.writer != listing.writer:
        return "an index of another writer"
    return None
