"""KV caches of any attention layout, reduced to pages of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "KVTensor",
    "tensor_address",
]


class _TorchTensor(Protocol):
    """The part of ``torch.Tensor`` that is used here, so that torch need not be installed."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def data_ptr(self) -> int: ...

    def stride(self) -> tuple[int, ...]: ...

    def element_size(self) -> int: ...


KVTensor: TypeAlias = "npt.NDArray[np.int8] | _TorchTensor"
"""A two-dimensional int8 tensor: a torch tensor on any device, or a numpy array."""


def tensor_address(tensor: KVTensor) -> int:
    """Return the virtual address of a tensor's first byte."""
    if isinstance(tensor, np.ndarray):
        return int(tensor.ctypes.data)
    return tensor.data_ptr()


def row_stride_bytes(tensor: KVTensor) -> int:
    """Return the bytes from one row to the next."""
    if isinstance(tensor, np.ndarray):
        return int(tensor.strides[0])
    return int(tensor.stride()[0]) * tensor.element_size()


def check_page_tensor(tensor: KVTensor, what: str) -> None:
    """Refuse memory that cannot be copied to and from, row by row, by address alone.

    Raises:
        ValueError: It is no two-dimensional int8 tensor, bytes of a row have gaps, rows overlap,
            or an array is read-only.
    """
    if isinstance(tensor, np.ndarray):
        kind, strides = str(tensor.dtype), tensor.strides
    else:
        kind, strides = str(tensor.dtype).removeprefix("torch."), tuple(tensor.stride())
    shape = tuple(tensor.shape)
    if len(shape) != 2 or kind != "int8" or (strides[1] != 1 and shape[1] > 1):
        raise ValueError(
            f"{what} must be a two-dimensional int8 tensor with contiguous rows, found shape "
            f"{shape}, element type {kind}, strides {strides}"
        )
    if abs(strides[0]) < shape[1] and shape[0] > 1:
        raise ValueError(
            f"the rows of {what} overlap: they have {shape[1]} bytes and begin {strides[0]} "
            "bytes apart"
        )
    if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
        raise ValueError(f"{what} must be writable, found a read-only array")


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalKVCacheTensor:
    """One piece of device memory that holds one page per block.

    Attributes:
        tensor: int8, shape ``(num_blocks, page_size_bytes)``.
        page_size_bytes: Bytes of one page, padding included.
    """

    tensor: KVTensor
    page_size_bytes: int

    def __post_init__(self) -> None:
        check_page_tensor(self.tensor, "a canonical KV cache tensor")
        if self.tensor.shape[1] != self.page_size_bytes:
            raise ValueError(
                f"page size {self.page_size_bytes} does not fit a tensor whose rows have "
                f"{self.tensor.shape[1]} bytes"
            )


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """The use that a KV cache group makes of one tensor.

    Attributes:
        tensor_idx: Index into ``CanonicalKVCaches.tensors``.
        page_size_bytes: Bytes of the page that the group fills, without padding.
    """

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalKVCaches:
    """A worker's KV caches.

    Attributes:
        tensors: Unique tensors; layers that share storage share one.
        group_data_refs: For each KV cache group, what it reads and writes of which tensors.
    """

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_data_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]

    def __post_init__(self) -> None:
        for group_idx, refs in enumerate(self.group_data_refs):
            indices = [ref.tensor_idx for ref in refs]
            if len(set(indices)) < len(indices):
                raise ValueError(
                    f"group {group_idx} refers to the tensors {indices}; each once is enough, and "
                    "more would copy the same bytes at the same time"
                )
            for ref in refs:
                if not 0 <= ref.tensor_idx < len(self.tensors):
                    raise ValueError(
                        f"group {group_idx} refers to tensor {ref.tensor_idx}, "
                        f"there are {len(self.tensors)}"
                    )
                page = self.tensors[ref.tensor_idx].page_size_bytes
                if not 0 < ref.page_size_bytes <= page:
                    raise ValueError(
                        f"group {group_idx} uses {ref.page_size_bytes} bytes of tensor "
                        f"{ref.tensor_idx}, whose pages have {page}"
                    )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one GPU block over all tensors, padding included."""
        return sum(tensor.page_size_bytes for tensor in self.tensors)
