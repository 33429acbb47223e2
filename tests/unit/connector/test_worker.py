"""The worker's half: stores one step later, flushes before return, failures as reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from kv_core.connector import (
    ConnectorMetadata,
    ConnectorOutput,
    OffloadingConnectorWorker,
    Transfer,
)
from kv_core.device import CanonicalKVCaches
from kv_core.engine import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
    TransferResult,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kv_core.engine import LoadStoreSpec, OffloadingConfig, TransferSpec

NO_CACHES = CanonicalKVCaches(tensors=(), group_data_refs=())


class Handler(OffloadingHandler):
    """Begins transfers when asked and ends them when the test says so, or when waited for.

    Attributes:
        log: What happened, in order, over both directions.
        refused: Jobs that cannot be begun.
        broken: Jobs whose copy fails.
    """

    def __init__(self, log: list[str], transfer_type: tuple[str, str]) -> None:
        self.log = log
        self.refused: set[int] = set()
        self.broken: set[int] = set()
        self._type = transfer_type
        self._running: list[int] = []
        self._ended: list[int] = []

    @override
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if job_id in self.refused:
            raise RuntimeError("no descriptor left")
        self.log.append(f"begin {job_id}")
        self._running.append(job_id)
        return True

    def end(self, *job_ids: int) -> None:
        """Let transfers end."""
        for job_id in job_ids:
            self._running.remove(job_id)
            self._ended.append(job_id)
            self.log.append(f"end {job_id}")

    @override
    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return [
            TransferResult(job_id, job_id not in self.broken, 4096, 0.5, self._type)
            for job_id in ended
        ]

    @override
    def wait(self, job_ids: Iterable[int]) -> None:
        wanted = set(job_ids)
        self.end(*[job_id for job_id in self._running if job_id in wanted])

    @override
    def shutdown(self) -> None:
        self.log.append(f"shutdown {self._type[0]}")


class Spec(OffloadingSpec):
    """Two scripted handlers."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.log: list[str] = []
        self.stores = Handler(self.log, ("GPU", "CPU"))
        self.loads = Handler(self.log, ("CPU", "GPU"))

    @override
    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    @override
    def get_handlers(
        self, kv_caches: object
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        assert kv_caches is NO_CACHES
        yield GPULoadStoreSpec, CPULoadStoreSpec, self.stores
        yield CPULoadStoreSpec, GPULoadStoreSpec, self.loads


@pytest.fixture
def spec(config: Callable[..., OffloadingConfig]) -> Spec:
    """Return a spec with scripted handlers."""
    return Spec(config())


@pytest.fixture
def finished() -> list[TransferResult]:
    """Return what the worker tells its observer."""
    return []


@pytest.fixture
def worker(spec: Spec, finished: list[TransferResult]) -> OffloadingConnectorWorker:
    """Return a worker over the spec."""
    worker = OffloadingConnectorWorker(spec, transfer_finished=finished.append)
    worker.register_kv_caches(NO_CACHES)
    return worker


def store(job_id: int) -> Transfer:
    """Return an order to store one block."""
    return Transfer(job_id, "r", (GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([0])))


def load(job_id: int) -> Transfer:
    """Return an order to load one block."""
    return Transfer(job_id, "r", (CPULoadStoreSpec([0]), GPULoadStoreSpec([1], [1], [0])))


def step(worker: OffloadingConnectorWorker, metadata: ConnectorMetadata) -> None:
    """Run the part of a step before the forward pass."""
    worker.handle_preemptions(metadata)
    worker.start_load_kv(metadata)


def test_stores_begin_one_step_later_and_before_its_loads(
    worker: OffloadingConnectorWorker, spec: Spec
) -> None:
    """Their source is written by the forward pass in between; loads begin at once."""
    step(worker, ConnectorMetadata(loads=(load(1),), stores=(store(2), store(3))))
    assert spec.log == ["begin 1"]
    step(worker, ConnectorMetadata(loads=(load(4),), stores=(store(5),)))
    assert spec.log == ["begin 1", "begin 2", "begin 3", "begin 4"]
    step(worker, ConnectorMetadata())
    assert spec.log[-1] == "begin 5"


def test_flushed_transfers_have_ended_when_preemptions_are_handled(
    worker: OffloadingConnectorWorker, spec: Spec
) -> None:
    """Deferred ones, those of this very step, and loads that are still under way."""
    step(worker, ConnectorMetadata(loads=(load(1),), stores=(store(2), store(3))))
    metadata = ConnectorMetadata(stores=(store(4), store(5)), flush_job_ids=frozenset({1, 2, 4}))
    worker.handle_preemptions(metadata)
    assert spec.log == ["begin 1", "begin 2", "begin 3", "begin 4", "end 2", "end 4", "end 1"]
    worker.handle_preemptions(ConnectorMetadata())
    assert spec.log[-1] == "begin 5"


def test_a_flush_of_transfers_that_have_ended_is_fine(
    worker: OffloadingConnectorWorker, spec: Spec
) -> None:
    """The scheduler may not have heard of their end yet."""
    step(worker, ConnectorMetadata(loads=(load(1),)))
    spec.loads.end(1)
    worker.get_finished()
    worker.handle_preemptions(ConnectorMetadata(flush_job_ids=frozenset({1, 99})))
    assert worker.get_finished() == ConnectorOutput()


def test_what_ended_is_reported_once_by_one_worker(
    worker: OffloadingConnectorWorker, spec: Spec, finished: list[TransferResult]
) -> None:
    """Both directions, with failures named; the observer hears of each."""
    step(worker, ConnectorMetadata(loads=(load(1), load(2)), stores=(store(3),)))
    step(worker, ConnectorMetadata())
    spec.loads.broken = {2}
    spec.loads.end(1, 2)
    spec.stores.end(3)
    assert worker.get_finished() == ConnectorOutput({1: 1, 2: 1, 3: 1}, {2})
    assert worker.get_finished() == ConnectorOutput()
    assert [result.job_id for result in finished] == [3, 1, 2]


def test_a_transfer_that_cannot_begin_is_a_failed_job(
    worker: OffloadingConnectorWorker, spec: Spec
) -> None:
    """An exception in a submit neither ends the step nor leaves anybody waiting."""
    spec.stores.refused = {2, 3}
    spec.loads.refused = {1}
    step(worker, ConnectorMetadata(loads=(load(1),), stores=(store(2), store(4))))
    assert worker.get_finished() == ConnectorOutput({1: 1}, {1})
    step(worker, ConnectorMetadata(stores=(store(3),), flush_job_ids=frozenset({3})))
    assert worker.get_finished() == ConnectorOutput({2: 1, 3: 1}, {2, 3})
    assert spec.log == ["begin 4"]


def test_shutdown_ends_both_directions_and_lets_go_of_them(
    worker: OffloadingConnectorWorker, spec: Spec
) -> None:
    """Idempotent; handlers hold arrays over the shared region."""
    worker.shutdown()
    worker.shutdown()
    assert spec.log == ["shutdown GPU", "shutdown CPU"]
