"""vLLM's ``OffloadingWorker`` over our handlers.

vLLM makes its workers before its scheduler, and the scheduler creates the primary tier. So a
thread of the worker's waits for it and attaches, while vLLM goes on starting; it owns the spec and
the handlers until it has ended. Everything else belongs to the worker's own thread, which waits for
that thread before its first transfer.

vLLM accepts no failure: it asserts that every submission is taken and that every transfer
succeeds. A copy that failed is made again, synchronously and through torch alone. It is made before
a wait for it returns, and before its end is reported: until then vLLM keeps the GPU's blocks as
they are. If that fails as well, a store marks its slots as failed in the region, where the
scheduler looks before it declares blocks readable; a load raises, because the request would run on
bytes that are not its own.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_core.device import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CpuGpuOffloadingHandlers,
    OffloadingWorker,
)
from kv_core.device.copy import TorchCopyBackend, choose_backend
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec, TransferResult
from kv_core.errors import CopyError
from kv_core.vllm import _compat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_core.connector import HostBackedSpec
    from kv_core.device.copy import CopyBackend
    from kv_core.engine import TransferSpec
    from kv_core.vllm._rows import PrimaryRows

__all__ = ["CopyBackends", "KVCoreOffloadingWorker", "canonical_kv_caches"]

_LOGGER: Final = logging.getLogger(__name__)


def canonical_kv_caches(kv_caches: Any) -> CanonicalKVCaches:
    """Translate vLLM's canonical KV caches. Copies nothing.

    Raises:
        ValueError: A tensor is not what it is said to be.
    """
    groups = []
    for refs in kv_caches.group_data_refs:
        # Layers of a group may share pages; one reference, as long as the longest, copies them.
        used: dict[int, int] = {}
        for ref in refs:
            used[ref.tensor_idx] = max(used.get(ref.tensor_idx, 0), ref.page_size_bytes)
        groups.append(tuple(CanonicalKVCacheRef(index, size) for index, size in used.items()))
    return CanonicalKVCaches(
        tensors=tuple(
            CanonicalKVCacheTensor(tensor.tensor, tensor.page_size_bytes)
            for tensor in kv_caches.tensors
        ),
        group_data_refs=tuple(groups),
    )


@final
class CopyBackends:
    """Makes the copy back ends of a worker: the usual one, and the one for what it failed at."""

    def __init__(
        self,
        gpu_tensors: Sequence[Any],
        *,
        usual: Callable[[Sequence[Any], Sequence[Any]], CopyBackend] = choose_backend,
        last_resort: Callable[[Sequence[Any]], CopyBackend] = TorchCopyBackend,
    ) -> None:
        """Prepare.

        Args:
            gpu_tensors: The engine's side: int8 tensors of torch.
            usual: Makes the usual one, of both sides.
            last_resort: Makes the other one, of all tensors as tensors of torch.
        """
        self._gpu_tensors = tuple(gpu_tensors)
        self._usual = usual
        self._last_resort = last_resort
        self.cpu_tensors: tuple[npt.NDArray[np.int8], ...] = ()

    def make_usual(self, cpu_tensors: Sequence[npt.NDArray[np.int8]]) -> CopyBackend:
        """Return the usual back end, and remember the primary tier's side."""
        self.cpu_tensors = tuple(cpu_tensors)
        return self._usual(self._gpu_tensors, cpu_tensors)

    def make_last_resort(self) -> CopyBackend:
        """Return a back end that needs nothing but torch."""
        import torch

        cpu_tensors = [torch.from_numpy(tensor) for tensor in self.cpu_tensors]
        return self._last_resort([*self._gpu_tensors, *cpu_tensors])

    def release(self) -> None:
        """Let go of the primary tier's side."""
        self.cpu_tensors = ()


@final
@dataclass(frozen=True, slots=True)
class _Transfer:
    """A transfer under way, should it have to be made again.

    Attributes:
        pages: The GPU's blocks.
        slots: Slots of the primary tier.
        is_store: Whether it copies to the slots.
    """

    pages: GPULoadStoreSpec
    slots: CPULoadStoreSpec
    is_store: bool

    @property
    def spec(self) -> TransferSpec:
        """Source and destination."""
        return (self.pages, self.slots) if self.is_store else (self.slots, self.pages)


