"""What a handler refuses, and how it reports, with copies that end on command."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_core.device import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CpuGpuOffloadingHandlers,
    OffloadingWorker,
)
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from tests.unit.device.conftest import (
        Layout,
        ManualBackend,
        ManualStream,
        ManualTicket,
        Memory,
        OpenHandlers,
    )

    from kv_core.device.copy import CopyBatch


def _store(gpu_ids: list[int], cpu_ids: list[int]) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    return GPULoadStoreSpec(gpu_ids, [len(gpu_ids)], [0]), CPULoadStoreSpec(cpu_ids)


@pytest.fixture
def memory(make_memory: type[Memory], make_layout: type[Layout]) -> Memory:
    """Return a memory of eight GPU blocks and six slots, factor 1."""
    return make_memory(make_layout())


@pytest.mark.parametrize(
    ("gpu_ids", "cpu_ids", "message"),
    [
        pytest.param([8], [0], r"GPU block ids must be in 0..7, found 8..8", id="gpu too high"),
        pytest.param([3, -1], [0, 1], r"GPU block ids .* found -1..3", id="gpu negative"),
        pytest.param([0], [6], r"CPU block ids must be in 0..5, found 6..6", id="cpu too high"),
        pytest.param([0], [-1], r"CPU block ids .* found -1..-1", id="cpu negative"),
        pytest.param([0, 1], [0], r"fill 2 offloaded block\(s\) of 1, found 1", id="too few slots"),
        pytest.param([0], [0, 1], r"fill 1 offloaded block\(s\) of 1, found 2", id="spare slots"),
        pytest.param([], [0], r"fill 0 offloaded block\(s\) of 1, found 1", id="slots for nothing"),
    ],
)
@pytest.mark.parametrize("to_cpu", [True, False], ids=["store", "load"])
def test_ids_that_do_not_fit_are_refused(
    open_handlers: OpenHandlers,
    memory: Memory,
    manual: ManualBackend,
    gpu_ids: list[int],
    cpu_ids: list[int],
    message: str,
    to_cpu: bool,
) -> None:
    """An address computed from a wrong id could be anybody's: nothing is submitted at all."""
    handlers = open_handlers(memory, manual)
    gpu, cpu = _store(gpu_ids, cpu_ids)
    handler = handlers.gpu_to_cpu if to_cpu else handlers.cpu_to_gpu
    with pytest.raises(ValueError, match=message):
        handler.transfer_async(1, (gpu, cpu) if to_cpu else (cpu, gpu))
    assert not any(stream.tickets for stream in manual.streams.values())
    assert handler.get_finished() == []


@pytest.mark.parametrize("sizes", [[1, 1], [3, -1], []])
def test_group_sizes_that_do_not_fit_are_refused(
    open_handlers: OpenHandlers, memory: Memory, manual: ManualBackend, sizes: list[int]
) -> None:
    """One size per KV cache group, none negative."""
    gpu = GPULoadStoreSpec([0] * sum(sizes), sizes, [0] * len(sizes))
    handler = open_handlers(memory, manual).gpu_to_cpu
    with pytest.raises(ValueError, match="expected a number of blocks for each of the 1 KV cache"):
        handler.transfer_async(1, (gpu, CPULoadStoreSpec([0] * sum(sizes))))
    assert manual.streams["gpu-to-cpu"].tickets == []


def test_a_short_list_of_slots_is_counted_over_all_groups(
    open_handlers: OpenHandlers,
    make_memory: type[Memory],
    make_layout: type[Layout],
    manual: ManualBackend,
) -> None:
    """The message gives the slots of all groups, although the first group already lacks some."""
    layout = make_layout(groups=(((0, 32),), ((1, 24),)), factor=2)
    gpu = GPULoadStoreSpec([0, 1, 2, 3, 4], [3, 2], [3, 1])
    handler = open_handlers(make_memory(layout), manual).gpu_to_cpu
    with pytest.raises(ValueError, match=r"fill 4 offloaded block\(s\) of 2, found 1 CPU"):
        handler.transfer_async(1, (gpu, CPULoadStoreSpec([0])))


