"""The storage of one tier: what is opened together, used by its threads, and closed together.

**Who owns what.** :meth:`SegmentStorage.open` and :meth:`SegmentStorage.close` run alone. In
between, ``index`` belongs to the engine's thread, and :meth:`SegmentStorage.store`,
:meth:`SegmentStorage.load` and :meth:`SegmentStorage.write_removals` may be called from any pool
thread. ``removals_due`` is a deque that any thread may add to and any pool thread empties.
"""

from __future__ import annotations

import logging
import resource
import secrets
from collections import deque
from contextlib import nullcontext
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, final

from kv_core.errors import BlockDamagedError, BlockDeclinedError
from kv_core.tierkit import Occasionally
from kv_tier_fs._folders import make_folder
from kv_tier_fs.segments._direct import DirectIO
from kv_tier_fs.segments._format import FrameKind, IndexFormatError, IndexHeader, decode_frames
from kv_tier_fs.segments._index import BlockIndex
from kv_tier_fs.segments._reader import SegmentFiles, SegmentReader
from kv_tier_fs.segments._segment import SegmentName, Segments
from kv_tier_fs.segments._writer import SegmentWriter, WriterPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kv_core.contract import OffloadKey, PrimaryView, TierContext
    from kv_tier_fs._config import FsConfig
    from kv_tier_fs.segments._index import Place
    from kv_tier_fs.segments._segment import Segment
    from kv_tier_fs.segments._writer import Stored

__all__ = ["SegmentStorage"]

logger = logging.getLogger(__name__)

_MOST_SEGMENT_BYTES: Final = 256 << 20
_CAPACITY_SHARE: Final = 32
"""A segment takes at most this part of the capacity."""
_MOST_DESCRIPTORS: Final = 256
_DESCRIPTOR_SHARE: Final = 8


def slots_per_segment(block_bytes: int, capacity_bytes: int | None) -> int:
    """Return how many blocks a segment has, at least one."""
    size = _MOST_SEGMENT_BYTES
    if capacity_bytes is not None:
        size = min(size, capacity_bytes // _CAPACITY_SHARE)
    return max(1, size // block_bytes)


class _Unbounded:
    def room(self, size_bytes: int) -> AbstractContextManager[object]:
        return nullcontext(size_bytes)


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
        self._namespace = context.namespace
        self._block_bytes = context.block_bytes
        self._clock = context.clock
        self._warn_removal = Occasionally(context.clock)
        self._root = config.root_dir.absolute()
        self._direct = DirectIO(context.block_bytes, wanted=config.direct_io)
        self._segments = Segments()
        self.index = BlockIndex()
        self.removals_due: deque[list[tuple[OffloadKey, Segment, int]]] = deque()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._files = SegmentFiles(
            self._root,
            self._direct,
            most_open=min(_MOST_DESCRIPTORS, max(1, limit // _DESCRIPTOR_SHARE)),
        )
        self._reader = SegmentReader(self._files, self._direct, context.block_bytes, lambda _: None)
        self._writer: SegmentWriter | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes that the blocks of the namespace take."""
        return len(self.index) * self._block_bytes

    # -- life -----------------------------------------------------------------------------------

    def open(self, primary: PrimaryView) -> None:  # noqa: ARG002
        """Open it.

        Raises:
            TierOpenError: It cannot be used.
        """
        folder = self._root / f"{self._namespace.fingerprint[:12]}" / "segments-v1"
        for path in reversed([folder, *folder.parents]):
            if not path.exists():
                make_folder(path)
        frames = []
        removed = []
        for index_path in sorted(folder.glob("*/*.idx")):
            data = memoryview(index_path.read_bytes())
            try:
                header = IndexHeader.decode(data)
            except IndexFormatError:
                continue
            segment = self._segments.add(
                SegmentName(header.writer, header.segment),
                index_path.with_suffix(".seg"),
                header.num_slots,
            )
            for frame, _ in decode_frames(data[128:], header.seed, 128):
                if frame.kind == FrameKind.STORED:
                    frames.append((segment, frame))
                else:
                    removed.append(frame)
        self.index.load(frames)
        for frame in removed:
            found = self._segments.get(SegmentName(frame.writer, frame.segment))
            if found is not None:
                for key, slot in zip(frame.split_keys(), frame.slots.tolist(), strict=True):
                    self.index.remove(key, found, slot)
        writer = secrets.token_bytes(16)
        writer_folder = folder / writer.hex()
        make_folder(writer_folder)
        place = WriterPlace(
            self._root,
            writer_folder,
            writer,
            self._namespace.fingerprint,
            self._block_bytes,
            slots_per_segment(self._block_bytes, self._config.capacity_bytes),
            sync=self._config.durability == "data",
        )
        self._writer = SegmentWriter(
            place, self._segments, _Unbounded(), self._direct, lambda: None, self._soon
        )

    def close(self) -> None:
        """Close it, also when it was opened in part. Idempotent."""
        if self._writer is not None:
            self.write_removals()
            self._writer.close()
        self._files.close()

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
        damaged = [
            (keys[index], places[index][0], places[index][1])
            for index, error in failures.items()
            if isinstance(error, BlockDamagedError)
        ]
        if damaged:
            self.removals_due.append(damaged)
            self.write_removals()
        return failures

    def write_removals(self) -> None:
        """Write down the removals that are due. What fails is tried again with the next."""
        writer = self._writer
        if writer is None:
            # Nobody else gets to know; here, the index has forgotten them.
            self.removals_due.clear()
            return
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
