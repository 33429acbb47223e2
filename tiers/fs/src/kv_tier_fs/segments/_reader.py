"""Reads blocks from segments, as many as possible in one call, and checks them.

**Who owns what.** Any thread may call anything. ``_lock`` of :class:`SegmentFiles` guards the
descriptors and is never held during I/O: two threads may open the same file, and the second
descriptor is closed again. A descriptor that is in use is not closed; one of a segment that has
been removed still reads what was there.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import stat
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, final

from kv_core.errors import BlockDamagedError, BlockMissingError
from kv_tier_fs._beneath import open_beneath
from kv_tier_fs.segments._direct import transfer
from kv_tier_fs.segments._format import checksum_of_pieces, payload_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_tier_fs.segments._direct import DirectIO
    from kv_tier_fs.segments._index import Place
    from kv_tier_fs.segments._segment import Segment

__all__ = ["CHECKED_BYTES", "SegmentFiles", "SegmentReader", "count_runs"]

CHECKED_BYTES: Final = 1 << 20
"""What a thread reads at a time of a block that is only checked."""

_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
# ESTALE: removed by another host of a network file system, while it was open here.
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})


@final
class _OpenFile:
    __slots__ = ("descriptor", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0


@final
class SegmentFiles:
    """Descriptors of segments that are being read, a bounded number of them.

    Args:
        root: Folder below which all segments are; no symbolic link below it is followed.
        direct: Whether to bypass the page cache.
        most_open: Most descriptors that are kept while nobody uses them.
    """

    def __init__(self, root: Path, direct: DirectIO, *, most_open: int) -> None:
        self._root = root
        self._direct = direct
        self._most_open = most_open
        self._lock = threading.Lock()
        # The one that was used last is at the end.
        self._files: OrderedDict[Segment, _OpenFile] = OrderedDict()

    @contextmanager
    def using(self, segment: Segment) -> Iterator[int]:
        """Lend the descriptor of a segment.

        Raises:
            BlockMissingError: There is no such file.
            OSError: It cannot be opened.
        """
        file = self._take(segment)
        try:
            yield file.descriptor
        finally:
            self._give_back(segment, file)

    def _take(self, segment: Segment) -> _OpenFile:
        with self._lock:
            file = self._files.get(segment)
            if file is not None:
                file.users += 1
                self._files.move_to_end(segment)
                return file
        file = _OpenFile(self._open(segment))
        file.users = 1
        with self._lock:
            self._files.setdefault(segment, file)
            excess = self._excess(self._most_open)
        _close_all(excess)
        return file

    def _give_back(self, segment: Segment, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            if file.users or (self._files.get(segment) is file and not segment.gone):
                return
            if self._files.get(segment) is file:
                del self._files[segment]
        os.close(file.descriptor)

    def _open(self, segment: Segment) -> int:
        try:
            descriptor = self._open_once(segment)
        except OSError as error:
            if error.errno in _GONE:
                raise BlockMissingError(f"segment {segment.path} is not there") from error
            if error.errno not in _NO_DESCRIPTORS:
                raise
            with self._lock:
                excess = self._excess(0)
            _close_all(excess)
            descriptor = self._open_once(segment)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise BlockMissingError(f"{segment.path} is no regular file")
        return descriptor

    def _open_once(self, segment: Segment) -> int:
        # Nonblocking, lest somebody's pipe in the place of a segment stops the thread.
        flags = os.O_RDONLY | os.O_NONBLOCK
        return self._direct.open(
            lambda more: open_beneath(self._root, segment.path, flags | more), writing=False
        )

    def _excess(self, most: int) -> list[int]:
        """Take out descriptors nobody uses, the least recently used first. Lock held."""
        excess = []
        if len(self._files) > most:
            for segment, file in list(self._files.items()):
                if not file.users:
                    del self._files[segment]
                    excess.append(file.descriptor)
                    if len(self._files) <= most:
                        break
        return excess

    def forget(self, segment: Segment) -> None:
        """Close the descriptor of a segment, now or when its last user is done."""
        with self._lock:
            file = self._files.get(segment)
            if file is None:
                return
            del self._files[segment]
            if file.users:
                return
        os.close(file.descriptor)

    def close(self) -> None:
        """Close every descriptor that is not in use. Idempotent."""
        with self._lock:
            excess = self._excess(0)
        _close_all(excess)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Scratch(threading.local):
    """Pages of a thread to read into what is not kept, aligned for direct I/O."""

    def __init__(self) -> None:
        self.pages = memoryview(mmap.mmap(-1, CHECKED_BYTES))


@final
class SegmentReader:
    """Reads blocks into memory and checks them there.

    Args:
        files: Lends descriptors.
        direct: Told when direct reads turn out not to work.
        block_bytes: Payload bytes of every block.
        note_use: Called with every segment that was read from.
    """

    def __init__(
        self,
        files: SegmentFiles,
        direct: DirectIO,
        block_bytes: int,
        note_use: Callable[[Segment], None],
    ) -> None:
        self._files = files
        self._direct = direct
        self._block_bytes = block_bytes
        self._note_use = note_use
        self._scratch = _Scratch()

    def load(
        self,
        places: Sequence[Place],
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> dict[int, BaseException]:
        """Read and check some blocks.

        Args:
            places: Where each is.
            keys: Under which key each was stored.
            blocks: Where each belongs: flat views of ``block_bytes`` bytes.

        Returns:
            What went wrong, by index. Every other block is what was stored.
        """
        failures: dict[int, BaseException] = {}
        for run in _runs(places):
            self._read_run(places, blocks, run, failures)
        for index, (place, key, block) in enumerate(zip(places, keys, blocks, strict=True)):
            checksum = place[2]
            if index in failures or payload_checksum(block, key) == checksum:
                continue
            # Once more: memory and buses fail as well, and what is retired is lost.
            self._read_run(places, blocks, [index], failures)
            found = payload_checksum(block, key)
            if index not in failures and found != checksum:
                failures[index] = _damaged(place, key, found)
        return failures

    def check(self, place: Place, key: OffloadKey) -> None:
        """Read a block without keeping it, and check that it is what was stored.

        Raises:
            BlockMissingError: Its segment is not there.
            BlockDamagedError: It is not.
            OSError: It cannot be read.
        """
        segment, _, checksum = place
        with self._files.using(segment) as descriptor:
            found = checksum_of_pieces(self._pieces(descriptor, place), key)
        if found != checksum:
            raise _damaged(place, key, found)

    def _pieces(self, descriptor: int, place: Place) -> Iterator[memoryview]:
        size = self._block_bytes
        start = place[1] * size
        for at in range(0, size, CHECKED_BYTES):
            piece = self._scratch.pages[: min(CHECKED_BYTES, size - at)]
            moved = transfer(self._direct, descriptor, [piece], start + at, writing=False)
            yield piece[:moved]

    def _read_run(
        self,
        places: Sequence[Place],
        blocks: Sequence[memoryview],
        run: list[int],
        failures: dict[int, BaseException],
    ) -> None:
        """Read blocks that are next to each other in one segment."""
        segment, slot, _ = places[run[0]]
        size = self._block_bytes
        try:
            with self._files.using(segment) as descriptor:
                moved = transfer(
                    self._direct,
                    descriptor,
                    [blocks[index] for index in run],
                    slot * size,
                    writing=False,
                )
            self._note_use(segment)
        except OSError as error:
            if error.errno in _GONE:
                self._files.forget(segment)
                missing = BlockMissingError(f"segment {segment.path} is not there any more")
                failures.update(dict.fromkeys(run, missing))
                return
            if len(run) == 1:
                failures[run[0]] = error
                return
            # One bad place on the disk must not cost its neighbours.
            for index in run:
                self._read_run(places, blocks, [index], failures)
        except (BlockDamagedError, BlockMissingError) as error:
            failures.update(dict.fromkeys(run, error))
        else:
            for index in run[moved // size :]:
                failures[index] = BlockDamagedError(
                    f"{segment.path} ends before slot {places[index][1]} does"
                )


def _damaged(place: Place, key: OffloadKey, found: int) -> BlockDamagedError:
    segment, slot, checksum = place
    return BlockDamagedError(
        f"block {key.hex()} in slot {slot} of {segment.path} has checksum {found:016x}, stored "
        f"was {checksum:016x}"
    )


def count_runs(places: Sequence[Place | None]) -> int:
    """Return about how many calls the reading of some blocks takes, in the given order."""
    count = 0
    # What no place is next to.
    segment, next_slot = None, -1
    for place in places:
        if place is not None:
            count += place[0] is not segment or place[1] != next_slot
            segment, next_slot = place[0], place[1] + 1
    return count


def _runs(places: Sequence[Place]) -> Iterator[list[int]]:
    """Return indices of places in runs: each in one segment, slot after slot."""
    # Most jobs load what one job has stored, in the same order.
    order: Sequence[int] = range(len(places))
    if any(
        after[0] is not before[0] or after[1] <= before[1]
        for before, after in itertools.pairwise(places)
    ):
        order = sorted(order, key=lambda index: (id(places[index][0]), places[index][1]))
    run: list[int] = []
    for index in order:
        segment, slot, _ = places[index]
        if run:
            last_segment, last_slot, _ = places[run[-1]]
            if segment is not last_segment or slot != last_slot + 1:
                yield run
                run = []
        run.append(index)
    if run:
        yield run
