"""Pins the rows of the primary tier, so that a GPU copies to and from them by itself.

All state belongs to the worker's thread. Runs in the tests over a stand-in for the driver, and has
not been run on real hardware.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from kv_core.device.copy._driver import CudaDriver
from kv_core.errors import CopyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.device._canonical import KVTensor

__all__ = ["HostRegistrar", "PinnedRows", "host_registrar_of"]

_LOGGER: Final = logging.getLogger(__name__)

# Drivers refuse single registrations of hundreds of gigabytes (vllm#51080).
_CHUNK_BYTES: Final = 32 * 2**30


class HostRegistrar(Protocol):
    """Makes host memory known to a device."""

    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin a range.

        Returns:
            ``None``, or why it failed. A failure leaves nothing behind: no part of the range is
            pinned, and no error is pending that a later call could be blamed for.
        """

    def unregister(self, address: int) -> None:
        """Unpin the range that begins here."""


@final
class PinnedRows:
    """The rows of a primary tier, pinned in chunks that end with a row; or not pinned at all.

    A row that is pinned in part would be copied at two speeds, and a primary tier pinned in part
    is hard to reason about. So when one chunk cannot be pinned the others are given back, one
    warning says why, and copies go through unpinned memory: slower, and right.

    Attributes:
        is_pinned: Whether all rows are pinned.
    """

    def __init__(
        self,
        registrar: HostRegistrar,
        address: int,
        num_rows: int,
        row_stride: int,
        *,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        """Pin the rows.

        Args:
            registrar: Pins and unpins.
            address: Address of the first row.
            num_rows: Rows.
            row_stride: Bytes from one row to the next.
            chunk_bytes: Most bytes of one registration, unless a single row is longer.
        """
        self._registrar = registrar
        self._pinned: list[int] = []
        rows_per_chunk = max(1, chunk_bytes // row_stride)
        for first in range(0, num_rows, rows_per_chunk):
            rows = min(rows_per_chunk, num_rows - first)
            start = address + first * row_stride
            problem = registrar.register(start, rows * row_stride)
            if problem is not None:
                _LOGGER.warning(
                    "the primary tier is not pinned: rows %d to %d of %d (%d bytes) were refused "
                    "(%s). Copies between GPU and CPU work, and are slower. Look at the limit of "
                    "locked memory (ulimit -l) and at the free memory of the host",
                    first,
                    first + rows - 1,
                    num_rows,
                    rows * row_stride,
                    problem,
                )
                self.release()
                break
            self._pinned.append(start)
        self.is_pinned = bool(self._pinned)

    def release(self) -> None:
        """Unpin everything, the last chunk first. Before the memory is unmapped. Idempotent."""
        while self._pinned:
            self._registrar.unregister(self._pinned.pop())
        self.is_pinned = False


def host_registrar_of(tensor: KVTensor) -> HostRegistrar | None:
    """Return what pins host memory for the device of a tensor; ``None`` for host memory."""
    device: Any = getattr(tensor, "device", None)
    if device is None or getattr(device, "type", "cpu") != "cuda":
        return None
    import torch

    try:
        driver = CudaDriver()
    except (AttributeError, CopyError, OSError):
        # AMD devices, which torch calls CUDA, too.
        return _RuntimeRegistrar(torch.cuda.cudart())
    return _DriverRegistrar(driver, lambda: torch.cuda.synchronize(device))


@final
class _DriverRegistrar:
    """Registers through the CUDA driver.

    Not through the runtime, as torch offers it: the runtime keeps the error of a refused
    registration, and whatever call looks next is blamed for it (vllm#51080).
    """

    def __init__(self, driver: CudaDriver, make_current: Callable[[], None]) -> None:
        """Prepare.

        Args:
            driver: The driver.
            make_current: Makes the context of the device the calling thread's.
        """
        self._driver = driver
        self._make_current = make_current

    def register(self, address: int, num_bytes: int) -> str | None:
        self._make_current()
        try:
            self._driver.pin(address, num_bytes)
        except CopyError as error:
            return error.error_name
        return None

    def unregister(self, address: int) -> None:
        self._make_current()
        try:
            self._driver.unpin(address)
        except CopyError as error:
            # The memory is about to be unmapped, and the end of the process unpins the rest.
            _LOGGER.warning("the primary tier cannot be unpinned: %s", error)


@final
class _RuntimeRegistrar:
    """Registers through the runtime that torch has loaded."""

    def __init__(self, runtime: Any) -> None:
        """Prepare.

        Args:
            runtime: ``torch.cuda.cudart()``.
        """
        self._runtime = runtime

    def register(self, address: int, num_bytes: int) -> str | None:
        code = int(self._runtime.cudaHostRegister(address, num_bytes, 0))
        return None if code == 0 else f"error {code} of the runtime"

    def unregister(self, address: int) -> None:
        self._runtime.cudaHostUnregister(address)
