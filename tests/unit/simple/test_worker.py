"""The worker's half: bytes in both directions, on every rank, and what goes wrong with them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.device import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kv_core.device.copy import HostCopyBackend
from kv_core.errors import ConfigError, EngineStateError
from kv_core.simple import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorker,
    SimpleCPUOffloadWorkerMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from kv_core.device.copy import CopyBatch, CopyStream, CopyTicket
    from kv_core.engine import TransferResult

PAGES = (24, 40)
GPU_BLOCKS, CPU_BLOCKS = 6, 4


@dataclass
class Rank:
    """A worker with its memory."""

    worker: SimpleCPUOffloadWorker
    gpu: list[npt.NDArray[np.int8]]
    transfers: list[TransferResult]

    def step(self, **orders: Any) -> SimpleCPUOffloadWorkerMetadata:
        """Run a step and wait until its transfers have ended."""
        self.worker.bind_connector_metadata(SimpleCPUOffloadMetadata(**orders))
        self.worker.handle_preemptions()
        self.worker.start_load_kv()
        first = self.worker.get_finished()
        self.worker.flush()
        return first.aggregate(self.worker.get_finished())

    def block(self, block_id: int) -> list[int]:
        """Return the bytes of a GPU block, over all tensors."""
        return [int(x) for tensor in self.gpu for x in tensor[block_id]]

    def fill(self, block_id: int, value: int) -> None:
        """Write a GPU block."""
        for tensor in self.gpu:
            tensor[block_id] = value


class GatedBackend:
    """Copies on host threads, which begin when the gate is open."""

    name = "gated"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.refuse = False

    def open_stream(self, name: str) -> CopyStream:
        """Open a stream behind the gate."""
        stream = HostCopyBackend().open_stream(name)
        backend = self

        class Gated:
            def submit(self, batch: CopyBatch) -> CopyTicket:
                if backend.refuse:
                    raise OSError("the driver says no")
                assert backend.gate.wait(30)
                return stream.submit(batch)

            def close(self) -> None:
                stream.close()

        return Gated()


def open_rank(backend: Any = None) -> Rank:
    """Make a worker over host memory with two tensors."""
    gpu: list[npt.NDArray[np.int8]] = [np.zeros((GPU_BLOCKS, n), dtype=np.int8) for n in PAGES]
    transfers: list[TransferResult] = []
    worker = SimpleCPUOffloadWorker(
        lambda _tensors: backend or HostCopyBackend(), transfer_finished=transfers.append
    )
    tensors = tuple(CanonicalKVCacheTensor(t, n) for t, n in zip(gpu, PAGES, strict=True))
    refs = ((CanonicalKVCacheRef(0, PAGES[0]),), (CanonicalKVCacheRef(1, PAGES[1] - 8),))
    worker.register_kv_caches(CanonicalKVCaches(tensors, refs), CPU_BLOCKS)
    return Rank(worker, gpu, transfers)


@pytest.fixture
def rank() -> Iterator[Rank]:
    """Return a rank that is shut down at the end."""
    rank = open_rank()
    yield rank
    rank.worker.shutdown()


def test_a_block_comes_back_whole(rank: Rank) -> None:
    """Every tensor of a block, whichever group uses it, and its padding as well."""
    rank.fill(2, 7)
    rank.fill(5, 8)
    before = [rank.block(block_id) for block_id in (2, 5)]
    report = rank.step(store_event=0, store_gpu_blocks=(2, 5), store_cpu_blocks=(3, 0))
    assert report.completed_store_events == {0: 1}
    assert [int(tensor[3, 0]) for tensor in rank.worker.cpu_tensors] == [7, 7]
    rank.fill(2, 0)
    rank.fill(5, 0)
    report = rank.step(load_event=0, load_gpu_blocks=(1, 4), load_cpu_blocks=(3, 0))
    assert report.completed_load_events == {0: 1}
    assert [rank.block(block_id) for block_id in (1, 4)] == before
    assert [rank.block(block_id) for block_id in (0, 2, 3, 5)] == [[0] * sum(PAGES)] * 4


def test_transfers_are_measured(rank: Rank) -> None:
    """Bytes and direction of each event, once."""
    rank.step(store_event=0, store_gpu_blocks=(1, 2), store_cpu_blocks=(0, 1))
    rank.step(load_event=0, load_gpu_blocks=(3,), load_cpu_blocks=(1,))
    assert [(t.transfer_type, t.transfer_size, t.success) for t in rank.transfers] == [
        (("GPU", "CPU"), 2 * sum(PAGES), True),
        (("CPU", "GPU"), sum(PAGES), True),
    ]


def test_copies_are_launched_after_the_forward_pass() -> None:
    """Neither the start of loads nor the wait for preempted blocks launches anything."""
    backend = GatedBackend()
    rank = open_rank(backend)
    backend.gate.set()
    rank.fill(1, 1)
    orders = SimpleCPUOffloadMetadata(
        store_event=0, store_gpu_blocks=(1,), store_cpu_blocks=(0,), need_flush=True
    )
    rank.worker.bind_connector_metadata(orders)
    rank.worker.handle_preemptions()
    rank.worker.start_load_kv()
    rank.fill(1, 2)
    rank.worker.get_finished()
    rank.worker.flush()
    assert int(rank.worker.cpu_tensors[0][0, 0]) == 2
    rank.worker.shutdown()


def test_the_forward_path_does_not_wait_for_copies() -> None:
    """Launching returns while the device takes its time; the next steps report the end."""
    backend = GatedBackend()
    rank = open_rank(backend)
    for event in range(3):
        orders = SimpleCPUOffloadMetadata(
            store_event=event, store_gpu_blocks=(1,), store_cpu_blocks=(event,)
        )
        rank.worker.bind_connector_metadata(orders)
        assert rank.worker.get_finished() == SimpleCPUOffloadWorkerMetadata()
    backend.gate.set()
    rank.worker.flush()
    assert rank.worker.get_finished().completed_store_events == {0: 1, 1: 1, 2: 1}
    rank.worker.shutdown()


def test_a_preemption_waits_for_earlier_copies() -> None:
    """When the step begins, no copy holds its blocks any more, and it says so."""
    backend = GatedBackend()
    rank = open_rank(backend)
    orders = SimpleCPUOffloadMetadata(store_event=0, store_gpu_blocks=(1,), store_cpu_blocks=(0,))
    rank.worker.bind_connector_metadata(orders)
    rank.worker.get_finished()
    opener = threading.Timer(0, backend.gate.set)
    opener.start()
    rank.worker.bind_connector_metadata(SimpleCPUOffloadMetadata(need_flush=True))
    rank.worker.handle_preemptions()
    assert rank.worker.get_finished().completed_store_events == {0: 1}
    opener.join()
    rank.worker.shutdown()


def test_orders_are_carried_out_once(rank: Rank) -> None:
    """A second question in a step launches nothing."""
    orders = SimpleCPUOffloadMetadata(store_event=0, store_gpu_blocks=(1,), store_cpu_blocks=(0,))
    rank.worker.bind_connector_metadata(orders)
    counts = []
    for _ in range(2):
        counts.append(rank.worker.get_finished().completed_store_events)
        rank.worker.flush()
    counts.append(rank.worker.get_finished().completed_store_events)
    assert sum(len(count) for count in counts) == 1
    assert len(rank.transfers) == 1


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (((6,), (0,)), r"GPU block ids must be in 0\.\.5, found 6\.\.6"),
        (((1,), (-1,)), r"CPU block ids must be in 0\.\.3, found -1\.\.-1"),
        (((1, 2), (0,)), "2 GPU blocks need as many CPU blocks, found 1"),
    ],
)
def test_blocks_that_do_not_exist_fail_their_event(
    rank: Rank, blocks: tuple[tuple[int, ...], ...], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No byte is touched, the log says why, and the next event works."""
    report = rank.step(store_event=0, store_gpu_blocks=blocks[0], store_cpu_blocks=blocks[1])
    assert (report.completed_store_events, report.failed_store_events) == ({0: 1}, {0})
    assert caplog.records[0].exc_info is not None
    with pytest.raises(ValueError, match=message):
        raise caplog.records[0].exc_info[1] or AssertionError
    report = rank.step(store_event=1, store_gpu_blocks=(1,), store_cpu_blocks=(0,))
    assert (report.completed_store_events, report.failed_store_events) == ({1: 1}, set())


