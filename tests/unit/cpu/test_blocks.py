"""The table of slots."""

from __future__ import annotations

from kv_core.cpu._blocks import BEING_WRITTEN, BlockTable


def _table_with_high_water_7_and_free_list_5_3() -> BlockTable:
    table = BlockTable(10)
    table.allocate(7)
    table.free([5, 3])
    return table


def test_free_slots_are_the_fresh_and_the_returned_ones() -> None:
    """Free = total - high-water mark + free list."""
    assert _table_with_high_water_7_and_free_list_5_3().num_free == 5


def test_fresh_slots_come_first_then_the_one_freed_last() -> None:
    """Allocation takes fresh ids in order, then the end of the free list."""
    table = _table_with_high_water_7_and_free_list_5_3()
    assert table.allocate(4) == [7, 8, 9, 3]
    assert table.allocate(1) == [5]
    assert table.num_free == 0


def test_several_returned_slots_are_reused_last_in_first_out() -> None:
    """A batch from the free list pops one by one from its end."""
    table = BlockTable(4)
    table.allocate(4)
    table.free([2, 0, 3])
    assert table.allocate(2) == [3, 0]
    assert table.allocate(1) == [2]


def test_allocating_nothing_changes_nothing() -> None:
    """An empty allocation leaves the free list alone."""
    table = BlockTable(2)
    table.allocate(2)
    table.free([1])
    assert table.allocate(0) == []
    assert table.num_free == 1


def test_each_allocation_is_a_generation_that_is_being_written() -> None:
    """A slot and its generation name one use of the slot."""
    table = BlockTable(2)
    table.allocate(1)
    assert (table.generations, table.ref_counts) == ([1, 0], [BEING_WRITTEN, 0])
    table.free([0])
    assert (table.generations, table.ref_counts) == ([1, 0], [0, 0])
    table.allocate(2)
    assert table.generations == [2, 1]


def test_slots_taken_one_by_one_are_those_taken_at_once() -> None:
    """``allocate_one`` and ``allocate`` agree on order and state."""
    one_by_one = _table_with_high_water_7_and_free_list_5_3()
    at_once = _table_with_high_water_7_and_free_list_5_3()
    assert [one_by_one.allocate_one() for _ in range(5)] == at_once.allocate(5) == [7, 8, 9, 3, 5]
    assert one_by_one.generations == at_once.generations
    assert one_by_one.ref_counts == at_once.ref_counts
