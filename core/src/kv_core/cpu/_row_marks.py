"""Marks on rows whose copy from the GPU failed, in the region itself.

An engine may have no way to say that a copy failed: it counts workers that are done, and nothing
else. So a worker marks the rows before it says that it is done, in memory that the scheduler sees,
and the scheduler looks before it declares blocks readable.

Workers only set marks, and the scheduler only clears them, when all workers are done with the row
and before it is given to another copy. So no two processes ever change one byte in different ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable

__all__ = ["RowMarks"]

_ALIGNMENT_BYTES: Final = 4096


@final
class RowMarks:
    """A byte for each row, and before them one that says whether any was ever set.

    Thanks to that one, looking costs nothing as long as nothing fails.
    """

    __slots__ = ("_mapping", "_start")

    def __init__(self, mapping: mmap.mmap, start: int) -> None:
        """Look at the marks of a mapped region.

        Args:
            mapping: The region.
            start: Offset of the marks in it.
        """
        self._mapping = mapping
        self._start = start

    @staticmethod
    def size_bytes(num_rows: int) -> int:
        """Return the bytes that the marks of so many rows take: whole pages."""
        return -(-(1 + num_rows) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def set(self, rows: Iterable[int]) -> None:
        """Mark rows."""
        first = self._start + 1
        for row in rows:
            self._mapping[first + row] = 1
        # Last: whoever sees it sees the others.
        self._mapping[self._start] = 1

    @property
    def has_any(self) -> bool:
        """Whether a row was ever marked."""
        return self._mapping[self._start] != 0

    def take(self, rows: Iterable[int]) -> list[int]:
        """Return those of some rows that are marked, and clear their marks."""
        first = self._start + 1
        marked = [row for row in rows if self._mapping[first + row]]
        for row in marked:
            self._mapping[first + row] = 0
        return marked
