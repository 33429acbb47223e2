"""Canonical pages from the tensors that an engine registers.

Two layouts can have the same shape, for instance with two KV heads, and a guess that is wrong
corrupts silently (LMCache#4467). So the engine says what each tensor is, and shapes are only
checked against that. Where the bytes of a block are, its strides say: an engine may permute the
dimensions of what it registers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from kv_core.device._canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    tensor_address,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kv_core.device._canonical import KVTensor

__all__ = ["KVLayout", "RegisteredLayer", "canonicalize_kv_caches"]


@final
class KVLayout(enum.Enum):
    """What the first dimensions of a layer's tensor are."""

    KV_FIRST = "kv_first"
    """Keys, then values: ``(2, num_blocks, ...)``, as FlashAttention has it."""

    BLOCK_FIRST = "block_first"
    """Keys and values of a block side by side: ``(num_blocks, 2, ...)``, as FlashInfer has it."""

    SINGLE = "single"
    """All of a block in one piece: ``(num_blocks, ...)``. MLA, fused keys and values, states."""


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredLayer:
    """The KV cache of one layer, as an engine allocated it.

    Attributes:
        name: The layer's name, unique.
        tensor: A torch tensor on any device, or a numpy array, of any element type.
        group_idx: The KV cache group that the layer belongs to.
        layout: What the tensor's dimensions are.
        used_page_bytes: Bytes that a block has in this layer, when the page is longer because of
            padding at its end; of keys and values together. By default the whole page.
    """

    name: str
    tensor: KVTensor
    group_idx: int
    layout: KVLayout
    used_page_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Pages:
    """A page for each block, somewhere in a layer's tensor.

    Attributes:
        layer: The layer.
        address: Address of the first page.
        stride: Bytes from one page to the next.
        page_bytes: Bytes of a page.
        used_bytes: Bytes of a page that are copied.
    """

    layer: RegisteredLayer
    address: int
    stride: int
    page_bytes: int
    used_bytes: int

    def holds(self, other: _Pages) -> bool:
        """Say whether another's page of every block lies within this one's."""
        start = other.address - self.address
        return self.stride == other.stride and 0 <= start <= self.page_bytes - other.page_bytes

    def overlaps(self, other: _Pages, num_blocks: int) -> bool:
        """Say whether pages overlap with those of another one that begins no earlier."""
        distance = other.address - self.address
        if distance >= (num_blocks - 1) * self.stride + self.page_bytes:
            return False
        if num_blocks == 1 or self.stride != other.stride:
            # Different strides might still miss each other, but no engine does that on purpose.
            return True
        start = distance % self.stride
        return start < self.page_bytes or start + other.page_bytes > self.stride


def canonicalize_kv_caches(
    layers: Sequence[RegisteredLayer], *, num_blocks: int, num_groups: int
) -> CanonicalKVCaches:
    """Describe the KV caches of a worker as pages of bytes. Copies nothing.

    Layers that share pages share a canonical tensor, as wide as the longest page; each group refers
    to as much of it, from its start, as its layers use. What lies between the pages of a tensor
    (another layer's bytes, or padding that the tensor does not show) takes no part.

    Args:
        layers: All layers on this worker. Canonical tensors have their order.
        num_blocks: GPU blocks, the same for all layers.
        num_groups: KV cache groups. One may have no layer here.

    Raises:
        ValueError: A layer is not what it is said to be or has no memory, layers are on different
            devices, or their memory overlaps in another way than page by page.
    """
    _check_layers(layers, num_groups)
    all_pages = [pages for layer in layers for pages in _pages_of(layer, num_blocks)]
    shared = _without_contained(all_pages)
    _check_overlaps(shared, num_blocks)
    tensors: list[_Pages] = []
    refs: list[dict[int, int]] = [{} for _ in range(num_groups)]
    for pages in all_pages:
        holder = next(candidate for candidate in shared if candidate.holds(pages))
        if holder not in tensors:
            tensors.append(holder)
        used = refs[pages.layer.group_idx]
        index = tensors.index(holder)
        stop = pages.address - holder.address + pages.used_bytes
        used[index] = max(used.get(index, 0), stop)
    return CanonicalKVCaches(
        tensors=tuple(
            CanonicalKVCacheTensor(_page_tensor(pages, num_blocks), pages.page_bytes)
            for pages in tensors
        ),
        group_data_refs=tuple(
            tuple(CanonicalKVCacheRef(index, used_bytes) for index, used_bytes in group.items())
            for group in refs
        ),
    )


def _check_layers(layers: Sequence[RegisteredLayer], num_groups: int) -> None:
    names: set[str] = set()
    devices: dict[str, str] = {}
    for layer in layers:
        if layer.name in names:
            raise ValueError(f"two layers are named {layer.name!r}; register each layer once")
        names.add(layer.name)
        if not 0 <= layer.group_idx < num_groups:
            raise ValueError(
                f"layer {layer.name!r} is in group {layer.group_idx}, there are {num_groups} groups"
            )
        tensor: Any = layer.tensor
        device = "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device)
        devices.setdefault(device, layer.name)
    if len(devices) > 1:
        found = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(
            f"the KV caches of a worker must be on one device, found {found}; make a worker for "
            "each device"
        )


