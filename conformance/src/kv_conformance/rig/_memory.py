"""The region: guarded memory whose every byte is known, or known to be in use.

Layout: one guard row, ``num_blocks`` rows of ``row_stride`` bytes, one guard row. A second copy,
the shadow, holds what every byte should be. Slots that a load is writing are left out of the
comparison until the load is reported.
"""

from __future__ import annotations

import hashlib
import mmap
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_core.contract import PrimaryView

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from kv_core.contract import OffloadKey

__all__ = ["GUARD", "POISON", "Region", "content_of"]

GUARD: Final = 0xA5
"""Bytes that belong to nobody: before, after and between the slots."""
POISON: Final = 0xDB
"""Bytes of a slot whose job has been reported, and of one that a load is to fill."""

# Above this size whole-region comparisons are left to the end of the test.
_SMALL_BYTES: Final = 2 << 20


def content_of(key: OffloadKey, count: int) -> npt.NDArray[np.uint8]:
    """Return the bytes that belong to a key: any change of the key changes all of them."""
    seed = int.from_bytes(hashlib.sha256(key).digest(), "big")
    # The bit generator itself: no other is as fast, and the bytes need not be good, only many.
    words = np.random.SFC64(seed).random_raw(-(-count // 8))
    return np.ascontiguousarray(words).view(np.uint8)[:count]


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
    """

    def __init__(self, num_blocks: int, block_bytes: int, row_stride: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.row_stride = row_stride
        guard_bytes = -(-max(row_stride, mmap.PAGESIZE) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._start = guard_bytes
        self._stop = guard_bytes + num_blocks * row_stride
        self._memory = mmap.mmap(-1, self._stop + guard_bytes)
        self._bytes().fill(GUARD)
        self._rows().fill(GUARD)
        self._rows()[:, :block_bytes] = POISON
        self.small = len(self._memory) <= _SMALL_BYTES
        self._shadow = self._bytes().copy() if self.small else None
        self._loading: set[int] = set()
        flat = memoryview(self._memory)[self._start : self._stop]
        self.primary = PrimaryView(flat.cast("B", (num_blocks, row_stride)), block_bytes)

    def _bytes(self) -> npt.NDArray[np.uint8]:
        # Made anew each time: a kept array would be an export of the mapping.
        return np.frombuffer(self._memory, dtype=np.uint8)

    def _rows(self) -> npt.NDArray[np.uint8]:
        return self._bytes()[self._start : self._stop].reshape(self.num_blocks, self.row_stride)

    # -- contents -----------------------------------------------------------------------------

    def fill(self, block_id: int, key: OffloadKey) -> None:
        """Write the bytes of a key into a slot."""
        self.write(block_id, content_of(key, self.block_bytes))

    def poison(self, block_id: int) -> None:
        """Overwrite a slot: whatever is read from it now is wrong, whatever is written is seen."""
        self.write(block_id, POISON)

    def write(self, block_id: int, content: npt.NDArray[np.uint8] | int) -> None:
        """Overwrite a slot with bytes or one repeated byte."""
        self._rows()[block_id, : self.block_bytes] = content
        if self._shadow is not None:
            start = self._start + block_id * self.row_stride
            self._shadow[start : start + self.block_bytes] = content

    def holds(self, block_id: int, key: OffloadKey) -> bool:
        """Say whether a slot holds the bytes of a key."""
        payload = self._rows()[block_id, : self.block_bytes]
        return bool(np.array_equal(payload, content_of(key, self.block_bytes)))

    def is_poisoned(self, block_id: int) -> bool:
        """Say whether a slot still holds nothing but poison."""
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
            is ``"slot"``, ``"padding"`` or ``"guard"`` (block id -1). Empty for large regions.
        """
        if self._shadow is None:
            return []
        memory = self._bytes()
        changed = np.flatnonzero(memory != self._shadow)
        if not len(changed):
            return []
        found: set[tuple[str, int]] = set()
        for position in changed.tolist():
            if not self._start <= position < self._stop:
                found.add(("guard", -1))
                continue
            block_id, offset = divmod(position - self._start, self.row_stride)
            if offset >= self.block_bytes:
                found.add(("padding", block_id))
            elif block_id not in self._loading:
                found.add(("slot", block_id))
        self._shadow[changed] = memory[changed]
        return sorted(found)

    # -- end ------------------------------------------------------------------------------------

    def unmap(self) -> str | None:
        """Release the view and unmap the memory. Idempotent.

        Returns:
            Why that is not possible, or ``None``.
        """
        try:
            self.primary.release()
            self._memory.close()
        except BufferError as error:
            return str(error)
        return None
