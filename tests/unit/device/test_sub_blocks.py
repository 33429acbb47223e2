"""From block ids to addresses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.device import compute_sub_block_ptrs, expand_sub_blocks


def _ids(*block_ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(block_ids, dtype=np.int32)


def _pairs(block_ids: tuple[int, ...], factor: int, skip: int, count: int) -> list[tuple[int, int]]:
    ids, positions = expand_sub_blocks(_ids(*block_ids), factor, skip, count)
    return list(zip(ids.tolist(), positions.tolist(), strict=True))


def test_sub_blocks_begin_after_the_skipped_ones() -> None:
    """Factor 2, blocks 0, 1, 2, skip 1, four sub-blocks: (0, 1), (1, 0), (1, 1), (2, 0)."""
    assert _pairs((0, 1, 2), 2, 1, 4) == [(0, 1), (1, 0), (1, 1), (2, 0)]


def test_the_last_block_may_be_partial() -> None:
    """Sub-blocks stop where the count ends, within a block or at its end."""
    assert _pairs((9, 4), 3, 0, 4) == [(9, 0), (9, 1), (9, 2), (4, 0)]
    assert _pairs((9, 4), 3, 0, 6)[-1] == (4, 2)


def test_with_factor_one_sub_blocks_are_blocks() -> None:
    """Each block has one part, at its start, whatever the order of the ids."""
    assert _pairs((7, 0, 3), 1, 0, 3) == [(7, 0), (0, 0), (3, 0)]


def test_no_sub_blocks_of_no_blocks() -> None:
    """Nothing wanted is nothing, not an error."""
    assert _pairs((), 2, 0, 0) == []
    assert _pairs((), 1, 0, 0) == []


def test_addresses_add_rows_and_parts_to_the_base() -> None:
    """Address = base + id x row stride + part x bytes of a part; strides may exceed the row."""
    addresses = compute_sub_block_ptrs(10_000, 100, _ids(0, 1, 2), 2, 1, 4, 40)
    assert addresses.tolist() == [10_040, 10_100, 10_140, 10_200]


@pytest.mark.parametrize("factor", [1, 2])
def test_arithmetic_is_64_bit(factor: int) -> None:
    """The largest 32-bit id with a large stride and a high base does not wrap around."""
    last, stride, base = 2**31 - 1, 2**30, 2**46
    addresses = compute_sub_block_ptrs(base, stride, _ids(last), factor, 0, 1, stride // factor)
    assert addresses.dtype == np.int64
    assert addresses.tolist() == [base + last * stride]


@given(
    block_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8),
    factor=st.integers(1, 5),
    data=st.data(),
)
def test_every_sub_block_is_where_a_loop_finds_it(
    block_ids: list[int], factor: int, data: st.DataObject
) -> None:
    """The whole-array computation equals counting one sub-block at a time."""
    skip = data.draw(st.integers(0, factor - 1))
    count = data.draw(st.integers(0, len(block_ids) * factor - skip))
    expected = [
        2**40 + block_ids[(skip + i) // factor] * 5000 + (skip + i) % factor * 96
        for i in range(count)
    ]
    addresses = compute_sub_block_ptrs(2**40, 5000, _ids(*block_ids), factor, skip, count, 96)
    assert addresses.tolist() == expected
