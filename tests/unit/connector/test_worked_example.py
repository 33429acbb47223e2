"""The worked example: four requests that share prefixes, through all three levels.

Blocks of 16 tokens, one GPU block each, the prompt only, one secondary tier.
R1 = P1 P2 P3, R2 = P1 P2 P4, R3 = P5 P6, R4 = P1 P2 P7: eleven block instances, seven blocks.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import pytest
from typing_extensions import override

from kv_core.connector import (
    ConnectorOutput,
    OffloadingConnectorScheduler,
    ScheduledRequest,
    StepSchedule,
)
from kv_core.contract import (
    ContractVersion,
    JobId,
    JobResult,
    NullMetrics,
    OffloadingEvent,
    PrimaryView,
    ReqContext,
    RequestOffloadingContext,
    SecondaryTierManager,
    TierConfig,
    TierLimits,
    TierSpec,
    get_offload_block_hash,
    make_offload_key,
)
from kv_core.cpu import CPUPrimaryTierOffloadingManager
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec, LookupResult
from kv_core.plugins import open_tier
from kv_core.tiering import TieringOffloadingManager

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.unit.connector.conftest import Request

    from kv_core.connector import ConnectorMetadata, LoadReport, Transfer
    from kv_core.contract import (
        JobMetadata,
        LookupAnswer,
        OffloadKey,
        ScheduleEndContext,
        TierContext,
    )
    from kv_core.engine import OffloadingConfig
    from kv_core.tiering import JobReport

BLOCK_BYTES: Final = 4096
PROMPTS: Final = {"R1": "P1 P2 P3", "R2": "P1 P2 P4", "R3": "P5 P6", "R4": "P1 P2 P7"}
PATIENCE_S: Final = 30.0


class StepTier(SecondaryTierManager):
    """A persistent tier that probes in batches of a step and ends jobs when it is told to.

    Attributes:
        storage: Blocks by key; outlives the tier.
        batches: Keys of each batch of probes.
        jobs: All jobs, in order.
    """

    @override
    def __init__(self, context: TierContext, storage: dict[OffloadKey, bytes]) -> None:
        self.storage = storage
        self.batches: list[list[OffloadKey]] = []
        self.jobs: list[JobMetadata] = []
        self._primary = context.primary
        self._questions: list[OffloadKey] = []
        self._answers: dict[OffloadKey, bool] = {}
        self._running: list[JobMetadata] = []
        self._results: list[JobResult] = []

    @property
    def job_sizes(self) -> list[int]:
        """Keys in each job so far."""
        return [len(job.keys) for job in self.jobs]

    def finish_all(self) -> None:
        """End all jobs; they are reported at the next poll."""
        for job in self._running:
            for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
                with self._primary.block(block_id) as slot:
                    if job.is_promotion:
                        slot[:] = self.storage[key]
                    else:
                        self.storage[key] = bytes(slot)
            self._results.append(JobResult(job.job_id, success=True))
        self._running.clear()

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        if key in self._answers:
            return self._answers[key]
        if key not in self._questions:
            self._questions.append(key)
        return None

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._questions:
            self.batches.append(self._questions)
            self._answers.update((key, key in self.storage) for key in self._questions)
            self._questions = []

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self.jobs.append(job)
        self._running.append(job)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self.jobs.append(job)
        self._running.append(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._results = self._results, []
        return results

    @override
    def drain_jobs(self) -> Collection[JobId]:
        self.finish_all()
        return ()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()


class Process:
    """One engine process: GPU pages, CPU slots, one tier.

    Attributes:
        reports: Finished jobs of the tier.
        gpu: Content of GPU blocks.
    """

    def __init__(
        self, config: OffloadingConfig, slots: int, tier: str | TierSpec, **settings: object
    ):
        self._memory = bytearray(slots * BLOCK_BYTES)
        self.view = self._new_view(slots)
        self.reports: list[JobReport] = []
        primary = CPUPrimaryTierOffloadingManager(
            slots, self._new_view(slots).view, BLOCK_BYTES, enable_events=True
        )
        self.primary = primary
        self.tier = open_tier(
            tier,
            name="fs",
            settings=settings,
            namespace=config.namespace,
            primary=self.view,
            clock=time.monotonic,
            metrics=NullMetrics(),
        )
        self.manager = TieringOffloadingManager(primary, [self.tier], observer=self)
        self.scheduler = OffloadingConnectorScheduler(config, self.manager)
        self.gpu: dict[int, bytes] = {}

    def _new_view(self, slots: int) -> PrimaryView:
        return PrimaryView(memoryview(self._memory).cast("B", (slots, BLOCK_BYTES)), BLOCK_BYTES)

    def job_finished(self, report: JobReport) -> None:
        """Keep what an observer is told."""
        self.reports.append(report)

    @property
    def step_tier(self) -> StepTier:
        """The scripted tier."""
        assert isinstance(self.tier.manager, StepTier)
        return self.tier.manager

    def cursor(self, req_id: str) -> int:
        """Return the number of blocks of a request that were taken."""
        return self.scheduler._requests[req_id].cursors[0]

    def compute(self, *requests: Request, tokens: int = 48) -> ConnectorMetadata:
        """Run a step that computes requests whole, each block in the GPU block of its name."""
        scheduled = []
        for request in requests:
            table = [_gpu_block(block_hash) for block_hash in request.block_hashes]
            for block_id, block_hash in zip(table, request.block_hashes, strict=True):
                self.gpu[block_id] = _content(block_hash)
            scheduled.append(
                ScheduledRequest(request, 0, min(tokens, request.num_tokens), (table,))
            )
        new = frozenset(request.req_id for request in requests)
        return self.scheduler.build_connector_meta(StepSchedule(scheduled, new))

    def idle(self) -> ConnectorMetadata:
        """Run a step without any request."""
        return self.scheduler.build_connector_meta(StepSchedule())

    def carry_out(self, transfers: Iterable[Transfer]) -> LoadReport:
        """Do what a worker does: copy, and report."""
        done: dict[int, int] = {}
        for transfer in transfers:
            source, destination = transfer.spec
            if isinstance(source, GPULoadStoreSpec):
                assert isinstance(destination, CPULoadStoreSpec)
                for block_id, slot_id in _pairs(source, destination):
                    with self.view.block(slot_id) as slot:
                        slot[:] = self.gpu[block_id]
            else:
                assert isinstance(source, CPULoadStoreSpec)
                assert isinstance(destination, GPULoadStoreSpec)
                for block_id, slot_id in _pairs(destination, source):
                    self.gpu[block_id] = bytes(self.view.block(slot_id))
            done[transfer.job_id] = 1
        return self.scheduler.update_connector_output(ConnectorOutput(done))

    def settle(self) -> None:
        """Run idle steps until every job has ended."""
        give_up = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while self.scheduler.has_pending_work():
            assert time.monotonic() < give_up, "the tier does not finish its jobs"
            if isinstance(self.tier.manager, StepTier):
                self.step_tier.finish_all()
            self.carry_out(self.idle().stores)
            pause.wait(0.001)

    def slots_of(self, keys: Iterable[OffloadKey]) -> list[int | None]:
        """Return the slots of blocks in the primary tier."""
        return [self.primary.block_id_of(key) for key in keys]

    def pinned(self) -> float:
        """Return the number of pinned slots."""
        return self.manager.get_stats()["blocks_pinned"]


def _pairs(gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> Iterator[tuple[int, int]]:
    return zip(gpu.block_ids.tolist(), cpu.block_ids.tolist(), strict=True)


def _content(block_hash: bytes) -> bytes:
    return block_hash * (BLOCK_BYTES // len(block_hash))


def _gpu_block(block_hash: bytes) -> int:
    return 1 + int.from_bytes(block_hash[:3], "big")


def _num_gpu_blocks(transfers: Sequence[Transfer]) -> int:
    return sum(
        len(spec.block_ids)
        for transfer in transfers
        for spec in transfer.spec
        if isinstance(spec, GPULoadStoreSpec)
    )


@pytest.fixture
def requests(request_of: Callable[..., Request]) -> dict[str, Request]:
    """Return the four requests."""
    return {req_id: request_of(req_id, names) for req_id, names in PROMPTS.items()}


@pytest.fixture
def blocks(key: Callable[..., OffloadKey]) -> dict[str, OffloadKey]:
    """Return the keys of the seven blocks."""
    return {name: key(name) for name in ("P1", "P2", "P3", "P4", "P5", "P6", "P7")}


@pytest.fixture
def storage() -> dict[OffloadKey, bytes]:
    """Return the storage of the scripted tier, which outlives a process."""
    return {}


@pytest.fixture
def launch(
    config: Callable[..., OffloadingConfig], storage: dict[OffloadKey, bytes]
) -> Iterator[Callable[..., Process]]:
    """Start processes over the scripted tier, or over files when a folder is given."""
    started: list[Process] = []

    def run(slots: int = 16, root_dir: Path | None = None, **extra: object) -> Process:
        tier: str | TierSpec = _step_tier(storage) if root_dir is None else "fs"
        settings = (
            {}
            if root_dir is None
            else {
                # The layout whose blocks can be counted from outside.
                "layout": "files",
                "root_dir": str(root_dir),
                "direct_io": False,
            }
        )
        started.append(Process(config(**extra), slots, tier, **settings))
        return started[-1]

    yield run
    for process in started:
        process.scheduler.shutdown()


def _step_tier(storage: dict[OffloadKey, bytes]) -> TierSpec:
    def limits(_: object) -> TierLimits:
        return TierLimits(job_deadline_s=1.0, lookup_deadline_s=1.0, min_free_bytes=1)

    return TierSpec(
        type="step",
        summary="a tier of the tests",
        contract=ContractVersion(1, 0),
        factory=lambda context: StepTier(context, storage),
        config_model=TierConfig,
        limits=limits,
    )


# -- step N -------------------------------------------------------------------------------------


def test_step_n_reserves_seven_slots_for_seven_blocks(
    launch: Callable[..., Process],
    requests: dict[str, Request],
    blocks: dict[str, OffloadKey],
) -> None:
    """Keys to store, slots and cursors are those of the text; nothing is evicted or moved."""
    process = launch()
    metadata = process.compute(*requests.values())
    stores = {
        transfer.req_id: transfer.spec[1].block_ids.tolist()  # type: ignore[attr-defined]
        for transfer in metadata.stores
    }
    assert stores == {"R1": [0, 1, 2], "R2": [3], "R3": [4, 5], "R4": [6]}
    assert process.slots_of(blocks.values()) == [0, 1, 2, 3, 4, 5, 6]
    assert [process.cursor(req_id) for req_id in PROMPTS] == [3, 3, 2, 3]
    stats = process.manager.get_stats()
    assert stats["blocks_writing"] == 7
    assert stats["blocks_evicted"] == 0
    assert process.step_tier.jobs == []
    # Their lookups are pending: another request has to ask again.
    for request in requests.values():
        assert process.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)


# -- step N+1 -----------------------------------------------------------------------------------


def test_step_n_plus_1_copies_seven_blocks_and_cascades_them(
    launch: Callable[..., Process],
    requests: dict[str, Request],
    blocks: dict[str, OffloadKey],
    storage: dict[OffloadKey, bytes],
) -> None:
    """Four copies move 7 blocks, not 11; jobs of 3, 1, 2, 1 keys; the tier lists 7."""
    process = launch()
    metadata = process.compute(*requests.values())
    assert len(metadata.stores) == 4
    assert _num_gpu_blocks(metadata.stores) == 7
    for transfer, names in zip(metadata.stores, ("P1 P2 P3", "P4", "P5 P6", "P7"), strict=True):
        before = process.pinned()
        process.carry_out([transfer])
        stored = tuple(blocks[name] for name in names.split())
        assert list(process.scheduler.take_events()) == [OffloadingEvent(stored, "CPU", False)]
        assert all(map(process.primary.is_ready, stored))
        assert process.pinned() == before + len(stored)
    assert process.step_tier.job_sizes == [3, 1, 2, 1]
    assert process.pinned() == 7
    process.step_tier.finish_all()
    process.idle()
    assert process.pinned() == 0
    assert not process.scheduler.has_pending_work()
    assert storage == {key: _content(key[:-4]) for key in blocks.values()}


# -- step N+2 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_only", "more"), [(True, 0), (False, 1)])
def test_step_n_plus_2_offers_nothing_beyond_the_prompt(
    launch: Callable[..., Process],
    requests: dict[str, Request],
    key: Callable[..., OffloadKey],
    prompt_only: bool,
    more: int,
) -> None:
    """At 68 tokens: 48 // 16 = 3 <= cursor; with the output, exactly tokens 49 to 64."""
    process = launch(offload_prompt_only=prompt_only)
    process.carry_out(process.compute(*requests.values()).stores)
    r1 = requests["R1"]
    r1.num_output_tokens = 20
    r1.block_hashes.append(get_offload_block_hash(key("output")))
    metadata = process.compute(r1, tokens=68)
    assert _num_gpu_blocks(metadata.stores) == more
    assert process.cursor("R1") == 3 + more
    assert process.slots_of([key("output")]) == ([7] if more else [None])


