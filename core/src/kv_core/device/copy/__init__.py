"""Copy back ends: who moves the bytes of a list of (source, destination, size)."""

from kv_core.device.copy._host import HostCopyBackend
from kv_core.device.copy._pinning import HostRegistrar, PinnedRows, host_registrar_of
from kv_core.device.copy._protocol import CopyBackend, CopyBatch, CopyStream, CopyTicket
from kv_core.device.copy._torch import TorchCopyBackend

__all__ = [
    "CopyBackend",
    "CopyBatch",
    "CopyStream",
    "CopyTicket",
    "HostCopyBackend",
    "HostRegistrar",
    "PinnedRows",
    "TorchCopyBackend",
    "host_registrar_of",
]