def test_a_refused_copy_fails_its_event_only() -> None:
    """In both directions; the copies before and after it are as they should be."""
    backend = GatedBackend()
    backend.gate.set()
    rank = open_rank(backend)
    orders = {"gpu_blocks": (1,), "cpu_blocks": (0,)}
    reports = []
    for event in range(3):
        backend.refuse = event == 1
        step = {f"{way}_{name}": x for way in ("load", "store") for name, x in orders.items()}
        reports.append(rank.step(load_event=event, store_event=event, **step))
    assert [report.failed_load_events for report in reports] == [set(), {1}, set()]
    assert [report.failed_store_events for report in reports] == [set(), {1}, set()]
    assert [report.completed_load_events for report in reports] == [{0: 1}, {1: 1}, {2: 1}]
    assert [t.transfer_size for t in rank.transfers].count(0) == 2
    rank.worker.shutdown()


def test_reports_of_ranks_add_up() -> None:
    """Completion is counted, failure of one is failure; the parts stay as they were."""
    first = SimpleCPUOffloadWorkerMetadata({0: 1, 1: 1}, {5: 1}, {1}, set())
    second = SimpleCPUOffloadWorkerMetadata({0: 1}, {5: 1, 6: 1}, set(), {6})
    total = first.aggregate(second)
    assert total == SimpleCPUOffloadWorkerMetadata({0: 2, 1: 1}, {5: 2, 6: 1}, {1}, {6})
    assert first.completed_store_events == {0: 1, 1: 1}