@final
class KVCoreOffloadingWorker(_compat.OffloadingWorker):  # type: ignore[misc]  # vLLM is not typed
    """Copies between one worker's GPU blocks and its part of the primary tier."""

    def __init__(
        self,
        spec: HostBackedSpec,
        kv_caches: CanonicalKVCaches,
        backends: CopyBackends,
        stop: threading.Event,
    ) -> None:
        """Begin to attach, on a thread, and return.

        Args:
            spec: Of this worker; its ``copy_backend`` is ``backends.make_usual``.
            kv_caches: The worker's KV caches.
            backends: Makes the copy back ends.
            stop: Ends the wait for the primary tier; the one in the role of the spec.
        """
        self._spec = spec
        self._kv_caches: CanonicalKVCaches | None = kv_caches
        self._backends = backends
        self._stop = stop
        self._copies = OffloadingWorker()
        self._last_resort: CpuGpuOffloadingHandlers | None = None
        self._under_way: dict[int, _Transfer] = {}
        # Ended while vLLM waited for them, and not yet reported.
        self._ended: list[TransferResult] = []
        self._attach_error: BaseException | None = None
        self._is_attached = False
        self._thread = threading.Thread(target=self._attach, name="kv-attach", daemon=True)
        self._thread.start()

    # -- the primary tier -----------------------------------------------------------------------

    def _attach(self) -> None:
        """Attach to the primary tier and make the handlers. Runs on the thread."""
        try:
            for source, destination, handler in self._spec.get_handlers(self._kv_caches):
                self._copies.register_handler(source, destination, handler)
        except BaseException as error:
            # Raised where a transfer needs it.
            self._attach_error = error
            if not self._stop.is_set():
                _LOGGER.exception("this worker cannot attach to the primary tier")

    def _require_attached(self) -> None:
        if not self._is_attached:
            self._thread.join()
            if self._attach_error is not None:
                raise self._attach_error
            self._is_attached = True

    # -- transfers ------------------------------------------------------------------------------

    @override
    def submit_store(
        self, job_id: int, src_spec: _compat.GPULoadStoreSpec, dst_spec: PrimaryRows
    ) -> bool:
        self._begin(job_id, _Transfer(_pages(src_spec), _slots(dst_spec), is_store=True))
        return True

    @override
    def submit_load(
        self,
        job_id: int,
        src_spec: PrimaryRows,
        dst_spec: _compat.GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        self._begin(job_id, _Transfer(_pages(dst_spec), _slots(src_spec), is_store=False))
        return True

    def _begin(self, job_id: int, transfer: _Transfer) -> None:
        self._require_attached()
        if self._copies.transfer_async(job_id, transfer.spec):
            self._under_way[job_id] = transfer
        else:
            self._ended.append(self._copy_again(job_id, transfer))

    @override
    def get_finished(self) -> list[_compat.TransferResult]:
        self._collect()
        ended, self._ended = self._ended, []
        return [
            _compat.TransferResult(
                job_id=result.job_id,
                success=True,
                transfer_size=result.transfer_size,
                transfer_time=result.transfer_time,
            )
            for result in ended
        ]

    @override
    def wait(self, job_ids: set[int]) -> None:
        if self._under_way:
            self._copies.wait(job_ids)
            # What failed reads or writes blocks once more, which vLLM hands out after this.
            self._collect()
            if not self._under_way.keys().isdisjoint(job_ids):
                # A copy that was refused is reported in its turn, after those before it.
                self._copies.wait(self._under_way)
                self._collect()

    def _collect(self) -> None:
        if not self._under_way:
            # Also while the thread has yet to make the handlers.
            return
        for result in self._copies.get_finished():
            transfer = self._under_way.pop(result.job_id)
            good = result if result.success else self._copy_again(result.job_id, transfer)
            self._ended.append(good)

    # -- copies that failed ---------------------------------------------------------------------

    def _copy_again(self, job_id: int, transfer: _Transfer) -> TransferResult:
        """Make a transfer that failed, here and now.

        Raises:
            CopyError: It is a load, and failed again.
        """
        result = None
        try:
            result = self._copy_now(job_id, transfer)
        except Exception:
            _LOGGER.exception("transfer %d failed twice", job_id)
        if result is not None and result.success:
            _LOGGER.warning("transfer %d failed, and succeeded at the second attempt", job_id)
            return result
        slots = transfer.slots.block_ids.tolist()
        if transfer.is_store:
            _LOGGER.error("%d block(s) could not be stored", len(slots))
            self._spec.mark_failed(slots)
            return TransferResult(job_id, True, 0, 0.0, ("GPU", "CPU"))
        raise CopyError(
            f"a load of {len(slots)} block(s) from CPU memory failed twice (transfer {job_id}); "
            "the log says why. vLLM cannot be told of it, so the engine ends rather than go on "
            "with wrong bytes",
            error_name="failed twice",
        )

    def _copy_now(self, job_id: int, transfer: _Transfer) -> TransferResult | None:
        if self._last_resort is None:
            if self._kv_caches is None:
                return None
            self._last_resort = CpuGpuOffloadingHandlers(
                self._kv_caches,
                self._backends.cpu_tensors,
                self._spec.config.block_size_factor,
                self._backends.make_last_resort(),
            )
        handlers = self._last_resort
        handler = handlers.gpu_to_cpu if transfer.is_store else handlers.cpu_to_gpu
        handler.transfer_async(job_id, transfer.spec)
        handler.wait((job_id,))
        return handler.get_finished()[0]

    # -- end ------------------------------------------------------------------------------------

    @override
    def shutdown(self) -> None:
        """Finish transfers in flight and detach from the primary tier. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._copies.shutdown()
        # Handlers hold arrays over the region, which could not be unmapped under them.
        self._copies = OffloadingWorker()
        if self._last_resort is not None:
            self._last_resort.gpu_to_cpu.shutdown()
            self._last_resort.cpu_to_gpu.shutdown()
            self._last_resort = None
        self._under_way.clear()
        self._backends.release()
        self._kv_caches = None
        self._spec.shutdown()


def _pages(spec: _compat.GPULoadStoreSpec) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(spec.block_ids, spec.group_sizes, spec.block_indices)


def _slots(rows: PrimaryRows) -> CPULoadStoreSpec:
    return CPULoadStoreSpec(rows.block_ids)
