"""The base class for tiers that know what they hold and move many blocks in one call.

**Who owns what.** ``exists``, the planning and the settling hooks run on the calling thread (the
engine's, one at a time), which owns whatever the tier knows of its blocks. ``write_batch`` and
``read_batch`` run on pool threads, several at a time; what they need to know is in the plan, which
the calling thread made at submission and gets back, with everything they noted in it, when the
job is reported. In between, a plan belongs to the pool threads of its job.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar, final

from typing_extensions import override

from kv_core.contract import JobErrorKind
from kv_core.tierkit._errors import (
    RETIRING_KINDS,
    BlockFailure,
    load_error_kind,
    store_error_kind,
    without_frames,
)
from kv_core.tierkit._index_lookup import IndexLookup
from kv_core.tierkit._pooled import PooledTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_core.contract import JobResult, OffloadKey
    from kv_core.tierkit._base import Lookups
    from kv_core.tierkit._jobs import Chunk, Job

__all__ = ["BatchOutcome", "BatchTier"]

logger = logging.getLogger(__name__)

StorePlanT = TypeVar("StorePlanT")
LoadPlanT = TypeVar("LoadPlanT")

CALLS_PER_BATCH: Final = 4
"""Calls that a batch of a scattered load should have at least."""

_NO_FAILURES: Final[Mapping[int, BaseException]] = {}


@final
@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """What became of the blocks of one batch.

    Attributes:
        moved_bytes: Bytes that moved.
        failures: What went wrong, by index in the batch; every other block succeeded.
    """

    moved_bytes: int
    failures: Mapping[int, BaseException] = field(default_factory=lambda: _NO_FAILURES)


class BatchTier(PooledTier, Generic[StorePlanT, LoadPlanT]):
    """A conforming tier over an index in memory and batched transfers.

    For a storage where one call moves many blocks, and where a lookup needs no I/O. Lookups are
    answered in the same call. Jobs are split in batches of about ``batch_bytes``: a batch is what
    a load has to wait for at most. Errors that hooks raise are translated as in
    :class:`ThreadedTier`.

    Attributes:
        batch_bytes: Payload bytes of a batch; a batch has at least one block.
    """

    batch_bytes: ClassVar[int] = 4 << 20

    _hooks: ClassVar[tuple[str, ...]] = (
        "exists",
        "plan_store",
        "plan_load",
        "write_batch",
        "read_batch",
        "settle_store",
        "settle_load",
        "open",
        "close",
    )

    # -- to be written: the engine's thread ------------------------------------------------------

    @abstractmethod
    def exists(self, key: OffloadKey) -> bool:
        """Say whether a block can be loaded. Must neither block nor raise."""

    @abstractmethod
    def plan_store(self, keys: Sequence[OffloadKey]) -> StorePlanT:
        """Note a store that has been submitted. Must not block; an error fails the job."""

    @abstractmethod
    def plan_load(self, keys: Sequence[OffloadKey]) -> LoadPlanT:
        """Note a load that has been submitted, and where its blocks are.

        Must not block; an error fails the job.
        """

    @abstractmethod
    def settle_store(self, plan: StorePlanT, failures: Mapping[int, BlockFailure]) -> None:
        """Enter what a store has brought, right before its job is reported.

        Called exactly once for every plan, also when no batch of it has run.

        Args:
            plan: What :meth:`plan_store` returned.
            failures: The blocks that failed, by index in the job.
        """

    @abstractmethod
    def settle_load(self, plan: LoadPlanT, failures: Mapping[int, BlockFailure]) -> None:
        """Give up what a load has held, right before its job is reported.

        A block whose failure is in ``RETIRING_KINDS`` (missing or damaged) must not be found any
        more. Called exactly once for every plan, also when no batch of it has run.
        """

    def count_calls(self, plan: LoadPlanT) -> int:  # noqa: ARG002 - for overrides
        """Return how many calls a load takes, when its blocks lie here and there.

        With many, the load is split in more batches than its size asks for: each call waits for
        the storage. The engine's thread calls this after :meth:`plan_load`.
        """
        return 1

    # -- to be written: pool threads -------------------------------------------------------------

    @abstractmethod
    def write_batch(
        self,
        plan: StorePlanT,
        start: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> BatchOutcome:
        """Store some consecutive blocks of a job, each so that others see all of it or nothing.

        What this raises has happened to every block of the batch.

        Args:
            plan: What :meth:`plan_store` returned.
            start: Index in the job of the first block.
            keys: The blocks.
            blocks: Their bytes: flat, read-only views of shared memory, valid until the return.
        """

    @abstractmethod
    def read_batch(
        self,
        plan: LoadPlanT,
        start: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> BatchOutcome:
        """Fill the buffers of some consecutive blocks of a job. See :meth:`write_batch`."""

    # -- for the author of a tier ---------------------------------------------------------------

    def note_all_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Note that blocks became present: :meth:`note_stored` for many at the price of one."""
        if self.emits_events:
            self._events.append((tuple(keys), False))

    def note_all_removed(self, keys: Sequence[OffloadKey]) -> None:
        """Note that blocks left the tier: :meth:`note_removed` for many at the price of one."""
        if self.emits_events:
            self._events.append((tuple(keys), True))

    def run_soon(self, task: Callable[[], None]) -> None:
        """Run something on a pool thread, before the stores that are waiting. Returns at once.

        It is dropped when the tier is shut down first: have :meth:`close` do what must be done.
        """
        self._pool.submit_chore(task)

    # -- life -----------------------------------------------------------------------------------

    @override
    def _start_lookups(self) -> Lookups:
        return IndexLookup(
            self.exists, clock=self._clock, error_backoff_s=self.config.error_backoff_s
        )

    @override
    def _max_stores(self) -> int:
        # Four of the usual sixteen keep a fast disk busy.
        return self.config.io_threads // 4

    @override
    def _max_stores_beside_loads(self) -> int:
        # The more stores are at the device, the longer a load has to wait there.
        return 2

    @override
    def _split(self, job: Job) -> int:
        blocks_per_batch = max(1, self.batch_bytes // self.context.block_bytes)
        batches = -(-len(job.metadata.keys) // blocks_per_batch)
        if job.metadata.is_promotion:
            calls = self.count_calls(job.plan)
            if calls > batches:
                batches = max(
                    batches, min(-(-calls // CALLS_PER_BATCH), self.config.io_threads // 2)
                )
        return batches

    # -- the engine's thread --------------------------------------------------------------------

    @override
    def _prepare(self, job: Job) -> None:
        plan = self.plan_load if job.metadata.is_promotion else self.plan_store
        job.plan = plan(job.metadata.keys)
        job.planned = True

    @override
    def _conclude(self, job: Job) -> JobResult:
        if job.planned:
            settle = self.settle_load if job.metadata.is_promotion else self.settle_store
            try:
                settle(job.plan, job.failures)
            except Exception as error:  # noqa: BLE001 - costs this job, not the others (JOB-7)
                logger.error(  # noqa: TRY400 - a traceback would repeat secrets
                    "tier %r: %s() raised: %s",
                    self.context.tier_name,
                    settle.__name__,
                    self._describe(error),
                )
                failure = BlockFailure(JobErrorKind.FAILED, self._describe(error), 0)
                job.failures = dict.fromkeys(range(len(job.metadata.keys)), failure)
        return super()._conclude(job)

    # -- pool threads ---------------------------------------------------------------------------

    @override
    def _run_chunk(self, chunk: Chunk) -> None:
        try:
            if chunk.begin_block(self._clock()):
                self._move(chunk)
                chunk.ended = self._clock()
        finally:
            self._finish_chunk(chunk)

    def _move(self, chunk: Chunk) -> None:
        job, start, stop = chunk.job, chunk.start, chunk.stop
        loads = job.metadata.is_promotion
        hook = self.read_batch if loads else self.write_batch
        primary = self._target if loads else self._source
        blocks: list[memoryview] = []
        try:
            blocks = primary.blocks(job.block_ids[start:stop])
            outcome = hook(job.plan, start, job.metadata.keys[start:stop], blocks)
        except BaseException as error:  # noqa: BLE001 - one batch's error fails that batch
            outcome = BatchOutcome(0, dict.fromkeys(range(stop - start), error))
        for problem in outcome.failures.values():
            without_frames(problem)
        for block in blocks:
            self._give_back(block, hook.__name__)
        kind_of = load_error_kind if loads else store_error_kind
        failures = {}
        for index, problem in outcome.failures.items():
            kind = kind_of(problem)
            failures[start + index] = BlockFailure(
                kind, self._describe(problem), 0, retired=kind in RETIRING_KINDS
            )
        chunk.record_all(outcome.moved_bytes, failures)
