"""The bytes of a slot that a KV cache group leaves alone, and why they are cleared.

A tier stores the whole row of a block. A group that has no layer in some of the tensors, or whose
pages are padded, writes only a part of it, and the rest is what the slot held before: perhaps
another tenant's. It would never be read as KV, but it would be written to disks and sent to
object stores under this block's name. So a store clears it. Padding between the pages of the
workers and the end of the row is not written by anybody, and stays zero from the creation of
the region on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_core.device._canonical import CanonicalKVCaches, KVTensor

__all__ = ["UnusedBytes"]


@final
class UnusedBytes:
    """What each group does not write of a worker's page in a row.

    Most layouts leave nothing: groups share all tensors and fill their pages. Otherwise the
    host clears, on the thread that submits the store, before the copy starts.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, block_size_factor: int) -> None:
        """Compute the spans.

        Args:
            kv_caches: Tensors, and what groups use of them.
            block_size_factor: GPU pages in a row of a CPU tensor.
        """
        self._spans = tuple(
            tuple(_spans_of(kv_caches, group_idx, block_size_factor))
            for group_idx in range(len(kv_caches.group_data_refs))
        )

    def clear(
        self, cpu_tensors: Sequence[KVTensor], group_idx: int, block_ids: npt.NDArray[np.int32]
    ) -> None:
        """Zero what a group does not write of some rows.

        Args:
            cpu_tensors: The worker's parts of the rows. Nobody else may use these rows now.
            group_idx: The group that stores.
            block_ids: Rows.
        """
        for tensor_idx, start, stop in self._spans[group_idx]:
            tensor: Any = cpu_tensors[tensor_idx]
            tensor[block_ids, start:stop] = 0


def _spans_of(
    kv_caches: CanonicalKVCaches, group_idx: int, factor: int
) -> Iterator[tuple[int, int, int]]:
    """Yield index of the tensor, first byte and end within its rows."""
    used = dict.fromkeys(range(len(kv_caches.tensors)), 0)
    for ref in kv_caches.group_data_refs[group_idx]:
        used[ref.tensor_idx] = max(used[ref.tensor_idx], ref.page_size_bytes)
    for tensor_idx, used_bytes in used.items():
        page_bytes = kv_caches.tensors[tensor_idx].page_size_bytes
        if used_bytes == 0:
            yield tensor_idx, 0, factor * page_bytes
        elif used_bytes < page_bytes:
            for page in range(factor):
                yield tensor_idx, page * page_bytes + used_bytes, (page + 1) * page_bytes
