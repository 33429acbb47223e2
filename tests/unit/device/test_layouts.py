"""Canonical pages from what engines register, layout by layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.device import (
    CanonicalKVCacheRef,
    CpuGpuOffloadingHandlers,
    KVLayout,
    RegisteredLayer,
    canonicalize_kv_caches,
    tensor_address,
)
from kv_core.device.copy import HostCopyBackend
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.device import CanonicalKVCaches


def _layer(
    tensor: Any, layout: KVLayout, name: str = "layers.0", group_idx: int = 0, **options: Any
) -> RegisteredLayer:
    return RegisteredLayer(name, tensor, group_idx, layout, **options)


def _random(*shape: int, dtype: str = "float16") -> Any:
    random = np.random.default_rng(3)
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return random.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)


def _of_block(caches: CanonicalKVCaches, group_idx: int, block_id: int) -> list[bytes]:
    """Return the bytes that a group has of a block, reference by reference."""
    found = []
    for ref in caches.group_data_refs[group_idx]:
        tensor: Any = caches.tensors[ref.tensor_idx].tensor
        found.append(tensor[block_id, : ref.page_size_bytes].tobytes())
    return found


def _refs(*pairs: tuple[int, int]) -> tuple[CanonicalKVCacheRef, ...]:
    return tuple(CanonicalKVCacheRef(index, size) for index, size in pairs)


def test_keys_and_values_apart_become_two_tensors_a_layer() -> None:
    """Two layers of (2, 1000, ...), 4096 and 1024 bytes a block: four tensors, two references."""
    large = np.zeros((2, 1000, 16, 2, 64), dtype=np.float16)
    small = np.zeros((2, 1000, 8, 1, 64), dtype=np.float16)
    caches = canonicalize_kv_caches(
        [
            _layer(large, KVLayout.KV_FIRST, "layers.0", 0),
            _layer(small, KVLayout.KV_FIRST, "layers.1", 1),
        ],
        num_blocks=1000,
        num_groups=2,
    )
    assert [tensor.page_size_bytes for tensor in caches.tensors] == [4096, 4096, 1024, 1024]
    assert caches.group_data_refs == (_refs((0, 4096), (1, 4096)), _refs((2, 1024), (3, 1024)))
    addresses = [tensor_address(tensor.tensor) for tensor in caches.tensors]
    assert addresses == [
        large.ctypes.data,
        large.ctypes.data + 1000 * 4096,
        small.ctypes.data,
        small.ctypes.data + 1000 * 1024,
    ]


def test_keys_and_values_apart_hold_their_own_bytes() -> None:
    """The first tensor has the keys of each block, the second the values."""
    tensor = _random(2, 5, 3, 2, 4)
    caches = canonicalize_kv_caches([_layer(tensor, KVLayout.KV_FIRST)], num_blocks=5, num_groups=1)
    assert _of_block(caches, 0, 3) == [tensor[0, 3].tobytes(), tensor[1, 3].tobytes()]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        pytest.param(KVLayout.BLOCK_FIRST, (5, 2, 3, 2, 4), id="keys and values side by side"),
        pytest.param(KVLayout.SINGLE, (5, 3, 24), id="one piece"),
    ],
)
def test_block_major_layouts_become_one_tensor(layout: KVLayout, shape: tuple[int, ...]) -> None:
    """A page has all that the layer has of a block."""
    tensor = _random(*shape)
    caches = canonicalize_kv_caches([_layer(tensor, layout)], num_blocks=5, num_groups=1)
    assert caches.group_data_refs == (_refs((0, tensor[0].nbytes)),)
    assert _of_block(caches, 0, 4) == [tensor[4].tobytes()]


def test_equal_shapes_are_told_apart_by_the_layout_alone() -> None:
    """Two blocks: (2, 2, ...) is either keys first or blocks first (LMCache#4467)."""
    tensor = _random(2, 2, 4)
    apart, beside = (
        canonicalize_kv_caches([_layer(tensor, layout)], num_blocks=2, num_groups=1)
        for layout in (KVLayout.KV_FIRST, KVLayout.BLOCK_FIRST)
    )
    assert _of_block(apart, 0, 1) == [tensor[0, 1].tobytes(), tensor[1, 1].tobytes()]
    assert _of_block(beside, 0, 1) == [tensor[1].tobytes()]


def test_permuted_dimensions_within_a_block_are_one_page() -> None:
    """Heads before tokens in memory, tokens before heads in the shape: the bytes count."""
    memory = _random(5, 2, 4, 3, 8)
    tensor = memory.transpose(0, 1, 3, 2, 4)
    caches = canonicalize_kv_caches(
        [_layer(tensor, KVLayout.BLOCK_FIRST)], num_blocks=5, num_groups=1
    )
    assert _of_block(caches, 0, 2) == [memory[2].tobytes()]


def test_keys_first_over_block_major_memory_is_one_page() -> None:
    """Shape (2, num_blocks, ...), but in memory the values of a block follow its keys."""
    memory = _random(5, 2, 3, 4)
    tensor = memory.transpose(1, 0, 2, 3)
    caches = canonicalize_kv_caches([_layer(tensor, KVLayout.KV_FIRST)], num_blocks=5, num_groups=1)
    assert len(caches.tensors) == 1
    assert _of_block(caches, 0, 2) == [memory[2].tobytes()]


def test_layers_that_share_storage_share_a_tensor() -> None:
    """One layer of each of two groups in one allocation: its blocks move once for each group."""
    memory = _random(6, 64, dtype="uint8")
    caches = canonicalize_kv_caches(
        [
            _layer(memory.reshape(6, 2, 32), KVLayout.BLOCK_FIRST, "attention", 0),
            _layer(memory[:, :40].view(np.float32), KVLayout.SINGLE, "state", 1),
        ],
        num_blocks=6,
        num_groups=2,
    )
    assert [tensor.page_size_bytes for tensor in caches.tensors] == [64]
    assert caches.group_data_refs == (_refs((0, 64)), _refs((0, 40)))
    assert _of_block(caches, 1, 5) == [memory[5, :40].tobytes()]


def test_the_longest_page_counts_whatever_the_order() -> None:
    """The layer with the short pages is registered first: the tensor has the long ones."""
    memory = _random(6, 64, dtype="uint8")
    caches = canonicalize_kv_caches(
        [
            _layer(memory[:, :40], KVLayout.SINGLE, "short", 0),
            _layer(memory, KVLayout.SINGLE, "long", 1),
        ],
        num_blocks=6,
        num_groups=2,
    )
    assert [tensor.page_size_bytes for tensor in caches.tensors] == [64]
    assert caches.group_data_refs == (_refs((0, 40)), _refs((0, 64)))


def test_layers_of_one_group_on_the_same_pages_move_them_once() -> None:
    """A layer that reuses another's KV cache adds nothing."""
    memory = _random(6, 64)
    layers = [_layer(memory, KVLayout.SINGLE, f"layers.{index}") for index in range(3)]
    caches = canonicalize_kv_caches(layers, num_blocks=6, num_groups=1)
    assert caches.group_data_refs == (_refs((0, 128)),)


def test_parts_of_a_page_that_another_layer_has_whole_belong_to_it() -> None:
    """Two states in the page of an attention layer: one reference, up to their end."""
    memory = _random(6, 64, dtype="uint8")
    caches = canonicalize_kv_caches(
        [
            _layer(memory[:, :24], KVLayout.SINGLE, "state.first", 0),
            _layer(memory[:, 24:50], KVLayout.SINGLE, "state.second", 0),
            _layer(memory, KVLayout.SINGLE, "attention", 1),
        ],
        num_blocks=6,
        num_groups=2,
    )
    assert caches.group_data_refs == (_refs((0, 50)), _refs((0, 64)))


def test_pages_side_by_side_in_a_row_are_tensors_of_their_own() -> None:
    """All layers of a block next to each other: as many tensors, with the row as their stride."""
    memory = _random(6, 3, 16)
    layers = [_layer(memory[:, index], KVLayout.SINGLE, f"layers.{index}") for index in range(3)]
    caches = canonicalize_kv_caches(layers, num_blocks=6, num_groups=1)
    assert caches.group_data_refs == (_refs((0, 32), (1, 32), (2, 32)),)
    assert _of_block(caches, 0, 5) == [memory[5, index].tobytes() for index in range(3)]


def test_padding_of_a_page_is_kept_out_of_the_reference() -> None:
    """The engine says how much of a page a block fills; the tensor keeps the padded page."""
    memory = _random(6, 64, dtype="uint8")
    caches = canonicalize_kv_caches(
        [_layer(memory, KVLayout.SINGLE, used_page_bytes=52)], num_blocks=6, num_groups=1
    )
    assert [tensor.page_size_bytes for tensor in caches.tensors] == [64]
    assert caches.group_data_refs == (_refs((0, 52)),)


def test_padding_that_the_tensor_does_not_show_takes_no_room() -> None:
    """Rows are further apart than they are long: the page is what the row has."""
    memory = _random(6, 64, dtype="uint8")
    caches = canonicalize_kv_caches(
        [_layer(memory[:, :52], KVLayout.SINGLE)], num_blocks=6, num_groups=1
    )
    assert [tensor.page_size_bytes for tensor in caches.tensors] == [52]
    assert _of_block(caches, 0, 5) == [memory[5, :52].tobytes()]


def test_a_group_may_have_no_layer_here() -> None:
    """Another pipeline stage has it: no references, and the indices of the others stay."""
    caches = canonicalize_kv_caches(
        [_layer(_random(4, 8), KVLayout.SINGLE, group_idx=1)], num_blocks=4, num_groups=3
    )
    assert caches.group_data_refs == ((), _refs((0, 16)), ())


def test_views_write_into_the_registered_memory() -> None:
    """Canonical tensors are views: the engine reads what a load writes."""
    tensor = np.zeros((2, 4, 8), dtype=np.float32)
    caches = canonicalize_kv_caches([_layer(tensor, KVLayout.KV_FIRST)], num_blocks=4, num_groups=1)
    values: Any = caches.tensors[1].tensor
    values[2] = 1
    expected = np.zeros((2, 4, 32), dtype=np.int8)
    expected[1, 2] = 1
    np.testing.assert_array_equal(tensor.view(np.int8), expected)


@pytest.mark.parametrize(
    ("tensor", "layout", "message"),
    [
        pytest.param(
            np.zeros((4, 2, 8)),
            KVLayout.KV_FIRST,
            r"begin with \(2, 4\), found \(4, 2, 8\)",
            id="kv",
        ),
        pytest.param(
            np.zeros((2, 4, 8)), KVLayout.BLOCK_FIRST, r"begin with \(4, 2\), found", id="block"
        ),
        pytest.param(
            np.zeros((3, 8)), KVLayout.SINGLE, r"and 4 blocks.*begin with \(4\), found", id="blocks"
        ),
        pytest.param(np.zeros((4, 0)), KVLayout.SINGLE, r"found \(4, 0\)", id="empty"),
        pytest.param(np.zeros(()), KVLayout.SINGLE, r"found \(\)", id="a number"),
        pytest.param(
            np.zeros((4, 8), dtype=object), KVLayout.SINGLE, "which are references", id="objects"
        ),
        pytest.param(
            np.zeros((4, 16))[:, ::2], KVLayout.SINGLE, "must be contiguous", id="gaps in a block"
        ),
        pytest.param(np.zeros((4, 8))[:, ::-1], KVLayout.SINGLE, "runs backwards", id="backwards"),
        pytest.param(
            np.zeros((2, 4, 8))[::-1], KVLayout.KV_FIRST, "runs backwards", id="values first"
        ),
        pytest.param(
            np.zeros((8, 4)).T, KVLayout.SINGLE, "must be contiguous", id="blocks innermost"
        ),
        pytest.param(
            np.broadcast_to(np.zeros(8), (4, 8)), KVLayout.SINGLE, "blocks of .* overlap", id="one"
        ),
    ],
)
def test_a_layer_that_is_not_what_is_said_is_refused(
    tensor: Any, layout: KVLayout, message: str
) -> None:
    """Shape, element type and strides are checked, and the message names the layer."""
    with pytest.raises(ValueError, match=message) as caught:
        canonicalize_kv_caches([_layer(tensor, layout)], num_blocks=4, num_groups=1)
    assert "'layers.0'" in str(caught.value)


@pytest.mark.parametrize("used_page_bytes", [0, -1, 17])
def test_the_used_part_lies_within_the_page(used_page_bytes: int) -> None:
    """More than the page would be another block's."""
    layer = _layer(_random(4, 8), KVLayout.SINGLE, used_page_bytes=used_page_bytes)
    with pytest.raises(ValueError, match=f"use {used_page_bytes} bytes of pages that have 16"):
        canonicalize_kv_caches([layer], num_blocks=4, num_groups=1)


def test_padding_of_keys_and_values_apart_is_refused() -> None:
    """Nobody could say which half has it."""
    layer = _layer(_random(2, 4, 8), KVLayout.KV_FIRST, used_page_bytes=30)
    with pytest.raises(ValueError, match="only pages with keys and values side by side"):
        canonicalize_kv_caches([layer], num_blocks=4, num_groups=1)


_SHARED = np.zeros((8, 64), dtype=np.int8)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([_SHARED[:4, :40], _SHARED[:4, 32:]], id="in part, within rows"),
        pytest.param([_SHARED[:4], _SHARED[1:5]], id="rows shifted"),
        pytest.param([_SHARED[:4], _SHARED[:4].reshape(8, 32)[:4]], id="other strides"),
        pytest.param(
            [_SHARED[:4, :16], _SHARED.reshape(-1)[32:288].reshape(4, 64)[:, :48]],
            id="across rows",
        ),
    ],
)
def test_memory_that_is_shared_in_part_is_refused(others: Sequence[Any]) -> None:
    """A load of one block would change another; both layers are named."""
    layers = [_layer(t, KVLayout.SINGLE, f"layers.{i}", i) for i, t in enumerate(others)]
    with pytest.raises(ValueError, match=r"layers 'layers.0' and 'layers.1' overlap in memory"):
        canonicalize_kv_caches(layers, num_blocks=4, num_groups=2)