def _pages_of(layer: RegisteredLayer, num_blocks: int) -> Iterator[_Pages]:
    """Yield the pages of a layer: of all of a block, or of its keys and of its values."""
    shape, strides, item_bytes = _geometry(layer)
    expected = {
        KVLayout.KV_FIRST: (2, num_blocks),
        KVLayout.BLOCK_FIRST: (num_blocks, 2),
        KVLayout.SINGLE: (num_blocks,),
    }[layer.layout]
    if shape[: len(expected)] != expected or 0 in shape:
        dimensions = ", ".join(map(str, expected))
        raise ValueError(
            f"layer {layer.name!r} has the layout {layer.layout.value!r} and {num_blocks} blocks, "
            f"so its shape must begin with ({dimensions}), found {shape}"
        )
    start = tensor_address(layer.tensor)
    if start == 0:
        # Meta tensors, and those whose storage was given back, would be copied to all the same.
        raise ValueError(
            f"layer {layer.name!r} has no memory behind it; register it once its memory is there"
        )
    if layer.layout is KVLayout.KV_FIRST:
        half_bytes = _dense_bytes(layer, shape[2:], strides[2:], item_bytes)
        if not strides[0] == half_bytes <= strides[1] // 2:
            if layer.used_page_bytes not in (None, 2 * half_bytes):
                raise ValueError(
                    f"layer {layer.name!r} has keys and values apart, {half_bytes} bytes a block "
                    f"each, and is said to use {layer.used_page_bytes} bytes of them; only pages "
                    "with keys and values side by side may have padding"
                )
            for half in range(2):
                address = start + half * strides[0]
                yield _checked(_Pages(layer, address, strides[1], half_bytes, half_bytes), shape[1])
            return
        # Dimensions permuted: in memory the values of a block follow its keys.
        stride, page_bytes = strides[1], 2 * half_bytes
    else:
        stride, page_bytes = strides[0], _dense_bytes(layer, shape[1:], strides[1:], item_bytes)
    used_bytes = page_bytes if layer.used_page_bytes is None else layer.used_page_bytes
    yield _checked(_Pages(layer, start, stride, page_bytes, used_bytes), num_blocks)


def _geometry(layer: RegisteredLayer) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, strides in bytes and bytes of an element."""
    tensor: Any = layer.tensor
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise ValueError(
                f"layer {layer.name!r} has elements of type {tensor.dtype}, which are references; "
                "expected numbers"
            )
        if any(stride < 0 for stride in tensor.strides):
            raise ValueError(
                f"layer {layer.name!r} runs backwards through memory: its strides are "
                f"{tensor.strides}; register the array that it is a view of"
            )
        return tensor.shape, tensor.strides, tensor.itemsize
    if str(tensor.layout) != "torch.strided":
        raise ValueError(
            f"layer {layer.name!r} must be a dense tensor, found the storage layout {tensor.layout}"
        )
    item_bytes = int(tensor.element_size())
    strides = tuple(int(stride) * item_bytes for stride in tensor.stride())
    return tuple(map(int, tensor.shape)), strides, item_bytes


def _dense_bytes(
    layer: RegisteredLayer, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> int:
    """Return the bytes of one block, which must be without gaps in some order of dimensions."""
    num_bytes = item_bytes
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != num_bytes:
                raise ValueError(
                    f"the bytes of a block in layer {layer.name!r} must be contiguous; found the "
                    f"sizes {shape} with strides of {strides} bytes for elements of {item_bytes}"
                )
            num_bytes *= size
    return num_bytes


def _checked(pages: _Pages, num_blocks: int) -> _Pages:
    if not 0 < pages.used_bytes <= pages.page_bytes:
        raise ValueError(
            f"layer {pages.layer.name!r} is said to use {pages.used_bytes} bytes of pages that "
            f"have {pages.page_bytes}"
        )
    if pages.stride < pages.page_bytes and num_blocks > 1:
        raise ValueError(
            f"the blocks of layer {pages.layer.name!r} overlap: they have {pages.page_bytes} bytes "
            f"and begin {pages.stride} bytes apart"
        )
    return pages


def _without_contained(all_pages: list[_Pages]) -> list[_Pages]:
    """Return one of those that share pages: the longest, for each."""
    kept: list[_Pages] = []
    for pages in sorted(all_pages, key=lambda pages: (pages.address, -pages.page_bytes)):
        if not any(holder.holds(pages) for holder in kept):
            kept.append(pages)
    return kept


def _check_overlaps(kept: list[_Pages], num_blocks: int) -> None:
    """Refuse memory that is shared in part: a load of one block would change another.

    Args:
        kept: By ascending address.
        num_blocks: Pages of each.
    """
    for position, first in enumerate(kept):
        for second in kept[position + 1 :]:
            if first.overlaps(second, num_blocks):
                raise ValueError(
                    f"layers {first.layer.name!r} and {second.layer.name!r} overlap in memory: "
                    f"pages of {first.page_bytes} bytes every {first.stride}, and of "
                    f"{second.page_bytes} bytes every {second.stride}, "
                    f"{second.address - first.address} bytes further on; layers may share whole "
                    "pages only"
                )


def _page_tensor(pages: _Pages, num_blocks: int) -> KVTensor:
    """Return the int8 view of shape ``(num_blocks, page_bytes)``."""
    tensor: Any = pages.layer.tensor
    offset = pages.address - tensor_address(tensor)
    shape, strides = (num_blocks, pages.page_bytes), (pages.stride, 1)
    if isinstance(tensor, np.ndarray):
        first = tensor[(slice(0, 1),) * tensor.ndim].reshape(1).view(np.int8)
        bytes_before = np.lib.stride_tricks.as_strided(first, (offset + 1,), (1,))
        return np.lib.stride_tricks.as_strided(bytes_before[offset:], shape, strides)
    import torch

    start = tensor.storage_offset() * tensor.element_size() + offset
    view: KVTensor = torch.empty(0, dtype=torch.int8, device=tensor.device).set_(
        tensor.untyped_storage(), start, shape, strides
    )
    return view
