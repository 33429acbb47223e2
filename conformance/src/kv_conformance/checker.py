"""Checks the other side: whether an *engine* keeps what the contract guarantees to a tier.

:class:`EngineChecker` stands between an engine and any tier and writes down every breach of G-1 to
G-7. For developers of engines: run your engine over :func:`checking_spec` and expect no breaches.

**Who owns what.** All state belongs to the engine's thread, by G-1; only ``_busy`` is a lock,
because a breach of G-1 is the one thing that cannot be assumed away.
"""

from __future__ import annotations

import dataclasses
import threading
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

import numpy as np
from typing_extensions import override

from kv_core.contract import SecondaryTierManager

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from kv_core.contract import (
        JobId,
        JobMetadata,
        JobResult,
        LookupAnswer,
        MetricDefinition,
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TierContext,
        TierSpec,
        TierUsage,
    )

__all__ = ["GUARANTEES", "Breach", "EngineChecker", "checking_spec"]

GUARANTEES: Final[dict[str, str]] = {
    "G-1": "All methods are called from one thread at a time, not always the same one.",
    "G-2": "The slots of a job are pinned from submit to result.",
    "G-3": "Keys and block ids of a job are distinct, in range, equally long and in order.",
    "G-4": "A job has an id of its own, which is never used again.",
    "G-5": "The view outlives the tier's `shutdown()`.",
    "G-6": "Results are polled until every job is reported.",
    "G-7": "`on_schedule_end` is called once per step.",
}
"""What an engine guarantees to its tiers, by id."""

_PATIENT_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class Breach:
    """One guarantee that was not kept.

    Attributes:
        guarantee: Its id.
        message: What was seen.
    """

    guarantee: str
    message: str


@dataclass(slots=True)
class _InFlight:
    job: JobMetadata
    checksums: tuple[int, ...]
    steps_unpolled: int = field(default=0)


