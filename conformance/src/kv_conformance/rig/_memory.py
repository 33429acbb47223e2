"""The region: guarded memory whose every byte is known, or known to be in use.

Layout: a guard, ``num_blocks`` rows of ``row_stride`` bytes, a guard. Of a small region a second
copy, the shadow, holds what every byte should be; slots that a load is writing are left out of the
comparison until the load is reported. Of a large one only the guards and the padding are looked at,
and of a huge one the guards: what nobody touches of it takes no memory.
"""

from __future__ import annotations

import enum
import gc
import hashlib
import mmap
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_core.contract import PrimaryView

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from kv_core.contract import OffloadKey

__all__ = ["GUARD", "POISON", "UNTOUCHED", "Difference", "Region", "content_of"]

GUARD: Final = 0xA5
"""Bytes that belong to nobody: around and between the slots; in a small region also in slots that
were not used so far."""
POISON: Final = 0xDB
"""Bytes of a slot whose job has been reported."""
UNTOUCHED: Final = 0x6E
"""Bytes of a slot that a load is to fill."""

# Above this size there is no shadow.
_SMALL_BYTES: Final = 2 << 20
# Not every system has it.
_POPULATE: Final[int] = getattr(mmap, "MAP_POPULATE", 0)
# Above this one only the slots that are used are ever touched.
_HUGE_BYTES: Final = 1 << 30
# Enough for what runs over its end, and little beside a block of 64 MiB.
_GUARD_BYTES: Final = 64 << 10
# Contents are made and compared in pieces that stay in the processor's cache, and out of the way of
# who measures memory.
_PIECE_WORDS: Final = 16 << 10


class Difference(enum.Enum):
    """What stands in a slot where the bytes of a key should."""

    POISON = "poison"
    """What the slot that was stored from held after its job had been reported."""
    UNTOUCHED = "untouched"
    """What the slot held before the load."""
    OTHER = "other"
    """Something else."""


def content_of(key: OffloadKey, count: int) -> npt.NDArray[np.uint8]:
    """Return the bytes that belong to a key: any change of the key changes all of them."""
    return np.concatenate([piece for _, piece in _pieces_of(key, count)])


