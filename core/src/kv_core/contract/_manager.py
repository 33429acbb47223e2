"""The abstract base class of every tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, TypeAlias

from kv_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kv_core.contract._context import TierContext
    from kv_core.contract._events import OffloadingEvent
    from kv_core.contract._jobs import JobId, JobMetadata, JobResult
    from kv_core.contract._metrics import MetricDefinition
    from kv_core.contract._request import ReqContext, RequestOffloadingContext, ScheduleEndContext
    from kv_core.contract._spec import TierUsage
    from kv_core.keys import OffloadKey

__all__ = ["ABSENT", "PRESENT", "UNKNOWN", "LookupAnswer", "SecondaryTierManager"]

LookupAnswer: TypeAlias = "bool | None"
"""The three answers of a lookup: :data:`PRESENT`, :data:`ABSENT`, :data:`UNKNOWN`."""

PRESENT: Final = True
"""The block is present and ready to be loaded."""

ABSENT: Final = False
"""The block is not present, or the backend failed (then also counted as an error)."""

UNKNOWN: Final = None
"""Not known yet. Ask again in a later step."""


class SecondaryTierManager(ABC):
    """A place below the primary tier where blocks are kept: a disk, a bucket, a peer.

    **Threads.** The engine calls all methods from one thread at a time, not always the same one
    (G-1). Methods return at once and do no blocking I/O on the calling thread, also while the
    backend is stalled (BLOCK-1); data moves on the tier's own threads, event loop or native
    engine. Only the constructor, :meth:`drain_jobs` and :meth:`shutdown` may block, until their
    declared deadlines.

    **Life of a job.** ``submit_store`` or ``submit_load`` hands a job over; from then on the
    engine keeps its slots pinned (G-2) and polls :meth:`get_finished_jobs` until the job is
    reported (G-6), exactly once (JOB-1), within ``job_deadline_s`` (JOB-5). Once it is reported
    the tier must not read (DATA-2) or write (DATA-5) its slots any more. A job whose I/O cannot
    be withdrawn, a ``pwrite`` inside the kernel for example, stays unreported until it has let
    go of its slots, even past the deadline: the engine's own deadline has freed the request by
    then. A job still queued always fails in time.

    **Steps.** ``on_schedule_end`` is called once per step, after all other calls of the step
    (G-7).

    **Errors.** A job that cannot be served is reported with ``success=False``; submit methods do
    not raise for it (JOB-2). One that raises all the same has not taken the job: the engine gives
    its slots to others at once, so nothing of the tier may touch them. Whatever a tier raises is
    contained by the engine, counted, and after repetition degrades the tier.
    """

    @abstractmethod
    def __init__(self, context: TierContext) -> None:
        """Open the tier. May block up to ``open_deadline_s``.

        A constructor that raises leaves nothing behind: no thread, descriptor or temporary
        object (LIFE-4).

        Args:
            context: Everything the tier may know of its surroundings.

        Raises:
            ConfigError: Settings that validate one by one but cannot work together.
            TierOpenError: The storage cannot be used. The message says what was found and what
                to do, and contains no secrets (CONF-2).
        """

    # -- lookup ---------------------------------------------------------------------------------

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        """Say whether a block is present.

        Either answer at once or answer :data:`UNKNOWN`, find out in the background, and answer
        in a later step; both are fine. Not fine would be to wait (LOOK-2), or to answer
        :data:`UNKNOWN` for longer than ``lookup_deadline_s`` while steps go on.

        Returns:
            :data:`PRESENT` only for a block that can be loaded now: never for a key that was
            not stored (LOOK-1), whose only store is still in flight (LOOK-8), or whose load
            failed (LOOK-4: until a new store when the object was missing or damaged; for
            requests alive then, and for ``error_backoff_s``, after a transient failure).
            :data:`ABSENT` may be remembered for the life of the request (LOOK-9), except that
            a successful store turns it into :data:`PRESENT` (LOOK-7), and that an error of the
            backend, answered as :data:`ABSENT` and counted as an error, is asked again after
            ``error_backoff_s`` (LOOK-6).
        """

    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        """Answer :meth:`lookup` for several keys, in order. The default loops."""
        return [self.lookup(key, req_context) for key in keys]

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """Note a use of blocks that did not need a load (TOUCH). The default does nothing.

        Args:
            keys: The blocks, in prefix order; unknown keys are ignored.
            req_context: The request that used them.
        """

    # -- jobs -----------------------------------------------------------------------------------

    @abstractmethod
    def submit_store(self, job: JobMetadata) -> None:
        """Begin to copy blocks from the primary tier into this tier. Returns at once.

        The job reads the shared pages when it runs; what was in the slots before the call is
        what is stored (ZC-2). A store never writes the primary (DATA-4). Storing a key that is
        validly present succeeds and counts as a use. Publication is atomic: a reader in any
        process sees the whole block or none (DATA-9), and a failed store never leaves an object
        that reads back wrong (DATA-8).
        """

    @abstractmethod
    def submit_load(self, job: JobMetadata) -> None:
        """Begin to copy blocks from this tier into the primary tier. Returns at once.

        Legal without a lookup before. The job writes only its own slots (DATA-3); only the
        slots of keys it reports as loaded may be relied on. A missing, truncated or over-long
        object is a failed load of that key, best of that key alone, and the object is retired
        (DATA-10). Loads are not stuck behind a backlog of stores (JOB-8).
        """

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of all jobs that finished since the last call. Does not block.

        An empty job is reported as well (JOB-4), and so is a job whose request has ended
        (JOB-6).
        """

    @abstractmethod
    def drain_jobs(self) -> Collection[JobId]:
        """Bring all jobs to an end. May block up to ``job_deadline_s``.

        Jobs that have not started may be cancelled or carried out; either is fine, and their
        results appear in the next :meth:`get_finished_jobs` (DRAIN-3). Returns at once when
        nothing is in flight (DRAIN-2). The tier works on afterwards (DRAIN-5).

        Returns:
            Ids of jobs whose I/O could not be stopped, normally none. Apart from those, no I/O
            of the tier touches the primary after the return (DRAIN-1).
        """

    # -- requests and steps ---------------------------------------------------------------------

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note a new request and say which of its blocks the tier wants to be offered."""

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """Free what is kept for a request. Idempotent; unknown requests are fine (REQ-2).

        The jobs of the request may still be in flight; their results are still due (JOB-6).
        """

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: B027
        """Note the end of a step: the moment to post batched work. Must not block."""

    def has_pending_work(self) -> bool:
        """Say whether the tier needs further steps even without requests. Default: no."""
        return False

    # -- observation ----------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call (EVENTS). The default has none."""
        return ()

    def get_stats(self) -> Mapping[str, float]:
        """Return measurements by name; names are those every tier shares or has defined.

        Shared names: ``lookup_queries``, ``lookup_hits``, ``lookup_misses``, ``lookup_errors``
        (queries = hits + misses + errors, counted once per request and key when it resolves; a
        hit whose load fails moves to the misses), ``store_failures``, ``load_failures``
        (blocks), ``stalled_jobs``.
        """
        return {}

    def build_metric_definitions(self) -> Sequence[MetricDefinition]:
        """Return the definitions of measurements beyond the shared ones. Default: none."""
        return ()

    def usage(self) -> TierUsage:
        """Return what the tier holds (USAGE). Must not block.

        Raises:
            UnsupportedError: The tier does not declare ``Capability.USAGE``.
        """
        raise UnsupportedError(f"{type(self).__name__} does not report its usage")

    # -- removal and end ------------------------------------------------------------------------

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks (DELETE). Returns at once; lookups answer absent from now on.

        Raises:
            UnsupportedError: The tier does not declare ``Capability.DELETE``.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot delete {len(keys)} block(s)")

    def shutdown(self) -> Collection[JobId]:
        """Close the tier. Idempotent. May block up to ``job_deadline_s``. Default: nothing.

        Afterwards no thread, process, socket or descriptor of the tier is left (LIFE-2), nothing
        touches the primary (LIFE-3), and no export of the view is held (ZC-3), apart from jobs
        whose I/O cannot be stopped.

        Returns:
            Ids of those jobs, normally none. Their pages stay mapped.
        """
        return ()
