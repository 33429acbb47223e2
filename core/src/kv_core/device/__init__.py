"""The worker side: copies between GPU memory and the primary tier."""

from kv_core.device._canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    KVTensor,
    tensor_address,
)
from kv_core.device._handler import CpuGpuOffloadingHandlers, SingleDirectionOffloadingHandler
from kv_core.device._layouts import KVLayout, RegisteredLayer, canonicalize_kv_caches
from kv_core.device._streams import OrderedStream, StreamApi, StreamTicket
from kv_core.device._sub_blocks import compute_sub_block_ptrs, expand_sub_blocks
from kv_core.device._worker import OffloadingWorker

__all__ = [
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "CpuGpuOffloadingHandlers",
    "KVLayout",
    "KVTensor",
    "OffloadingWorker",
    "OrderedStream",
    "RegisteredLayer",
    "SingleDirectionOffloadingHandler",
    "StreamApi",
    "StreamTicket",
    "canonicalize_kv_caches",
    "compute_sub_block_ptrs",
    "expand_sub_blocks",
    "tensor_address",
]