@pytest.mark.parametrize("group_idx", [-1, 2])
def test_groups_exist(group_idx: int) -> None:
    """A negative index would silently mean another group."""
    layer = _layer(_random(4, 8), KVLayout.SINGLE, group_idx=group_idx)
    with pytest.raises(ValueError, match=f"in group {group_idx}, there are 2 groups"):
        canonicalize_kv_caches([layer], num_blocks=4, num_groups=2)


def test_a_layer_is_registered_once() -> None:
    """A repeated name is a mistake of whoever registers."""
    layers = [_layer(_random(4, 8), KVLayout.SINGLE) for _ in range(2)]
    with pytest.raises(ValueError, match=r"two layers are named 'layers.0'"):
        canonicalize_kv_caches(layers, num_blocks=4, num_groups=1)


def test_read_only_memory_is_refused() -> None:
    """A load into it would end the process."""
    tensor = _random(4, 8)
    tensor.flags.writeable = False
    with pytest.raises(ValueError, match="must be writable"):
        canonicalize_kv_caches([_layer(tensor, KVLayout.SINGLE)], num_blocks=4, num_groups=1)


def _round_trip(caches: CanonicalKVCaches, block_ids: Sequence[int]) -> None:
    """Store blocks of group 0, wipe them, and load them back."""
    cpu = [np.zeros((8, tensor.page_size_bytes), np.int8) for tensor in caches.tensors]
    handlers = CpuGpuOffloadingHandlers(caches, cpu, 1, HostCopyBackend())
    gpu_spec, cpu_spec = (
        GPULoadStoreSpec(block_ids, [len(block_ids)], [0]),
        CPULoadStoreSpec(range(len(block_ids))),
    )
    handlers.gpu_to_cpu.transfer_async(1, (gpu_spec, cpu_spec))
    handlers.gpu_to_cpu.wait([1])
    for tensor in caches.tensors:
        pages: Any = tensor.tensor
        pages[list(block_ids)] = 0
    handlers.cpu_to_gpu.transfer_async(2, (cpu_spec, gpu_spec))
    handlers.cpu_to_gpu.wait([2])
    handlers.gpu_to_cpu.shutdown()
    handlers.cpu_to_gpu.shutdown()


