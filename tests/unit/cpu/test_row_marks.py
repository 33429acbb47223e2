"""Marks on rows whose copy failed: set by workers, read by the scheduler."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest

from kv_core.cpu._row_marks import RowMarks

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = 5000
START = 4096


@pytest.fixture
def mapping() -> Iterator[mmap.mmap]:
    """Return memory with a page before the marks and one after them."""
    with mmap.mmap(-1, START + RowMarks.size_bytes(ROWS) + 4096) as memory:
        memory[:START] = b"\xff" * START
        memory[-4096:] = b"\xff" * 4096
        yield memory


def test_marks_take_whole_pages() -> None:
    """The byte that says whether any is set counts as one."""
    assert [RowMarks.size_bytes(rows) for rows in (1, 4095, 4096, 8191)] == [
        4096,
        4096,
        8192,
        8192,
    ]


def test_rows_are_marked_one_by_one(mapping: mmap.mmap) -> None:
    """The first and the last row as well as others; nothing around the marks changes."""
    marks = RowMarks(mapping, START)
    before = marks.has_any
    marks.set([0, 17, ROWS - 1])
    assert (before, marks.has_any) == (False, True)
    assert marks.take(range(ROWS)) == [0, 17, ROWS - 1]
    assert mapping[:START] == b"\xff" * START
    assert mapping[-4096:] == b"\xff" * 4096


def test_a_mark_is_taken_once(mapping: mmap.mmap) -> None:
    """The row is given to another copy after that, whose failure is another one."""
    marks = RowMarks(mapping, START)
    marks.set([3, 4])
    assert marks.take([4, 5]) == [4]
    assert marks.take([4, 5]) == []
    assert marks.take([3]) == [3]


def test_others_see_the_marks_of_a_worker(mapping: mmap.mmap) -> None:
    """They are in the memory, not in the object."""
    RowMarks(mapping, START).set([7])
    assert RowMarks(mapping, START).take([7]) == [7]
