"""Copies blocks that are in use out of the segment that goes next, before it goes.

A segment goes as a whole, at the moment when a new one is needed. So that this moment is short,
and because there is no room to copy to at that moment, the copies are made ahead: whenever a
segment was made, the next victim's used blocks go into the segments that are being filled.

**Who owns what.** The collector's thread runs :meth:`Collector.collect`; any thread may call
:meth:`Collector.wake` and :meth:`Collector.settle`. The staging memory belongs to the collector's
thread. Of several processes, one copies at a time, by a lock; that another one removes the victim
meanwhile is fine.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, final

from kv_tier_fs.segments._file_lock import FileLock
from kv_tier_fs.segments._victims import worth_copying

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.contract import OffloadKey
    from kv_tier_fs.segments._folder import NamespaceFolder
    from kv_tier_fs.segments._index import BlockIndex, Copy, Place
    from kv_tier_fs.segments._segment import Segment
    from kv_tier_fs.segments._space import Space
    from kv_tier_fs.segments._writer import Stored

__all__ = ["COLLECT_LOCK_NAME", "Collector"]

logger = logging.getLogger(__name__)

COLLECT_LOCK_NAME: Final = "collect.lock"
"""In the folder of the namespace: locked by whoever copies."""

# Of larger blocks, one at a time takes its own size: that of a fifth of a segment at most, because
# of larger ones not a single one is spared.
_STAGING_BYTES: Final = 4 << 20
_LOCK_TIMEOUT_S: Final = 1.0
# How long whoever needs room waits for copies that are being made, in all and while one is written:
# the collector may need a new segment for it, and so wait for whoever waits.
_PATIENCE_S: Final = 0.5
_PATIENCE_FOR_WRITE_S: Final = 0.05
_LOOK_EVERY_S: Final = 0.005


class Reader(Protocol):
    """Whoever reads blocks and checks them."""

    def load(
        self, places: Sequence[Place], keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> dict[int, BaseException]:
        """Read blocks; return what went wrong, by index."""


class Writer(Protocol):
    """Whoever writes blocks."""

    def store(
        self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> tuple[list[Stored], dict[int, BaseException]]:
        """Write blocks and publish them; return where they are, and what went wrong."""

    def remove(self, segment: Segment, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Publish that some slots of a segment do not count any more."""


@final
class Collector:
    """Keeps used blocks when their segment goes.

    Args:
        folder: Folder of the namespace.
        space: Says which segment goes next.
        index: Knows the blocks, and is told of the copies.
        reader: Reads them.
        writer: Writes them.
        block_bytes: Payload bytes of a block.

    Attributes:
        copied_blocks: Blocks that were copied.
    """

    def __init__(
        self,
        folder: NamespaceFolder,
        space: Space,
        index: BlockIndex,
        reader: Reader,
        writer: Writer,
        block_bytes: int,
    ) -> None:
        self._folder = folder
        self._space = space
        self._index = index
        self._reader = reader
        self._writer = writer
        self._block_bytes = block_bytes
        self._due = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        # On the monotonic clock; infinite while none is being written.
        self._write_began_s = float("inf")
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.copied_blocks = 0

    # -- one collection -------------------------------------------------------------------------

    def collect(self) -> int:
        """Remove empty segments, and copy what is worth it from the next victim if one is needed.

        Returns:
            Number of blocks that were copied.

        Raises:
            OSError: The folder cannot be used.
        """
        with suppress(OSError):
            # Tried again with the next collection, and nothing here waits for it.
            self.remove_unwanted()
        self._space.remove_empty()
        if not self._space.is_short:
            return 0
        try:
            lock = FileLock.take(
                self._folder.root_dir, self._folder.path / COLLECT_LOCK_NAME, _LOCK_TIMEOUT_S
            )
        except TimeoutError:
            # Another process copies, of the same victim as a rule.
            return 0
        with lock:
            victim = self._space.next_victim()
            return 0 if victim is None else self._copy_from(victim)

    def _copy_from(self, victim: Segment) -> int:
        blocks = worth_copying(self._index.used_blocks_in(victim), victim.num_slots)
        # As they lie in the file, so that neighbours are read in one call.
        blocks.sort(key=lambda block: block[1])
        copied = 0
        if not blocks:
            return copied
        # One at least: whatever is worth copying counts as kept when the victim is chosen.
        at_once = max(1, _STAGING_BYTES // self._block_bytes)
        staging_bytes = max(_STAGING_BYTES, self._block_bytes)
        with mmap.mmap(-1, staging_bytes) as memory, memoryview(memory) as pages:
            for start in range(0, len(blocks), at_once):
                if self._stopping or victim.gone:
                    break
                copied += self._copy(victim, blocks[start : start + at_once], pages)
        self.copied_blocks += copied
        return copied

    def _copy(
        self, victim: Segment, blocks: Sequence[tuple[OffloadKey, int, int]], pages: memoryview
    ) -> int:
        size = self._block_bytes
        views = [pages[start : start + size] for start in range(0, len(blocks) * size, size)]
        try:
            places = [(victim, slot, checksum) for _, slot, checksum in blocks]
            # Whatever was read of the index half changed, fails its checksum here.
            failures = self._reader.load(places, [key for key, _, _ in blocks], views)
            good = [index for index in range(len(blocks)) if index not in failures]
            if not good:
                return 0
            self._write_began_s = time.monotonic()
            stored, _ = self._writer.store(
                [blocks[index][0] for index in good], [views[index] for index in good]
            )
        finally:
            self._write_began_s = float("inf")
            for view in views:
                view.release()
        copied = 0
        for part in stored:
            chosen = good[part.start : part.start + len(part.slots)]
            copies: list[Copy] = [
                (blocks[index][0], blocks[index][1], slot, checksum)
                for index, slot, checksum in zip(chosen, part.slots, part.checksums, strict=True)
            ]
            self._index.post_copies(victim, part.segment, copies)
            copied += len(copies)
        return copied

    def remove_unwanted(self) -> None:
        """Write down that copies of blocks do not count that were removed meanwhile.

        On the collector's thread, or after its end.

        Raises:
            OSError: That could not be written down; it is tried again with the next call.
        """
        unwanted = self._index.unwanted
        while unwanted:
            key, segment, slot = unwanted[0]
            if not segment.gone:
                self._writer.remove(segment, [key], [slot])
            unwanted.popleft()

    # -- the thread -----------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start to collect in the background."""
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._thread = thread

    def wake(self) -> None:
        """Say that a segment was made, or blocks were removed. Any thread."""
        if self._thread is not None:
            self._idle.clear()
            self._due.set()

    def settle(self) -> None:
        """Wait for the copies that are being made, if any, and not for long. Any thread.

        Whoever is about to remove a segment calls this: what is not copied by then, is lost.
        """
        if threading.current_thread() is self._thread:
            return
        end = time.monotonic() + _PATIENCE_S
        while not self._idle.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            if now >= end or now - self._write_began_s > _PATIENCE_FOR_WRITE_S:
                return

    def _run(self) -> None:
        while True:
            self._due.wait()
            # The end of the last collection may have set it after this one became due.
            self._idle.clear()
            self._due.clear()
            if self._stopping:
                self._idle.set()
                return
            try:
                self.collect()
            except Exception as error:  # noqa: BLE001 - without the thread, used blocks are lost
                logger.warning("blocks in use cannot be copied before they go: %s", error)
            finally:
                if not self._due.is_set():
                    self._idle.set()

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread; ``False`` when it is stuck in I/O. Idempotent."""
        self._stopping = True
        self._due.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
