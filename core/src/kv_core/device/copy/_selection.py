"""Chooses the copy back end for a worker's memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kv_core.device.copy._cuda import CudaCopyBackend
from kv_core.device.copy._driver import CudaDriver
from kv_core.device.copy._host import HostCopyBackend
from kv_core.device.copy._torch import TorchCopyBackend
from kv_core.errors import CopyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.device._canonical import KVTensor
    from kv_core.device.copy._protocol import CopyBackend

__all__ = ["choose_backend"]

_LOGGER: Final = logging.getLogger(__name__)


def choose_backend(gpu_tensors: Sequence[KVTensor], cpu_tensors: Sequence[KVTensor]) -> CopyBackend:
    """Choose what copies between two sides of a worker's memory.

    Args:
        gpu_tensors: Pages of the engine: int8, shape ``(num_blocks, page_size_bytes)``, all on
            one device.
        cpu_tensors: The worker's part of the primary tier.

    Returns:
        For host memory the host back end, which takes any address. For a CUDA device its driver;
        where the driver's library is missing (as for AMD devices, which torch calls CUDA, too),
        and for every other device, torch: right everywhere, and slow with small pages.
    """
    device = _device_of(gpu_tensors)
    if device is None or str(device) == "cpu":
        return HostCopyBackend()
    import torch

    if device.type == "cuda":
        page_sizes = {tensor.shape[1] for tensor in gpu_tensors}
        try:
            return CudaCopyBackend(CudaDriver(), torch.cuda, device, page_sizes)
        except (AttributeError, CopyError, OSError) as error:
            _LOGGER.warning(
                "the CUDA driver cannot be called directly (%s). Copies go through torch: slower "
                "with small pages, and right",
                error,
            )
    everything = (*gpu_tensors, *cpu_tensors)
    return TorchCopyBackend(
        [torch.from_numpy(t) if isinstance(t, np.ndarray) else t for t in everything]
    )


def _device_of(tensors: Sequence[KVTensor]) -> Any:
    """Return the torch device of tensors; for arrays ``None``, or "cpu" from numpy 2 on."""
    return next((getattr(tensor, "device", None) for tensor in tensors), None)
