"""The storage of one tier: what is opened together, used by its threads, and closed together.

**Who owns what.** :meth:`SegmentStorage.open` and :meth:`SegmentStorage.close` run alone. In
between, ``index`` belongs to the engine's thread, and :meth:`SegmentStorage.store`,
:meth:`SegmentStorage.load` and :meth:`SegmentStorage.write_removals` may be called from any pool
thread. ``removals_due`` is a deque that any thread may add to and any pool thread empties.
"""

from __future__ import annotations

import itertools
import logging
import resource
from collections import deque
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, final

from kv_core.errors import BlockDamagedError, BlockDeclinedError, BlockMissingError
from kv_core.tierkit import Occasionally
from kv_tier_fs._beneath import sync_folder
from kv_tier_fs._root import explained
from kv_tier_fs.segments._collect import Collector
from kv_tier_fs.segments._direct import DirectIO
from kv_tier_fs.segments._folder import NamespaceFolder
from kv_tier_fs.segments._follow import Follower
from kv_tier_fs.segments._index import BlockIndex
from kv_tier_fs.segments._membership import Membership
from kv_tier_fs.segments._probe import probe_io
from kv_tier_fs.segments._reader import SegmentFiles, SegmentReader
from kv_tier_fs.segments._segment import SegmentName, Segments
from kv_tier_fs.segments._space import Limits, Space
from kv_tier_fs.segments._use_times import UseTimes
from kv_tier_fs.segments._watch import is_local, open_watch
from kv_tier_fs.segments._writer import SegmentWriter, WriterPlace, slots_per_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_core.contract import OffloadKey, PrimaryView, TierContext
    from kv_tier_fs._config import FsConfig
    from kv_tier_fs.segments._folder import WriterFolder
    from kv_tier_fs.segments._format import Frame
    from kv_tier_fs.segments._index import Place
    from kv_tier_fs.segments._segment import Segment
    from kv_tier_fs.segments._writer import Stored

__all__ = ["SegmentStorage"]

logger = logging.getLogger(__name__)

_MOST_DESCRIPTORS: Final = 256
_DESCRIPTOR_SHARE: Final = 8
# Room that the index reserves, and does not take before it is filled.
_MOST_EXPECTED_BLOCKS: Final = 1 << 24

FOLLOW_EVERY_S: Final = 0.25
"""How often to look for changes by others where the kernel does not tell of them."""

_LOCK_TIMEOUT_S: Final = 5.0
_STOP_TIMEOUT_S: Final = 5.0


