"""Copies between a CUDA device and host memory: by the driver, or by a kernel.

A stream and all that belongs to it are used by one thread, the one that submits. Runs in the
tests over a stand-in for the driver and a model of a device, and has not been run on real hardware.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, final

from kv_core.device._streams import OrderedStream
from kv_core.device.copy._driver import MemoryKind
from kv_core.device.copy._routes import CopyRoute, choose_route
from kv_core.device.copy._triton import TritonCopier

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from kv_core.device._streams import StreamApi, StreamTicket
    from kv_core.device.copy._driver import CudaDriver
    from kv_core.device.copy._protocol import CopyBatch, CopyStream

__all__ = ["CudaCopier", "CudaCopyBackend"]

_LOGGER: Final = logging.getLogger(__name__)


@final
class CudaCopyBackend:
    """Copies between the memory of one device and host memory, pinned or not."""

    name: Final = "cuda"

    def __init__(
        self,
        driver: CudaDriver,
        api: StreamApi,
        device: torch.device,
        page_sizes: Collection[int] = (),
    ) -> None:
        """Prepare.

        Args:
            driver: The CUDA driver.
            api: Makes streams and events: ``torch.cuda``.
            device: The device, with its ordinal.
            page_sizes: Bytes of the pages that will be copied. The kernel is compiled for them
                when a stream is opened, and not used without them.
        """
        self._driver = driver
        self._api = api
        self._device = device
        self._page_sizes = tuple(page_sizes)

    def open_stream(self, name: str) -> CopyStream:  # noqa: ARG002 - CUDA streams have no name
        """Open a stream, and compile the kernel for it if that has not happened yet."""
        copier = CudaCopier(self._driver, self._api, self._device, self._page_sizes)
        if not copier.has_kernel:
            # What cannot be compiled for one stream is not tried, and warned of, for the next.
            self._page_sizes = ()
        return _CudaStream(OrderedStream(self._api, self._device), copier)


@final
class _CudaStream:
    def __init__(self, stream: OrderedStream, copier: CudaCopier) -> None:
        self._stream = stream
        self._copier = copier

    def submit(self, batch: CopyBatch) -> StreamTicket:
        return self._stream.run(lambda stream: self._copier.copy(batch, stream))

    def close(self) -> None:
        self._stream.close()


@final
class CudaCopier:
    """Queues batches on a stream, each in the way that suits it."""

    def __init__(
        self,
        driver: CudaDriver,
        api: StreamApi,
        device: torch.device,
        page_sizes: Collection[int] = (),
    ) -> None:
        """Prepare, as :class:`CudaCopyBackend` does."""
        self._driver = driver
        self._device_ordinal = device.index or 0
        self._kernel: TritonCopier | None = None
        if page_sizes:
            try:
                self._kernel = TritonCopier(api, device, page_sizes)
            except Exception as error:  # noqa: BLE001 - Triton fails in many ways; copies need not
                _LOGGER.warning(
                    "the kernel for loads of small pages cannot be used (%s: %s). Copies work, and "
                    "pages below 28 KiB are loaded more slowly. Triton needs a C compiler (gcc) "
                    "and a folder that it can write to (TRITON_CACHE_DIR)",
                    type(error).__name__,
                    error,
                )

    @property
    def has_kernel(self) -> bool:
        """Whether loads of small pages can be left to the kernel."""
        return self._kernel is not None

    def copy(self, batch: CopyBatch, stream: Any) -> None:
        """Queue a batch.

        Args:
            batch: Copies, all in one direction.
            stream: The current stream, not the default one: ``torch.cuda.Stream``.

        Raises:
            CopyError: The driver refused. Some copies may be queued all the same.
        """
        if len(batch.sizes) == 0:
            return
        # The memory of a side is pinned as a whole or not at all, so that one page speaks for all.
        source = self._driver.kind_of(int(batch.sources[0]))
        destination = self._driver.kind_of(int(batch.destinations[0]))
        route = choose_route(
            batch,
            source,
            destination,
            has_kernel=self.has_kernel,
            has_batch_copy=self._driver.has_batch_copy,
        )
        if route is CopyRoute.KERNEL and self._kernel is not None:
            self._kernel.copy(batch, stream)
        elif route is CopyRoute.BATCH:
            self._driver.copy_batch(
                batch,
                stream.cuda_stream,
                from_host=source is not MemoryKind.DEVICE,
                device=self._device_ordinal,
            )
        else:
            self._driver.copy_each(batch, stream.cuda_stream)