def _pieces_of(key: OffloadKey, count: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield the content of a key in pieces, each with its offset."""
    seed = int.from_bytes(hashlib.sha256(key).digest(), "big")
    # The bit generator itself: no other is as fast, and the bytes need not be good, only many.
    generator = np.random.SFC64(seed)
    for start in range(0, count, _PIECE_WORDS * 8):
        piece_bytes = min(count - start, _PIECE_WORDS * 8)
        words = generator.random_raw(-(-piece_bytes // 8))
        yield start, np.ascontiguousarray(words).view(np.uint8)[:piece_bytes]


@final
class Region:
    """Anonymous shared memory, laid out as the engine's region is.

    Belongs to the suite's thread; tiers reach it through :attr:`primary` only.

    Args:
        num_blocks: Slots.
        block_bytes: Payload bytes of a slot.
        row_stride: Bytes from slot to slot.

    Attributes:
        primary: What the tier is given.
        mapped_bytes: Memory that the region takes itself, guards included; without the shadow.
        zeros: Keys whose bytes are all zero, for a test to add to.
    """

    def __init__(self, num_blocks: int, block_bytes: int, row_stride: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.row_stride = row_stride
        guard_bytes = min(row_stride, _GUARD_BYTES)
        guard_bytes = -(-guard_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._start = guard_bytes
        self._stop = guard_bytes + num_blocks * row_stride
        self.mapped_bytes = self._stop + guard_bytes
        self._huge = self.mapped_bytes > _HUGE_BYTES
        self.small = self.mapped_bytes <= _SMALL_BYTES
        # Also the pages that nothing is ever stored from: memory is measured later. The kernel is
        # faster at it than whoever writes to them.
        populate = 0 if self._huge else _POPULATE
        self._memory = mmap.mmap(
            -1, self.mapped_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | populate
        )
        if self.small or not (self._huge or populate):
            self._bytes().fill(GUARD)
        else:
            for guard in self._guards():
                guard.fill(GUARD)
            if not self._huge:
                self._rows()[:, block_bytes:] = GUARD
        self._shadow = self._bytes().copy() if self.small else None
        self._loading: set[int] = set()
        self.zeros: set[OffloadKey] = set()
        flat = memoryview(self._memory)[self._start : self._stop]
        self.primary = PrimaryView(flat.cast("B", (num_blocks, row_stride)), block_bytes)

    def _bytes(self) -> npt.NDArray[np.uint8]:
        # Made anew each time: a kept array would be an export of the mapping.
        return np.frombuffer(self._memory, dtype=np.uint8)

    def _guards(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        memory = self._bytes()
        return memory[: self._start], memory[self._stop :]

    def _rows(self) -> npt.NDArray[np.uint8]:
        return self._bytes()[self._start : self._stop].reshape(self.num_blocks, self.row_stride)

    # -- contents -----------------------------------------------------------------------------

    def _pieces(self, key: OffloadKey) -> Iterable[tuple[int, npt.NDArray[np.uint8]]]:
        if key in self.zeros:
            return [(0, np.zeros(self.block_bytes, dtype=np.uint8))]
        return _pieces_of(key, self.block_bytes)

    def fill(self, block_id: int, key: OffloadKey) -> None:
        """Write the bytes of a key into a slot."""
        for offset, piece in self._pieces(key):
            self._write(block_id, offset, piece)

    def poison(self, block_id: int) -> None:
        """Overwrite a slot: whatever is read from it now is wrong, whatever is written is seen."""
        self.write(block_id, POISON)

    def clear(self, block_id: int) -> None:
        """Overwrite a slot that a load is to fill: bytes that it does not write can be told."""
        self.write(block_id, UNTOUCHED)

    def write(self, block_id: int, content: npt.NDArray[np.uint8] | int) -> None:
        """Overwrite a slot with bytes or one repeated byte."""
        if isinstance(content, int):
            content = np.broadcast_to(np.uint8(content), self.block_bytes)
        self._write(block_id, 0, content)

    def _write(self, block_id: int, offset: int, content: npt.NDArray[np.uint8]) -> None:
        self._rows()[block_id, offset : offset + len(content)] = content
        if self._shadow is not None:
            start = self._start + block_id * self.row_stride + offset
            self._shadow[start : start + len(content)] = content

    def difference(self, block_id: int, key: OffloadKey) -> Difference | None:
        """Say what stands where the bytes of a key should; ``None``: they are all there."""
        payload = self._rows()[block_id, : self.block_bytes]
        found: set[int] = set()
        for offset, piece in self._pieces(key):
            there = payload[offset : offset + len(piece)]
            found.update(np.unique(there[there != piece]).tolist())
        if not found:
            return None
        if found == {POISON}:
            return Difference.POISON
        return Difference.UNTOUCHED if found == {UNTOUCHED} else Difference.OTHER

    def holds(self, block_id: int, key: OffloadKey) -> bool:
        """Say whether a slot holds the bytes of a key."""
        return self.difference(block_id, key) is None

    def is_poisoned(self, block_id: int) -> bool:
        """Say whether a slot holds nothing but what the rig wrote when its last job ended."""
        return bool((self._rows()[block_id, : self.block_bytes] == POISON).all())

    # -- what may change -----------------------------------------------------------------------

    def begin_load(self, block_ids: Iterable[int]) -> None:
        """Expect changes in these slots."""
        self._loading.update(block_ids)

    def end_load(self, block_ids: Iterable[int]) -> None:
        """Expect no more changes in these slots; what is there now is right."""
        for block_id in block_ids:
            self._loading.discard(block_id)
            if self._shadow is not None:
                start = self._start + block_id * self.row_stride
                stop = start + self.block_bytes
                self._shadow[start:stop] = self._bytes()[start:stop]

    def unexpected_changes(self) -> list[tuple[str, int]]:
        """Compare memory and shadow, once for each change.

        Returns:
            (place, block id) of each row with a change that nobody was expected to make; place
            is ``"slot"``, ``"padding"`` or ``"guard"`` (block id -1). Nothing once it is unmapped.
        """
        if self._memory.closed:
            return []
        if self._shadow is None:
            return self._changes_outside()
        memory = self._bytes()
        changed = np.flatnonzero(memory != self._shadow)
        if not len(changed):
            return []
        inside = (self._start <= changed) & (changed < self._stop)
        found: set[tuple[str, int]] = set() if inside.all() else {("guard", -1)}
        block_ids, offsets = np.divmod(changed[inside] - self._start, self.row_stride)
        in_slot = offsets < self.block_bytes
        found.update(("padding", block_id) for block_id in np.unique(block_ids[~in_slot]).tolist())
        slots = set(np.unique(block_ids[in_slot]).tolist()) - self._loading
        found.update(("slot", block_id) for block_id in slots)
        self._shadow[changed] = memory[changed]
        return sorted(found)

    def _changes_outside(self) -> list[tuple[str, int]]:
        """Compare what is outside of the slots with what it should be, once for each change."""
        found = []
        for guard in self._guards():
            if (guard != GUARD).any():
                found.append(("guard", -1))
                guard.fill(GUARD)
        if self.row_stride > self.block_bytes and not self._huge:
            padding = self._rows()[:, self.block_bytes :]
            changed = np.flatnonzero((padding != GUARD).any(axis=1)).tolist()
            found += [("padding", block_id) for block_id in changed]
            padding[changed] = GUARD
        return found

    # -- end ------------------------------------------------------------------------------------

    def unmap(self) -> str | None:
        """Release the view and unmap the memory. Idempotent.

        Returns:
            Why that is not possible, or ``None``.
        """
        try:
            self._unmap()
        except BufferError:
            # A view in a cycle of dead objects, a traceback for example, is held by nobody: whether
            # the collector has come by already must not decide over a verdict.
            gc.collect()
            try:
                self._unmap()
            except BufferError as error:
                return str(error)
        return None

    def _unmap(self) -> None:
        self.primary.release()
        self._memory.close()
