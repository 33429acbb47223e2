"""Where the blocks of a transfer are, on either side of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["BlockIDsLoadStoreSpec", "CPULoadStoreSpec", "GPULoadStoreSpec", "LoadStoreSpec"]

_ID_LIMITS: Final = np.iinfo(np.int32)


class LoadStoreSpec(ABC):
    """One side of a transfer."""

    __slots__ = ()

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the name of the medium, for example ``"GPU"``."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks given by their ids within a medium.

    Attributes:
        block_ids: ``int32``, one-dimensional, in transfer order.
    """

    __slots__ = ("block_ids",)

    def __init__(self, block_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Take block ids.

        Raises:
            ValueError: They are no flat sequence of integers of 32 bits.
        """
        self.block_ids: npt.NDArray[np.int32] = _ids_of_32_bits(np.asarray(block_ids))

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


@final
class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Offloaded blocks in slots of the primary tier."""

    __slots__ = ()

    @staticmethod
    @override
    def medium() -> str:
        return "CPU"


@final
class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """GPU blocks, ordered by KV cache group.

    Attributes:
        group_sizes: Number of blocks of each group; they add up to ``len(block_ids)``.
        block_indices: For each group, the logical index (within its request) of the group's
            first block here. With ``block_size_factor`` f, ``block_indices[g] % f`` sub-blocks
            of the first offloaded block are skipped.
    """

    __slots__ = ("block_indices", "group_sizes")

    def __init__(
        self,
        block_ids: Sequence[int] | npt.NDArray[np.int32],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
    ) -> None:
        """Check that the parts fit together.

        Raises:
            ValueError: Group sizes do not add up, or there is not one index per group, or ids are
                no flat sequence of integers of 32 bits.
        """
        super().__init__(block_ids)
        if sum(group_sizes) != len(self.block_ids):
            raise ValueError(
                f"group sizes {list(group_sizes)} add up to {sum(group_sizes)}, "
                f"but there are {len(self.block_ids)} block ids"
            )
        if len(group_sizes) != len(block_indices):
            raise ValueError(
                f"{len(group_sizes)} group sizes need as many block indices, "
                f"found {len(block_indices)}"
            )
        self.group_sizes = tuple(group_sizes)
        self.block_indices = tuple(block_indices)

    @staticmethod
    @override
    def medium() -> str:
        return "GPU"


def _ids_of_32_bits(ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return ids as they are stored. numpy would cut what does not fit: to another block's id."""
    if ids.ndim != 1:
        raise ValueError(f"block ids are one flat sequence, found the shape {ids.shape}")
    if ids.dtype == np.int32 or ids.size == 0:
        return ids.astype(np.int32, copy=False)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"block ids are integers, found elements of type {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < _ID_LIMITS.min or high > _ID_LIMITS.max:
        raise ValueError(f"block ids have 32 bits, found {low}..{high}")
    return ids.astype(np.int32)
