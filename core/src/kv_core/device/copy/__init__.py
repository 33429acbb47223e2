"""Copy back ends: who moves the bytes of a list of (source, destination, size)."""

from kv_core.device.copy._cuda import CudaCopier, CudaCopyBackend
from kv_core.device.copy._driver import CudaDriver, MemoryKind
from kv_core.device.copy._host import HostCopyBackend
from kv_core.device.copy._pinning import HostRegistrar, PinnedRows, host_registrar_of
from kv_core.device.copy._protocol import CopyBackend, CopyBatch, CopyStream, CopyTicket
from kv_core.device.copy._routes import CopyRoute, choose_route
from kv_core.device.copy._selection import choose_backend
from kv_core.device.copy._torch import TorchCopyBackend

__all__ = [
    "CopyBackend",
    "CopyBatch",
    "CopyRoute",
    "CopyStream",
    "CopyTicket",
    "CudaCopier",
    "CudaCopyBackend",
    "CudaDriver",
    "HostCopyBackend",
    "HostRegistrar",
    "MemoryKind",
    "PinnedRows",
    "TorchCopyBackend",
    "choose_backend",
    "choose_route",
    "host_registrar_of",
]