@final
class SegmentStorage:
    """All that a tier of this layout has on disk, and what it knows of it.

    Args:
        context: What the tier was given.
        config: Its settings.
        soon: Runs something on a pool thread, before the stores that are waiting.

    Attributes:
        index: Which block is where.
        removals_due: Removals that have yet to be written down.
    """

    def __init__(
        self,
        context: TierContext,
        config: FsConfig,
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._soon = soon
        self._config = config
        self._tier_name = context.tier_name
        self._block_bytes = context.block_bytes
        self._clock = context.clock
        self._warn_removal = Occasionally(context.clock)
        self._root = config.root_dir.absolute()
        self._direct = DirectIO(context.block_bytes, wanted=config.direct_io)
        self._folder = NamespaceFolder(self._root, context.namespace)
        self._membership = Membership(self._root, self._folder.path)
        self._own: WriterFolder | None = None
        self._segments = Segments()
        capacity_bytes = config.capacity_bytes or 0
        self.index = BlockIndex(
            expected_blocks=min(capacity_bytes // context.block_bytes, _MOST_EXPECTED_BLOCKS)
        )
        self.removals_due: deque[list[tuple[OffloadKey, Segment, int]]] = deque()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._files = SegmentFiles(
            self._root,
            self._direct,
            most_open=min(_MOST_DESCRIPTORS, max(1, limit // _DESCRIPTOR_SHARE)),
        )
        use_times = UseTimes(self._files.using)
        self._reader = SegmentReader(
            self._files, self._direct, context.block_bytes, use_times.note_use
        )
        self._space = Space(
            self._folder,
            self._segments,
            self.index,
            context.block_bytes,
            Limits(
                capacity_bytes=config.capacity_bytes,
                root_capacity_bytes=config.root_capacity_bytes,
                min_free_bytes=config.min_free_bytes,
                namespace_ttl_s=config.namespace_ttl_s,
                lock_timeout_s=_LOCK_TIMEOUT_S,
            ),
            context.clock,
            self._membership,
            self._files.forget,
        )
        self._writer: SegmentWriter | None = None
        self._follower: Follower | None = None
        self._collector: Collector | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes that the blocks of the namespace take on the disk, as far as is known.

        More than the capacity while the disk holds more, as after the capacity was lowered.
        """
        num_blocks = len(self.index)
        if not num_blocks:
            # What is left is reserved, or about to be reclaimed.
            return 0
        block_bytes = num_blocks * self._block_bytes
        if self._config.capacity_bytes is not None:
            # Of what went to make room, the index may be yet to hear.
            block_bytes = min(block_bytes, self._config.capacity_bytes)
        return max(self._space.disk_bytes, block_bytes)

    # -- life -----------------------------------------------------------------------------------

    def open(self, primary: PrimaryView) -> None:
        """Open it.

        Raises:
            TierOpenError: It cannot be used.
        """
        config, folder = self._config, self._folder
        folder.open(read_only=config.read_only, timeout_s=_LOCK_TIMEOUT_S)
        if not config.read_only:
            self._own = folder.become_writer(_LOCK_TIMEOUT_S)
        with explained(self._root):
            # Before anything is looked at that somebody who is alone could write over.
            self._join()
            if self._own is not None:
                self._space.tidy()
            local = is_local(self._root)
        self._follower = Follower(
            folder,
            self._block_bytes,
            self._segments,
            self.index,
            self._files.forget,
            own=None if self._own is None else self._own.writer,
            trust_times=local,
            is_member=self._join,
        )
        with explained(self._root):
            self._fill_index(self._follower)
        if self._own is not None:
            with explained(self._root):
                probe_io(self._root, self._own.path, self._direct, primary)
            self._open_writer(self._own)
        name = f"kv-{self._tier_name}"
        self._follower.start(
            lambda: open_watch(folder.path, local=local),
            interval_s=FOLLOW_EVERY_S,
            name=f"{name}-follow",
            then=self._space.measure,
        )
        if self._collector is not None:
            self._collector.start(f"{name}-collect")

    def _join(self) -> bool:
        """Count as somebody who has the namespace open; who only reads waits for a writer."""
        return self._membership.join(_LOCK_TIMEOUT_S, create=not self._config.read_only)

    def _fill_index(self, follower: Follower) -> None:
        # Nothing better is known of uses than the order in which the blocks were written.
        uses = itertools.count(1)

        def load(segment: Segment, frames: list[Frame]) -> None:
            segment.used_at = next(uses)
            self.index.load(segment, frames)

        news = follower.look(load)
        self.index.end_load()
        for frame in news.removed:
            target = self._segments.get(SegmentName(frame.writer, frame.segment))
            if target is not None:
                for key, slot in zip(frame.split_keys(), frame.slots.tolist(), strict=True):
                    self.index.remove(key, target, slot)

    def _open_writer(self, own: WriterFolder) -> None:
        block_bytes = self._block_bytes
        self._writer = SegmentWriter(
            self._place_of(own),
            self._segments,
            self._space,
            self._direct,
            self._segment_was_made,
            self._soon,
            self._become_writer_again,
        )
        self._collector = Collector(
            self._folder,
            self._space,
            self.index,
            SegmentReader(self._files, self._direct, block_bytes, lambda _: None),
            self._writer,
            block_bytes,
        )
        self._space.settle = self._collector.settle

    def _place_of(self, own: WriterFolder) -> WriterPlace:
        block_bytes = self._block_bytes
        sync = self._config.durability == "data"
        if sync:
            # The names of folders, too, have to be there after a loss of power.
            for folder in (self._folder.path, self._folder.path.parent, self._root):
                sync_folder(self._root, folder)
        return WriterPlace(
            self._root,
            own.path,
            own.writer,
            self._folder.fingerprint,
            block_bytes,
            lambda: slots_per_segment(block_bytes, self._space.bound_bytes()),
            sync=sync,
        )

    def _become_writer_again(self) -> WriterPlace:
        """Make the folders that somebody has removed. On a pool thread, one at a time."""
        logger.warning("the folders of %s were removed; making them again", self._folder.path)
        lost = self._own
        self._folder.open(read_only=False, timeout_s=_LOCK_TIMEOUT_S)
        self._own = self._folder.become_writer(_LOCK_TIMEOUT_S)
        self._membership.leave()
        self._join()
        if self._follower is not None:
            self._follower.add_own(self._own.writer)
        if lost is not None:
            for segment in self._segments.snapshot():
                if segment.name.writer == lost.writer:
                    self._forget(segment)
            lost.close()
        return self._place_of(self._own)

    def _segment_was_made(self) -> None:
        if self._collector is not None:
            self._collector.wake()

    def close(self) -> None:
        """Close it, also when it was opened in part. Idempotent."""
        if self._collector is not None and self._collector.stop(_STOP_TIMEOUT_S):
            with suppress(OSError):
                self._collector.remove_unwanted()
        if self._follower is not None:
            self._follower.stop(_STOP_TIMEOUT_S)
        if self._writer is not None:
            self.write_removals()
            self._writer.close()
        self._files.close()
        self._membership.leave()
        if self._own is not None:
            self._own.close()

    # -- pool threads ---------------------------------------------------------------------------

    def store(
        self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> tuple[list[Stored], dict[int, BaseException]]:
        """Store blocks. See :meth:`SegmentWriter.store`.

        Raises:
            BlockDeclinedError: The tier was opened for reading only.
        """
        if self._writer is None:
            raise BlockDeclinedError("the tier was opened with 'read_only'")
        return self._writer.store(keys, blocks)

    def load(
        self, places: Sequence[Place], keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> dict[int, BaseException]:
        """Load blocks, and retire those that turn out damaged. See :meth:`SegmentReader.load`."""
        failures = self._reader.load(places, keys, blocks)
        if failures:
            for index, error in failures.items():
                if isinstance(error, BlockMissingError):
                    self._forget(places[index][0])
            self._retire(
                [
                    (keys[index], places[index])
                    for index, error in failures.items()
                    if isinstance(error, BlockDamagedError)
                ]
            )
        return failures

    def check(self, place: Place, key: OffloadKey) -> None:
        """Check a block where it is, and retire it if it is damaged.

        Raises:
            BlockDamagedError: It is not what was stored.
            BlockMissingError: Its segment is not there.
            OSError: It cannot be read.
        """
        try:
            self._reader.check(place, key)
        except BlockDamagedError:
            self._retire([(key, place)])
            raise

    def _forget(self, segment: Segment) -> None:
        """Forget a segment that is not there, with all that it was to hold."""
        if self._segments.discard(segment):
            self.index.post_drop(segment)
            self._files.forget(segment)

    def _retire(self, damaged: Sequence[tuple[OffloadKey, Place]]) -> None:
        if damaged:
            self.removals_due.append([(key, place[0], place[1]) for key, place in damaged])
            self.write_removals()

    def write_removals(self) -> None:
        """Write down the removals that are due. What fails is tried again with the next."""
        writer = self._writer
        if writer is None:
            # Nobody else gets to know; here, the index has forgotten them.
            self.removals_due.clear()
            return
        if self._collector is not None and self.removals_due:
            # A segment may have become empty.
            self._collector.wake()
        while self.removals_due:
            try:
                due = self.removals_due.popleft()
            except IndexError:
                # Another thread was faster.
                return
            try:
                for segment, group in groupby(due, key=itemgetter(1)):
                    removed = list(group)
                    writer.remove(
                        segment,
                        [key for key, _, _ in removed],
                        [slot for _, _, slot in removed],
                    )
            except OSError as error:
                self.removals_due.append(due)
                if self._warn_removal.due():
                    logger.warning(
                        "the removal of %d block(s) cannot be written down: %s", len(due), error
                    )
                return
