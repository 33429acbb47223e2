"""Bounds the space that segments take: room for a new one is made before it is.

Usage is what the folders hold at that moment, of all writers, alive or dead, and nothing that
anybody remembers: a restart, a crash or another process cannot make it wrong. A segment that was
just made counts in full before anything is in it.

**Who owns what.** Pool threads call :meth:`Space.room`, one at a time; the lock of the root folder
is held from the look at the folders until the new segment exists, so the bound holds over all
processes. The collector's thread calls :meth:`Space.next_victim` and :meth:`Space.remove_empty`,
the follower's :meth:`Space.measure`. The attributes are numbers that any thread may read.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from kv_core.errors import BlockDeclinedError, ConfigError
from kv_core.units import format_bytes
from kv_tier_fs.segments._file_lock import FileLock
from kv_tier_fs.segments._folder import SPACE_LOCK_NAME
from kv_tier_fs.segments._format import index_bytes
from kv_tier_fs.segments._leftovers import reclaim_leftovers
from kv_tier_fs.segments._listing import list_writer, list_writers
from kv_tier_fs.segments._neighbours import Neighbours
from kv_tier_fs.segments._victims import Victims

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kv_core.contract import Clock
    from kv_tier_fs.segments._folder import NamespaceFolder
    from kv_tier_fs.segments._index import BlockIndex
    from kv_tier_fs.segments._listing import Listing
    from kv_tier_fs.segments._membership import Membership
    from kv_tier_fs.segments._segment import Segment, Segments

__all__ = ["Limits", "Space"]

logger = logging.getLogger(__name__)

_PAGE_BYTES: Final = 4096
# How often to look for dead writers while room is short, and in any case.
_RECLAIM_EVERY_S: Final = 10.0
_TIDY_EVERY_S: Final = 600.0
# How much longer than a measurement has taken until the next: a folder with thousands of segments
# is looked at less often.
_MEASURE_SHARE: Final = 50


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """What the space is bounded by.

    Attributes:
        capacity_bytes: Most that the namespace takes; ``None`` for no bound.
        root_capacity_bytes: Most that all namespaces of the root take; ``None`` for no bound.
        min_free_bytes: Least that the file system keeps free.
        namespace_ttl_s: Other namespaces that nobody has used for so long go; ``None``: they stay.
        lock_timeout_s: How long to wait for other processes that make room.
    """

    capacity_bytes: int | None
    root_capacity_bytes: int | None
    min_free_bytes: int
    namespace_ttl_s: float | None
    lock_timeout_s: float


def _check_capacities(limits: Limits, block_bytes: int) -> None:
    # One segment that is being filled, and one that can go meanwhile.
    least = 2 * (-(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES + index_bytes(1))
    for setting in ("capacity_bytes", "root_capacity_bytes"):
        found = getattr(limits, setting)
        if found is not None and found < least:
            raise ConfigError(
                f"{setting!r} is {found}: blocks of {block_bytes} bytes need {least} bytes or more",
                setting=setting,
            )


def _is_empty(segment: Segment) -> bool:
    """Say whether there is nothing in a segment, of which nobody is about to hear either."""
    return (
        segment.sealed
        and segment.is_entered
        and not (segment.live_blocks or segment.pins or segment.gone)
    )


@final
class _Inventory:
    """What the folders of a namespace hold, as of now."""

    def __init__(self, listings: Sequence[Listing], segments: Segments, block_bytes: int) -> None:
        self.used_bytes = sum(listing.size_bytes for listing in listings)
        self.removable: dict[Segment, int] = {}
        self.oldest_touch_s = float("inf")
        for listing in listings:
            for name, payload, index in listing.segments():
                size = payload.size_bytes + index.size_bytes
                if not payload.sealed:
                    # Its index goes on growing.
                    num_slots = payload.size_bytes // block_bytes
                    self.used_bytes += max(0, index_bytes(num_slots) - index.size_bytes)
                    continue
                segment = segments.get(name)
                # One that is not known yet is younger than all that are.
                if segment is not None and not segment.gone:
                    segment.sealed = True
                    self.oldest_touch_s = min(self.oldest_touch_s, payload.modified_s)
                    self.removable[segment] = size


@final
class Space:
    """Makes room for segments by removing others.

    Args:
        folder: Folder of the namespace.
        segments: Those that are known.
        index: Told of what was removed, and asked for the uses of blocks.
        block_bytes: Payload bytes of a block.
        limits: The bounds.
        clock: Monotonic seconds.
        membership: Knows whether anybody else has the namespace open.
        removed: Called with every segment that was removed.

    Raises:
        ConfigError: A capacity is too small for a single block.

    Attributes:
        disk_bytes: What the namespace takes on disk, as of the last look.
        is_short: Whether something will have to go for the next segment of the same size.
        removed_segments: Segments that were removed here to make room.
        settle: Called before segments are removed to make room: the last chance to copy.
    """

    def __init__(
        self,
        folder: NamespaceFolder,
        segments: Segments,
        index: BlockIndex,
        block_bytes: int,
        limits: Limits,
        clock: Clock,
        membership: Membership,
        removed: Callable[[Segment], None],
    ) -> None:
        _check_capacities(limits, block_bytes)
        self._folder = folder
        self._segments = segments
        self._index = index
        self._block_bytes = block_bytes
        self._limits = limits
        self._clock = clock
        self._membership = membership
        self._removed = removed
        self._neighbours = Neighbours(folder.root_dir, folder.path)
        self._reclaimed_at = clock()
        self._locked_until = float("-inf")
        self._measure_at = clock()
        self.disk_bytes = 0
        self.is_short = False
        self.removed_segments = 0
        self.settle: Callable[[], None] = lambda: None

    # -- room -----------------------------------------------------------------------------------

    @contextmanager
    def room(self, size_bytes: int) -> Iterator[Path | None]:
        """Make room for a new segment and hold it while the segment is made.

        Args:
            size_bytes: Bytes of its payloads.

        Yields:
            The payloads of a removed segment, of the same length and in the way, to be renamed
            and written over: that saves the file system from freeing and allocating as much.
            ``None`` when there are none.

        Raises:
            BlockDeclinedError: There is none, and nothing that may be removed; or another process
                holds the lock for too long.
            OSError: The folders cannot be looked at.
        """
        if self.is_short:
            self.settle()
        # Each store that waits keeps a thread from other work: one of them is enough to find out.
        timeout_s = self._limits.lock_timeout_s if self._clock() >= self._locked_until else 0.0
        try:
            lock = self._folder.lock_space(timeout_s)
        except TimeoutError as error:
            self._locked_until = self._clock() + self._limits.lock_timeout_s
            raise BlockDeclinedError(str(error)) from error
        with lock:
            reusable = self._make_room(size_bytes, index_bytes(size_bytes // self._block_bytes))
            try:
                yield reusable
            finally:
                if reusable is not None:
                    # Not renamed, for whatever reason.
                    reusable.unlink(missing_ok=True)

    def bound_bytes(self) -> int | None:
        """Return what the namespace can take, as of the last look; ``None`` if that is not known.

        That is the least of the capacities and of what the file system leaves it.
        """
        limits = self._limits
        free_bytes = self._free_bytes()
        bounds = [
            limits.capacity_bytes,
            limits.root_capacity_bytes,
            None
            if free_bytes is None
            else max(0, self.disk_bytes + free_bytes - limits.min_free_bytes),
        ]
        return min((bound for bound in bounds if bound is not None), default=None)

    def tidy(self) -> None:
        """Reclaim what dead writers left behind and remove what is too old, at the opening.

        Raises:
            TimeoutError: Another process holds the lock for too long.
            OSError: The folders cannot be looked at.
        """
        with self._folder.lock_space(self._limits.lock_timeout_s):
            self._reclaim()
        self.measure()

    def measure(self) -> None:
        """Look how much the namespace takes now. Any thread, one at a time.

        Raises:
            OSError: The folders cannot be looked at.
        """
        if self._clock() < self._measure_at:
            return
        began = self._clock()
        capacity_bytes = self._limits.capacity_bytes
        used_bytes = self._list_used_bytes()
        if capacity_bytes is not None and used_bytes > capacity_bytes:
            used_bytes = self._look_again(used_bytes, capacity_bytes)
        self.disk_bytes = used_bytes
        took = self._clock() - began
        self._measure_at = began + took * _MEASURE_SHARE

    def _list_used_bytes(self) -> int:
        return sum(list_writer(folder).size_bytes for folder in list_writers(self._folder.path))

    def _look_again(self, used_bytes: int, capacity_bytes: int) -> int:
        """Return what the namespace takes that seems to take more than its capacity.

        Without the lock, a segment that goes and the one that is made in its place both count.
        """
        root_dir = self._folder.root_dir
        lock = None
        with suppress(OSError):
            # Not waited for, and not made: who only reads leaves the folder as it is.
            lock = FileLock.try_take(root_dir, root_dir / SPACE_LOCK_NAME, create=False)
        if lock is None:
            return min(used_bytes, max(self.disk_bytes, capacity_bytes))
        with lock:
            return self._list_used_bytes()

    def _reclaim(self) -> None:
        reclaim_leftovers(self._folder.root_dir, self._folder.path)
        if self._limits.namespace_ttl_s is not None:
            self._neighbours.remove_unused(self._limits.namespace_ttl_s)
        self._reclaimed_at = self._clock()

    def _look(self) -> _Inventory:
        listings = [list_writer(folder) for folder in list_writers(self._folder.path)]
        return _Inventory(listings, self._segments, self._block_bytes)

    def _make_room(self, payload_bytes: int, index_size_bytes: int) -> Path | None:
        size_bytes = payload_bytes + index_size_bytes
        inventory = self._look()
        missing_bytes, setting = self._missing_bytes(inventory, size_bytes)
        reclaimed_for_s = self._clock() - self._reclaimed_at
        is_due = reclaimed_for_s > _RECLAIM_EVERY_S or not inventory.removable
        if (missing_bytes > 0 and is_due) or reclaimed_for_s > _TIDY_EVERY_S:
            self._reclaim()
            inventory = self._look()
            missing_bytes, setting = self._missing_bytes(inventory, size_bytes)
        reusable = None
        if missing_bytes > 0:
            reusable = self._remove(inventory, missing_bytes, payload_bytes, setting)
        free_bytes = self._free_bytes()
        taken_bytes = index_size_bytes if reusable is not None else size_bytes
        if free_bytes is not None and free_bytes - taken_bytes < self._limits.min_free_bytes:
            if reusable is not None:
                reusable.unlink(missing_ok=True)
            # Removed files that somebody still reads give their space back later.
            raise BlockDeclinedError(
                f"the file system of {self._folder.path} has {format_bytes(free_bytes)} free, and "
                f"'min_free_bytes' ({format_bytes(self._limits.min_free_bytes)}) is to stay free"
            )
        self.disk_bytes = inventory.used_bytes
        self.is_short = missing_bytes + size_bytes > 0
        return reusable

    def _missing_bytes(self, inventory: _Inventory, size_bytes: int) -> tuple[int, str]:
        """Return how much has to go (zero or less: nothing), and the setting that says so."""
        limits = self._limits
        found = [(-sys.maxsize, "capacity_bytes")]
        if limits.capacity_bytes is not None:
            missing = inventory.used_bytes + size_bytes - limits.capacity_bytes
            found.append((missing, "capacity_bytes"))
        if limits.root_capacity_bytes is not None:
            used_bytes = inventory.used_bytes + self._neighbours.used_bytes()
            missing = used_bytes + size_bytes - limits.root_capacity_bytes
            # Those that were touched before any of ours go first.
            missing -= self._neighbours.remove_oldest(missing, inventory.oldest_touch_s)
            found.append((missing, "root_capacity_bytes"))
        free_bytes = self._free_bytes()
        if free_bytes is not None:
            missing = limits.min_free_bytes + size_bytes - free_bytes
            found.append((missing, "min_free_bytes"))
        return max(found)

    def _free_bytes(self) -> int | None:
        try:
            status = os.statvfs(self._folder.path)
        except OSError:
            # The write that follows meets the same trouble, and says more about it.
            return None
        # Network file systems that know no limit have no blocks to count.
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    # -- removal --------------------------------------------------------------------------------

    def next_victim(self) -> Segment | None:
        """Return the segment that would go next, if any. It may change until it goes."""
        sealed = [segment for segment in self._segments.snapshot() if segment.sealed]
        return Victims(self._index, sealed).next()

    def remove_empty(self) -> int:
        """Remove the segments of which every block has been removed.

        Returns:
            Number of segments that went.

        Raises:
            OSError: The folders cannot be used.
        """
        empty = [segment for segment in self._segments.snapshot() if _is_empty(segment)]
        if not empty:
            return 0
        with self._folder.lock_space(self._limits.lock_timeout_s):
            return sum(self._remove_segment(s) for s in empty if _is_empty(s))

    def _remove(
        self, inventory: _Inventory, missing_bytes: int, payload_bytes: int, setting: str
    ) -> Path | None:
        """Remove segments; return payloads of such a length that may be written over."""
        victims = Victims(self._index, inventory.removable)
        reusable: Path | None = None
        while missing_bytes > 0:
            victim = victims.next()
            if victim is None:
                if reusable is not None:
                    reusable.unlink(missing_ok=True)
                raise BlockDeclinedError(
                    f"{self._folder.path} needs {format_bytes(missing_bytes)} more than "
                    f"{setting!r} leaves it, and all segments are in use"
                )
            size_bytes = inventory.removable.pop(victim)
            if reusable is None and self._is_whole(victim.path, payload_bytes):
                removed, reusable = self._take_payloads(victim)
            else:
                removed = self._remove_segment(victim)
            if removed:
                missing_bytes -= size_bytes
                inventory.used_bytes -= size_bytes
        return reusable

    def _take_payloads(self, segment: Segment) -> tuple[bool, Path | None]:
        """Remove a segment, and keep its payloads if nobody can be reading them.

        Returns:
            Whether it is removed, and the payloads if they are kept.
        """
        with self._membership.alone(self._limits.lock_timeout_s) as alone:
            if not self._remove_index(segment):
                return False, None
            # It is gone by now for whoever looks; who has pinned it before, may read it yet.
            if alone and not segment.pins:
                return True, segment.path
        return self._remove_payloads(segment), None

    @staticmethod
    def _is_whole(path: Path, payload_bytes: int) -> bool:
        try:
            status = path.lstat()
        except OSError:
            return False
        size, allocated = status.st_size, status.st_blocks * 512
        return stat.S_ISREG(status.st_mode) and size == payload_bytes <= allocated

    def _remove_segment(self, segment: Segment) -> bool:
        return self._remove_index(segment) and self._remove_payloads(segment)

    def _remove_index(self, segment: Segment) -> bool:
        segment.leaving = True
        if segment.pins:
            # Since it was chosen.
            segment.leaving = False
            return False
        try:
            # Payloads that no index speaks of are leftovers; the other way round, an index would
            # promise blocks that are not there.
            segment.index_path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("segment %s cannot be removed: %s", segment.path, error)
            segment.leaving = False
            return False
        self._segments.discard(segment)
        self._index.post_drop(segment)
        self._removed(segment)
        self.removed_segments += 1
        return True

    def _remove_payloads(self, segment: Segment) -> bool:
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the payloads of %s cannot be removed: %s", segment.path, error)
            return False
        return True
