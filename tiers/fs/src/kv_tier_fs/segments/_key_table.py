"""A table of all keys of one length, with the columns that say where their blocks are.

A dict would take 160 bytes and more a block. This takes the bytes of the keys and about forty
more: the keys lie in flat pieces of memory, a slot of the hash table is one number (32 bits of the
hash, 32 bits of the row), columns are arrays. Rows are given out one after the other, and a prompt
asks for what was stored one after the other: the row behind the last one is tried before any hash.

The hash table is cut into shards. Each grows alone, so that the growth of a large table never
stops the engine for longer than a shard takes. Collisions go to the next slot (a shard does not
wrap around: it ends with free slots), and a removal moves later ones back, so that there are no
tombstones to sweep.

**Who owns what.** The engine's thread owns everything. Other threads may read the columns: they
see what was there a moment ago, or half of a change, and have to check what they make of it. They
look at ``num_rows`` first and at a column afterwards: one that grows is replaced by a longer one,
and only then there are more rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_core.contract import OffloadKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

__all__ = ["NOWHERE", "KeyTable"]

NOWHERE: Final = 0xFFFF_FFFF
"""In the column of segments: the row is free."""

_SHARDS: Final = 256
# Most caches outgrow less, and each time a shard grows costs as much as twenty new keys.
_LEAST_SHARD: Final = 64
# Free slots at the end of a shard, where others would wrap around.
_TAIL: Final = 8

# Rows whose keys get their memory at once.
_STEP_ROWS: Final = 4096
_FIRST_ROWS: Final = 1024
_ROWS_AT_ONCE: Final = 256
# Row 0 has no key: a slot of the hash table that is zero is free.
_FIRST_ROW: Final = 1
# Keys that are hashed at once: as many objects exist for that moment.
_HASHED_AT_ONCE: Final = 1 << 16


def _empty_shards() -> list[tuple[memoryview, int]]:
    size = _LEAST_SHARD + _TAIL
    slots = np.zeros(_SHARDS * size, dtype=np.uint64).data
    return [(slots[at : at + size], _LEAST_SHARD - 1) for at in range(0, len(slots), size)]


def _shard_of(slots: npt.NDArray[np.uint64], size: int) -> tuple[memoryview, int]:
    """Build a shard from its slots, in any order, for a size that is a power of two."""
    homes = (slots >> np.uint64(32)).astype(np.int64) & (size - 1)
    order = np.argsort(homes, kind="stable")
    steps = np.arange(len(order))
    # Each goes to its home, or to the first free slot behind those that come before it.
    places = np.maximum.accumulate(homes[order] - steps) + steps
    length = size + _TAIL
    if len(places):
        length = max(length, int(places[-1]) + _TAIL)
    shard = np.zeros(length, dtype=np.uint64)
    shard[places] = slots[order]
    return shard.data, size - 1


def _size_for(count: int) -> int:
    return max(_LEAST_SHARD, 1 << (2 * count - 1).bit_length()) if count else _LEAST_SHARD


@final
class KeyTable:
    """Keys of one length, each with a row.

    Args:
        key_bytes: Length of every key.
        expected_rows: Most keys to be expected. Memory is only taken as it is filled.

    Attributes:
        key_bytes: Length of every key.
        segments: Column: number of the segment, ``uint32``; :data:`NOWHERE` in free rows.
        slots: Column: slot in the segment, ``uint32``.
        checksums: Column: checksum of the block, ``uint64``.
        uses: Column: use counter at the latest use, ``uint32``.
        num_rows: Rows that have been taken so far, free ones included.
        guess: Row that is tried first; 0 while rows that were found did not follow each other.
        last: Row that was found last.
    """

    __slots__ = (
        "_appended",
        "_counts",
        "_free",
        "checksums",
        "guess",
        "key_bytes",
        "keys",
        "last",
        "num_rows",
        "segments",
        "shards",
        "slots",
        "uses",
    )

    segments: memoryview
    slots: memoryview
    checksums: memoryview
    uses: memoryview

    def __init__(self, key_bytes: int, expected_rows: int = 0) -> None:
        self.key_bytes = key_bytes
        self.shards = _empty_shards()
        self._counts = [0] * _SHARDS
        self.keys = bytearray()
        self._free: list[int] = []
        self._appended: list[tuple[int, npt.NDArray[np.int64]]] = []
        self.num_rows = self.guess = self.last = 0
        self._set_columns(max(expected_rows, _FIRST_ROWS), 0)
        self._take_rows(_FIRST_ROW)

    def _set_columns(self, rows: int, kept: int) -> None:
        """Make columns of another length, with what the present ones hold."""
        old = (self.segments, self.slots, self.checksums, self.uses) if kept else ()
        # Zeros come from the system page by page, as they are written to.
        new = [np.zeros(rows, dtype=kind).data for kind in ("u4", "u4", "u8", "u4")]
        for before, after in zip(old, new, strict=False):
            after[:kept] = before[:kept]
        self.segments, self.slots, self.checksums, self.uses = new

    def __len__(self) -> int:
        """Return the number of keys."""
        return self.num_rows - _FIRST_ROW - len(self._free)

    # -- one key --------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """Return the row of a key, or -1."""
        row = self.guess
        if row:
            if (
                self.keys.startswith(key, row * self.key_bytes)
                and row < self.num_rows
                and self.segments[row] != NOWHERE
            ):
                self.guess = row + 1
                return row
            self.guess = self.last = 0
        digest = hash(key)
        shard, mask = self.shards[digest & 0xFF]
        tag = digest >> 8 & 0xFFFF_FFFF
        at = tag & mask
        while slot := shard[at]:
            if slot >> 32 == tag:
                row = slot & 0xFFFF_FFFF
                if self.keys.startswith(key, row * self.key_bytes):
                    if row == self.last + 1:
                        self.guess = row + 1
                    self.last = row
                    return row
            at += 1
        return -1

    def find_or_add(self, keys: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Return the rows of keys, new ones for those that have none.

        The caller fills the columns of the new rows, the segment last.

        Args:
            keys: Keys of the right length.

        Returns:
            The row of each key, and the indices of those that have been added.
        """
        # One loop for all of it: this is most of what a store costs the engine's thread.
        shards, counts, free, flat = self.shards, self._counts, self._free, self.keys
        key_bytes = self.key_bytes
        rows: list[int] = []
        added: list[int] = []
        for index, key in enumerate(keys):
            digest = hash(key)
            number = digest & 0xFF
            tag = digest >> 8 & 0xFFFF_FFFF
            shard, mask = shards[number]
            at = tag & mask
            while slot := shard[at]:
                if slot >> 32 == tag:
                    row = slot & 0xFFFF_FFFF
                    if flat.startswith(key, row * key_bytes):
                        break
                at += 1
            else:
                if not free:
                    first = self._take_rows(_ROWS_AT_ONCE)
                    free.extend(range(first + _ROWS_AT_ONCE - 1, first - 1, -1))
                row = free.pop()
                start = row * key_bytes
                flat[start : start + key_bytes] = key
                counts[number] += 1
                # Only the last slot is left, perhaps, and that one ends searches.
                while counts[number] * 5 > (mask + 1) * 3 or at >= len(shard) - 1:
                    shard, mask = self._resize(number, 2 * (mask + 1))
                    at = tag & mask
                    while shard[at]:
                        at += 1
                shard[at] = tag << 32 | row
                added.append(index)
            rows.append(row)
        return rows, added

    def _resize(self, number: int, size: int) -> tuple[memoryview, int]:
        slots = np.asarray(self.shards[number][0])
        shard = self.shards[number] = _shard_of(slots[slots != 0], size)
        return shard

    def remove(self, row: int) -> None:
        """Free a row."""
        digest = hash(self.key_at(row))
        shard, mask = self.shards[digest & 0xFF]
        tag = digest >> 8 & 0xFFFF_FFFF
        wanted = tag << 32 | row
        hole = tag & mask
        while shard[hole] != wanted:
            hole += 1
        after = hole + 1
        while slot := shard[after]:
            # One whose home is at the hole or before it may move there; another may not.
            if (slot >> 32 & mask) <= hole:
                shard[hole] = slot
                hole = after
            after += 1
        shard[hole] = 0
        self._counts[digest & 0xFF] -= 1
        self.segments[row] = NOWHERE
        self._free.append(row)

    def key_at(self, row: int) -> OffloadKey:
        """Return the key of a row."""
        start = row * self.key_bytes
        return OffloadKey(bytes(self.keys[start : start + self.key_bytes]))

    def rows(self) -> Iterator[int]:
        """Return all rows that have a key."""
        for row in range(_FIRST_ROW, self.num_rows):
            if self.segments[row] != NOWHERE:
                yield row

    def rows_in(self, segment: int) -> npt.NDArray[np.int64]:
        """Return the rows whose blocks are in a segment. Any thread."""
        num_rows = self.num_rows
        return np.flatnonzero(np.asarray(self.segments)[:num_rows] == segment)

    # -- many keys ------------------------------------------------------------------------------

    def append(self, keys: bytes) -> slice:
        """Give new keys rows one after the other; :meth:`build` makes them findable.

        Args:
            keys: All keys, one after the other; none of them may be findable already.
        """
        count = len(keys) // self.key_bytes
        first = self._take_rows(count)
        self.keys[first * self.key_bytes : (first + count) * self.key_bytes] = keys
        self._appended.append((first, self._hash(keys, count)))
        return slice(first, first + count)

    def build(self) -> list[int]:
        """Make appended keys findable, in a table that had none before.

        Returns:
            Rows of keys that are not, because of another with the same hash: an equal one as a
            rule. The caller frees them with :meth:`give_up`.
        """
        if not self._appended:
            return []
        rows = np.concatenate([np.arange(f, f + len(d)) for f, d in self._appended])
        digests = np.concatenate([d for _, d in self._appended])
        self._appended.clear()
        order = np.argsort(digests, kind="stable")
        digests, rows = digests[order], rows[order]
        twins = digests[1:] == digests[:-1]
        rejected = np.zeros(len(rows), dtype=np.bool_)
        if twins.any():
            rejected[1:][twins] = True
            rejected[:-1][twins] = True
        self._build(digests[~rejected], rows[~rejected])
        return sorted(rows[rejected].tolist())

    def give_up(self, row: int) -> None:
        """Free a row whose key is not findable."""
        self.segments[row] = NOWHERE
        self._free.append(row)

    def _hash(self, keys: bytes, count: int) -> npt.NDArray[np.int64]:
        digests = np.empty(count, dtype=np.int64)
        for start in range(0, count, _HASHED_AT_ONCE):
            piece = np.frombuffer(
                keys,
                dtype=f"V{self.key_bytes}",
                count=min(_HASHED_AT_ONCE, count - start),
                offset=start * self.key_bytes,
            ).tolist()
            digests[start : start + len(piece)] = np.fromiter(map(hash, piece), np.int64)
        return digests

    def _build(self, digests: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        numbers = (digests & 0xFF).astype(np.uint8)
        tags = (digests >> 8 & 0xFFFF_FFFF).astype(np.uint64)
        slots = tags << np.uint64(32) | rows.astype(np.uint64)
        by_shard = slots[np.argsort(numbers, kind="stable")]
        start = 0
        for number, size in enumerate(np.bincount(numbers, minlength=_SHARDS).tolist()):
            piece = by_shard[start : start + size]
            self.shards[number] = _shard_of(piece, _size_for(size))
            self._counts[number] = size
            start += size

    def _take_rows(self, count: int) -> int:
        """Take rows that have never been used; return the first."""
        first = self.num_rows
        end = first + count
        if end > len(self.segments):
            self._set_columns(max(end, 2 * len(self.segments)), first)
        missing = end * self.key_bytes - len(self.keys)
        if missing > 0:
            self.keys += bytes(max(missing, _STEP_ROWS * self.key_bytes))
        # Before they count: nobody may mistake them for rows of the first segment.
        np.asarray(self.segments)[first:end] = NOWHERE
        self.num_rows = end
        return first