# -- little room --------------------------------------------------------------------------------


def test_with_six_slots_the_last_request_is_declined_and_evicts_p3_later(
    launch: Callable[..., Process],
    requests: dict[str, Request],
    blocks: dict[str, OffloadKey],
    storage: dict[OffloadKey, bytes],
) -> None:
    """Nothing is evictable at first; then P3, the coldest unprotected block, makes room."""
    process = launch(slots=6)
    metadata = process.compute(*requests.values())
    assert [transfer.req_id for transfer in metadata.stores] == ["R1", "R2", "R3"]
    assert process.cursor("R4") == 0
    assert process.scheduler.stores_declined == 1
    process.carry_out(metadata.stores)
    process.settle()
    process.scheduler.take_events()
    again = process.compute(requests["R4"])
    assert process.cursor("R4") == 3
    assert list(process.scheduler.take_events()) == [OffloadingEvent((blocks["P3"],), "CPU", True)]
    process.carry_out(again.stores)
    process.settle()
    assert process.slots_of(blocks.values()) == [0, 1, None, 3, 4, 5, 2]
    assert set(storage) == set(blocks.values())


def test_with_five_slots_the_third_request_is_declined_and_the_fourth_gets_the_last(
    launch: Callable[..., Process],
    requests: dict[str, Request],
    blocks: dict[str, OffloadKey],
) -> None:
    """R3 needs two slots and one is free: all or nothing, and nothing changes."""
    process = launch(slots=5)
    metadata = process.compute(*requests.values())
    assert [transfer.req_id for transfer in metadata.stores] == ["R1", "R2", "R4"]
    assert process.slots_of(blocks.values()) == [0, 1, 2, 3, None, None, 4]
    assert [process.cursor(req_id) for req_id in PROMPTS] == [3, 3, 0, 3]


