"""Several ranks over one primary tier, here in one process: whose bytes are where."""

from __future__ import annotations

from contextlib import ExitStack
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.connector import ConnectorOutput, TieringOffloadingSpec
from kv_core.cpu import SharedOffloadRegion
from kv_core.errors import ConfigError
from kv_core.keys import make_offload_key
from kv_core.workload import BlockChecker
from kv_core.workload.replay import HostGpuMemory, ReplayConfig, ReplayEngine, _tiered, replay_trace
from kv_core.workload.replay._worker import StepOutcome, Worker, content_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kv_core.connector import RegionRole
    from kv_core.engine import OffloadingConfig
    from kv_core.plugins import TierRegistry
    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayReport
    from kv_core.workload.replay._report import Stopwatch
    from kv_core.workload.replay._worker import StepOrders


class WorkersHere:
    """Stands in for worker processes: the same workers and regions, in the test's process."""

    ranks: Sequence[int] = ()
    """What the process at each place takes for its rank; by default the place."""

    late_place: int | None = None
    """Reports what it has finished every third step only."""

    failing_place: int | None = None
    """Reports all of its loads as failed."""

    def __init__(
        self,
        config: ReplayConfig,
        offloading: OffloadingConfig,
        role: RegionRole,
        wait_until_attached: Callable[[float], None],
        stopwatch: Stopwatch,
    ) -> None:
        self.devices = ("here",) * config.workers
        self.workers: list[Worker] = []
        self.held_back: list[StepOutcome] = []
        self.steps = 0
        self.loads: set[int] = set()
        with ExitStack() as opened:
            for place in range(config.workers):
                spec = TieringOffloadingSpec(offloading, role=role.of_worker(place))
                opened.callback(spec.shutdown)
                worker = Worker(
                    spec,
                    HostGpuMemory(config.gpu_blocks, config.block_bytes),
                    config.block_bytes,
                    rank=self.ranks[place] if self.ranks else place,
                    num_workers=config.workers,
                    stopwatch=stopwatch,
                )
                opened.callback(worker.shutdown)
                self.workers.append(worker)
            wait_until_attached(0)
            self._opened = opened.pop_all()

    def run_step(self, orders: StepOrders) -> StepOutcome:
        """Run the step on one worker after the other."""
        self.steps += 1
        self.loads.update(load.job_id for load in orders.metadata.loads)
        outcomes = []
        for place, worker in enumerate(self.workers):
            outcome = worker.run_step(orders)
            if place == self.failing_place:
                outcome.output.failed |= self.loads.intersection(outcome.output.finished)
            if place == self.late_place:
                self.held_back.append(outcome)
                if self.steps % 3:
                    continue
                outcomes += self.held_back
                self.held_back = []
            else:
                outcomes.append(outcome)
        return StepOutcome(
            reduce(ConnectorOutput.aggregate, (outcome.output for outcome in outcomes)),
            [transfer for outcome in outcomes for transfer in outcome.transfers],
        )

    def count_wrong_bytes(self, blocks: Sequence[tuple[int, bytes]]) -> list[list[int]]:
        """Have each worker compare its pages."""
        return [counts for worker in self.workers for counts in worker.count_wrong_bytes(blocks)]

    def shutdown(self) -> None:
        """Let go of the region."""
        self._opened.close()


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> type[WorkersHere]:
    """Replace worker processes by workers in this process."""

    class Workers(WorkersHere):
        """A class of the test's own, to be changed."""

    monkeypatch.setattr(_tiered, "WorkerProcesses", Workers)
    return Workers


@pytest.fixture
def replay(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    install_tier: Callable[[str], TierRegistry],
    workers_here: type[WorkersHere],
) -> Callable[..., ReplayReport]:
    """Return a function that replays on a pool that holds one request, with a tier below.

    The tier keeps its blocks from one replay to the next. Few slots make it needed.
    """
    registry = install_tier("DictTier")
    trace = letters("abcd", "lmno", "wxyz", "abce", "lmnp")

    def run(workers: int, **fields: Any) -> ReplayReport:
        fields = {"block_bytes": 1000, "cpu_slots": 8, "max_seqs": 1, **fields}
        fields["secondary_tiers"] = [{"type": "test"}]
        return replay_trace(trace, make_config(trace, workers=workers, **fields), registry=registry)

    return run


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_rank_gets_its_own_bytes_back(
    replay: Callable[..., ReplayReport], workers: int
) -> None:
    """Through the primary tier and the tier below: each rank compares what it has loaded."""
    report = replay(workers)
    assert report.problems() == []
    assert report.hits == {"gpu": 0, "cpu": 0, "test": 6}
    assert [worker.blocks_verified for worker in report.workers] == [6] * workers
    assert report.blocks_verified == 6


def test_what_moves_is_added_up_over_ranks(replay: Callable[..., ReplayReport]) -> None:
    """Pages over all ranks between GPU and CPU, whole rows with padding below."""
    report = replay(3, block_size_factor=1)
    stored, loaded = 4 + 4 + 4 + 1 + 1, 6
    assert report.bytes_moved == {
        "gpu_to_cpu": stored * 3 * 1000,
        "cpu_to_gpu": loaded * 3 * 1000,
        "cpu_to_test": stored * 4096,
        "test_to_cpu": loaded * 4096,
    }


