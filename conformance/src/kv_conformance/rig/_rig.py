"""One open tier over one region.

Every call of the tier goes through :meth:`Rig.call`, so that an exception is put down to the
clause that forbids it. Every result is checked the moment it arrives, its slots are poisoned, and
the whole region is compared with what it should hold. All of it runs on one thread: the engine's,
as far as the tier can tell.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import numpy as np

from kv_conformance.harness import Fault, HarnessError, Subject
from kv_conformance.rig._budget import Interrupted, OutOfTime
from kv_conformance.rig._findings import Broken
from kv_conformance.rig._memory import Difference
from kv_core.contract import (
    JobError,
    JobId,
    JobMetadata,
    JobResult,
    ReqContext,
    ScheduleEndContext,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from typing_extensions import Never

    from kv_conformance.harness import Corruption, Opening
    from kv_conformance.rig._budget import Budget
    from kv_conformance.rig._findings import Findings
    from kv_conformance.rig._memory import Region
    from kv_conformance.rig._rigs import RecordedMetrics, SubjectType
    from kv_core.contract import (
        Namespace,
        OffloadKey,
        RequestOffloadingContext,
        SecondaryTierManager,
        TierLimits,
    )

__all__ = ["Loaded", "Rig"]

ReturnT = TypeVar("ReturnT")

# Job ids of all tiers of a process: an engine never uses one twice.
_JOB_IDS: Final = itertools.count(1)
_REQUEST_IDS: Final = itertools.count(1)
# To tell a result that went to the wrong instance from one of no job at all.
_SUBMITTED: Final[set[JobId]] = set()

# A storage below this has no room for what a test stores: nothing the tier can help.
_LEAST_FREE_BYTES: Final = 64 << 20

# Which clause forbids a method to raise.
_MUST_NOT_RAISE: Final[Mapping[str, str]] = {
    "lookup": "LOOK-2",
    "lookup_many": "LOOK-2",
    "submit_store": "JOB-2",
    "submit_load": "JOB-2",
    "get_finished_jobs": "JOB-3",
    "drain_jobs": "DRAIN-1",
    "on_new_request": "REQ-1",
    "on_request_finished": "REQ-2",
    "on_schedule_end": "JOB-7",
    "has_pending_work": "JOB-7",
    "take_events": "EVT-1",
    "get_stats": "MET-1",
    "usage": "USE-1",
    "delete": "DEL-1",
    "touch": "TOUCH-1",
    "shutdown": "LIFE-1",
}


@dataclass(slots=True)
class _Job:
    metadata: JobMetadata
    slots: tuple[int, ...]
    is_load: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of a load.

    Attributes:
        result: What the tier reported.
        keys: Keys it reported as loaded, in job order.
    """

    result: JobResult
    keys: tuple[OffloadKey, ...]