# -- a new process over the same storage --------------------------------------------------------


@pytest.mark.parametrize(("shares_prefix", "loaded"), [(True, 7), (False, 11)])
def test_a_new_process_finds_everything(
    launch: Callable[..., Process],
    requests: dict[str, Request],
    blocks: dict[str, OffloadKey],
    shares_prefix: bool,
    loaded: int,
) -> None:
    """11 unknown and 7 probes; 7 slots and jobs of 3, 1, 2, 1; 11 hits, no new stores."""
    first = launch()
    first.carry_out(first.compute(*requests.values()).stores)
    first.settle()
    first.scheduler.shutdown()

    process = launch()
    assert _ask_all(process, requests) == dict.fromkeys(PROMPTS)
    assert _lookups(process, requests) == [LookupResult.RETRY] * 11
    process.idle()
    assert process.step_tier.batches == [list(blocks.values())]

    assert _ask_all(process, requests) == dict.fromkeys(PROMPTS)
    assert _lookups(process, requests) == [LookupResult.PENDING] * 11
    assert process.manager.get_stats()["blocks_writing"] == 7
    assert process.step_tier.jobs == []
    process.idle()
    assert process.step_tier.job_sizes == [3, 1, 2, 1]
    assert all(job.is_promotion for job in process.step_tier.jobs)

    process.step_tier.finish_all()
    # The last token of each is left to compute, and its block is loaded whole.
    assert _ask_all(process, requests) == {"R1": 47, "R2": 47, "R3": 31, "R4": 47}
    assert _lookups(process, requests) == [LookupResult.HIT] * 11
    assert process.manager.get_stats()["blocks_cached"] == 7
    loads = _load_all(process, requests, shares_prefix=shares_prefix)
    assert _num_gpu_blocks(loads) == loaded
    report = process.carry_out(loads)
    assert report.loaded_req_ids == set(PROMPTS)
    assert not report.failed_req_ids
    for request in requests.values():
        for block_hash in request.block_hashes:
            assert process.gpu[_gpu_block(block_hash)] == _content(block_hash)

    metadata = process.compute(*requests.values())
    assert metadata.stores == ()
    assert [process.cursor(req_id) for req_id in PROMPTS] == [3, 3, 2, 3]
    assert process.step_tier.job_sizes == [3, 1, 2, 1]