def test_ranks_after_a_restart_find_their_bytes(replay: Callable[..., ReplayReport]) -> None:
    """The tier's blocks hold the pages of all ranks, for the engine that comes after."""
    replay(2)
    report = replay(2)
    assert report.problems() == []
    # All but the last block of each prompt at least.
    assert report.hits["test"] >= 5 * 3
    assert report.workers[1].blocks_verified == report.workers[0].blocks_verified > 0


def test_another_number_of_ranks_has_another_namespace(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """Rows of 1, 2 and 4 pages have one size here, and still are no substitute for each other."""
    trace = letters("ab")
    namespaces = [
        make_config(trace, workers=workers).offloading_config(trace, "engine-0").namespace
        for workers in (1, 2, 4)
    ]
    assert {namespace.block_bytes for namespace in namespaces} == {4096}
    assert len({namespace.fingerprint for namespace in namespaces}) == 3


def test_swapped_ranks_are_seen(
    replay: Callable[..., ReplayReport], workers_here: type[WorkersHere]
) -> None:
    """After a restart in which two processes take each other's place, no page is right."""
    replay(2)
    workers_here.ranks = (1, 0)
    report = replay(2)
    assert report.bytes_wrong_by_level.keys() >= {"test"}
    assert [worker.bytes_wrong > 900 * 3 for worker in report.workers] == [True, True]
    assert "on worker 1" in report.problems()[0]


def test_two_ranks_of_one_kind_are_seen(
    replay: Callable[..., ReplayReport], workers_here: type[WorkersHere]
) -> None:
    """If rank 1 computes what rank 0 does, its own comparison is content, the next start's not."""
    workers_here.ranks = (0, 0)
    assert replay(2).bytes_wrong == 0
    workers_here.ranks = ()
    report = replay(2)
    assert report.workers[0].bytes_wrong == 0
    assert report.workers[1].bytes_wrong > 0


@pytest.mark.parametrize("shift", [-8, 8])
def test_a_shifted_view_is_seen_at_once(
    replay: Callable[..., ReplayReport], monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    """A rank whose page begins eight bytes off overwrites its neighbour's, or is overwritten."""
    original = SharedOffloadRegion.create_next_view

    def shifted(region: SharedOffloadRegion, worker: int, page_bytes: int) -> npt.NDArray[np.int8]:
        view = original(region, worker, page_bytes)
        if worker != 1:
            return view
        whole = np.frombuffer(region._open_mapping(), dtype=np.int8, count=region._rows_bytes)
        start = page_bytes * worker + shift
        return whole.reshape(region.geometry.num_blocks, -1)[:, start : start + page_bytes]

    monkeypatch.setattr(SharedOffloadRegion, "create_next_view", shifted)
    report = replay(3)
    wrong = [worker.bytes_wrong for worker in report.workers]
    # Who wrote first of the two that overlap is the victim.
    bystander = 2 if shift < 0 else 0
    assert wrong[bystander] == 0
    assert report.bytes_wrong == sum(wrong) > 0


def test_a_page_lies_where_the_layout_says(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    workers_here: type[WorkersHere],
) -> None:
    """In a row, the page of rank 0 comes first, then that of rank 1."""
    trace = letters("abcd")
    engine = ReplayEngine(trace, make_config(trace, workers=2, block_bytes=1000))
    engine.run()
    assert isinstance(engine._levels, _tiered.TieredLevels)
    checker = BlockChecker()
    for slot, block_hash in enumerate(trace.requests[0].block_hashes):
        row = engine._levels._primary.block(slot)
        for rank in (0, 1):
            key = content_key(make_offload_key(block_hash, 0), rank, 2)
            page = row[1000 * rank : 1000 * (rank + 1)]
            assert checker.count_wrong_bytes(key, page) == 0
            page.release()
        row.release()
    engine.shutdown()


def test_a_transfer_counts_when_the_last_rank_has_ended(
    replay: Callable[..., ReplayReport], workers_here: type[WorkersHere]
) -> None:
    """A rank that reports late holds all others up, and no byte is wrong."""
    workers_here.late_place = 1
    report = replay(2)
    assert report.problems() == []
    assert report.hits == {"gpu": 0, "cpu": 0, "test": 6}


def test_a_load_that_one_rank_fails_has_failed(
    replay: Callable[..., ReplayReport], workers_here: type[WorkersHere]
) -> None:
    """The blocks are computed, by all ranks, instead of being used by some."""
    workers_here.failing_place = 1
    report = replay(2)
    assert report.problems() == []
    assert (report.loads_failed, report.blocks_verified, report.misses) == (2, 0, 20)


def test_ranks_of_a_single_worker_have_the_content_of_the_key() -> None:
    """What replays of one worker have stored so far stays what it was."""
    assert content_key(b"key", 0, 1) == b"key"
    assert content_key(b"key", 1, 2) == b"key\x00\x00\x00\x01"


def test_rows_have_room_for_every_rank() -> None:
    """Three pages of 3000 bytes take three memory pages."""
    assert ReplayConfig(block_bytes=3000, workers=3).row_bytes == 12288
    with pytest.raises(ConfigError, match="takes 12288 bytes"):
        ReplayConfig(block_bytes=3000, workers=3, cpu_bytes=12287)


def test_memory_for_one_worker_is_not_shared_by_several(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """Each worker has a pool of its own."""
    trace = letters("ab")
    config = make_config(trace, workers=2)
    with pytest.raises(ValueError, match="memory for one worker"):
        ReplayEngine(trace, config, memory=HostGpuMemory(config.gpu_blocks, config.block_bytes))
