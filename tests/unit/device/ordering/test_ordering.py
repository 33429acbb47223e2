"""Transfers amid the engine's work on the same pages, on a device that keeps no order itself."""

from __future__ import annotations

import logging
import random
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.device.ordering.conftest import FakeBackend, FakeDevice, FakeEvent, FakeStream

    from kv_core.engine import TransferSpec

PAGE_BYTES = 8


class Rig:
    """One worker on the device: eight pages, eight slots, and an engine that works on the pages."""

    def __init__(self, device: FakeDevice, backend: FakeBackend) -> None:
        self.device = device
        self.gpu = np.zeros((8, PAGE_BYTES), dtype=np.int8)
        self.cpu = np.zeros((8, PAGE_BYTES), dtype=np.int8)
        self.handlers = CpuGpuOffloadingHandlers(
            CanonicalKVCaches(
                (CanonicalKVCacheTensor(self.gpu, PAGE_BYTES),),
                ((CanonicalKVCacheRef(0, PAGE_BYTES),),),
            ),
            [self.cpu],
            1,
            backend,
        )
        self.worker = OffloadingWorker()
        self.worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, self.handlers.gpu_to_cpu)
        self.worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, self.handlers.cpu_to_gpu)
        self.seen: list[int] = []

    def write(self, page: int, value: int) -> None:
        """Let a kernel fill a page."""
        self.device.compute.enqueue(lambda: self.gpu[page].fill(value))

    def read(self, page: int) -> None:
        """Let a kernel read a page; a mix of bytes counts as -1."""

        def look() -> None:
            values = set(self.gpu[page].tolist())
            self.seen.append(values.pop() if len(values) == 1 else -1)

        self.device.compute.enqueue(look)

    def store(self, job_id: int, page: int, slot: int) -> None:
        """Submit a store."""
        assert self.worker.transfer_async(job_id, self._specs(page, slot))

    def load(self, job_id: int, slot: int, page: int) -> None:
        """Submit a load."""
        gpu, cpu = self._specs(page, slot)
        assert self.worker.transfer_async(job_id, (cpu, gpu))

    @staticmethod
    def _specs(page: int, slot: int) -> TransferSpec:
        return GPULoadStoreSpec([page], [1], [0]), CPULoadStoreSpec([slot])

    def finished(self) -> list[tuple[int, bool]]:
        """Return jobs that ended, and whether well."""
        return [(result.job_id, result.success) for result in self.worker.get_finished()]


@pytest.fixture
def rig(device: FakeDevice, backend: FakeBackend) -> Iterator[Rig]:
    """Return a worker."""
    rig = Rig(device, backend)
    yield rig
    device.is_lost = False
    device.frozen = []
    rig.worker.shutdown()


def _store_races(rig: Rig) -> bool:
    """Store a page that a kernel has yet to write; say whether the slot lacks the new bytes."""
    rig.write(5, 7)
    rig.store(1, 5, 2)
    rig.device.run()
    return bool((rig.cpu[2] != 7).any())


def _load_races(rig: Rig) -> bool:
    """Load into a page that a kernel has yet to read; say whether it read anything else."""
    rig.gpu[5], rig.cpu[2] = 3, 7
    rig.read(5)
    rig.load(1, 2, 5)
    rig.device.run()
    assert rig.gpu[5].tolist() == [7] * PAGE_BYTES
    return rig.seen != [3]


def _load_loses(rig: Rig) -> bool:
    """Load into a page that a kernel has yet to write; say whether the load was overwritten."""
    rig.cpu[2] = 7
    rig.write(5, 3)
    rig.load(1, 2, 5)
    rig.device.run()
    return bool((rig.gpu[5] != 7).any())


RACES = pytest.mark.parametrize(
    "races",
    [
        pytest.param(_store_races, id="store after writers, vllm#45704"),
        pytest.param(_load_races, id="load after readers, vllm#47282"),
        pytest.param(_load_loses, id="load after writers"),
    ],
)


@RACES
def test_transfers_wait_for_the_engine(rig: Rig, races: Callable[[Rig], bool]) -> None:
    """The device would rather run the copy first, but the engine's earlier work comes before."""
    assert not races(rig)
    assert rig.finished() == [(1, True)]