def _ask_all(process: Process, requests: dict[str, Request]) -> dict[str, int | None]:
    return {
        req_id: process.scheduler.get_num_new_matched_tokens(request, 0)[0]
        for req_id, request in requests.items()
    }


def _lookups(process: Process, requests: dict[str, Request]) -> list[LookupResult]:
    """Return the answer for each of the eleven block instances."""
    return [
        process.manager.lookup(make_offload_key(block_hash, 0), ReqContext(req_id))
        for req_id, request in requests.items()
        for block_hash in request.block_hashes
    ]


def _load_all(
    process: Process, requests: dict[str, Request], *, shares_prefix: bool
) -> tuple[Transfer, ...]:
    """Begin all four loads in one step; those behind R1 may find P1 and P2 on the GPU."""
    for req_id, request in requests.items():
        on_gpu = 32 if shares_prefix and req_id in ("R2", "R4") else 0
        tokens, _ = process.scheduler.get_num_new_matched_tokens(request, on_gpu)
        assert tokens is not None
        table = [_gpu_block(block_hash) for block_hash in request.block_hashes]
        process.scheduler.update_state_after_alloc(request, (table,), tokens)
    return process.idle().loads


# -- the same with real files -------------------------------------------------------------------


def test_files_list_seven_blocks_and_serve_a_new_process(
    launch: Callable[..., Process], requests: dict[str, Request], tmp_path: Path
) -> None:
    """The fs tier: 7 files after jobs of 3, 1, 2, 1; then jobs of the same sizes bring 11 hits."""
    pytest.importorskip("kv_tier_fs")
    first = launch(root_dir=tmp_path)
    first.carry_out(first.compute(*requests.values()).stores)
    first.settle()
    assert sorted(report.blocks_succeeded for report in first.reports) == [1, 1, 2, 3]
    assert len(list(tmp_path.rglob("*.bin"))) == 7
    assert first.pinned() == 0
    first.scheduler.shutdown()

    process = launch(root_dir=tmp_path)
    found = _ask_until_known(process, requests)
    assert found == {"R1": 47, "R2": 47, "R3": 31, "R4": 47}
    assert sorted(report.blocks_succeeded for report in process.reports) == [1, 1, 2, 3]
    assert all(report.is_promotion for report in process.reports)
    loads = _load_all(process, requests, shares_prefix=False)
    assert process.carry_out(loads).loaded_req_ids == set(PROMPTS)
    for request in requests.values():
        for block_hash in request.block_hashes:
            assert process.gpu[_gpu_block(block_hash)] == _content(block_hash)
    assert process.compute(*requests.values()).stores == ()


def test_files_keep_what_six_slots_cannot(
    launch: Callable[..., Process],
    requests: dict[str, Request],
    blocks: dict[str, OffloadKey],
    tmp_path: Path,
) -> None:
    """With six slots the CPU ends up without P3, and the fs tier has all seven."""
    pytest.importorskip("kv_tier_fs")
    process = launch(slots=6, root_dir=tmp_path)
    process.carry_out(process.compute(*requests.values()).stores)
    process.settle()
    process.carry_out(process.compute(requests["R4"]).stores)
    process.settle()
    assert process.slots_of(blocks.values()) == [0, 1, None, 3, 4, 5, 2]
    assert len(list(tmp_path.rglob("*.bin"))) == 7


def _ask_until_known(process: Process, requests: dict[str, Request]) -> dict[str, int | None]:
    give_up = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while None in (found := _ask_all(process, requests)).values():
        assert time.monotonic() < give_up, "the tier does not answer"
        process.idle()
        pause.wait(0.001)
    return found
