"""The scheduler-thread half of a tier: all methods of the contract, none of which blocks.

**Who owns what.** The calling thread (the engine's, one at a time) owns every attribute here;
``_events`` is a deque that any thread may append to,
and ``_tickets`` a counter that any thread may draw from. What runs elsewhere reaches this half only
through the ledger, the lookups' inbox and that deque.
"""

from __future__ import annotations

import itertools
import logging
import os
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from typing_extensions import override

from kv_core.contract import (
    ABSENT,
    OffloadingEvent,
    RequestOffloadingContext,
    SecondaryTierManager,
)
from kv_core.errors import KVCoreError, TierClosedError, TierOpenError
from kv_core.tierkit._config import TierKitConfig
from kv_core.tierkit._errors import Occasionally, describe_error
from kv_core.tierkit._jobs import JobLedger
from kv_core.tierkit._lookup import AsyncLookup

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

    from kv_core.contract import (
        JobId,
        JobMetadata,
        JobResult,
        LookupAnswer,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
        TierContext,
    )
    from kv_core.tierkit._errors import BlockFailure
    from kv_core.tierkit._jobs import Chunk, Executor, Job
    from kv_core.tierkit._lookup import HitClaim, Prober

__all__ = ["KitTier", "Lookups"]

logger = logging.getLogger(__name__)

# A wait of the whole deadline would end after it.
_PATIENCE: Final = 0.9

_CLOSED: Final = "the tier has been shut down"

# How many forks led to this process. A lookup from memory takes a microsecond, and to ask the
# system which process this is would be another fifth.
_generation: Final = [1]


def _count_fork() -> None:
    _generation[0] += 1


os.register_at_fork(after_in_child=_count_fork)


class Lookups(Protocol):
    """What answers the lookups of a tier and hears of its jobs. Calling thread only."""

    def request_started(self, req_id: str) -> None:
        """Note a request."""

    def request_finished(self, req_id: str) -> None:
        """Forget a request."""

    def ask(self, key: OffloadKey, req_id: str) -> LookupAnswer:
        """Answer one lookup."""

    def ask_many(self, keys: Sequence[OffloadKey], req_id: str) -> list[LookupAnswer]:
        """Answer several lookups, in order."""

    def end_step(self) -> None:
        """Note the end of a step."""

    def has_open_questions(self) -> bool:
        """Say whether further steps are needed to resolve what was asked."""

    def removed(self, key: OffloadKey, ticket: int) -> None:
        """Hear that a block left the tier. Thread-safe."""

    def read_news(self) -> None:
        """Apply what other threads have handed in so far."""

    def store_submitted(self, keys: Sequence[OffloadKey]) -> None:
        """Hear of a store before its transfer can begin."""

    def store_finished(
        self, keys: Sequence[OffloadKey], failed: Container[int], tickets: Sequence[int]
    ) -> None:
        """Hear of the outcome of a store."""

    def load_submitted(self, keys: Sequence[OffloadKey], req_id: str) -> HitClaim:
        """Hear of a load before its transfer can begin."""

    def load_finished(
        self, keys: Sequence[OffloadKey], failures: Mapping[int, BlockFailure], claim: HitClaim
    ) -> None:
        """Hear of the outcome of a load."""

    def stats(self) -> dict[str, float]:
        """Return the shared lookup measurements."""


