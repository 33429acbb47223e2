"""The primary tier: blocks in CPU memory, their ledger, and the memory itself."""

from kv_core.cpu._geometry import ROW_ALIGNMENT_BYTES, PrimaryGeometry
from kv_core.cpu._manager import CPUOffloadingManager
from kv_core.cpu._primary import CPUPrimaryTierOffloadingManager, PreparedWrite
from kv_core.cpu._region import SharedOffloadRegion
from kv_core.cpu._reuse_filter import FilterReusedOffloadingManager

__all__ = [
    "ROW_ALIGNMENT_BYTES",
    "CPUOffloadingManager",
    "CPUPrimaryTierOffloadingManager",
    "FilterReusedOffloadingManager",
    "PreparedWrite",
    "PrimaryGeometry",
    "SharedOffloadRegion",
]