LAYOUTS = pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (KVLayout.KV_FIRST, (2, 7, 3, 2, 4)),
        (KVLayout.BLOCK_FIRST, (7, 2, 3, 2, 4)),
        (KVLayout.SINGLE, (7, 3, 24)),
    ],
)


@LAYOUTS
def test_blocks_of_every_layout_survive_a_round_trip(
    layout: KVLayout, shape: tuple[int, ...]
) -> None:
    """Stored, wiped and loaded: the engine's tensor has its bytes again."""
    tensor = _random(*shape)
    expected = tensor.copy()
    _round_trip(
        canonicalize_kv_caches([_layer(tensor, layout)], num_blocks=7, num_groups=1), [6, 1, 3]
    )
    np.testing.assert_array_equal(tensor.view(np.int8), expected.view(np.int8))


@pytest.mark.torch
@LAYOUTS
def test_torch_tensors_are_viewed_in_place(layout: KVLayout, shape: tuple[int, ...]) -> None:
    """Any element type and offset: the canonical tensors are int8 views of the same storage."""
    torch: Any = pytest.importorskip("torch")
    memory = torch.arange(7 * 72 + 5, dtype=torch.float32).to(torch.bfloat16)
    tensor = memory[5 : 5 + 7 * 72 if layout is KVLayout.SINGLE else 5 + 2 * 7 * 24].reshape(shape)
    expected = tensor.clone()
    caches = canonicalize_kv_caches([_layer(tensor, layout)], num_blocks=7, num_groups=1)
    assert tensor_address(caches.tensors[0].tensor) == tensor.data_ptr()
    assert {str(page.tensor.dtype) for page in caches.tensors} == {"torch.int8"}
    _round_trip(caches, [6, 1, 3])
    assert torch.equal(tensor, expected)


