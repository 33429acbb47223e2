"""The scheduler-side interface of offloading: a ledger that moves nothing itself."""

from kv_core.engine._config import KVCacheGroupConfig, OffloadingConfig
from kv_core.engine._factory import OffloadingSpecFactory
from kv_core.engine._load_store_specs import (
    BlockIDsLoadStoreSpec,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
)
from kv_core.engine._manager import LookupResult, OffloadingManager, PrepareStoreOutput
from kv_core.engine._spec import OffloadingSpec
from kv_core.engine._transfers import (
    OffloadingHandler,
    TransferResult,
    TransferSpec,
    TransferType,
)

__all__ = [
    "BlockIDsLoadStoreSpec",
    "CPULoadStoreSpec",
    "GPULoadStoreSpec",
    "KVCacheGroupConfig",
    "LoadStoreSpec",
    "LookupResult",
    "OffloadingConfig",
    "OffloadingHandler",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingSpecFactory",
    "PrepareStoreOutput",
    "TransferResult",
    "TransferSpec",
    "TransferType",
]
