"""Slots of the primary tier, on their way from vLLM's scheduler to its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_core.engine import CPULoadStoreSpec
from kv_core.vllm import _compat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kv_core.engine import LoadStoreSpec

__all__ = ["PrimaryRows"]


@final
class PrimaryRows(_compat.LoadStoreSpec):  # type: ignore[misc]  # vLLM is not typed
    """One side of a transfer: slots in the order of the blocks.

    Attributes:
        block_ids: ``int32``.
    """

    def __init__(self, block_ids: npt.NDArray[np.int32]) -> None:
        self.block_ids = block_ids

    @classmethod
    def of(cls, spec: LoadStoreSpec) -> PrimaryRows:
        """Return the slots of a spec of our manager's.

        Raises:
            TypeError: It is about another medium.
        """
        if not isinstance(spec, CPULoadStoreSpec):
            raise TypeError(f"expected slots of the primary tier, found {type(spec).__name__}")
        return cls(spec.block_ids)