def test_the_other_direction_is_refused(open_handlers: OpenHandlers, memory: Memory) -> None:
    """Each handler serves one route; bytes never move the wrong way."""
    handlers = open_handlers(memory)
    gpu, cpu = _store([1], [0])
    before = [array.copy() for array in memory.everything]
    with pytest.raises(TypeError, match="copies GPU to CPU, found CPU to GPU"):
        handlers.gpu_to_cpu.transfer_async(1, (cpu, gpu))
    with pytest.raises(TypeError, match="copies CPU to GPU, found CPU to CPU"):
        handlers.cpu_to_gpu.transfer_async(1, (cpu, cpu))
    for array, old in zip(memory.everything, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_both_sides_must_have_the_same_tensors(memory: Memory, manual: ManualBackend) -> None:
    """A missing CPU tensor shows at construction."""
    caches = memory.kv_caches(memory.gpu_tensors())
    with pytest.raises(ValueError, match="2 canonical tensors need as many CPU tensors, found 1"):
        CpuGpuOffloadingHandlers(caches, memory.cpu_tensors()[:1], 1, manual)


def test_a_cpu_row_has_room_for_factor_pages(memory: Memory, manual: ManualBackend) -> None:
    """Another width would shift every page after the first."""
    caches = memory.kv_caches(memory.gpu_tensors())
    with pytest.raises(ValueError, match=r"rows of 32 bytes; 2 GPU page\(s\) of 32 bytes are 64"):
        CpuGpuOffloadingHandlers(caches, memory.cpu_tensors(), 2, manual)


def test_cpu_tensors_are_checked_like_gpu_tensors(memory: Memory, manual: ManualBackend) -> None:
    """A wrong element type is refused by name."""
    caches = memory.kv_caches(memory.gpu_tensors())
    wrong = [memory.cpu_tensors()[0], np.zeros((6, 24), dtype=np.uint8)]
    with pytest.raises(ValueError, match="CPU tensor 1 must be a two-dimensional int8 tensor"):
        CpuGpuOffloadingHandlers(caches, wrong, 1, manual)  # type: ignore[arg-type] # on purpose


def test_results_carry_sizes_times_and_direction(
    open_handlers: OpenHandlers, memory: Memory, manual: ManualBackend
) -> None:
    """Bytes are those of the unpadded pages, seconds those of the copy."""
    handler = open_handlers(memory, manual).cpu_to_gpu
    gpu, cpu = _store([1, 2], [0, 1])
    handler.transfer_async(5, (cpu, gpu))
    assert handler.get_finished() == []
    manual.streams["cpu-to-gpu"].tickets[0].ended = True
    (result,) = handler.get_finished()
    assert (result.job_id, result.success, result.transfer_type) == (5, True, ("CPU", "GPU"))
    assert (result.transfer_size, result.transfer_time) == (2 * (32 + 24), 0.25)
    assert handler.get_finished() == []


def test_real_copies_are_timed(open_handlers: OpenHandlers, memory: Memory) -> None:
    """A finished transfer says how long it took."""
    handler = open_handlers(memory).gpu_to_cpu
    handler.transfer_async(1, _store(list(range(6)), list(range(6))))
    handler.wait([1])
    (result,) = handler.get_finished()
    assert 0 < result.transfer_time < 60


def test_a_failed_copy_is_a_failed_result(
    open_handlers: OpenHandlers, memory: Memory, manual: ManualBackend
) -> None:
    """An error of the back end counts no bytes, and the next transfer is unharmed."""
    handler = open_handlers(memory, manual).gpu_to_cpu
    handler.transfer_async(1, _store([1], [0]))
    handler.transfer_async(2, _store([2], [1]))
    first, second = manual.streams["gpu-to-cpu"].tickets
    first.ended, first.error = True, OSError("bus error")
    second.ended = True
    failed, good = handler.get_finished()
    assert (failed.job_id, failed.success, failed.transfer_size) == (1, False, 0)
    assert (good.job_id, good.success, good.transfer_size) == (2, True, 56)


def test_results_come_in_the_order_of_submission(
    open_handlers: OpenHandlers, memory: Memory, manual: ManualBackend
) -> None:
    """A transfer is not reported before those submitted earlier in its direction."""
    handler = open_handlers(memory, manual).gpu_to_cpu
    for job_id in (1, 2, 3):
        handler.transfer_async(job_id, _store([job_id], [job_id]))
    first, second, third = manual.streams["gpu-to-cpu"].tickets
    second.ended = third.ended = True
    assert handler.get_finished() == []
    first.ended = True
    assert [result.job_id for result in handler.get_finished()] == [1, 2, 3]


def test_wait_waits_for_the_named_transfers_only(
    open_handlers: OpenHandlers, memory: Memory, manual: ManualBackend
) -> None:
    """Unknown and finished ids are fine."""
    handler = open_handlers(memory, manual).gpu_to_cpu
    handler.transfer_async(1, _store([1], [0]))
    handler.transfer_async(2, _store([2], [1]))
    handler.wait([1, 99])
    first, second = manual.streams["gpu-to-cpu"].tickets
    assert (first.waits, second.waits) == (1, 0)
    assert [result.job_id for result in handler.get_finished()] == [1]
    handler.wait([1])
    assert second.waits == 0


def test_directions_have_streams_of_their_own(
    open_handlers: OpenHandlers, memory: Memory, manual: ManualBackend
) -> None:
    """A load is not queued behind stores."""
    handlers = open_handlers(memory, manual)
    gpu, cpu = _store([1], [0])
    handlers.gpu_to_cpu.transfer_async(1, (gpu, cpu))
    handlers.cpu_to_gpu.transfer_async(2, (cpu, gpu))
    manual.streams["cpu-to-gpu"].tickets[0].ended = True
    assert [result.job_id for result in handlers.cpu_to_gpu.get_finished()] == [2]
    assert handlers.gpu_to_cpu.get_finished() == []


def test_shutdown_finishes_what_is_in_flight(
    open_handlers: OpenHandlers, memory: Memory, manual: ManualBackend
) -> None:
    """Transfers in flight are ended and can still be collected; new ones are refused."""
    handler = open_handlers(memory, manual).gpu_to_cpu
    handler.transfer_async(1, _store([1], [0]))
    handler.shutdown()
    handler.shutdown()
    assert manual.streams["gpu-to-cpu"].closed
    assert [result.job_id for result in handler.get_finished()] == [1]
    with pytest.raises(EngineStateError, match="shut down"):
        handler.transfer_async(2, _store([1], [0]))


def test_a_refused_transfer_is_a_failed_submit_of_the_worker(
    open_handlers: OpenHandlers, memory: Memory
) -> None:
    """Wrong ids cost one transfer, not the step (llm-d-kv-cache#514)."""
    handlers = open_handlers(memory)
    worker = OffloadingWorker()
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, handlers.gpu_to_cpu)
    assert not worker.transfer_async(1, _store([8], [0]))
    assert worker.transfer_async(2, _store([7], [0]))
    worker.wait([1, 2])
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [(2, True)]


