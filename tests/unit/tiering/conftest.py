"""A tiering engine over plain memory and tiers that do what the test says, when it says so."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typing_extensions import override

from kv_core.contract import (
    Capability,
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
    TierUsage,
    make_offload_key,
)
from kv_core.cpu import CPUPrimaryTierOffloadingManager
from kv_core.errors import BlockMissingError
from kv_core.keys import GroupGeometry, Namespace
from kv_core.plugins import OpenTier
from kv_core.tiering import (
    PARAMS_KEY,
    JobReport,
    SingleTier,
    TieringConfig,
    TieringOffloadingManager,
    TierOptions,
)
from kv_core.tierkit import ThreadedTier, TierKitConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from kv_core.contract import JobMetadata, LookupAnswer, OffloadingEvent

BLOCK_BYTES = 32
ROW_STRIDE = 64
PATIENCE_S = 20.0


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
        raising_error: What they raise, if anything special.
        drain_gate: What ``drain_jobs`` waits for, if anything.
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
        epoch: Epoch of the namespace it was opened under.
    """

    @override
    def __init__(self, context: TierContext, log: list[str]) -> None:
        self.name = context.tier_name
        self.epoch = context.namespace.epoch
        self.log = log
        self.answers: dict[OffloadKey, LookupAnswer] = {}
        self.raising: set[str] = set()
        self.raising_error: Exception | None = None
        self.drain_gate: threading.Event | None = None
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
        if method in self.raising and self.raising_error is not None:
            raise self.raising_error
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

    def finish(
        self,
        job: JobMetadata,
        good: Sequence[OffloadKey] | None = None,
        kind: JobErrorKind = JobErrorKind.FAILED,
    ) -> JobResult:
        """Carry a job out, or only a part of it, and have it reported at the next poll."""
        done = job.keys if good is None else tuple(good)
        for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
            if key not in done:
                continue
            with self._primary.block(block_id) as slot:
                if job.is_promotion:
                    slot[:BLOCK_BYTES] = self.blocks.get(key, content(key))
                else:
                    self.blocks[key] = bytes(slot[:BLOCK_BYTES])
                    self.answers[key] = True
        self.open_jobs.remove(job.job_id)
        success = len(done) == len(job.keys)
        error = None if success else JobError(kind, "as scripted")
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
        if self.drain_gate is not None:
            assert self.drain_gate.wait(PATIENCE_S)
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
    def usage(self) -> TierUsage:
        self._enter("usage")
        return super().usage()

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        self._enter("delete")
        super().delete(keys)

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


