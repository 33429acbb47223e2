"""Transfers between the GPU's pages and the slots of the primary tier.

All state belongs to the worker's thread; copies run wherever the copy back end runs them.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from kv_core.device._descriptors import DescriptorBuffers, DescriptorBuilder
from kv_core.device._unused import UnusedBytes
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec, OffloadingHandler, TransferResult
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_core.device._canonical import CanonicalKVCaches, KVTensor
    from kv_core.device.copy import CopyBackend, CopyTicket
    from kv_core.engine import TransferSpec

__all__ = ["CpuGpuOffloadingHandlers", "SingleDirectionOffloadingHandler"]

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """A transfer that has not been reported.

    Attributes:
        job_id: Its job.
        ticket: Tells of its end; ``None`` when the copy back end refused it.
        num_bytes: Bytes that it copies.
        descriptors: The buffer that its descriptors are in.
    """

    job_id: int
    ticket: CopyTicket | None
    num_bytes: int
    descriptors: npt.NDArray[np.int64]


@final
class SingleDirectionOffloadingHandler(OffloadingHandler):
    """Copies GPU to CPU, or CPU to GPU, in order of submission."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        cpu_tensors: Sequence[KVTensor],
        block_size_factor: int,
        backend: CopyBackend,
        *,
        to_cpu: bool,
    ) -> None:
        """Prepare one direction.

        Args:
            kv_caches: The GPU side.
            cpu_tensors: The CPU side: for each canonical tensor an int8 tensor of shape
                ``(num_cpu_blocks, page_size_bytes * block_size_factor)``.
            block_size_factor: GPU blocks in one offloaded block.
            backend: Moves the bytes.
            to_cpu: The direction: ``True`` for stores.

        Raises:
            ValueError: The two sides do not fit each other.
        """
        self._builder = DescriptorBuilder(kv_caches, cpu_tensors, block_size_factor)
        self._buffers = DescriptorBuffers()
        # Descriptors are addresses only: these keep the memory alive.
        self._memory: tuple[object, ...] = (kv_caches, *cpu_tensors)
        self._cpu_tensors = tuple(cpu_tensors)
        self._to_cpu = to_cpu
        self._unused = UnusedBytes(kv_caches, block_size_factor)
        self._type = ("GPU", "CPU") if to_cpu else ("CPU", "GPU")
        self._stream = backend.open_stream("-to-".join(self._type).lower())
        self._in_flight: deque[_Transfer] = deque()
        self._is_closed = False

    @override
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a copy and return at once.

        A transfer that the copy back end refuses is reported as failed, in its turn.

        Raises:
            EngineStateError: The handler is shut down.
            TypeError: The specs are those of another route.
            ValueError: Group sizes or ids do not fit the memory. Nothing was touched.
        """
        if self._is_closed:
            raise EngineStateError("the handler is shut down")
        source, destination = spec
        gpu, cpu = (source, destination) if self._to_cpu else (destination, source)
        if not isinstance(gpu, GPULoadStoreSpec) or not isinstance(cpu, CPULoadStoreSpec):
            raise TypeError(
                f"this handler copies {self._type[0]} to {self._type[1]}, found "
                f"{source.medium()} to {destination.medium()}"
            )
        parts = self._builder.split(gpu, cpu)
        descriptors = self._buffers.take(self._builder.count(parts))
        batch = self._builder.build(parts, descriptors, to_cpu=self._to_cpu)
        if self._to_cpu:
            for part in parts:
                self._unused.clear(self._cpu_tensors, part.group_idx, part.cpu_ids)
        ticket = None
        try:
            ticket = self._stream.submit(batch)
        except Exception:
            # A failed copy costs a recompute; the worker's step must go on.
            _LOGGER.exception("transfer %d (%s to %s) was refused", job_id, *self._type)
        self._in_flight.append(_Transfer(job_id, ticket, batch.total_bytes, descriptors))
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        finished = []
        while self._in_flight:
            ticket = self._in_flight[0].ticket
            if ticket is not None and not ticket.done():
                break
            transfer = self._in_flight.popleft()
            # Not before: the device may have read the descriptors until now.
            self._buffers.give_back(transfer.descriptors)
            finished.append(self._result_of(transfer))
        return finished

    def _result_of(self, transfer: _Transfer) -> TransferResult:
        """Return the result of a transfer that has ended or was refused."""
        ticket = transfer.ticket
        error = None if ticket is None else ticket.error
        if error is not None:
            _LOGGER.error("transfer %d (%s to %s) failed: %r", transfer.job_id, *self._type, error)
        success = ticket is not None and error is None
        return TransferResult(
            job_id=transfer.job_id,
            success=success,
            transfer_size=transfer.num_bytes if success else 0,
            transfer_time=0.0 if ticket is None else ticket.elapsed_seconds,
            transfer_type=self._type,
        )

    @override
    def wait(self, job_ids: Iterable[int]) -> None:
        wanted = set(job_ids)
        for transfer in self._in_flight:
            if transfer.job_id in wanted and transfer.ticket is not None:
                transfer.ticket.wait()

    @override
    def shutdown(self) -> None:
        self._is_closed = True
        try:
            self._stream.close()
        except Exception:
            # A lost device takes its copies with it; the memory must still be released.
            _LOGGER.exception("the stream %s to %s ended badly", *self._type)
        # Exports of the shared region, which could not be unmapped while they live.
        self._memory = self._cpu_tensors = ()


@final
class CpuGpuOffloadingHandlers:
    """The two directions between one worker's GPU memory and the primary tier.

    Attributes:
        gpu_to_cpu: Handles stores.
        cpu_to_gpu: Handles loads.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        cpu_tensors: Sequence[KVTensor],
        block_size_factor: int,
        backend: CopyBackend,
    ) -> None:
        self.gpu_to_cpu = SingleDirectionOffloadingHandler(
            kv_caches, cpu_tensors, block_size_factor, backend, to_cpu=True
        )
        try:
            self.cpu_to_gpu = SingleDirectionOffloadingHandler(
                kv_caches, cpu_tensors, block_size_factor, backend, to_cpu=False
            )
        except BaseException:
            self.gpu_to_cpu.shutdown()
            raise
