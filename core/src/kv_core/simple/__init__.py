"""The simple mode: GPU and CPU memory, no tiers, the smallest machinery.

Every rank has CPU memory of its own, a block there is a block on the GPU, and one map on the
scheduler's side says what it holds. *Eager* stores a block as soon as it is computed; *lazy* only
when the GPU is about to evict it. See :mod:`kv_core.connector` for the mode with tiers.
"""

from kv_core.simple._compute_order import ComputeOrder, HostComputeOrder, StreamComputeOrder
from kv_core.simple._config import RankMemory, SimpleOffloadConfig
from kv_core.simple._cpu_blocks import CpuBlockPool
from kv_core.simple._cpu_memory import CpuMemory
from kv_core.simple._dma import DmaCopyBackend, FinishedCopy
from kv_core.simple._lazy import FreeQueueCursor
from kv_core.simple._loads import SimpleLoadReport
from kv_core.simple._metadata import (
    NO_EVENT,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)
from kv_core.simple._protocol import (
    GpuBlockPoolView,
    SimpleRequest,
    SimpleStep,
    SimpleStepRequest,
)
from kv_core.simple._scheduler import SimpleCPUOffloadScheduler
from kv_core.simple._states import LoadRequestState, StoreRequestState, TransferMeta
from kv_core.simple._worker import SimpleCPUOffloadWorker

__all__ = [
    "NO_EVENT",
    "ComputeOrder",
    "CpuBlockPool",
    "CpuMemory",
    "DmaCopyBackend",
    "FinishedCopy",
    "FreeQueueCursor",
    "GpuBlockPoolView",
    "HostComputeOrder",
    "LoadRequestState",
    "RankMemory",
    "SimpleCPUOffloadMetadata",
    "SimpleCPUOffloadScheduler",
    "SimpleCPUOffloadWorker",
    "SimpleCPUOffloadWorkerMetadata",
    "SimpleLoadReport",
    "SimpleOffloadConfig",
    "SimpleRequest",
    "SimpleStep",
    "SimpleStepRequest",
    "StoreRequestState",
    "StreamComputeOrder",
    "TransferMeta",
]