class GatedTier(ThreadedTier):
    """A real tier, threads and all, over a dictionary. Its I/O waits at gates of the test.

    Attributes:
        objects: What is stored.
        gates: Gate of ``"read"`` and ``"write"``, open at first.
        entered: Set once I/O of that kind has begun.
        broken: Kinds of I/O that fail.
        loads: Keys that were read.
    """

    answers_at_once = True

    @override
    def open(self) -> None:
        self.objects: dict[OffloadKey, bytes] = {}
        self.gates = {kind: threading.Event() for kind in ("read", "write")}
        self.entered = {kind: threading.Event() for kind in ("read", "write")}
        self.broken: set[str] = set()
        self.loads: list[OffloadKey] = []
        for gate in self.gates.values():
            gate.set()

    def _pass(self, kind: str) -> None:
        self.entered[kind].set()
        if not self.gates[kind].wait(PATIENCE_S):
            raise TimeoutError(f"the test left the {kind} gate shut")
        if kind in self.broken:
            raise OSError(errno.EIO, f"the {kind} fails as scripted")

    @override
    def exists(self, key: OffloadKey) -> bool:
        return key in self.objects

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        self.loads.append(key)
        self._pass("read")
        if key not in self.objects:
            raise BlockMissingError("no such object")
        buffer[:BLOCK_BYTES] = self.objects[key]

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> None:
        self._pass("write")
        self.objects[key] = bytes(data[:BLOCK_BYTES])

    @override
    def retire(self, key: OffloadKey) -> None:
        self.objects.pop(key, None)


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
        reopen_error: What the opening of a tier under a new epoch raises.
        reopened_policy: Answer to ``on_new_request`` of a tier opened so.
    """

    def __init__(
        self,
        num_blocks: int = 8,
        num_tiers: int = 1,
        *,
        max_job_keys: int | None = None,
        enable_events: bool = False,
        lookup_deadline_s: float = 100.0,
        job_deadline_s: float = 1.0,
        options: Mapping[str, TierOptions] | None = None,
        can_reopen: bool = True,
        block_bytes: int = BLOCK_BYTES,
        tier: Callable[[TierContext], SecondaryTierManager] | None = None,
        capabilities: Iterable[Capability] = (Capability.EVENTS, Capability.TOUCH),
        **settings: Any,
    ) -> None:
        """Open everything.

        Args:
            num_blocks: Slots of the primary.
            num_tiers: Scripted tiers.
            max_job_keys: Limit of each tier.
            enable_events: Whether the primary records events.
            lookup_deadline_s: Limit of each tier.
            job_deadline_s: Limit of each tier.
            options: Options of tiers by name.
            can_reopen: Whether tiers can be opened under another epoch.
            block_bytes: Payload of a slot.
            tier: Makes a tier that is in the place of the scripted ones.
            capabilities: What each tier declares.
            settings: Fields of ``TieringConfig``.
        """
        self.clock = FakeClock()
        self.log: list[str] = []
        self.reports: list[JobReport] = []
        self.freed: list[int] = []
        self.reopen_error: Exception | None = None
        self.reopened_policy = RequestOffloadingContext()
        stride = block_bytes + ROW_STRIDE - BLOCK_BYTES
        self.memory = bytearray(num_blocks * stride)
        shape = (num_blocks, stride)
        self.view = PrimaryView(memoryview(self.memory).cast("B", shape), block_bytes)
        self.primary = CPUPrimaryTierOffloadingManager(
            num_blocks,
            memoryview(self.memory).cast("B", shape),
            block_bytes,
            enable_events=enable_events,
            slot_freed=self._poison,
            on_shutdown=lambda: self.log.append("primary.shutdown"),
        )
        self._limits = TierLimits(
            job_deadline_s=job_deadline_s,
            lookup_deadline_s=lookup_deadline_s,
            max_job_keys=max_job_keys,
        )
        self._spec = replace(_SPEC, capabilities=frozenset(capabilities))
        self.tiers: list[ScriptedTier] = []
        if tier is None:
            self.tiers = [
                ScriptedTier(self._context(f"tier{index}"), self.log) for index in range(num_tiers)
            ]
            opened = [OpenTier(tier.name, self._spec, self._limits, tier) for tier in self.tiers]
        else:
            opened = [OpenTier("tier0", self._spec, self._limits, tier(self._context("tier0")))]
        self.config = TieringConfig(**settings)
        self.manager = TieringOffloadingManager(
            self.primary,
            opened,
            options=options,
            config=self.config,
            clock=self.clock,
            observer=self,
            reopen=self._reopen if can_reopen else None,
        )

    def _reopen(self, name: str, epoch: int) -> OpenTier:
        self.log.append(f"{name}.open")
        if self.reopen_error is not None:
            raise self.reopen_error
        index = int(name.removeprefix("tier"))
        self.tiers[index] = ScriptedTier(self._context(name, epoch), self.log)
        self.tiers[index].policy = self.reopened_policy
        return OpenTier(name, self._spec, self._limits, self.tiers[index])

    def _context(self, name: str, epoch: int = 0) -> TierContext:
        return TierContext(
            namespace=_NAMESPACE.with_epoch(epoch, "tests"),
            block_bytes=self.view.block_bytes,
            num_blocks=self.view.num_blocks,
            primary=self.view,
            tier_type="scripted",
            tier_name=name,
            config=TierKitConfig(io_threads=2, job_deadline_s=_KIT_DEADLINE_S),
            clock=self.clock,
            metrics=NullMetrics(),
        )

    def single(self, *, can_hold_slots: bool = True, **options: Any) -> SingleTier:
        """Put the first tier under another engine, which has as many slots."""
        return SingleTier(
            OpenTier(self.tier.name, self._spec, self._limits, self.tier),
            num_blocks=self.view.num_blocks,
            block_bytes=self.view.block_bytes,
            can_hold_slots=lambda: can_hold_slots,
            options=TierOptions(**options),
            config=self.config,
            clock=self.clock,
        )

    def job_finished(self, report: JobReport) -> None:
        """Keep what an observer is told."""
        self.reports.append(report)

    def _poison(self, block_id: int) -> None:
        self.freed.append(block_id)
        self.write(block_id, b"\xee" * self.view.block_bytes)

    # -- memory ---------------------------------------------------------------------------------

    def write(self, block_id: int, data: bytes) -> None:
        """Write a slot, as a worker does."""
        with self.view.block(block_id) as slot:
            slot[: len(data)] = data

    def read(self, block_id: int) -> bytes:
        """Read a slot, as a worker does."""
        with self.view.block(block_id) as slot:
            return bytes(slot[:BLOCK_BYTES])

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

    def until(self, condition: Callable[[], bool]) -> None:
        """Go through steps until a condition holds; threads of a real tier need their time."""
        end = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        self.end_step()
        while not condition():
            assert time.monotonic() < end, "it never came true"
            pause.wait(0.001)
            self.end_step()

    def begin(self, req_id: str, **wishes: Any) -> str:
        """Begin a request, with what its client wishes; return the engine's answer."""
        params = {PARAMS_KEY: wishes} if wishes else {}
        return self.manager.on_new_request(ReqContext(req_id, params)).policy.value

    def health(self, index: int = 0) -> str:
        """Return the health of a tier."""
        return self.manager.tier_health()[f"tier{index}"][0].value

    def tier_stat(self, name: str, index: int = 0) -> float:
        """Return what the manager measures of a tier."""
        return self.stats[f"tier.tier{index}.{name}"]


