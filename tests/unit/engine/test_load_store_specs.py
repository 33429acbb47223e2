"""Where the blocks of a transfer are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec


def test_media_have_names() -> None:
    """Handlers are routed by them."""
    assert (CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium()) == ("CPU", "GPU")


def test_block_ids_are_32_bit_integers_in_order() -> None:
    """Lists and arrays give the same spec."""
    from_list = CPULoadStoreSpec([3, 1, 2])
    from_array = CPULoadStoreSpec(np.array([3, 1, 2], dtype=np.int32))
    for spec in (from_list, from_array):
        assert spec.block_ids.dtype == np.int32
        assert spec.block_ids.tolist() == [3, 1, 2]
    assert repr(from_list) == "CPULoadStoreSpec([3, 1, 2])"


def test_no_blocks_are_fine() -> None:
    """An empty transfer has an empty array."""
    assert CPULoadStoreSpec([]).block_ids.shape == (0,)
    assert GPULoadStoreSpec([], [0, 0], [0, 5]).group_sizes == (0, 0)


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        (np.array([2**32 + 1]), r"have 32 bits, found 4294967297\.\.4294967297"),
        (np.array([0, 2**31]), r"found 0\.\.2147483648"),
        ([5, -(2**31) - 1], "found -2147483649"),
        ([2**64], "integers, found elements of type object"),
        ([1.5], "integers, found elements of type float64"),
        (["1"], "integers"),
        ([True], "integers, found elements of type bool"),
        ([[1, 2], [3, 4]], r"flat sequence, found the shape \(2, 2\)"),
        (7, r"the shape \(\)"),
    ],
)
def test_ids_are_not_cut_to_other_ids(block_ids: Any, message: str) -> None:
    """What is no id of 32 bits would become the id of another block."""
    with pytest.raises(ValueError, match=message):
        CPULoadStoreSpec(block_ids)


def test_ids_of_other_widths_keep_their_values() -> None:
    """The limits themselves fit."""
    assert CPULoadStoreSpec(np.array([0, 2**31 - 1])).block_ids.tolist() == [0, 2**31 - 1]
    assert CPULoadStoreSpec(np.array([3], dtype=np.uint8)).block_ids.dtype == np.int32


def test_gpu_blocks_are_ordered_by_group() -> None:
    """One size and one logical index of the first block for each group."""
    spec = GPULoadStoreSpec([9, 8, 7], [2, 1], [4, 0])
    assert spec.block_ids.tolist() == [9, 8, 7]
    assert (spec.group_sizes, spec.block_indices) == ((2, 1), (4, 0))


@pytest.mark.parametrize(
    ("group_sizes", "block_indices", "message"),
    [
        ([2], [0], r"\[2\] add up to 2, but there are 3 block ids"),
        ([2, 2], [0, 0], "add up to 4"),
        ([2, 1], [0], "2 group sizes need as many block indices, found 1"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    group_sizes: list[int], block_indices: list[int], message: str
) -> None:
    """Sizes add up to the blocks, and every group has an index."""
    with pytest.raises(ValueError, match=message):
        GPULoadStoreSpec([9, 8, 7], group_sizes, block_indices)


@pytest.mark.parametrize(("first_index", "skipped"), [(2, 0), (3, 1)])
def test_the_first_index_says_how_many_sub_blocks_are_skipped(
    first_index: int, skipped: int
) -> None:
    """Factor 2: start index 2 skips 0, start 3 skips 1."""
    factor = 2
    assert GPULoadStoreSpec([5], [1], [first_index]).block_indices[0] % factor == skipped