class KitTier(SecondaryTierManager):
    """What all kinds of tier have in common. Not for subclassing.

    Attributes:
        context: What the tier was given.
        config: ``context.config``. Narrow the type in the subclass: ``config: MyConfig``.
        emits_events: Whether :meth:`note_stored` and :meth:`note_removed` become events. Set it
            when the tier declares ``Capability.EVENTS``.
    """

    emits_events: ClassVar[bool] = False

    context: TierContext
    config: TierKitConfig

    # No process has this id: a subclass whose __init__ does not call this one is found out.
    _pid: int = 0
    _opened_in: int = 0

    @override
    def __init__(self, context: TierContext) -> None:
        if not isinstance(context.config, TierKitConfig):
            raise TypeError(
                f"{type(self).__name__} needs a config derived from TierKitConfig, found "
                f"{type(context.config).__name__}: derive the config_model of the TierSpec from "
                "kv_core.tierkit.TierKitConfig"
            )
        self.context = context
        self.config = context.config
        self._clock = context.clock
        self._pid = os.getpid()
        self._opened_in = _generation[0]
        self._closed = False
        self._released = False
        self._tickets = itertools.count(1)
        self._events: deque[tuple[Sequence[OffloadKey], bool]] = deque()
        self._warn_kept = Occasionally(context.clock)
        self._warn_retire = Occasionally(context.clock)
        self._store_failures = 0
        self._load_failures = 0
        self._target = context.primary
        self._source = context.primary.as_readonly()
        try:
            self._executor, self._lookups = self._open()
        except BaseException as error:
            self._source.release()
            if isinstance(error, KVCoreError) or not isinstance(error, Exception):
                raise
            raise TierOpenError(
                f"tier {context.tier_name!r} cannot be opened: {self._describe(error)}"
            ) from error
        self._ledger = JobLedger(
            self._executor,
            self._run_chunk,
            clock=self._clock,
            job_deadline_s=self.config.job_deadline_s,
            split=self._split,
        )

    # -- what the kinds of tier fill in -----------------------------------------------------

    @abstractmethod
    def _open(self) -> tuple[Executor, Lookups]:
        """Open the storage, then start threads. Leave nothing behind when that fails."""

    @abstractmethod
    def _run_chunk(self, chunk: Chunk) -> object:
        """Move the blocks of a chunk."""

    @abstractmethod
    def _stop(self, timeout_s: float) -> bool:
        """Join all threads and close the storage. ``False``: a thread is stuck in I/O."""

    def _split(self, job: Job) -> int:  # noqa: ARG002 - for overrides
        """Return the most chunks for a job; more of them run at the same time."""
        return self.config.io_threads

    def _prepare(self, job: Job) -> None:
        """Note a job before it is launched. What this raises fails the job."""

    # -- for the kinds of tier, on their threads --------------------------------------------

    def _finish_chunk(self, chunk: Chunk) -> None:
        self._ledger.finish(chunk)

    def _async_lookup(
        self, prober: Prober, *, probe_now: Callable[[OffloadKey], bool] | None = None
    ) -> AsyncLookup:
        return AsyncLookup(
            prober,
            clock=self._clock,
            lookup_deadline_s=self.config.lookup_deadline_s,
            error_backoff_s=self.config.error_backoff_s,
            probe_now=probe_now,
            describe=self._describe,
            tier_name=self.context.tier_name,
        )

    def _give_back(self, view: memoryview | None, hook: str) -> None:
        try:
            if view is not None:
                view.release()
        except BufferError:
            # It ends with whatever was made from it; until then the region stays mapped.
            if self._warn_kept.due():
                logger.warning(
                    "tier %r: %s kept a reference to its buffer", self.context.tier_name, hook
                )

    def _warn_not_retired(self, error: BaseException) -> None:
        if self._warn_retire.due():
            logger.warning(
                "tier %r: a bad object could not be removed: %s",
                self.context.tier_name,
                self._describe(error),
            )

    def _describe(self, error: BaseException) -> str:
        # Client libraries like to repeat the credentials that were refused.
        return describe_error(error, self.config.hide_secrets)

    # -- for the author of a tier ---------------------------------------------------------------

    def note_stored(self, key: OffloadKey) -> None:
        """Note that a block became present. Thread-safe.

        Call it under the lock that orders the changes of the tier, or events of one key may
        come out in the wrong order.
        """
        if self.emits_events:
            self._events.append(((key,), False))

    def note_removed(self, key: OffloadKey) -> None:
        """Note that a block left the tier, by eviction for example. Thread-safe.

        Remembered lookups of the key are forgotten. Call it as :meth:`note_stored` says, and
        not before the tier is open.
        """
        self._lookups.removed(key, next(self._tickets))
        if self.emits_events:
            self._events.append(((key,), True))

    def check_process(self) -> None:
        """Refuse to work in a fork. Call it first in every method of the contract you override.

        Raises:
            TierClosedError: This is not the process that opened the tier: it has none of the
                threads, and locks may be held in it for ever. Or the tier was never opened.
        """
        if _generation[0] != self._opened_in:
            if not self._pid:
                raise TierClosedError(
                    f"{type(self).__name__} was never opened: its __init__ must call "
                    "super().__init__(context). What a tier needs at its start can go into open()"
                )
            raise TierClosedError(
                f"tier {self.context.tier_name!r} was opened by process {self._pid} and cannot be "
                f"used in its fork {os.getpid()}, which has none of its threads: open the tier in "
                "the process that uses it"
            )

    # -- lookup ---------------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        if _generation[0] != self._opened_in:
            # Looked at first: the call would be a tenth of a lookup from memory.
            self.check_process()
        if self._closed:
            return ABSENT
        return self._lookups.ask(key, req_context.req_id)

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        self.check_process()
        if self._closed:
            return [ABSENT] * len(keys)
        return self._lookups.ask_many(keys, req_context.req_id)

    # -- jobs -----------------------------------------------------------------------------------

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self.check_process()
        entry = self._ledger.admit(job)
        if self._closed:
            self._ledger.refuse(entry, _CLOSED)
            return
        if not self._is_prepared(entry):
            return
        entry.tracked = True
        self._lookups.store_submitted(job.keys)
        self._ledger.launch(entry)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self.check_process()
        entry = self._ledger.admit(job)
        if self._closed:
            self._ledger.refuse(entry, _CLOSED)
            return
        if not self._is_prepared(entry):
            return
        entry.claim = self._lookups.load_submitted(job.keys, job.req_context.req_id)
        self._ledger.launch(entry)

    def _is_prepared(self, entry: Job) -> bool:
        try:
            self._prepare(entry)
        except Exception as error:  # noqa: BLE001 - whatever the tier raises fails the job (JOB-2)
            self._ledger.refuse(entry, self._describe(error))
            return False
        return True

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self.check_process()
        jobs = self._ledger.collect()
        if not jobs:
            return ()
        # Removals that happened before these jobs ended must not undo what they report.
        self._lookups.read_news()
        return [self._conclude(job) for job in jobs]

    def _conclude(self, job: Job) -> JobResult:
        keys, failures = job.metadata.keys, job.failures
        if job.metadata.is_promotion:
            self._load_failures += len(failures)
            if job.claim is not None:
                self._lookups.load_finished(keys, failures, job.claim)
        else:
            self._store_failures += len(failures)
            if job.tracked:
                self._lookups.store_finished(keys, failures, job.tickets)
        return job.result()

    @override
    def drain_jobs(self) -> Collection[JobId]:
        self.check_process()
        patience_s = self.config.job_deadline_s * _PATIENCE
        if not self._ledger.wait_until_idle(patience_s):
            self._ledger.cancel("cancelled by a drain")
            self._ledger.wait_until_idle(self.config.job_deadline_s - patience_s)
        return self._ledger.unfinished_ids()

    # -- requests and steps ---------------------------------------------------------------------

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.check_process()
        self._lookups.request_started(req_context.req_id)
        return RequestOffloadingContext()

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self.check_process()
        self._lookups.request_finished(req_context.req_id)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.check_process()
        if not self._closed:
            self._lookups.end_step()

    @override
    def has_pending_work(self) -> bool:
        self.check_process()
        return self._ledger.has_jobs() or (not self._closed and self._lookups.has_open_questions())

    # -- observation ----------------------------------------------------------------------------

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        self.check_process()
        events: list[OffloadingEvent] = []
        run: list[OffloadKey] = []
        run_removed = False
        while self._events:
            keys, removed = self._events.popleft()
            if run and removed != run_removed:
                events.append(OffloadingEvent(tuple(run), self.context.tier_name, run_removed))
                run = []
            run_removed = removed
            run += keys
        if run:
            events.append(OffloadingEvent(tuple(run), self.context.tier_name, run_removed))
        return events

    @override
    def get_stats(self) -> Mapping[str, float]:
        self.check_process()
        return {
            **self._lookups.stats(),
            "store_failures": float(self._store_failures),
            "load_failures": float(self._load_failures),
            "stalled_jobs": float(self._ledger.stalled_jobs),
        }

    # -- end ------------------------------------------------------------------------------------

    @override
    def shutdown(self) -> Collection[JobId]:
        self.check_process()
        if not self._released:
            first = not self._closed
            self._closed = True
            self._ledger.cancel("cancelled by the shutdown of the tier")
            # Again after a thread was stuck: it may have come back, but nobody waits for it.
            patience_s = self.config.job_deadline_s * _PATIENCE if first else 0.0
            if self._stop(patience_s):
                self._released = True
            else:
                logger.warning(
                    "tier %r: I/O did not end within %g s of the shutdown; its threads and "
                    "descriptors are left behind",
                    self.context.tier_name,
                    patience_s,
                )
        unfinished = self._ledger.unfinished_ids()
        if not unfinished:
            # Also when a lookup is stuck: that one has no business with the memory.
            self._source.release()
        return unfinished
