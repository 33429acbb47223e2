"""The index in memory: which segment holds which block, and when each was used last.

Lookups are answered from here, in the same call and without a system call.

**Who owns what.** The engine's thread owns the index. Other threads (followers, the collector)
call :meth:`BlockIndex.post` and :meth:`BlockIndex.post_drop` only, which queue a change, and
:meth:`BlockIndex.survey`, which reads columns that may change meanwhile. Changes take effect in
:meth:`BlockIndex.apply`, so a lookup never waits for anybody and needs no lock.

**Removal of a segment** marks it as gone, at once and for all its blocks. Rows are cleaned up in
slices, a few with each :meth:`BlockIndex.apply`; until then they count as absent.
"""

from __future__ import annotations

import ctypes
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, final

import numpy as np

from kv_tier_fs.segments._format import FrameKind
from kv_tier_fs.segments._key_table import NOWHERE, KeyTable
from kv_tier_fs.segments._segment import NOT_INDEXED, Segment, SegmentName
from kv_tier_fs.segments._spare_places import Place, SparePlaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from kv_core.contract import OffloadKey
    from kv_tier_fs.segments._format import Frame

__all__ = ["BlockIndex", "Copy", "Place"]

Copy: TypeAlias = "tuple[OffloadKey, int, int, int]"
"""A block that was copied: key, slot before, slot now, checksum."""

# Blocks that one apply() takes on: about half a millisecond.
_APPLIED_AT_ONCE: Final = 512
# Rows that one apply() cleans up, at least, and what part of all that are waiting.
_CLEANED_AT_ONCE: Final = 128
_CLEANED_SHARE: Final = 64
_LAST_USE: Final = 0x7FFF_FFFF
# Rows that a survey counts in one call to numpy, which holds the interpreter for so long.
_SURVEYED_AT_ONCE: Final = 1 << 14

_NONE: Final = Segment(SegmentName(b"", 0), Path(), 0)
_NONE.gone = True

_Rows: TypeAlias = "list[tuple[KeyTable, npt.NDArray[np.int64]]]"


class _Copies:
    """Blocks that were copied from one segment to another."""

    __slots__ = ("blocks", "source", "target")

    def __init__(self, source: Segment, target: Segment, blocks: Sequence[Copy]) -> None:
        self.source = source
        self.target = target
        self.blocks = blocks


class _Drop:
    """A segment that is gone, and the rows that were found in it."""

    __slots__ = ("rows", "segment")

    def __init__(
        self, segment: Segment, rows: list[tuple[KeyTable, npt.NDArray[np.int64]]]
    ) -> None:
        self.segment = segment
        self.rows = rows