@RACES
def test_without_the_wait_the_race_is_lost(
    rig: Rig, races: Callable[[Rig], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is strict enough: a stream that does not wait has the wrong bytes."""

    def go_on(event: FakeEvent) -> None:
        """Do not wait."""

    for stream in rig.device.streams[1:]:
        monkeypatch.setattr(stream, "wait_event", go_on)
    assert races(rig)


def test_submitting_does_not_wait(rig: Rig) -> None:
    """The engine's thread goes on: nothing has run on the device when submit returns."""
    rig.write(5, 7)
    rig.store(1, 5, 2)
    rig.load(2, 3, 6)
    assert rig.device.now_ms == 0
    assert rig.finished() == []


def test_work_that_the_engine_queues_later_is_not_waited_for(rig: Rig) -> None:
    """A transfer overlaps with the forward pass that follows it."""
    rig.store(1, 5, 2)
    assert rig.device.step(), "the compute stream reaches the mark of the store"
    rig.write(7, 1)
    rig.device.frozen = [rig.device.compute]
    rig.device.run()
    assert rig.finished() == [(1, True)]


def test_transfers_of_a_direction_keep_their_order(rig: Rig) -> None:
    """Two stores into one slot: the later one stays."""
    for value in range(1, 6):
        rig.gpu[value] = value
        rig.store(value, value, 0)
    rig.device.run()
    assert rig.cpu[0].tolist() == [5] * PAGE_BYTES
    assert [job_id for job_id, _ in rig.finished()] == [1, 2, 3, 4, 5]


def test_directions_do_not_wait_for_each_other(rig: Rig, backend: FakeBackend) -> None:
    """A request that waits for its load is not behind stores."""
    rig.store(1, 5, 2)
    rig.load(2, 3, 6)
    rig.device.frozen = [backend.streams["gpu-to-cpu"].stream]
    rig.device.run()
    assert rig.finished() == [(2, True)]


def test_flushed_stores_have_left_their_pages(rig: Rig) -> None:
    """A preempted request's pages are handed out again: after wait the new owner may write them."""
    rig.write(5, 7)
    rig.store(1, 5, 2)
    rig.store(2, 6, 3)
    rig.worker.wait([1])
    rig.gpu[5] = 9
    rig.device.run()
    assert rig.cpu[2].tolist() == [7] * PAGE_BYTES


def test_shutdown_lets_transfers_in_flight_end(rig: Rig) -> None:
    """Both directions are finished, their bytes are in place, and their results can be had."""
    rig.cpu[3] = 4
    rig.write(5, 7)
    rig.store(1, 5, 2)
    rig.load(2, 3, 6)
    rig.worker.shutdown()
    assert (rig.cpu[2].tolist(), rig.gpu[6].tolist()) == ([7] * PAGE_BYTES, [4] * PAGE_BYTES)
    assert rig.finished() == [(1, True), (2, True)]


def test_descriptors_stay_until_the_device_has_read_them(rig: Rig) -> None:
    """Polling while transfers wait gives no buffer away that one of them needs."""
    rig.gpu[:] = np.arange(8, dtype=np.int8)[:, None]
    rig.write(0, 100)
    for job_id in range(8):
        rig.store(job_id, job_id, 7 - job_id)
        assert rig.finished() == []
    rig.device.run()
    assert rig.cpu[:, 0].tolist() == [7, 6, 5, 4, 3, 2, 1, 100]


def test_transfer_time_is_the_device_s(rig: Rig) -> None:
    """One copy takes one of the model's milliseconds, and one more to mark the end."""
    rig.write(5, 7)
    rig.store(1, 5, 2)
    rig.device.run()
    (result,) = rig.worker.get_finished()
    assert result.transfer_time == pytest.approx(0.002)
    assert (result.transfer_size, result.transfer_type) == (PAGE_BYTES, ("GPU", "CPU"))


def test_a_lost_device_fails_transfers_and_nothing_else(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """In flight, refused, waited for, shut down: results that say failed, and no exception."""
    rig.store(1, 5, 2)
    rig.load(2, 3, 6)
    rig.device.is_lost = True
    rig.store(3, 4, 1)
    rig.worker.wait([1, 2, 3])
    with caplog.at_level(logging.ERROR, logger="kv_core"):
        assert rig.finished() == [(1, False), (3, False), (2, False)]
        rig.worker.shutdown()
    assert "transfer 1 (GPU to CPU) failed: RuntimeError('the device is lost')" in caplog.text
    assert "the stream GPU to CPU ended badly" in caplog.text


def _play(rig: Rig, dice: random.Random) -> tuple[list[int], list[int]]:
    """Mix the engine's work and transfers, as a legal engine would; return what reads should see.

    The oracle does everything at once and in the order of submission. As in an engine, pages and
    slots of a transfer are left alone until it is reported, except that a page may be handed to
    a load while kernels that were queued before still read it.
    """
    gpu, cpu, expected = [0] * 8, [0] * 8, []
    busy: dict[int, tuple[int, int]] = {}
    for job_id in range(60):
        page, slot, value = dice.randrange(8), dice.randrange(8), dice.randrange(1, 100)
        for _ in range(dice.randrange(3)):
            rig.device.step()
        for ended, success in rig.finished():
            assert success
            del busy[ended]
        conflicts = [job for job, parts in busy.items() if page == parts[0] or slot == parts[1]]
        if conflicts:
            rig.worker.wait(conflicts)
            for ended, _ in rig.finished():
                del busy[ended]
        rig.read(page)
        expected.append(gpu[page])
        action = dice.choice(("write", "store", "load"))
        if action == "write":
            rig.write(page, value)
            gpu[page] = value
        elif action == "store":
            rig.store(job_id, page, slot)
            cpu[slot] = gpu[page]
            busy[job_id] = (page, slot)
        else:
            rig.load(job_id, slot, page)
            gpu[page] = cpu[slot]
            busy[job_id] = (page, slot)
    rig.device.run()
    assert rig.gpu[:, 0].tolist() == gpu
    assert rig.cpu[:, 0].tolist() == cpu
    return rig.seen, expected


@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_has_the_bytes_of_the_order_of_submission(rig: Rig, seed: int) -> None:
    """Whichever stream goes on next: reads, pages and slots are as if nothing overlapped."""
    dice = random.Random(seed)

    def choose(streams: list[FakeStream]) -> FakeStream:
        return dice.choice(streams)

    rig.device.choose = choose
    seen, expected = _play(rig, dice)
    assert seen == expected
