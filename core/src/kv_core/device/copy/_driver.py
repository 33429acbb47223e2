"""The few calls of the CUDA driver that copies and pinning need, through ctypes.

The driver library comes with the kernel module, so that its version is the machine's and not
ours: what it lacks is found out here, once. Immutable after construction; any thread that has the
device's context may call. The interpreter lock is free during calls. Tested with a library that
stands in for the driver, and not yet run on real hardware.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

import numpy as np

from kv_core.errors import CopyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.device.copy._protocol import CopyBatch

__all__ = ["CudaDriver", "MemoryKind"]

_LIBRARY: Final = "libcuda.so.1"

# Of the batch call there are two prototypes. A driver hands out the one of the version asked for.
_FIRST_BATCH_VERSION: Final = 12080
_SECOND_BATCH_VERSION: Final = 13000

_NO_INDEX: Final = ctypes.c_size_t(-1).value

# Values of the driver's enumerations.
_SUCCESS: Final = 0
_POINTER_MEMORY_TYPE: Final = 2
_POINTER_DEVICE_POINTER: Final = 3
_MEMORY_TYPE_HOST: Final = 1
_LOCATION_DEVICE: Final = 1
_LOCATION_HOST: Final = 2
_PREFER_OVERLAP_WITH_COMPUTE: Final = 1
_PINNED_FOR_ALL_DEVICES_AND_KERNELS: Final = 1 | 2

# When the driver may read a source. A page of the GPU must not be read before the kernels ahead in
# the stream have written it. A slot of the primary tier was written before its load was asked for,
# and stays as it is until the load has ended: the driver may read it when it likes.
_SOURCE_IN_STREAM_ORDER: Final = 1
_SOURCE_IN_ANY_ORDER: Final = 3


class MemoryKind(Enum):
    """What an address is to the device.

    Attributes:
        DEVICE: The device's own memory.
        PINNED: Host memory that kernels reach at the same address.
        PAGEABLE: Other host memory, which only the driver copies, in pieces.
    """

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"


@final
class _Location(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("type", ctypes.c_int),
        ("id", ctypes.c_int),
    ]


@final
class _CopyAttributes(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("source_access_order", ctypes.c_int),
        ("source_location_hint", _Location),
        ("destination_location_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


@final
class CudaDriver:
    """Copies and pinning of the CUDA driver.

    Attributes:
        version: The newest CUDA version that the driver supports: 1000 times the major version
            plus 10 times the minor.
        has_batch_copy: Whether :meth:`copy_batch` works; it came with CUDA 12.8.
    """

    def __init__(self, library: str = _LIBRARY) -> None:
        """Load the driver.

        Args:
            library: Name or path of the shared library.

        Raises:
            OSError: There is no such library: no driver on this machine.
            CopyError: The driver does not answer.
        """
        self._library = ctypes.CDLL(library)
        self._error_name = self._function("cuGetErrorName", ctypes.c_int, ctypes.c_void_p)
        self._copy_one = self._function(
            "cuMemcpyAsync", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        )
        self._pointer_attribute = self._function(
            "cuPointerGetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        )
        self._pin = self._function(
            "cuMemHostRegister_v2", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        )
        self._unpin = self._function("cuMemHostUnregister", ctypes.c_void_p)
        version = ctypes.c_int()
        get_version = self._function("cuDriverGetVersion", ctypes.c_void_p)
        self._check("cuDriverGetVersion", get_version(ctypes.byref(version)))
        self.version = version.value
        self._reports_index = self.version < _SECOND_BATCH_VERSION
        self._copy_many = self._find_batch_copy()
        self.has_batch_copy = self._copy_many is not None

    def _function(self, name: str, *argument_types: Any) -> Any:
        function = getattr(self._library, name)
        function.argtypes = argument_types
        function.restype = ctypes.c_int
        return function

    def _find_batch_copy(self) -> Any:
        """Ask the driver for the prototype that belongs to its own version.

        A driver that is asked for a version newer than itself answers with the newest function it
        has, whose prototype is another; so the version decides, not the answer.
        """
        if self.version < _FIRST_BATCH_VERSION:
            return None
        wanted = _FIRST_BATCH_VERSION if self._reports_index else _SECOND_BATCH_VERSION
        find = self._function(
            "cuGetProcAddress_v2",
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_void_p,
        )
        address, status = ctypes.c_void_p(), ctypes.c_int()
        code = find(b"cuMemcpyBatchAsync", ctypes.byref(address), wanted, 0, ctypes.byref(status))
        if code != _SUCCESS or status.value != _SUCCESS or not address.value:
            return None
        arrays = [ctypes.c_void_p] * 3
        attributes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        index = [ctypes.c_void_p] if self._reports_index else []
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, *arrays, ctypes.c_size_t, *attributes, *index, ctypes.c_void_p
        )
        return prototype(address.value)

    def copy_batch(self, batch: CopyBatch, stream: int, *, from_host: bool, device: int) -> None:
        """Queue all copies of a batch in one call. The driver runs them in any order.

        Args:
            batch: Copies. The arrays may be used again once the call has returned.
            stream: The driver's handle of a stream, not the default one.
            from_host: Whether all sources are in host memory that nothing queued on the device
                writes; otherwise they are in device memory.
            device: Ordinal of the device.

        Raises:
            CopyError: The driver refused. Copies of the batch may be queued all the same.
        """
        count = len(batch.sizes)
        if count == 0:
            # One set of attributes would be more sets than copies, which the driver refuses.
            return
        # The places are hints, for memory that the driver does not know.
        on_host, on_device = _Location(_LOCATION_HOST, 0), _Location(_LOCATION_DEVICE, device)
        attributes = _CopyAttributes(
            _SOURCE_IN_ANY_ORDER if from_host else _SOURCE_IN_STREAM_ORDER,
            on_host if from_host else on_device,
            on_device if from_host else on_host,
            _PREFER_OVERLAP_WITH_COMPUTE,
        )
        first_copy, failed_copy = ctypes.c_size_t(0), ctypes.c_size_t(_NO_INDEX)
        columns = [
            np.ascontiguousarray(column)
            for column in (batch.destinations, batch.sources, batch.sizes)
        ]
        code = self._copy_many(
            *(column.ctypes.data for column in columns),
            count,
            ctypes.byref(attributes),
            ctypes.byref(first_copy),
            1,
            *([ctypes.byref(failed_copy)] if self._reports_index else []),
            stream,
        )
        if code != _SUCCESS:
            is_known = failed_copy.value != _NO_INDEX
            place = f"range {failed_copy.value} of {count}" if is_known else f"{count} range(s)"
            self._check("cuMemcpyBatchAsync", code, f" at {place}")

    def copy_each(self, batch: CopyBatch, stream: int) -> None:
        """Queue the copies of a batch one by one.

        Args:
            batch: Copies.
            stream: The driver's handle of a stream.

        Raises:
            CopyError: The driver refused a copy. Those before it are queued.
        """
        columns = (batch.destinations, batch.sources, batch.sizes)
        ranges = zip(*(column.tolist() for column in columns), strict=True)
        for index, (destination, source, size) in enumerate(ranges):
            code = self._copy_one(destination, source, size, stream)
            if code != _SUCCESS:
                self._check("cuMemcpyAsync", code, f" at range {index} of {len(batch.sizes)}")

    def kind_of(self, address: int) -> MemoryKind:
        """Say what kind of memory an address is in."""
        kind = ctypes.c_uint()
        if self._pointer_attribute(ctypes.byref(kind), _POINTER_MEMORY_TYPE, address) != _SUCCESS:
            # The answer for memory that the driver has never been told of.
            return MemoryKind.PAGEABLE
        if kind.value != _MEMORY_TYPE_HOST:
            return MemoryKind.DEVICE
        for_kernels = ctypes.c_uint64()
        code = self._pointer_attribute(ctypes.byref(for_kernels), _POINTER_DEVICE_POINTER, address)
        is_same = code == _SUCCESS and for_kernels.value == address
        return MemoryKind.PINNED if is_same else MemoryKind.PAGEABLE

    def pin(self, address: int, num_bytes: int) -> None:
        """Lock host memory and map it at its own address, for all devices.

        Raises:
            CopyError: The driver refused; no part of it is pinned.
        """
        code = self._pin(address, num_bytes, _PINNED_FOR_ALL_DEVICES_AND_KERNELS)
        self._check("cuMemHostRegister", code)

    def unpin(self, address: int) -> None:
        """Undo :meth:`pin` for the range that begins here.

        Raises:
            CopyError: The driver refused.
        """
        self._check("cuMemHostUnregister", self._unpin(address))

    def _check(self, call: str, code: int, place: str = "") -> None:
        if code == _SUCCESS:
            return
        text = ctypes.c_char_p()
        known = self._error_name(code, ctypes.byref(text)) == _SUCCESS and text.value
        name = text.value.decode() if known and text.value else "an error without a name"
        raise CopyError(
            f"{call} failed{place}: {name} ({code}). After an earlier CUDA error of this process "
            "every call fails: look for the first one in the log",
            error_name=name,
        )
