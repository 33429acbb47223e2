"""Validation of the canonical form of KV caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kv_core.device import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    tensor_address,
)


def _tensor(rows: int = 4, page_bytes: int = 16) -> CanonicalKVCacheTensor:
    return CanonicalKVCacheTensor(np.zeros((rows, page_bytes), dtype=np.int8), page_bytes)


def test_keys_and_values_apart_become_two_tensors_a_layer() -> None:
    """Two layers of shape (2, 1000, ...), 4096 and 1024 bytes a block: four tensors, two groups."""
    large = np.zeros((2, 1000, 4096), dtype=np.int8)
    small = np.zeros((2, 1000, 16, 64), dtype=np.int8)
    tensors = tuple(
        CanonicalKVCacheTensor(half.reshape(1000, -1), half[0].size)
        for layer in (large, small)
        for half in layer
    )
    caches = CanonicalKVCaches(
        tensors,
        (
            (CanonicalKVCacheRef(0, 4096), CanonicalKVCacheRef(1, 4096)),
            (CanonicalKVCacheRef(2, 1024), CanonicalKVCacheRef(3, 1024)),
        ),
    )
    assert [tensor.page_size_bytes for tensor in caches.tensors] == [4096, 4096, 1024, 1024]
    assert caches.bytes_per_block == 10_240
    assert tensor_address(tensors[1].tensor) == tensor_address(large) + 1000 * 4096


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(np.zeros((4, 16), dtype=np.uint8), id="element type"),
        pytest.param(np.zeros((4, 16), dtype=np.float16), id="element size"),
        pytest.param(np.zeros(64, dtype=np.int8), id="one dimension"),
        pytest.param(np.zeros((4, 4, 4), dtype=np.int8), id="three dimensions"),
        pytest.param(np.zeros((4, 32), dtype=np.int8)[:, ::2], id="gaps in a row"),
        pytest.param(np.zeros((16, 4), dtype=np.int8).T, id="transposed"),
    ],
)
def test_other_tensors_are_refused(tensor: Any) -> None:
    """Only two-dimensional int8 memory with contiguous rows has a page per row."""
    with pytest.raises(ValueError, match="two-dimensional int8 tensor with contiguous rows"):
        CanonicalKVCacheTensor(tensor, 16)


def test_overlapping_rows_are_refused() -> None:
    """A write to one block must not change another."""
    rows = np.lib.stride_tricks.as_strided(
        np.zeros(64, dtype=np.int8), shape=(4, 16), strides=(8, 1)
    )
    with pytest.raises(ValueError, match="rows of a canonical KV cache tensor overlap"):
        CanonicalKVCacheTensor(rows, 16)


def test_read_only_memory_is_refused() -> None:
    """A copy into it would end the process."""
    tensor = np.zeros((4, 16), dtype=np.int8)
    tensor.flags.writeable = False
    with pytest.raises(ValueError, match="must be writable"):
        CanonicalKVCacheTensor(tensor, 16)


def test_rows_may_be_apart_or_backwards() -> None:
    """Any stride between rows will do, also a negative one, and one-byte pages."""
    wide = np.zeros((4, 64), dtype=np.int8)
    assert CanonicalKVCacheTensor(wide[:, 8:24], 16).page_size_bytes == 16
    assert CanonicalKVCacheTensor(wide[::-1], 64).page_size_bytes == 64
    assert CanonicalKVCacheTensor(wide[:, ::64], 1).page_size_bytes == 1


def test_the_page_size_is_that_of_the_rows() -> None:
    """A page size that does not fit the tensor is named with what was found."""
    with pytest.raises(ValueError, match=r"page size 15 .* rows have 16 bytes"):
        CanonicalKVCacheTensor(np.zeros((4, 16), dtype=np.int8), 15)


@pytest.mark.parametrize("tensor_idx", [-1, 1])
def test_references_name_existing_tensors(tensor_idx: int) -> None:
    """A negative index would silently mean another tensor."""
    with pytest.raises(ValueError, match=f"refers to tensor {tensor_idx}, there are 1"):
        CanonicalKVCaches((_tensor(),), ((CanonicalKVCacheRef(tensor_idx, 16),),))


@pytest.mark.parametrize("page_size_bytes", [0, -1, 17])
def test_references_stay_within_the_page(page_size_bytes: int) -> None:
    """More than the page is another block's memory; nothing is no reference."""
    with pytest.raises(ValueError, match=f"group 1 uses {page_size_bytes} bytes of tensor 0"):
        CanonicalKVCaches(
            (_tensor(),),
            ((CanonicalKVCacheRef(0, 16),), (CanonicalKVCacheRef(0, page_size_bytes),)),
        )


def test_a_group_refers_to_a_tensor_once() -> None:
    """Twice would copy the same bytes twice, at the same time."""
    with pytest.raises(ValueError, match=r"group 0 refers to the tensors \[0, 0\]"):
        CanonicalKVCaches((_tensor(),), ((CanonicalKVCacheRef(0, 16), CanonicalKVCacheRef(0, 8)),))


@pytest.mark.torch
def test_torch_tensors_obey_the_same_rules() -> None:
    """The element type, the dimensions and the strides are checked for torch as for numpy."""
    torch: Any = pytest.importorskip("torch")
    assert CanonicalKVCacheTensor(torch.zeros(4, 16, dtype=torch.int8), 16).page_size_bytes == 16
    for wrong in (
        torch.zeros(4, 16, dtype=torch.uint8),
        torch.zeros(64, dtype=torch.int8),
        torch.zeros(16, 4, dtype=torch.int8).T,
    ):
        with pytest.raises(ValueError, match="contiguous rows"):
            CanonicalKVCacheTensor(wrong, 16)
    with pytest.raises(ValueError, match="overlap"):
        CanonicalKVCacheTensor(torch.zeros(1, 16, dtype=torch.int8).expand(4, 16), 16)