def content(key: OffloadKey) -> bytes:
    """Return the bytes of the block of this key."""
    return hashlib.sha256(b"content of " + key).digest()


# Of a real tier, in real seconds: what a drain waits for stalled I/O.
_KIT_DEADLINE_S = 0.2

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


class RealEngine(Engine):
    """An engine over one :class:`GatedTier`.

    Attributes:
        gated: The tier.
    """

    gated: GatedTier

    def __init__(self, num_blocks: int = 8, **settings: Any) -> None:
        def make(context: TierContext) -> GatedTier:
            self.gated = GatedTier(context)
            return self.gated

        super().__init__(num_blocks, tier=make, **settings)

    @override
    def _reopen(self, name: str, epoch: int) -> OpenTier:
        self.gated = GatedTier(self._context(name, epoch))
        return OpenTier(name, self._spec, self._limits, self.gated)

    def has(self, *keys: OffloadKey) -> None:
        """Put blocks into the tier, as if another process had stored them."""
        self.gated.objects.update({key: content(key) for key in keys})

    def shut(self, kind: str) -> None:
        """Stall all I/O of a kind from now on."""
        self.gated.gates[kind].clear()

    def open_gates(self) -> None:
        """Let all I/O go on."""
        for gate in self.gated.gates.values():
            gate.set()

    def entered(self, kind: str) -> None:
        """Wait until I/O of a kind has begun."""
        assert self.gated.entered[kind].wait(PATIENCE_S)


@pytest.fixture
def keys() -> list[OffloadKey]:
    """Return 32 distinct keys."""
    return [make_offload_key(hashlib.sha256(bytes([i])).digest(), 0) for i in range(32)]


@pytest.fixture
def clock() -> FakeClock:
    """Return a clock that the test turns."""
    return FakeClock()


@pytest.fixture
def start() -> Callable[..., Engine]:
    """Return the maker of engines; it takes what :class:`Engine` takes."""
    return Engine


@pytest.fixture
def start_real() -> Iterator[Callable[..., RealEngine]]:
    """Return the maker of engines over a real tier; all are shut down after the test."""
    engines: list[RealEngine] = []

    def make(num_blocks: int = 8, **settings: Any) -> RealEngine:
        engines.append(RealEngine(num_blocks, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.open_gates()
        engine.manager.shutdown()


@pytest.fixture
def engine() -> Engine:
    """Return an engine of eight slots, four of them for promotions, and one tier."""
    return Engine()


@pytest.fixture
def expected() -> Callable[[OffloadKey], bytes]:
    """Return the function from a key to the bytes of its block."""
    return content