@final
class Rig:
    """Drives one tier.

    Attributes:
        tier: The tier. Tests call it directly only where :meth:`call` would be in the way.
        limits: What the tier declares for its settings.
        namespace: The namespace it was opened under.
        opening: What was asked of the harness.
        settings: What the harness answered.
        region: The memory.
        request: The request on whose behalf calls are made unless another is given.
        results: Results so far, by job.
        budget: The time for waits.
    """

    def __init__(
        self,
        *,
        subject_type: SubjectType,
        tier: SecondaryTierManager,
        limits: TierLimits,
        namespace: Namespace,
        opening: Opening,
        settings: Mapping[str, Any],
        region: Region,
        findings: Findings,
        budget: Budget,
        metrics: RecordedMetrics,
    ) -> None:
        self.subject_type = subject_type
        self.tier = tier
        self.limits = limits
        self.namespace = namespace
        self.opening = opening
        self.settings = settings
        self.region = region
        self.budget = budget
        self.findings = findings
        self.metrics = metrics
        self.results: dict[JobId, JobResult] = {}
        self._subject = Subject(tier, opening, namespace)
        # Scattered and out of order, as in a cache that has been used for a while.
        self._free: deque[int] = deque(
            sorted(range(region.num_blocks), key=lambda slot: slot * 11 % region.num_blocks)
        )
        self._jobs: dict[JobId, _Job] = {}
        # Slots whose last job has been reported.
        self._reported: set[int] = set()
        # Slots whose last job was a load.
        self._loaded_into: set[int] = set()
        self._unfinished: frozenset[JobId] = frozenset()
        self._is_shut_down = False
        self._lets_go = False
        self._faulty = False
        self._pid = os.getpid()
        self.request = self.new_request()

    # -- calls --------------------------------------------------------------------------------

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the tier.

        Raises:
            Broken: It raised, which the contract forbids.
        """
        try:
            return getattr(self.tier, method)(*args)
        except (OutOfTime, Interrupted):
            raise
        except BaseException as error:  # noqa: BLE001 - an exit, too, is a finding
            self._forbid(method, error)

    def _forbid(self, method: str, error: BaseException) -> Never:
        clause = _MUST_NOT_RAISE[method]
        message = f"{method} raised {type(error).__name__}: {error}"
        self.findings.add(clause, message)
        raise Broken(message, clause) from error

    # -- requests --------------------------------------------------------------------------------

    def new_request(self, **params: Any) -> ReqContext:
        """Announce a new request to the tier and return it."""
        request = ReqContext(f"request-{next(_REQUEST_IDS)}", params)
        self.announce(request)
        return request

    def announce(self, request: ReqContext) -> RequestOffloadingContext:
        """Call ``on_new_request`` and return the answer."""
        answer: RequestOffloadingContext = self.call("on_new_request", request)
        return answer

    def finish_request(self, request: ReqContext) -> None:
        """Call ``on_request_finished``."""
        self.call("on_request_finished", request)

    # -- lookups ---------------------------------------------------------------------------------

    def ask(self, key: OffloadKey, request: ReqContext | None = None) -> bool | None:
        """Call ``lookup`` once.

        Raises:
            Broken: The answer is none of the three (LOOK-2).
        """
        return self._checked(self.call("lookup", key, request or self.request))

    def ask_many(
        self, keys: Sequence[OffloadKey], request: ReqContext | None = None
    ) -> list[bool | None]:
        """Call ``lookup_many`` once."""
        answers = self.call("lookup_many", keys, request or self.request)
        if not isinstance(answers, list) or len(answers) != len(keys):
            self.findings.fail(
                "LOOK-2",
                f"lookup_many of {len(keys)} keys returned {answers!r}, expected a list "
                "with an answer for each",
            )
        return [self._checked(answer) for answer in answers]

    def _checked(self, answer: object) -> bool | None:
        # Not "in": 1 == True, and an engine asks "is True".
        if answer is not True and answer is not False and answer is not None:
            self.findings.fail("LOOK-2", f"a lookup returned {answer!r}, no True, False or None")
        return answer

    def resolve(
        self,
        keys: Sequence[OffloadKey],
        request: ReqContext | None = None,
        *,
        clause: str = "LOOK-2",
    ) -> list[bool]:
        """Look keys up, step after step, until every answer is known.

        Raises:
            OutOfTime: Not within ``lookup_deadline_s``; the clause is to blame.
        """
        answers: list[bool | None] = []

        def known() -> bool:
            answers[:] = self.ask_many(keys, request)
            if None not in answers:
                return True
            self.step()
            return False

        self.budget.until(
            known, "a lookup did not resolve", self.limits.lookup_deadline_s, clause=clause
        )
        return [bool(answer) for answer in answers]

    def finds(self, key: OffloadKey, request: ReqContext | None = None) -> bool:
        """Resolve one key."""
        return self.resolve([key], request)[0]

    def until_found(
        self, keys: Sequence[OffloadKey], within_s: float, *, clause: str, fresh: bool = True
    ) -> None:
        """Look keys up until all are found.

        Args:
            keys: The keys.
            within_s: How long that may take, seconds.
            clause: To blame when it takes longer.
            fresh: Whether each round asks on behalf of a new request: an old one may remember.
        """

        def found() -> bool:
            request = self.new_request() if fresh else self.request
            answers = self.resolve(keys, request)
            if fresh:
                self.finish_request(request)
            return all(answers)

        self.budget.until(
            found,
            f"{len(keys)} key(s) were not found",
            within_s + self.limits.lookup_deadline_s,
            clause=clause,
        )

    # -- jobs -----------------------------------------------------------------------------------

    def submit_store(
        self,
        keys: Sequence[OffloadKey],
        *,
        slots: Sequence[int] | None = None,
        request: ReqContext | None = None,
        fill: bool = True,
    ) -> JobId:
        """Fill slots with the bytes of the keys and submit a store of them.

        Args:
            keys: What to store.
            slots: Where; by default the slots that were free longest.
            request: On whose behalf.
            fill: ``False``: the test has filled the slots already.
        """
        taken = self.take_slots(len(keys)) if slots is None else tuple(slots)
        if fill:
            for slot, key in zip(taken, keys, strict=True):
                self.region.fill(slot, key)
        return self._submit(keys, taken, request, is_load=False)

    def submit_load(
        self,
        keys: Sequence[OffloadKey],
        *,
        slots: Sequence[int] | None = None,
        request: ReqContext | None = None,
    ) -> JobId:
        """Clear slots and submit a load into them."""
        taken = self.take_slots(len(keys)) if slots is None else tuple(slots)
        for slot in taken:
            self.region.clear(slot)
        self.region.begin_load(taken)
        return self._submit(keys, taken, request, is_load=True)

    def take_slots(self, count: int) -> tuple[int, ...]:
        """Take the slots that were free longest. They come back when their job is reported."""
        if count > len(self._free):
            raise ValueError(f"{count} slots wanted, {len(self._free)} free: open a larger region")
        taken = tuple(self._free.popleft() for _ in range(count))
        self._reported.difference_update(taken)
        return taken

    def _submit(
        self,
        keys: Sequence[OffloadKey],
        slots: tuple[int, ...],
        request: ReqContext | None,
        *,
        is_load: bool,
    ) -> JobId:
        job_id = JobId(next(_JOB_IDS))
        block_ids = np.array(slots, dtype=np.int32)
        block_ids.flags.writeable = False
        metadata = JobMetadata(
            job_id=job_id,
            keys=tuple(keys),
            block_ids=block_ids,
            is_promotion=is_load,
            req_context=request or self.request,
            submit_time=time.monotonic(),
        )
        self._jobs[job_id] = _Job(metadata, slots, is_load)
        if is_load:
            self._loaded_into.update(slots)
        else:
            self._loaded_into.difference_update(slots)
        _SUBMITTED.add(job_id)
        method = "submit_load" if is_load else "submit_store"
        try:
            getattr(self.tier, method)(metadata)
        except (OutOfTime, Interrupted):
            raise
        except BaseException as error:  # noqa: BLE001 - an exit, too, is a finding
            # A job that was refused with an exception was not taken, and will not be reported.
            del self._jobs[job_id]
            self._release(slots)
            self._forbid(method, error)
        return job_id

    def store(
        self,
        keys: Sequence[OffloadKey],
        *,
        request: ReqContext | None = None,
        clause: str = "JOB-1",
    ) -> JobResult:
        """Store keys, in one job, and wait for the result, whatever it is."""
        return self.wait(self.submit_store(keys, request=request), clause=clause)

    def stored(
        self,
        keys: Sequence[OffloadKey],
        *,
        request: ReqContext | None = None,
        clause: str = "DATA-1",
    ) -> None:
        """Store keys and expect success, with some patience: stores may fail, but not for ever.

        Raises:
            Broken: A key could not be stored in many attempts; the clause is to blame.
        """
        missing = list(keys)
        error: JobError | None = None
        for _attempt in range(20):
            todo, missing = missing, []
            for start in range(0, len(todo), self.job_keys):
                part = todo[start : start + self.job_keys]
                result = self.store(part, request=request)
                error = result.error or error
                done = set(part if result.success else result.successful_keys)
                missing += [key for key in part if key not in done]
            if not missing:
                return
        free_bytes = shutil.disk_usage(self.subject_type.workdir).free
        if free_bytes < _LEAST_FREE_BYTES:
            raise HarnessError(
                f"the file system of {self.subject_type.workdir} is full ({free_bytes} bytes are "
                "free): make room, or name another folder with --conformance-workdir"
            )
        self.findings.fail(
            clause,
            f"{len(missing)} of {len(keys)} keys could not be stored in 20 attempts, "
            f"although the storage is in order; last error: {error}",
        )

    def load(
        self,
        keys: Sequence[OffloadKey],
        *,
        request: ReqContext | None = None,
        clause: str = "JOB-1",
    ) -> Loaded:
        """Load keys, in one job, and wait. The bytes of keys reported as loaded are checked."""
        job_id = self.submit_load(keys, request=request)
        return self.loaded(self.wait(job_id, clause=clause), keys)

    def loaded(self, result: JobResult, keys: Sequence[OffloadKey]) -> Loaded:
        """Say which keys a result reports."""
        return Loaded(result, tuple(keys) if result.success else tuple(result.successful_keys))

    def expect_loads(self, keys: Sequence[OffloadKey], *, clause: str | None = None) -> None:
        """Load keys in jobs of the declared size and expect all of them.

        Raises:
            Broken: Some were not loaded.
        """
        for start in range(0, len(keys), self.job_keys):
            part = keys[start : start + self.job_keys]
            loaded = self.load(part)
            if len(loaded.keys) != len(part):
                raise Broken(
                    f"only {len(loaded.keys)} of {len(part)} stored keys could be loaded: "
                    f"{loaded.result.error}",
                    clause,
                )

    def until_loaded(self, keys: Sequence[OffloadKey], *, clause: str) -> None:
        """Load keys until all are loaded: with short deadlines a load may fail on a busy machine.

        Raises:
            OutOfTime: They are not, within ``job_deadline_s``; the clause is to blame.
        """

        def loaded() -> bool:
            parts = (keys[i : i + self.job_keys] for i in range(0, len(keys), self.job_keys))
            return all(len(self.load(part).keys) == len(part) for part in parts)

        self.budget.until(
            loaded,
            f"{len(keys)} stored key(s) could not be loaded",
            self.limits.job_deadline_s,
            clause=clause,
        )

    @property
    def job_keys(self) -> int:
        """Most keys of one job: what the tier declares, and no more than a quarter of the slots."""
        most = max(1, self.region.num_blocks // 4)
        return min(most, self.limits.max_job_keys or most)

    def wait(
        self, job_id: JobId, *, clause: str = "JOB-1", limit_s: float | None = None
    ) -> JobResult:
        """Go through steps until a job is reported.

        Raises:
            OutOfTime: It is not, within ``job_deadline_s``; the clause is to blame.
        """
        self.wait_all([job_id], clause=clause, limit_s=limit_s)
        return self.results[job_id]

    def wait_all(
        self, job_ids: Iterable[JobId], *, clause: str = "JOB-1", limit_s: float | None = None
    ) -> float:
        """Go through steps until all jobs are reported; return the seconds."""
        open_ids = set(job_ids) - self.results.keys()

        def reported() -> bool:
            if open_ids:
                self.step()
                open_ids.difference_update(self.results)
            return not open_ids

        return self.budget.until(
            reported,
            "a job was not reported",
            self.limits.job_deadline_s if limit_s is None else limit_s,
            clause=clause,
        )

    # -- steps ----------------------------------------------------------------------------------

    def step(self) -> list[JobResult]:
        """End a step of the scheduler, then collect results."""
        self.call("on_schedule_end", ScheduleEndContext())
        return self.poll()

    def poll(self) -> list[JobResult]:
        """Collect results; check each, and poison its slots."""
        results = list(self.call("get_finished_jobs"))
        if results:
            # First of all: what was done to a slot is the work of the jobs that end now, and
            # accepting their results overwrites it.
            self.check_memory()
        return [result for result in results if self._accept(result)]

    def _accept(self, result: object) -> bool:
        """Check a result; return whether it is the first of a job of this rig."""
        if not isinstance(result, JobResult):
            self.findings.fail("JOB-1", f"get_finished_jobs returned {result!r}, no JobResult")
        if result.job_id in self.results:
            self.findings.add("JOB-1", f"job {result.job_id} was reported twice")
            return False
        job = self._jobs.pop(result.job_id, None)
        if job is None and result.job_id in _SUBMITTED:
            self.findings.fail(
                "LIFE-5",
                f"job {result.job_id} was reported by an instance that it was not given to",
            )
        if job is None:
            self.findings.add("JOB-1", f"job {result.job_id} was reported but never submitted")
            return False
        self.results[result.job_id] = result
        self._check_keys(job, result)
        if job.is_load:
            self._check_bytes(job, result)
            self.region.end_load(job.slots)
        self._release(job.slots)
        return True

    def _check_keys(self, job: _Job, result: JobResult) -> None:
        success: object = result.success
        error: object = result.error
        if not isinstance(success, bool):
            self.findings.add("DATA-6", f"success is {success!r}, expected a bool")
        if success:
            return
        foreign = set(result.successful_keys) - set(job.metadata.keys)
        if foreign or len(set(result.successful_keys)) != len(result.successful_keys):
            self.findings.add(
                "DATA-6", "successful_keys names keys that the job did not have, or one twice"
            )
        if error is not None and not isinstance(error, JobError):
            self.findings.add("DATA-6", f"error is {error!r}, expected a JobError or None")

    def _check_bytes(self, job: _Job, result: JobResult) -> None:
        """Compare what a load reports with what belongs to its keys."""
        good = set(job.metadata.keys if result.success else result.successful_keys)
        for key, slot in zip(job.metadata.keys, job.slots, strict=True):
            difference = self.region.difference(slot, key) if key in good else None
            if difference is None:
                continue
            claim = f"a load reported {key.hex()[:16]}... as loaded, but its slot "
            if difference is Difference.POISON:
                self.findings.add(
                    "DATA-2", claim + "holds bytes that were read after the store was reported"
                )
            elif difference is Difference.UNTOUCHED and not result.success:
                # A success that is none is a false report; wrong bytes are wrong bytes.
                self.findings.add("DATA-6", claim + "was not written, or not to its end")
            else:
                self.findings.add(
                    self.blame_bytes,
                    claim
                    + (
                        "was not written, or not to its end"
                        if difference is Difference.UNTOUCHED
                        else "holds other bytes"
                    ),
                )

    blame_bytes: str = "DATA-1"
    """Whose promise wrong bytes of a load are; a test of another clause sets its own."""

    def _release(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self.region.poison(slot)
        self._reported.update(slots)
        self._free.extend(slots)

    def check_memory(self) -> None:
        """Put changes down that nobody was expected to make."""
        # What a load spills looks like a store that writes, or like a write that comes late: that
        # there is a load, and what the slot was used for, decides.
        loading = any(job.is_load for job in self._jobs.values())
        for place, slot in self.region.unexpected_changes():
            if place != "slot":
                clause = "ZC-4" if place == "padding" else "DATA-3"
                self.findings.add(clause, f"{place} bytes that belong to nobody were overwritten")
            elif any(slot in job.slots for job in self._jobs.values()) and not loading:
                self.findings.add("DATA-4", f"slot {slot} was written while it was being stored")
            elif slot in self._reported and (slot in self._loaded_into or not loading):
                self.findings.add(
                    "DATA-5", f"slot {slot} was written although no job had it any more"
                )
            else:
                self.findings.add(
                    "DATA-3", f"slot {slot} was written by a load that had no part in it"
                )

    # -- everything else ------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Return ``get_stats``."""
        return dict(self.call("get_stats"))

    def drain(self) -> frozenset[JobId]:
        """Call ``drain_jobs`` and return what it returns."""
        self._unfinished = frozenset(self.call("drain_jobs"))
        return self._unfinished

    def shutdown(self) -> Collection[JobId]:
        """Call ``shutdown``."""
        self._is_shut_down = True
        self._unfinished = frozenset(self.call("shutdown"))
        self._lets_go = True
        return self._unfinished

    def forget_results(self) -> None:
        """Forget the results so far, for tests that count what jobs leave behind."""
        _SUBMITTED.difference_update(self.results)
        self.results.clear()

    @property
    def jobs_in_flight(self) -> frozenset[JobId]:
        """Jobs that were submitted and not reported."""
        return frozenset(self._jobs)

    def slots_of(self, job_id: JobId) -> tuple[int, ...]:
        """Return the slots of a job in flight."""
        return self._jobs[job_id].slots

    # -- behind the tier's back --------------------------------------------------------------------

    def lose(self, key: OffloadKey) -> None:
        """Remove the object of a key from the storage."""
        self.subject_type.harness.lose(self._subject, key)

    def corrupt(self, key: OffloadKey, how: Corruption) -> None:
        """Damage the object of a key."""
        self.subject_type.harness.corrupt(self._subject, key, how)

    def list_keys(self) -> frozenset[OffloadKey]:
        """Return what the storage holds."""
        return frozenset(self.subject_type.harness.list_keys(self._subject))

    def count_leftovers(self) -> int:
        """Return how many unfinished objects lie in the storage."""
        return self.subject_type.harness.count_leftovers(self._subject)

    def inject(self, fault: Fault) -> None:
        """Make the storage misbehave."""
        if not self.opening.faults:
            raise ValueError("open the rig with faults=True first")
        self._faulty = True
        self.subject_type.harness.inject(self._subject, fault)

    def heal(self) -> None:
        """End the fault."""
        self._faulty = False
        self.subject_type.harness.heal(self._subject)

    # -- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Shut down, look at the memory once more, and unmap it. Idempotent."""
        if self._faulty:
            self.heal()
        if not self._is_shut_down and self.tier_is_ours():
            try:
                self.shutdown()
            except Broken:
                return
        self.check_memory()
        # What did not come back from its shutdown may use the memory for ever.
        lets_go = self._lets_go and not self._unfinished
        if lets_go and (problem := self.region.unmap()) is not None:
            self.findings.add(
                "ZC-3", f"the tier holds on to the memory after its shutdown: {problem}"
            )

    def tier_is_ours(self) -> bool:
        """Say whether this is the process that opened the tier."""
        return os.getpid() == self._pid