@pytest.mark.torch
def test_sparse_tensors_are_refused() -> None:
    """They have no strides."""
    torch: Any = pytest.importorskip("torch")
    tensor = torch.zeros(4, 8).to_sparse()
    with pytest.raises(ValueError, match=r"must be a dense tensor, found .* torch.sparse_coo"):
        canonicalize_kv_caches([_layer(tensor, KVLayout.SINGLE)], num_blocks=4, num_groups=1)


@pytest.mark.torch
def test_tensors_without_memory_are_refused() -> None:
    """A copy would go to address 0: of a meta tensor, or of one whose storage was given back."""
    torch = pytest.importorskip("torch")
    given_back = torch.zeros(4, 8)
    given_back.untyped_storage().resize_(0)
    for tensor in (torch.zeros(4, 8, device="meta"), given_back):
        with pytest.raises(ValueError, match="has no memory behind it"):
            canonicalize_kv_caches([_layer(tensor, KVLayout.SINGLE)], num_blocks=4, num_groups=1)


@pytest.mark.torch
def test_layers_on_different_devices_are_refused() -> None:
    """One worker has one device; host memory counts as one, whoever allocated it."""
    torch: Any = pytest.importorskip("torch")
    layers = [
        _layer(_random(4, 8), KVLayout.SINGLE, "layers.0"),
        _layer(torch.zeros(4, 8), KVLayout.SINGLE, "layers.1"),
        _layer(torch.zeros(4, 8, device="meta"), KVLayout.SINGLE, "layers.2"),
    ]
    canonicalize_kv_caches(layers[:2], num_blocks=4, num_groups=1)
    with pytest.raises(ValueError, match=r"found 'layers.0' on cpu, 'layers.2' on meta"):
        canonicalize_kv_caches(layers, num_blocks=4, num_groups=1)
