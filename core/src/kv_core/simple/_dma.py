"""Launches copies from a thread of its own, so that the forward path does not pay for it.

The worker's thread puts copies into a queue, and is the only one that looks at launched ones and
moves the high-water marks. The copy thread takes copies from the queue in order, computes their
descriptors, submits them, and appends what it got to the launched ones of the direction; ``None``
ends it. Whatever goes wrong on it fails the copy at hand, and no other.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from kv_core.device import tensor_address
from kv_core.device.copy import CopyBatch
from kv_core.errors import EngineStateError
from kv_core.simple._metadata import NO_EVENT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from kv_core.device import CanonicalKVCaches, KVTensor
    from kv_core.device.copy import CopyBackend, CopyStream, CopyTicket
    from kv_core.simple._compute_order import ComputeOrder

__all__ = ["DmaCopyBackend", "FinishedCopy"]

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedCopy:
    """One copy that ended.

    Attributes:
        event: Its event.
        error: Why it failed; ``None`` after success.
        num_bytes: Bytes copied; 0 after a failure.
        seconds: From the start of the copy to its end.
    """

    event: int
    error: BaseException | None
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Order:
    """A copy to launch.

    Attributes:
        event: Its event.
        gpu_block_ids: Blocks on the GPU.
        cpu_block_ids: Blocks in CPU memory.
        after: Context that orders what is submitted within it; or why there is none, and nothing
            can be submitted: nobody knows what it would overtake.
    """

    event: int
    gpu_block_ids: Sequence[int]
    cpu_block_ids: Sequence[int]
    after: AbstractContextManager[None] | Exception


@dataclass(frozen=True, slots=True)
class _Launched:
    """A copy under way. Without a ticket it was refused.

    Attributes:
        event: Its event.
        batch: Kept until the end: a device may read the descriptors late.
        ticket: Tells how it goes.
        refusal: Why it was not begun.
    """

    event: int
    batch: CopyBatch | None = None
    ticket: CopyTicket | None = None
    refusal: BaseException | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Where the pages of one side are: prepared once, as ``int64`` columns, a row per tensor.

    Attributes:
        bases: Addresses of the first blocks.
        strides: Bytes from one block to the next.
        num_blocks: Blocks.
        name: For messages.
    """

    bases: npt.NDArray[np.int64]
    strides: npt.NDArray[np.int64]
    num_blocks: int
    name: str

    @classmethod
    def of(cls, tensors: Sequence[KVTensor], name: str) -> _Side:
        addresses = [tensor_address(tensor) for tensor in tensors]
        strides = [_row_stride_bytes(tensor) for tensor in tensors]
        num_blocks = min(int(tensor.shape[0]) for tensor in tensors)
        return cls(_column(addresses), _column(strides), num_blocks, name)

    def addresses(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the address of each block in each tensor, tensor by tensor.

        Raises:
            ValueError: A block does not exist: its address could be anybody's.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_blocks:
            raise ValueError(
                f"{self.name} block ids must be in 0..{self.num_blocks - 1}, found "
                f"{int(ids.min())}..{int(ids.max())}"
            )
        return (self.bases + ids * self.strides).ravel()


@final
class _Direction:
    """One direction: its stream, what was launched, and how far it has got."""

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        self.launched: deque[_Launched] = deque()
        self.high_water_mark = NO_EVENT


@final
class DmaCopyBackend:
    """Copies whole blocks, all tensors of a rank at once, in both directions.

    A GPU block has one page in every tensor, whichever group uses it, so that nothing of the
    groups need be known here. Copies of one direction run in order: when one has ended, all
    before it have, and one number says how far a direction has got.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        cpu_tensors: Sequence[KVTensor],
        backend: CopyBackend,
        order: ComputeOrder,
    ) -> None:
        """Prepare the parameters of all copies and start the thread.

        Args:
            kv_caches: The GPU side.
            cpu_tensors: The CPU side: for each canonical tensor one of shape
                ``(num_cpu_blocks, page_size_bytes)``.
            backend: Moves the bytes.
            order: Orders copies after the engine's work.

        Raises:
            ValueError: The two sides do not fit each other.
        """
        pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        found = [int(tensor.shape[1]) for tensor in cpu_tensors]
        if not pages or pages != found:
            raise ValueError(
                f"CPU tensors have rows of {found} bytes, expected the GPU's pages of {pages} "
                "bytes, of at least one tensor"
            )
        # Copies have addresses only: these keep the memory alive, even if nobody shuts down.
        self._memory: tuple[object, ...] = (kv_caches, *cpu_tensors)
        self._gpu = _Side.of([tensor.tensor for tensor in kv_caches.tensors], "GPU")
        self._cpu = _Side.of(cpu_tensors, "CPU")
        self._page_bytes = _column(pages)
        self._order = order
        self._loads = _Direction(backend.open_stream("load"))
        try:
            self._stores = _Direction(backend.open_stream("store"))
        except BaseException:
            self._loads.stream.close()
            raise
        self._is_closed = False
        self._queue: queue.SimpleQueue[tuple[_Direction, _Order] | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-dma", daemon=True)
        self._thread.start()

    # -- the worker's thread --------------------------------------------------------------------

    def launch_copy(
        self,
        event: int,
        gpu_block_ids: Sequence[int],
        cpu_block_ids: Sequence[int],
        *,
        is_store: bool,
    ) -> None:
        """Copy blocks after all that the engine has submitted so far; return at once.

        A copy that cannot be ordered or submitted is reported as failed, in its turn.

        Args:
            event: Larger than those of the direction before.
            gpu_block_ids: Blocks on the GPU.
            cpu_block_ids: Blocks in CPU memory, as many.
            is_store: The direction: ``True`` for GPU to CPU.

        Raises:
            EngineStateError: The back end is shut down.
        """
        if self._is_closed:
            raise EngineStateError("the copy back end is shut down")
        after: AbstractContextManager[None] | Exception
        try:
            after = self._order.mark()
        except Exception as error:  # noqa: BLE001 - reported as the outcome of this copy
            after = error
        order = _Order(event, gpu_block_ids, cpu_block_ids, after)
        self._queue.put((self._direction(is_store=is_store), order))

    def high_water_mark(self, *, is_store: bool) -> int:
        """Return the last event of a direction that :meth:`poll` has seen end."""
        return self._direction(is_store=is_store).high_water_mark

    def poll(self, *, is_store: bool) -> list[FinishedCopy]:
        """Return the copies of a direction that ended since the last call. Does not block."""
        direction = self._direction(is_store=is_store)
        finished = []
        while direction.launched and _has_ended(direction.launched[0]):
            launched = direction.launched.popleft()
            direction.high_water_mark = launched.event
            finished.append(_outcome(launched))
        return finished

    def flush(self) -> None:
        """Block until every copy that was ordered so far has ended."""
        if self._is_closed:
            return
        all_launched = threading.Event()
        self._queue.put(all_launched)
        all_launched.wait()
        for direction in (self._loads, self._stores):
            for launched in tuple(direction.launched):
                if launched.ticket is not None:
                    launched.ticket.wait()

    def shutdown(self) -> None:
        """Finish what was ordered and end the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        self._thread.join()
        for direction in (self._loads, self._stores):
            try:
                direction.stream.close()
            except Exception:
                # A lost device takes its copies with it; the memory must still be released.
                _LOGGER.exception("a stream of the copy thread ended badly")
        self._memory = ()

    def _direction(self, *, is_store: bool) -> _Direction:
        return self._stores if is_store else self._loads

    # -- the copy thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            direction, order = item
            direction.launched.append(self._launch(direction, order))

    def _launch(self, direction: _Direction, order: _Order) -> _Launched:
        if isinstance(order.after, Exception):
            return _Launched(order.event, refusal=order.after)
        try:
            batch = self._describe(order, to_cpu=direction is self._stores)
            with order.after:
                ticket = direction.stream.submit(batch)
        except BaseException as error:  # noqa: BLE001 - the copy's outcome; the thread lives on
            return _Launched(order.event, refusal=error)
        return _Launched(order.event, batch, ticket)

    def _describe(self, order: _Order, *, to_cpu: bool) -> CopyBatch:
        """Build one descriptor for each block and tensor."""
        num_blocks = len(order.gpu_block_ids)
        if len(order.cpu_block_ids) != num_blocks:
            raise ValueError(
                f"{num_blocks} GPU blocks need as many CPU blocks, found {len(order.cpu_block_ids)}"
            )
        gpu = self._gpu.addresses(order.gpu_block_ids)
        cpu = self._cpu.addresses(order.cpu_block_ids)
        sizes = np.repeat(self._page_bytes.ravel(), num_blocks)
        return CopyBatch(gpu, cpu, sizes) if to_cpu else CopyBatch(cpu, gpu, sizes)


def _has_ended(launched: _Launched) -> bool:
    return launched.ticket is None or launched.ticket.done()


def _outcome(launched: _Launched) -> FinishedCopy:
    ticket, batch = launched.ticket, launched.batch
    if ticket is None or batch is None:
        return FinishedCopy(launched.event, launched.refusal, 0, 0.0)
    num_bytes = batch.total_bytes if ticket.error is None else 0
    return FinishedCopy(launched.event, ticket.error, num_bytes, ticket.elapsed_seconds)


def _row_stride_bytes(tensor: Any) -> int:
    if int(tensor.shape[0]) < 2:
        return int(tensor.shape[1])
    return tensor_address(tensor[1:]) - tensor_address(tensor)


def _column(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64).reshape(-1, 1)