def test_two_ranks_bring_back_their_own_bytes(make_engine: Callable[..., Any]) -> None:
    """One scheduler, two workers: a block is found when both have stored it, and each loads its."""
    engine = make_engine(world_size=2, gpu_blocks=GPU_BLOCKS, cpu_blocks=CPU_BLOCKS)
    ranks = [open_rank(), open_rank()]

    def launch(metadata: SimpleCPUOffloadMetadata) -> list[SimpleCPUOffloadWorkerMetadata]:
        reports = []
        for rank in ranks:
            rank.worker.bind_connector_metadata(metadata)
            early = rank.worker.get_finished()
            rank.worker.flush()
            reports.append(early.aggregate(rank.worker.get_finished()))
        return reports

    hashes = (b"a" * 32, b"b" * 32)
    request = SimpleNamespace(req_id="r", num_tokens=9, block_hashes=hashes)
    other = SimpleNamespace(req_id="s", num_tokens=9, block_hashes=hashes)
    table = engine.allocate(request, 3)
    for index, rank in enumerate(ranks):
        for position, block_id in enumerate(table[0][:2]):
            rank.fill(block_id, 10 * index + position + 1)
    scheduled = SimpleNamespace(
        request=request, num_computed_tokens=0, num_scheduled_tokens=9, block_ids=table
    )
    first, second = launch(engine.step(scheduled))
    engine.scheduler.update_connector_output(first)
    assert engine.matched(other) == 0
    engine.scheduler.update_connector_output(second)
    assert engine.matched(other) == 8
    into = engine.allocate(other, 2)
    engine.scheduler.update_state_after_alloc(other, into, 8)
    first, second = launch(engine.step())
    report = engine.scheduler.update_connector_output(first.aggregate(second))
    assert report.loaded_req_ids == {"s"}
    for index, rank in enumerate(ranks):
        assert [rank.gpu[1][block_id, -1] for block_id in into[0]] == [
            10 * index + 1,
            10 * index + 2,
        ]
        rank.worker.shutdown()


def test_calls_out_of_order_are_refused(rank: Rank) -> None:
    """Before registration, twice, and after the end."""
    with pytest.raises(EngineStateError, match="register_kv_caches was not called"):
        SimpleCPUOffloadWorker(lambda _: HostCopyBackend()).get_finished()
    caches = CanonicalKVCaches((CanonicalKVCacheTensor(rank.gpu[0], PAGES[0]),), ((),))
    with pytest.raises(EngineStateError, match="registered already"):
        rank.worker.register_kv_caches(caches, 1)
    rank.worker.shutdown()
    orders = SimpleCPUOffloadMetadata(store_event=0, store_gpu_blocks=(1,), store_cpu_blocks=(0,))
    rank.worker.bind_connector_metadata(orders)
    with pytest.raises(EngineStateError, match="shut down"):
        rank.worker.get_finished()


def test_shutdown_finishes_copies_and_leaves_no_thread() -> None:
    """Twice is fine; what was ordered is done, and memory is released."""
    threads = threading.enumerate()
    rank = open_rank()
    rank.fill(1, 3)
    orders = SimpleCPUOffloadMetadata(store_event=0, store_gpu_blocks=(1,), store_cpu_blocks=(2,))
    rank.worker.bind_connector_metadata(orders)
    rank.worker.get_finished()
    tensor = rank.worker.cpu_tensors[0]
    rank.worker.shutdown()
    rank.worker.shutdown()
    assert int(tensor[2, 0]) == 3
    assert rank.worker.cpu_tensors == ()
    assert threading.enumerate() == threads


def test_nothing_to_offload_is_refused() -> None:
    """KV caches without tensors, and CPU memory without blocks, by what is missing."""
    worker = SimpleCPUOffloadWorker(lambda _: HostCopyBackend())
    with pytest.raises(ValueError, match="no tensors"):
        worker.register_kv_caches(CanonicalKVCaches((), ()), 1)
    gpu = np.zeros((2, 8), dtype=np.int8)
    caches = CanonicalKVCaches((CanonicalKVCacheTensor(gpu, 8),), ((CanonicalKVCacheRef(0, 8),),))
    with pytest.raises(ConfigError, match="at least one block, found 0"):
        worker.register_kv_caches(caches, 0)
