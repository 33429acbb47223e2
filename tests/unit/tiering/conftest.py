"""A tiering engine over plain memory and tiers that do what the test says, when it says so."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typing_extensions import override

from kv_core.contract import (
    ContractVersion,
    JobError,
    JobErrorKind,
    JobId,
    JobResult,
    NullMetrics,
    OffloadKey,
    OffloadPolicy,
    PrimaryView,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TierConfig,
    TierContext,
    TierLimits,
    TierSpec,
    make_offload_key,
)
from kv_core.cpu import CPUPrimaryTierOffloadingManager
from kv_core.keys import GroupGeometry, Namespace
from kv_core.plugins import OpenTier
from kv_core.tiering import JobReport, TieringConfig, TieringOffloadingManager

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from kv_core.contract import JobMetadata, LookupAnswer, OffloadingEvent

BLOCK_BYTES = 32
ROW_STRIDE = 64


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class ScriptedTier(SecondaryTierManager):
    """A tier whose answers and results are those that the test put in.

    It really copies: a finished store has read its slots, a finished load has written them.

    Attributes:
        name: Name of the tier.
        log: Calls of all tiers and of the primary's end, ``"name.method"``, in order.
        answers: Lookup answers by key; other keys are absent.
        raising: Names of methods that raise.
        lookups: Keys that were asked for, with the request.
        jobs: Every job, by id, in order of submission.
        open_jobs: Ids of jobs that were not finished yet.
        blocks: What finished stores have brought, by key.
        results: Whatever the next ``get_finished_jobs`` yields; an exception is raised in turn.
        stuck: What ``drain_jobs`` and ``shutdown`` return.
        ends: Contexts of ``on_schedule_end``.
        policy: Answer to ``on_new_request``.
        events: What the next ``take_events`` returns.
        stats: What ``get_stats`` returns.
    """

    @override
    def __init__(self, context: TierContext, log: list[str]) -> None:
        self.name = context.tier_name
        self.log = log
        self.answers: dict[OffloadKey, LookupAnswer] = {}
        self.raising: set[str] = set()
        self.lookups: list[tuple[OffloadKey, str]] = []
        self.jobs: dict[JobId, JobMetadata] = {}
        self.open_jobs: list[JobId] = []
        self.blocks: dict[OffloadKey, bytes] = {}
        self.results: list[object] = []
        self.stuck: Any = ()
        self.ends: list[ScheduleEndContext] = []
        self.policy: Any = RequestOffloadingContext(OffloadPolicy.BLOCK_LEVEL)
        self.events: list[OffloadingEvent] = []
        self.stats: Any = {}
        self.pending = False
        self._primary = context.primary

    def _enter(self, method: str) -> None:
        self.log.append(f"{self.name}.{method}")
        if method in self.raising:
            raise RuntimeError(f"{self.name} raises in {method}")

    # -- what the test reads and does -----------------------------------------------------------

    @property
    def stores(self) -> list[JobMetadata]:
        """All stores so far."""
        return [job for job in self.jobs.values() if not job.is_promotion]

    @property
    def loads(self) -> list[JobMetadata]:
        """All loads so far."""
        return [job for job in self.jobs.values() if job.is_promotion]

    def has(self, *keys: OffloadKey) -> None:
        """Put blocks into the tier, as if another process had stored them."""
        for key in keys:
            self.answers[key] = True
            self.blocks[key] = content(key)

    def finish(self, job: JobMetadata, good: Sequence[OffloadKey] | None = None) -> JobResult:
        """Carry a job out, or only a part of it, and have it reported at the next poll."""
        done = job.keys if good is None else tuple(good)
        for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
            if key not in done:
                continue
            slot = self._primary.block(block_id)
            if job.is_promotion:
                slot[:] = self.blocks.get(key, content(key))
            else:
                self.blocks[key] = bytes(slot)
                self.answers[key] = True
            slot.release()
        self.open_jobs.remove(job.job_id)
        success = len(done) == len(job.keys)
        error = None if success else JobError(JobErrorKind.FAILED, "as scripted")
        result = JobResult(job.job_id, success, () if success else done, error)
        self.results.append(result)
        return result

    def finish_all(self) -> None:
        """Carry out every job that is not finished yet."""
        for job_id in tuple(self.open_jobs):
            self.finish(self.jobs[job_id])

    # -- the contract ---------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        self.lookups.append((key, req_context.req_id))
        self._enter("lookup")
        return self.answers.get(key, False)

    def _submit(self, job: JobMetadata) -> None:
        assert job.job_id not in self.jobs, "job ids are never reused (G-4)"
        assert len(set(job.keys)) == len(job.keys) == len(job.block_ids)
        assert len(set(job.block_ids.tolist())) == len(job.block_ids)
        assert job.block_ids.dtype == np.int32
        self._enter("submit_load" if job.is_promotion else "submit_store")
        self.jobs[job.job_id] = job
        self.open_jobs.append(job.job_id)

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._submit(job)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._submit(job)

    @override
    def get_finished_jobs(self) -> Iterator[JobResult]:
        self._enter("get_finished_jobs")
        while self.results:
            result = self.results.pop(0)
            if isinstance(result, BaseException):
                raise result
            yield result  # type: ignore[misc]  # a test may put anything here

    @override
    def drain_jobs(self) -> Collection[JobId]:
        self._enter("drain_jobs")
        for job_id in tuple(self.open_jobs):
            if job_id not in (self.stuck or ()):
                self.finish(self.jobs[job_id])
        stuck: Collection[JobId] = self.stuck
        return stuck

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._enter("on_new_request")
        policy: RequestOffloadingContext = self.policy
        return policy

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._enter("on_request_finished")

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._enter("on_schedule_end")
        self.ends.append(context)

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._enter("touch")

    @override
    def has_pending_work(self) -> bool:
        self._enter("has_pending_work")
        return self.pending

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        self._enter("take_events")
        events, self.events = self.events, []
        return events

    @override
    def get_stats(self) -> Mapping[str, float]:
        self._enter("get_stats")
        stats: Mapping[str, float] = self.stats
        return stats

    @override
    def shutdown(self) -> Collection[JobId]:
        self._enter("shutdown")
        stuck: Collection[JobId] = self.stuck
        return stuck


class Engine:
    """A tiering manager, its parts, and what a scheduler does with it.

    Attributes:
        manager: The manager under test.
        primary: Its primary tier.
        tiers: Its secondary tiers, in lookup order.
        clock: Its clock.
        log: Calls that reached the tiers, and ``"primary.shutdown"``.
        reports: What the observer was told.
        freed: Slots whose content became meaningless, in order.
    """

    def __init__(
        self,
        num_blocks: int = 8,
        num_tiers: int = 1,
        *,
        lease_share: float = 0.5,
        request_lookup_deadline_s: float = 30.0,
        max_job_keys: int | None = None,
        enable_events: bool = False,
    ) -> None:
        self.clock = FakeClock()
        self.log: list[str] = []
        self.reports: list[JobReport] = []
        self.freed: list[int] = []
        self.memory = bytearray(num_blocks * ROW_STRIDE)
        shape = (num_blocks, ROW_STRIDE)
        self.view = PrimaryView(memoryview(self.memory).cast("B", shape), BLOCK_BYTES)
        self.primary = CPUPrimaryTierOffloadingManager(
            num_blocks,
            memoryview(self.memory).cast("B", shape),
            BLOCK_BYTES,
            enable_events=enable_events,
            slot_freed=self._poison,
            on_shutdown=lambda: self.log.append("primary.shutdown"),
        )
        self.tiers = [
            ScriptedTier(self._context(f"tier{index}"), self.log) for index in range(num_tiers)
        ]
        limits = TierLimits(job_deadline_s=1.0, lookup_deadline_s=1.0, max_job_keys=max_job_keys)
        self.manager = TieringOffloadingManager(
            self.primary,
            [OpenTier(tier.name, _SPEC, limits, tier) for tier in self.tiers],
            config=TieringConfig(
                lease_share=lease_share, request_lookup_deadline_s=request_lookup_deadline_s
            ),
            clock=self.clock,
            observer=self,
        )

    def _context(self, name: str) -> TierContext:
        return TierContext(
            namespace=_NAMESPACE,
            block_bytes=BLOCK_BYTES,
            num_blocks=self.view.num_blocks,
            primary=self.view,
            tier_type="scripted",
            tier_name=name,
            config=TierConfig(),
            clock=self.clock,
            metrics=NullMetrics(),
        )

    def job_finished(self, report: JobReport) -> None:
        """Keep what an observer is told."""
        self.reports.append(report)

    def _poison(self, block_id: int) -> None:
        self.freed.append(block_id)
        self.write(block_id, b"\xee" * BLOCK_BYTES)

    # -- memory ---------------------------------------------------------------------------------

    def write(self, block_id: int, data: bytes) -> None:
        """Write a slot, as a worker does."""
        with self.view.block(block_id) as slot:
            slot[:] = data

    def read(self, block_id: int) -> bytes:
        """Read a slot, as a worker does."""
        with self.view.block(block_id) as slot:
            return bytes(slot)

    # -- one call or a few of them --------------------------------------------------------------

    @property
    def tier(self) -> ScriptedTier:
        """The only tier, or the first."""
        return self.tiers[0]

    @property
    def stats(self) -> Mapping[str, float]:
        """What the manager measures."""
        return self.manager.get_stats()

    def ask(self, req_id: str, *keys: OffloadKey) -> list[str]:
        """Look keys up and return the answers as words."""
        context = ReqContext(req_id)
        return [self.manager.lookup(key, context).value for key in keys]

    def end_step(self, *new_req_ids: str) -> None:
        """End a step."""
        self.manager.on_schedule_end(ScheduleEndContext(frozenset(new_req_ids)))

    def offer(self, req_id: str, *keys: OffloadKey) -> list[int] | None:
        """Reserve slots for a store; ``None`` when it is declined."""
        output = self.manager.prepare_store(keys, ReqContext(req_id))
        if output is None:
            return None
        block_ids: list[int] = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
        for key, block_id in zip(output.keys_to_store, block_ids, strict=True):
            self.write(block_id, content(key))
        return block_ids

    def store(self, req_id: str, *keys: OffloadKey) -> list[int]:
        """Store blocks in the primary tier, to the end; cascades begin."""
        block_ids = self.offer(req_id, *keys)
        assert block_ids is not None, "no room"
        self.manager.complete_store(keys, ReqContext(req_id))
        return block_ids

    def promote(self, req_id: str, *keys: OffloadKey) -> None:
        """Bring blocks that the first tier has into the primary tier, for a request."""
        for key in keys:
            self.tier.has(key)
        assert self.ask(req_id, *keys) == ["pending"] * len(keys)
        self.end_step()
        self.tier.finish_all()

    def load(self, req_id: str, *keys: OffloadKey) -> list[bytes]:
        """Copy blocks to the GPU, to the end, and return their bytes."""
        spec = self.manager.prepare_load(keys, ReqContext(req_id))
        blocks = [self.read(block_id) for block_id in spec.block_ids.tolist()]  # type: ignore[attr-defined]
        self.manager.complete_load(keys, ReqContext(req_id))
        return blocks

    def finish(self, req_id: str) -> None:
        """End a request."""
        self.manager.on_request_finished(ReqContext(req_id))


def content(key: OffloadKey) -> bytes:
    """Return the bytes of the block of this key."""
    return hashlib.sha256(b"content of " + key).digest()


_SPEC = TierSpec(
    type="scripted",
    summary="a tier of the tests",
    contract=ContractVersion(1, 0),
    factory=lambda context: ScriptedTier(context, []),
    config_model=TierConfig,
    limits=lambda _: TierLimits(job_deadline_s=1.0, lookup_deadline_s=1.0),
)

_NAMESPACE = Namespace(
    model="tests/model",
    model_fingerprint="weights-1",
    revision="local",
    dtype="int8",
    kv_layout="flat",
    groups=(GroupGeometry(tokens_per_block=16, bytes_per_block=BLOCK_BYTES, num_layers=1),),
    block_bytes=BLOCK_BYTES,
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="0",
)


@pytest.fixture
def keys() -> list[OffloadKey]:
    """Return 32 distinct keys."""
    return [make_offload_key(hashlib.sha256(bytes([i])).digest(), 0) for i in range(32)]


@pytest.fixture
def start() -> Callable[..., Engine]:
    """Return the maker of engines; it takes what :class:`Engine` takes."""
    return Engine


@pytest.fixture
def engine() -> Engine:
    """Return an engine of eight slots, four of them for promotions, and one tier."""
    return Engine()


@pytest.fixture
def expected() -> Callable[[OffloadKey], bytes]:
    """Return the function from a key to the bytes of its block."""
    return content