class RefusingStream:
    """Refuses what it is told to, as a driver without resources does."""

    def __init__(self, real: ManualStream) -> None:
        self.real = real
        self.refuses = False
        self.close_error: Exception | None = None

    def submit(self, batch: CopyBatch) -> ManualTicket:
        """Refuse, or keep the batch."""
        if self.refuses:
            raise OSError("out of resources")
        return self.real.submit(batch)

    def close(self) -> None:
        """End everything, perhaps badly."""
        self.real.close()
        if self.close_error is not None:
            raise self.close_error


class RefusingBackend:
    """Opens streams that may refuse; or does not open them."""

    name = "refusing"

    def __init__(self, manual: ManualBackend) -> None:
        self.manual = manual
        self.streams: dict[str, RefusingStream] = {}
        self.refuses_streams: set[str] = set()

    def open_stream(self, name: str) -> RefusingStream:
        """Open a stream."""
        if name in self.refuses_streams:
            raise OSError("no more streams")
        self.streams[name] = RefusingStream(self.manual.open_stream(name))
        return self.streams[name]


@pytest.fixture
def refusing(manual: ManualBackend) -> RefusingBackend:
    """Return a back end that refuses when told to."""
    return RefusingBackend(manual)


def test_a_transfer_that_the_back_end_refuses_is_a_failed_result(
    open_handlers: OpenHandlers,
    memory: Memory,
    refusing: RefusingBackend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is reported in its turn, the reason is logged, and later transfers are unharmed."""
    handler = open_handlers(memory, refusing).gpu_to_cpu
    stream = refusing.streams["gpu-to-cpu"]
    handler.transfer_async(1, _store([1], [0]))
    stream.refuses = True
    with caplog.at_level(logging.ERROR, logger="kv_core"):
        assert handler.transfer_async(2, _store([2], [1]))
    stream.refuses = False
    handler.transfer_async(3, _store([3], [2]))
    assert handler.get_finished() == []
    handler.wait([1, 2, 3])
    results = handler.get_finished()
    assert [(result.job_id, result.success) for result in results] == [
        (1, True),
        (2, False),
        (3, True),
    ]
    assert (results[1].transfer_size, results[1].transfer_time) == (0, 0.0)
    assert "transfer 2 (GPU to CPU) was refused" in caplog.text
    assert "out of resources" in caplog.text


def test_a_stream_that_ends_badly_does_not_stop_the_shutdown(
    open_handlers: OpenHandlers,
    memory: Memory,
    refusing: RefusingBackend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The region must still be unmapped, so its memory is let go of."""
    handler = open_handlers(memory, refusing).gpu_to_cpu
    refusing.streams["gpu-to-cpu"].close_error = RuntimeError("the device is lost")
    with caplog.at_level(logging.ERROR, logger="kv_core"):
        handler.shutdown()
    assert "the stream GPU to CPU ended badly" in caplog.text
    refusing.streams["gpu-to-cpu"].close_error = None


def test_a_direction_that_cannot_be_opened_leaves_no_stream(
    memory: Memory, refusing: RefusingBackend, manual: ManualBackend
) -> None:
    """The first direction's stream is closed again."""
    refusing.refuses_streams = {"cpu-to-gpu"}
    caches = memory.kv_caches(memory.gpu_tensors())
    with pytest.raises(OSError, match="no more streams"):
        CpuGpuOffloadingHandlers(caches, memory.cpu_tensors(), 1, refusing)
    assert manual.streams["gpu-to-cpu"].closed


def test_a_shut_down_handler_holds_no_memory(
    open_handlers: OpenHandlers, manual: ManualBackend
) -> None:
    """Neither the region, which could not be unmapped, nor the GPU's pages."""
    gpu, cpu = (np.zeros((4, 8), dtype=np.int8) for _ in range(2))
    caches = CanonicalKVCaches((CanonicalKVCacheTensor(gpu, 8),), ((CanonicalKVCacheRef(0, 8),),))
    handlers = CpuGpuOffloadingHandlers(caches, [cpu], 1, manual)
    references = [weakref.ref(gpu), weakref.ref(cpu)]
    handlers.gpu_to_cpu.transfer_async(1, _store([1], [0]))
    del gpu, cpu, caches
    handlers.gpu_to_cpu.shutdown()
    handlers.cpu_to_gpu.shutdown()
    assert [reference() for reference in references] == [None, None]
    assert [result.job_id for result in handlers.gpu_to_cpu.get_finished()] == [1]