@final
class EngineChecker(SecondaryTierManager):
    """Hands every call on to a tier, and watches the caller.

    Args:
        context: What the engine gave.
        tier: The tier, opened with the same context.
        breaches: Where breaches are put down.

    Attributes:
        steps: Calls of ``on_schedule_end`` so far.
        jobs: Jobs submitted so far.
        breaches: What was seen.
    """

    @override
    def __init__(
        self, context: TierContext, tier: SecondaryTierManager, breaches: list[Breach]
    ) -> None:
        self._context = context
        self._tier = tier
        self._busy = threading.Lock()
        self._seen_ids: set[JobId] = set()
        self._in_flight: dict[JobId, _InFlight] = {}
        # True between the end of a step and the beginning of the next; None: nobody tells.
        self._step_has_ended: bool | None = None
        self._closed = False
        self.breaches = breaches
        self.steps = 0
        self.jobs = 0

    # -- the checks -----------------------------------------------------------------------------

    def _breach(self, guarantee: str, message: str) -> None:
        self.breaches.append(Breach(guarantee, message))

    @contextmanager
    def _called(self, method: str) -> Iterator[None]:
        """Watch one call: nobody else may be in one (G-1)."""
        alone = self._busy.acquire(blocking=False)
        if not alone:
            self._breach("G-1", f"{method} was called while another call was running")
        try:
            yield
        finally:
            if alone:
                self._busy.release()

    def _check_submitted(self, job: JobMetadata, *, is_load: bool) -> _InFlight | None:
        """Check a job; return what to keep of it, or ``None`` when its slots make no sense."""
        self.jobs += 1
        if job.job_id in self._seen_ids:
            self._breach("G-4", f"job id {job.job_id} was used before")
        self._seen_ids.add(job.job_id)
        if job.is_promotion is not is_load:
            self._breach("G-3", f"job {job.job_id} was submitted to the wrong method")
        block_ids = np.asarray(job.block_ids)
        slots = block_ids.tolist()
        if block_ids.dtype != np.int32 or block_ids.shape != (len(job.keys),):
            self._breach(
                "G-3",
                f"job {job.job_id} has {len(job.keys)} keys, and block ids of type "
                f"{block_ids.dtype} and shape {block_ids.shape}",
            )
        if len(set(job.keys)) != len(job.keys) or len(set(slots)) != len(slots):
            self._breach("G-3", f"job {job.job_id} has a key or a slot twice")
        if any(not 0 <= slot < self._context.num_blocks for slot in slots):
            self._breach("G-3", f"job {job.job_id} has a slot out of range")
            return None
        self._check_pins(job, slots, is_load=is_load)
        return _InFlight(job, () if is_load else self._checksums(slots))

    def _take(self, taken: _InFlight | None) -> None:
        """Keep a job. Not before the tier has it: one that raises has not taken the job."""
        if taken is not None:
            self._in_flight[taken.job.job_id] = taken

    def _check_pins(self, job: JobMetadata, slots: list[int], *, is_load: bool) -> None:
        """A slot that is in another job may only be read by both, and for the same key (G-2)."""
        wanted = dict(zip(slots, job.keys, strict=False))
        for other in self._in_flight.values():
            for slot, key in zip(other.job.block_ids.tolist(), other.job.keys, strict=False):
                if slot not in wanted:
                    continue
                both_read = not is_load and not other.job.is_promotion
                if not both_read or wanted[slot] != key:
                    self._breach(
                        "G-2",
                        f"slot {slot} of job {other.job.job_id}, which is in flight, is also in "
                        f"job {job.job_id}",
                    )

    def _checksums(self, slots: list[int]) -> tuple[int, ...]:
        return tuple(zlib.crc32(self._context.primary.block(slot)) for slot in slots)

    def _check_reported(self, results: Iterable[JobResult]) -> None:
        for entry in self._in_flight.values():
            entry.steps_unpolled = 0
        for result in results:
            ended = self._in_flight.pop(result.job_id, None)
            if ended is None or ended.job.is_promotion:
                continue
            # The bytes of a store that was told to have read them must have stood still.
            if self._checksums(ended.job.block_ids.tolist()) != ended.checksums:
                self._breach(
                    "G-2", f"a slot of store {result.job_id} was written while it was in flight"
                )

    def _check_step(self) -> None:
        self.steps += 1
        if self._step_has_ended:
            self._breach("G-7", "on_schedule_end was called twice in a step")
        if self._step_has_ended is False:
            self._step_has_ended = True
        for job_id, entry in self._in_flight.items():
            entry.steps_unpolled += 1
            if entry.steps_unpolled == _PATIENT_STEPS + 1:
                self._breach("G-6", f"job {job_id} was not polled for {_PATIENT_STEPS} steps")

    def _check_view(self, when: str) -> None:
        try:
            first = self._context.primary.block(0)
            first.release()
        except ValueError as error:
            self._breach("G-5", f"the view is gone {when}: {error}")

    def begin_step(self) -> None:
        """Note that the engine begins a step.

        For G-7: from the outside, two calls in one step look like two idle steps. Called by
        whoever drives the engine, before every step.
        """
        if self._step_has_ended is False:
            self._breach("G-7", "a step ended without on_schedule_end")
        self._step_has_ended = False

    @property
    def unreported(self) -> frozenset[JobId]:
        """Jobs whose results nobody has polled; empty when the engine has ended (G-6)."""
        return frozenset(self._in_flight)

    # -- the tier's methods ------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        with self._called("lookup"):
            return self._tier.lookup(key, req_context)

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        with self._called("lookup_many"):
            return self._tier.lookup_many(keys, req_context)

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        with self._called("touch"):
            self._tier.touch(keys, req_context)

    @override
    def submit_store(self, job: JobMetadata) -> None:
        with self._called("submit_store"):
            taken = self._check_submitted(job, is_load=False)
            self._tier.submit_store(job)
            self._take(taken)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        with self._called("submit_load"):
            taken = self._check_submitted(job, is_load=True)
            self._tier.submit_load(job)
            self._take(taken)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._called("get_finished_jobs"):
            results = list(self._tier.get_finished_jobs())
            self._check_reported(results)
            return results

    @override
    def drain_jobs(self) -> Collection[JobId]:
        with self._called("drain_jobs"):
            return self._tier.drain_jobs()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        with self._called("on_new_request"):
            return self._tier.on_new_request(req_context)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        with self._called("on_request_finished"):
            self._tier.on_request_finished(req_context)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        with self._called("on_schedule_end"):
            self._check_step()
            self._tier.on_schedule_end(context)

    @override
    def has_pending_work(self) -> bool:
        with self._called("has_pending_work"):
            return self._tier.has_pending_work()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        with self._called("take_events"):
            return self._tier.take_events()

    @override
    def get_stats(self) -> Mapping[str, float]:
        with self._called("get_stats"):
            return self._tier.get_stats()

    @override
    def build_metric_definitions(self) -> Sequence[MetricDefinition]:
        with self._called("build_metric_definitions"):
            return self._tier.build_metric_definitions()

    @override
    def usage(self) -> TierUsage:
        with self._called("usage"):
            return self._tier.usage()

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        with self._called("delete"):
            self._tier.delete(keys)

    @override
    def shutdown(self) -> Collection[JobId]:
        with self._called("shutdown"):
            self._check_view("before shutdown() has begun")
            unfinished = self._tier.shutdown()
            if not self._closed:
                self._check_view("before shutdown() has returned")
            self._closed = True
            return unfinished


def checking_spec(
    spec: TierSpec, breaches: list[Breach], checkers: list[EngineChecker] | None = None
) -> TierSpec:
    """Return the declaration of a tier whose engine is watched.

    Args:
        spec: The tier underneath.
        breaches: Where breaches are put down.
        checkers: Receives every checker that is opened.
    """

    def make(context: TierContext) -> SecondaryTierManager:
        checker = EngineChecker(context, spec.factory(context), breaches)
        if checkers is not None:
            checkers.append(checker)
        return checker

    return dataclasses.replace(spec, factory=make)