def _give_memory_back() -> None:
    """Return what the filling has used in passing to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _ignore(_: Sequence[OffloadKey]) -> None:
    pass


@final
class BlockIndex:
    """An exact map from keys to places.

    A key may be in several places, when several processes have stored it or while a block is
    moved. The latest is the current one, the others come into their own when it goes.

    Args:
        expected_blocks: Most blocks to be expected; a hint.
        on_stored: Called with keys that became present.
        on_removed: Called with keys that became absent.

    A use is a number that goes up from job to job. With the latest use of a block goes one bit:
    whether that was since the block was written to where it is.

    Attributes:
        unwanted: Copies of blocks that have been removed while they were copied: to be removed
            as well, where they are. Any thread may take them from here.
    """

    def __init__(
        self,
        *,
        expected_blocks: int = 0,
        on_stored: Callable[[Sequence[OffloadKey]], None] = _ignore,
        on_removed: Callable[[Sequence[OffloadKey]], None] = _ignore,
    ) -> None:
        self._expected_blocks = expected_blocks
        self._on_stored = on_stored
        self._on_removed = on_removed
        self._tables: dict[int, KeyTable] = {}
        # By number: the segment, whether it has been dropped here, and its rows.
        self._segments: list[Segment] = []
        self._gone = bytearray()
        self._rows: list[int] = []
        self._free_numbers: list[int] = []
        self._num_blocks = 0
        self._spares = SparePlaces()
        self._inbox: deque[tuple[Segment, Frame] | _Copies | _Drop] = deque()
        self._to_clean: deque[tuple[KeyTable, npt.NDArray[np.int64]]] = deque()
        self._num_to_clean = 0
        self._late: list[tuple[Segment, Frame]] = []
        self.unwanted: deque[tuple[OffloadKey, Segment, int]] = deque()
        self._use = 1
        # What goes into a column: the use, and the bit.
        self._used = self._use << 1 | 1

    def listen(
        self,
        on_stored: Callable[[Sequence[OffloadKey]], None],
        on_removed: Callable[[Sequence[OffloadKey]], None],
    ) -> None:
        """Say who is to hear of changes from now on."""
        self._on_stored = on_stored
        self._on_removed = on_removed

    # -- questions ------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of blocks that are present."""
        return self._num_blocks

    def __contains__(self, key: bytes) -> bool:
        """Say whether a block is present. That is a use: somebody is about to load it."""
        try:
            table = self._tables[len(key)]
        except KeyError:
            return False
        # KeyTable.find, once more: the call would be a tenth of a lookup.
        row = table.guess
        if row:
            if table.keys.startswith(key, row * table.key_bytes) and row < table.num_rows:
                number = table.segments[row]
                if number != NOWHERE:
                    table.guess = row + 1
                    if self._segments[number].gone:
                        return False
                    table.uses[row] = self._used
                    return True
            table.guess = table.last = 0
        digest = hash(key)
        shard, mask = table.shards[digest & 0xFF]
        tag = digest >> 8 & 0xFFFF_FFFF
        at = tag & mask
        while slot := shard[at]:
            if slot >> 32 == tag:
                row = slot & 0xFFFF_FFFF
                if table.keys.startswith(key, row * table.key_bytes):
                    if row == table.last + 1:
                        table.guess = row + 1
                    table.last = row
                    if self._segments[table.segments[row]].gone:
                        return False
                    table.uses[row] = self._used
                    return True
            at += 1
        return False

    def locate(self, key: bytes) -> Place | None:
        """Return where a block is; ``None`` when it is absent. A use."""
        table = self._tables.get(len(key))
        row = -1 if table is None else table.find(key)
        if table is None or row < 0:
            return None
        segment = self._segments[table.segments[row]]
        if segment.gone:
            return None
        table.uses[row] = self._used
        segment.used_at = self._use
        return segment, table.slots[row], table.checksums[row]

    def places(self, key: OffloadKey) -> list[Place]:
        """Return all places of a block, the current one first. No use."""
        found: list[Place] = []
        table = self._tables.get(len(key))
        row = -1 if table is None else table.find(key)
        if table is not None and row >= 0:
            segment = self._segments[table.segments[row]]
            if not segment.gone:
                found.append((segment, table.slots[row], table.checksums[row]))
        found.extend(self._spares.of(key))
        return found

    def keys(self) -> Iterator[OffloadKey]:
        """Return all keys that are present."""
        for table in self._tables.values():
            for row in table.rows():
                if not self._segments[table.segments[row]].gone:
                    yield table.key_at(row)

    # -- uses -----------------------------------------------------------------------------------

    def count_use(self) -> None:
        """Begin a new use, younger than all before."""
        if self._use >= _LAST_USE:
            self._age()
        self._use += 1
        self._used = self._use << 1 | 1

    def use(self, keys: Iterable[bytes]) -> None:
        """Note a use of blocks; unknown ones are ignored."""
        self.count_use()
        for key in keys:
            self.locate(key)

    def _age(self) -> None:
        """Halve all uses, which keeps their order."""
        self._use //= 2
        for table in self._tables.values():
            words = np.asarray(table.uses)
            words[:] = words >> 2 << 1 | words & 1
        for segment in self._segments:
            segment.used_at //= 2

    # -- changes --------------------------------------------------------------------------------

    def put(
        self,
        segment: Segment,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        checksums: Sequence[int],
    ) -> None:
        """Note that a segment holds blocks. A use. Nothing happens when the segment is gone."""
        if segment.gone:
            return
        self.count_use()
        self._put(segment, keys, slots, checksums, self._use)

    def remove(self, key: OffloadKey, segment: Segment, slot: int) -> bool:
        """Note that a place of a block does not count any more.

        Returns:
            Whether the key is absent now.
        """
        table = self._tables.get(len(key))
        row = -1 if table is None else table.find(key)
        if table is None or row < 0:
            return True
        current = self._segments[table.segments[row]]
        if current.gone:
            return True
        if current is not segment or table.slots[row] != slot:
            self._spares.remove(key, segment, slot)
            return False
        spare = self._spares.take(key)
        if spare is not None:
            self._leave(table, row)
            self._settle(table, row, *spare)
            return False
        self._leave(table, row)
        table.remove(row)
        self._on_removed((key,))
        return True

    def drop(self, segment: Segment) -> None:
        """Forget a segment with all its blocks. On the engine's thread."""
        segment.gone = True
        self._drop(_Drop(segment, self._rows_in(segment)))

    def load(self, segment: Segment, frames: Iterable[Frame]) -> None:
        """Take over what a segment holds, at the opening: the oldest segment first.

        Much faster than :meth:`put`. Only after :meth:`end_load` anything is found. Removals must
        not be among the frames. Nobody is told of what was there from the start.
        """
        number = self._number(segment)
        self._use = max(self._use, segment.used_at)
        for frame in frames:
            if not frame.key_bytes:
                # Of the empty key there is one.
                self._late.append((segment, frame))
                continue
            table = self._table(frame.key_bytes)
            rows = table.append(frame.keys)
            np.asarray(table.slots)[rows] = frame.slots
            np.asarray(table.checksums)[rows] = frame.checksums
            np.asarray(table.uses)[rows] = segment.used_at << 1
            np.asarray(table.segments)[rows] = number
            self._count(number, len(frame))

    def end_load(self) -> None:
        """Let everything be found that was taken over."""
        for table in self._tables.values():
            # Equal keys one by one: of several places, the latest is the current one.
            for row in table.build():
                key, slot, checksum = table.key_at(row), table.slots[row], table.checksums[row]
                segment = self._segments[table.segments[row]]
                self._count(table.segments[row], -1)
                table.give_up(row)
                self._put(segment, (key,), (slot,), (checksum,), segment.used_at)
        for segment, frame in self._late:
            slots, checksums = frame.slots.tolist(), frame.checksums.tolist()
            self._put(segment, frame.split_keys(), slots, checksums, segment.used_at)
        self._late.clear()
        _give_memory_back()

    def _count(self, number: int, count: int) -> None:
        segment = self._segments[number]
        self._rows[number] += count
        segment.entered_blocks += count
        segment.live_blocks += count
        self._num_blocks += count

    # -- changes by other threads ---------------------------------------------------------------

    def post(self, segment: Segment, frame: Frame) -> None:
        """Queue what a frame says of blocks of a segment. Any thread."""
        self._inbox.append((segment, frame))

    def post_copies(self, source: Segment, target: Segment, blocks: Sequence[Copy]) -> None:
        """Queue that blocks of a segment are in another one, too. No use of them. Any thread."""
        self._inbox.append(_Copies(source, target, blocks))

    def post_drop(self, segment: Segment) -> None:
        """Mark a segment as gone, and queue that its blocks be forgotten. Any thread."""
        segment.gone = True
        # The search is the long part, and is done here.
        self._inbox.append(_Drop(segment, self._rows_in(segment)))

    def apply(self) -> None:
        """Let queued changes take effect: as many as can be had in half a millisecond."""
        if not self._inbox and not self._to_clean:
            return
        budget = _APPLIED_AT_ONCE
        while self._inbox and budget > 0:
            change = self._inbox.popleft()
            if isinstance(change, _Drop):
                self._drop(change)
                budget -= 1
            elif isinstance(change, _Copies):
                self._apply_copies(change)
                budget -= len(change.blocks)
            else:
                self._apply_frame(*change)
                budget -= len(change[1])
        self._clean(max(_CLEANED_AT_ONCE, self._num_to_clean // _CLEANED_SHARE))

    def apply_all(self) -> None:
        """Let all queued changes take effect, however long that takes."""
        while self._inbox or self._to_clean:
            self.apply()

    @property
    def has_changes(self) -> bool:
        """Whether anything is queued."""
        return bool(self._inbox or self._to_clean)

    # -- surveys by other threads ---------------------------------------------------------------

    def survey(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return how many blocks each segment has and the sum of their latest uses. Any thread.

        By :attr:`Segment.number_in_index`. The numbers are of slightly different moments.
        """
        size = len(self._segments)
        counts = np.zeros(size, dtype=np.int64)
        sums = np.zeros(size, dtype=np.float64)
        for table in list(self._tables.values()):
            # First: a column that is taken afterwards has so many rows at least, and what is behind
            # them in one that was replaced by a longer one means nothing.
            num_rows = table.num_rows
            segments, words = np.asarray(table.segments), np.asarray(table.uses)
            for start in range(0, num_rows, _SURVEYED_AT_ONCE):
                piece = slice(start, min(start + _SURVEYED_AT_ONCE, num_rows))
                # A copy: between the look and the use, the engine's thread may free a row.
                numbers = segments[piece].copy()
                known = numbers < size
                numbers = numbers[known]
                counts += np.bincount(numbers, minlength=size)
                sums += np.bincount(numbers, weights=words[piece][known] >> 1, minlength=size)
        return counts, sums

    def uses_in(self, segment: Segment) -> npt.NDArray[np.uint32]:
        """Return the latest uses of the blocks of a segment. Any thread, see :meth:`survey`."""
        uses = [np.asarray(table.uses)[rows] >> 1 for table, rows in self._rows_in(segment)]
        return np.concatenate(uses) if uses else np.empty(0, dtype=np.uint32)

    def used_blocks_in(self, segment: Segment) -> list[tuple[int, OffloadKey, int, int]]:
        """Return use, key, slot and checksum of the blocks used since they came to a segment.

        Any thread. What comes from another thread than the engine's may be wrong in any field: a
        block has to be read and to pass its checksum under its key before it is believed.
        """
        found = []
        for table, rows in self._rows_in(segment):
            words = np.asarray(table.uses)[rows]
            for row, word in zip(rows.tolist(), words.tolist(), strict=True):
                if word & 1:
                    slot, checksum = table.slots[row], table.checksums[row]
                    found.append((word >> 1, table.key_at(row), slot, checksum))
        return found

    # -- inside ---------------------------------------------------------------------------------

    def _table(self, key_bytes: int) -> KeyTable:
        table = self._tables.get(key_bytes)
        if table is None:
            # What is expected has keys of one length, as a rule the first.
            expected = 0 if self._tables else self._expected_blocks
            table = self._tables[key_bytes] = KeyTable(key_bytes, expected)
        return table

    def _number(self, segment: Segment) -> int:
        number = segment.number_in_index
        if number == NOT_INDEXED:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._segments[number] = segment
                self._gone[number] = 0
            else:
                number = len(self._segments)
                self._segments.append(segment)
                self._gone.append(0)
                self._rows.append(0)
            segment.number_in_index = number
        return number

    def _put(
        self,
        segment: Segment,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        checksums: Sequence[int],
        use: int,
    ) -> None:
        if not keys:
            return
        segment.used_at = max(segment.used_at, use)
        stored: list[OffloadKey] = []
        blocks = list(zip(keys, slots, checksums, strict=True))
        if len(set(map(len, keys))) == 1:
            self._enter(segment, keys, blocks, use, stored)
        else:
            for block in blocks:
                self._enter(segment, block[:1], (block,), use, stored)
        # Once for all of them: this is what a store costs the engine's thread.
        self._count(self._number(segment), len(keys))
        if stored:
            self._on_stored(stored)

    def _enter(
        self,
        segment: Segment,
        keys: Sequence[OffloadKey],
        blocks: Sequence[tuple[OffloadKey, int, int]],
        use: int,
        stored: list[OffloadKey],
    ) -> None:
        """Enter blocks whose keys have the same length; all but their number.

        Args:
            segment: Where they are.
            keys: Their keys.
            blocks: Key, slot and checksum of each.
            use: Their latest use.
            stored: Gets the keys that become present.
        """
        number = self._number(segment)
        table = self._table(len(keys[0]))
        rows, added = table.find_or_add(keys)
        new = set(added)
        stored.extend(keys[index] for index in added)
        segments, uses = table.segments, table.uses
        for index, (row, (key, slot, checksum)) in enumerate(zip(rows, blocks, strict=True)):
            if index in new:
                uses[row] = use << 1
            else:
                # Of a key that comes twice, the first is in its place by now.
                self._supersede(table, row, key, segment, slot, stored)
                uses[row] = max(use << 1, uses[row] & ~1)
            table.slots[row] = slot
            table.checksums[row] = checksum
            segments[row] = number

    def _supersede(
        self,
        table: KeyTable,
        row: int,
        key: OffloadKey,
        segment: Segment,
        slot: int,
        stored: list[OffloadKey],
    ) -> None:
        """Make the present place of a key a further one, or forget it when it is gone."""
        old = self._segments[table.segments[row]]
        old_slot, old_checksum = table.slots[row], table.checksums[row]
        self._leave(table, row)
        if old.gone:
            # Nobody has been told yet that it went.
            self._on_removed((key,))
            stored.append(key)
        elif old is not segment or old_slot != slot:
            self._spares.add(key, (old, old_slot, old_checksum))
        self._spares.remove(key, segment, slot)

    def _settle(
        self, table: KeyTable, row: int, segment: Segment, slot: int, checksum: int
    ) -> None:
        number = self._number(segment)
        table.slots[row] = slot
        table.checksums[row] = checksum
        table.segments[row] = number
        self._rows[number] += 1
        segment.live_blocks += 1
        self._num_blocks += 1

    def _leave(self, table: KeyTable, row: int) -> None:
        """Note that a row is no longer one of its segment."""
        number = table.segments[row]
        self._rows[number] -= 1
        if not self._gone[number]:
            self._segments[number].live_blocks -= 1
            self._num_blocks -= 1
        elif not self._rows[number]:
            self._release(number)

    def _release(self, number: int) -> None:
        self._segments[number] = _NONE
        self._free_numbers.append(number)

    def _apply_frame(self, segment: Segment, frame: Frame) -> None:
        if frame.kind == FrameKind.STORED:
            if not segment.gone:
                self.put(
                    segment, frame.split_keys(), frame.slots.tolist(), frame.checksums.tolist()
                )
            return
        for key, slot in zip(frame.split_keys(), frame.slots.tolist(), strict=True):
            self.remove(key, segment, slot)

    def _apply_copies(self, copies: _Copies) -> None:
        source, target = copies.source, copies.target
        if target.gone:
            return
        target.used_at = max(target.used_at, source.used_at)
        target.entered_blocks += len(copies.blocks)
        for key, slot_before, slot, checksum in copies.blocks:
            table = self._tables.get(len(key))
            row = -1 if table is None else table.find(key)
            if table is None or row < 0:
                self.unwanted.append((key, target, slot))
                continue
            current = self._segments[table.segments[row]]
            if current is source and table.slots[row] == slot_before:
                self._leave(table, row)
                if not source.gone:
                    self._spares.add(key, (source, slot_before, checksum))
                self._settle(table, row, target, slot, checksum)
                # As old as it was, and to be used once more to be copied once more.
                table.uses[row] &= ~1
            elif current is target or current.gone:
                target.entered_blocks -= 1
                self._put(target, (key,), (slot,), (checksum,), table.uses[row] >> 1)
            else:
                # Stored again meanwhile.
                self._spares.add(key, (target, slot, checksum))

    # -- segments that are gone -----------------------------------------------------------------

    def _rows_in(self, segment: Segment) -> _Rows:
        number = segment.number_in_index
        if number == NOT_INDEXED:
            return []
        return [(table, table.rows_in(number)) for table in list(self._tables.values())]

    def _drop(self, drop: _Drop) -> None:
        segment = drop.segment
        self._spares.drop(segment)
        number = segment.number_in_index
        if number == NOT_INDEXED or self._segments[number] is not segment or self._gone[number]:
            return
        self._gone[number] = 1
        self._num_blocks -= segment.live_blocks
        segment.live_blocks = 0
        rows = drop.rows
        found = sum(np.count_nonzero(np.asarray(t.segments)[part] == number) for t, part in rows)
        if found < self._rows[number]:
            # Blocks came in after the search, and others may have left.
            rows = self._rows_in(segment)
        for part in rows:
            if len(part[1]):
                self._to_clean.append(part)
                self._num_to_clean += len(part[1])
        if not self._rows[number]:
            self._release(number)

    def _clean(self, budget: int) -> None:
        removed: list[OffloadKey] = []
        while self._to_clean and budget > 0:
            table, rows = self._to_clean.popleft()
            if len(rows) > budget:
                self._to_clean.appendleft((table, rows[budget:]))
                rows = rows[:budget]
            budget -= len(rows)
            self._num_to_clean -= len(rows)
            for row in rows.tolist():
                number = table.segments[row]
                if number != NOWHERE and self._gone[number]:
                    self._clean_row(table, row, removed)
        if removed:
            self._on_removed(removed)

    def _clean_row(self, table: KeyTable, row: int, removed: list[OffloadKey]) -> None:
        key = table.key_at(row)
        spare = self._spares.take(key) if self._spares else None
        self._leave(table, row)
        if spare is not None:
            # Absent for a moment only, of which nobody was told.
            self._settle(table, row, *spare)
            return
        table.remove(row)
        removed.append(key)
