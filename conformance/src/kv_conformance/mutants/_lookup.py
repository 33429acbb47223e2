"""Mutants of the LOOK clauses."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import (
    DictHarness,
    DictTier,
    FolderHarness,
    FolderTier,
    dict_spec,
    folder_spec,
)
from kv_core.contract import JobErrorKind
from kv_core.errors import BlockDamagedError, BlockMissingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_conformance.reference._dict_tier import _Job
    from kv_core.contract import (
        JobError,
        JobId,
        JobMetadata,
        JobResult,
        LookupAnswer,
        OffloadKey,
        ReqContext,
        TierContext,
    )

_KEPT_BLOCKS: Final = 40


class _OneByOne(FolderTier):
    """A folder tier whose batches go through ``lookup``."""

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        return [self.lookup(key, req_context) for key in keys]


class _WithMemory(DictTier):
    """A dict tier with a memory of its own for each request."""

    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._memory: dict[str, dict[OffloadKey, bool]] = defaultdict(dict)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._memory.pop(req_context.req_id, None)
        super().on_request_finished(req_context)


# -- LOOK-1 -------------------------------------------------------------------------------------


class _AlwaysThere(_OneByOne):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return True


@mutant(
    "LOOK-1",
    breaks="Answers True for every key.",
    source="sglang#31881: the hit that was promised was never fetched",
    also=frozenset(
        {
            "LOOK-4",
            "LOOK-5",
            "LOOK-6",
            "LOOK-8",
            "DATA-7",
            "DATA-10",
            "LIFE-5",
            "REQ-2",
            "NS-1",
            "MET-1",
            "PERS-2",
            "SHARE-1",
            "CAP-2",
            "INT-1",
            "DEL-1",
            "TOUCH-1",
        }
    ),
)
def always_there(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_AlwaysThere))


class _GroupBlind(DictTier):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        if key not in self.store.objects and key[:-4] in {k[:-4] for k in self.store.objects}:
            return True
        return super().lookup(key, req_context)


@mutant(
    "LOOK-1",
    breaks="Looks for the hash of a block and leaves the group out.",
    source="sglang#30321: one part of a block stands for the others",
    also=frozenset({"DATA-7"}),
)
def group_blind(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_GroupBlind))


class _FailedStoreCounts(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._index: set[OffloadKey] = set()

    @override
    def _fail(self, job: _Job, key: OffloadKey, error: JobError) -> None:
        super()._fail(job, key, error)
        if job.metadata.is_promotion:
            self._index.discard(key)
        else:
            self._index.add(key)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return key in self._index or super().lookup(key, req_context)


@mutant(
    "LOOK-1",
    breaks="Enters a key in its index when the store ends, failed or not.",
    source="LMCache#4991: later hits on keys whose stores had failed",
    also=frozenset({"DATA-8"}),
)
def failed_store_counts(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_FailedStoreCounts))


# -- LOOK-2 -------------------------------------------------------------------------------------


class _WaitsForEver(FolderTier):
    @override
    def open(self) -> None:
        self.config = self.config.model_copy(update={"lookup_deadline_s": 3600.0})
        super().open()


@mutant(
    "LOOK-2",
    breaks="Answers None for as long as the storage hangs.",
    source="vllm#49829: requests that touch a stalled block time out at the client",
    also=frozenset({"LOOK-6"}),
)
def waits_for_ever(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_WaitsForEver))


class _WaitsForTheFirst(_OneByOne):
    @override
    def open(self) -> None:
        super().open()
        self._askers: dict[OffloadKey, str] = {}

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        if self._askers.setdefault(key, req_context.req_id) != req_context.req_id:
            return None
        answer = super().lookup(key, req_context)
        if answer is not None:
            del self._askers[key]
        return answer


@mutant(
    "LOOK-2",
    breaks="Lets a request wait for the answer of the one that asked first, which may have ended.",
    source="vllm#35931: what a lookup takes is given back only by the one that took it",
    also=frozenset({"LOOK-5", "REQ-2", "MET-1"}),
)
def waits_for_the_first(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_WaitsForTheFirst))


class _AnswersWithACount(DictTier):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        answer = super().lookup(key, req_context)
        return answer if answer is None else int(answer)  # type: ignore[return-value]


@mutant(
    "LOOK-2",
    breaks="Hands on how many objects the client has counted, 0 or 1.",
    source="clients count: the EXISTS of Redis does, and 1 is not True",
)
def answers_with_a_count(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_AnswersWithACount))


# -- LOOK-3 -------------------------------------------------------------------------------------


class _SmallMemory(DictTier):
    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        error = super()._store_block(key, block_id)
        while len(self.store.objects) > _KEPT_BLOCKS:
            del self.store.objects[next(iter(self.store.objects))]
        return error


@mutant(
    "LOOK-3",
    breaks="Drops all but the last 40 blocks, whatever retention it declares.",
    source="LMCache#4725: a declared capacity that nothing follows",
)
def small_memory(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_SmallMemory))


class _StopsAtTheFirstGap(DictTier):
    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        answers = super().lookup_many(keys, req_context)
        gap = answers.index(False) if False in answers else len(answers)
        return [*answers[:gap], *([False] * (len(answers) - gap))]


@mutant(
    "LOOK-3",
    breaks="Answers False for everything behind the first absent key of a batch.",
    source="a prefix ends at its first gap; the blocks of a window or of another group do not",
)
def stops_at_the_first_gap(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_StopsAtTheFirstGap))


class _StoredTwiceIsGone(DictTier):
    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        if key not in self.store.objects:
            return super()._store_block(key, block_id)
        self.store.remove(key)
        return None


@mutant(
    "LOOK-3",
    breaks="Removes an object that is stored again and does not write it anew.",
    source="LMCache#2517: a second writer of a key leaves its state inconsistent",
    also=frozenset({"DATA-8", "DATA-9", "DATA-11", "LIFE-5"}),
)
def stored_twice_is_gone(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_StoredTwiceIsGone))


# -- LOOK-4 -------------------------------------------------------------------------------------


class _PromisesAgain(_WithMemory):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        memory = self._memory[req_context.req_id]
        if key in memory:
            return True
        answer = super().lookup(key, req_context)
        if answer:
            memory[key] = True
        return answer


@mutant(
    "LOOK-4",
    breaks="Remembers a hit for the life of the request, failed loads or not.",
    source="vllm#49176: the same doomed promotion is submitted in every step",
)
def promises_again(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_PromisesAgain))


class _IndexKeepsTheLost(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._still_listed: set[OffloadKey] = set()

    @override
    def _fail(self, job: _Job, key: OffloadKey, error: JobError) -> None:
        super()._fail(job, key, error)
        if error.kind is JobErrorKind.MISSING:
            self._still_listed.add(key)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return key in self._still_listed or super().lookup(key, req_context)


@mutant(
    "LOOK-4",
    breaks="Does not tell its index of an object that is gone.",
    source="sglang#31315: every request on the page is told True, waits and aborts",
    also=frozenset({"LOOK-1", "DATA-10"}),
)
def index_keeps_the_lost(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_IndexKeepsTheLost))


class _OutageEmpties(FolderTier):
    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        try:
            super().read_block(key, buffer)
        except OSError as error:
            raise BlockMissingError("cannot be read") from error


@mutant(
    "LOOK-4",
    breaks="Takes every object that cannot be read for lost, for ever.",
    source="nixl#1496: status 403 and 5xx taken for 'not found'",
    also=frozenset({"JOB-7", "DATA-11", "EVT-1"}),
)
def outage_empties(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OutageEmpties))


class _HealsAtOnce(DictTier):
    @override
    def _fail(self, job: _Job, key: OffloadKey, error: JobError) -> None:
        super()._fail(job, key, error)
        self._lookups._failed.pop(key, None)


@mutant(
    "LOOK-4",
    breaks="Asks the storage again right after a failed load, and promises what it finds there.",
    source="sglang#31315: exists says yes, get fails, again and again",
)
def heals_at_once(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_HealsAtOnce))


class _ForgivesWithTheBackoff(DictTier):
    @override
    def _fail(self, job: _Job, key: OffloadKey, error: JobError) -> None:
        super()._fail(job, key, error)
        failed = self._lookups._failed
        if key in failed:
            failed[key] = (0, failed[key][1])


@mutant(
    "LOOK-4",
    breaks="Promises a block again to requests that saw its load fail, once the back-off is over.",
    source="vllm#49176: one request can fail on one block for ever",
)
def forgives_with_the_backoff(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_ForgivesWithTheBackoff))


class _DamageIsTransient(FolderTier):
    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        try:
            super().read_block(key, buffer)
        except BlockDamagedError as error:
            raise OSError("cannot be read") from error


@mutant(
    "LOOK-4",
    breaks="Takes a damaged object for one that cannot be read just now.",
    source="vllm#54363: an object with wrong bytes stays where it is",
    also=frozenset({"DATA-10", "INT-1", "EVT-1"}),
)
def damage_is_transient(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DamageIsTransient))


# -- LOOK-5 is an allowance, and its other half a duty ------------------------------------------


class _KeepsStepping(_OneByOne):
    @override
    def open(self) -> None:
        super().open()
        self._unclaimed: dict[str, set[OffloadKey]] = defaultdict(set)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        answer = super().lookup(key, req_context)
        unclaimed = self._unclaimed[req_context.req_id]
        if answer is None:
            unclaimed.add(key)
        else:
            unclaimed.discard(key)
        return answer

    @override
    def has_pending_work(self) -> bool:
        return any(self._unclaimed.values()) or super().has_pending_work()

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._unclaimed.pop(req_context.req_id, None)
        super().on_request_finished(req_context)


@mutant(
    "LOOK-5",
    breaks="Has work pending until every question it answered None has been asked again.",
    source="vllm#35931: chunks that are looked up and never retrieved stay locked",
)
def keeps_stepping(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_KeepsStepping))


# -- LOOK-6 -------------------------------------------------------------------------------------


class _ErrorIsAMiss(FolderTier):
    @override
    def exists(self, key: OffloadKey) -> bool:
        try:
            return super().exists(key)
        except OSError:
            return False


@mutant(
    "LOOK-6",
    breaks="Takes an exception of the client for 'not there', and remembers it.",
    source="vLLM 0.33.0, async_lookup.py: an exception becomes a miss for the whole batch",
)
def error_is_a_miss(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ErrorIsAMiss))


class _CountsErrorsAsMisses(FolderTier):
    @override
    def get_stats(self) -> Mapping[str, float]:
        stats = super().get_stats()
        misses = stats["lookup_misses"] + stats["lookup_errors"]
        return {**stats, "lookup_misses": misses, "lookup_errors": 0.0}


@mutant(
    "LOOK-6",
    breaks="Counts errors as misses.",
    source="LMCache#5119: a failing storage that all measurements call healthy",
)
def counts_errors_as_misses(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CountsErrorsAsMisses))


class _LongBackoff(FolderTier):
    @override
    def open(self) -> None:
        self.config = self.config.model_copy(update={"error_backoff_s": 3600.0})
        super().open()


@mutant(
    "LOOK-6",
    breaks="Stays away from the storage for an hour after an error, whatever it declares.",
    source="vllm#53128: a fixed time that no setting changes",
    also=frozenset({"LOOK-4"}),
)
def long_backoff(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LongBackoff))


class _UnansweredIsAbsent(_WithMemory):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        memory = self._memory[req_context.req_id]
        if key in memory:
            return False
        before = self.get_stats()["lookup_errors"]
        waiting = key in self._lookups._request(req_context.req_id).asked_at
        answer = super().lookup(key, req_context)
        if waiting and self.get_stats()["lookup_errors"] > before:
            memory[key] = False
        return answer


@mutant(
    "LOOK-6",
    breaks="Remembers the False that stands in for an answer in time as if it were one.",
    source="nixl#1496: timeouts cached as misses",
)
def unanswered_is_absent(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_UnansweredIsAbsent))


# -- LOOK-7 -------------------------------------------------------------------------------------


class _RemembersAbsence(_WithMemory):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        memory = self._memory[req_context.req_id]
        if key in memory:
            return False
        before = self.get_stats()["lookup_misses"]
        answer = super().lookup(key, req_context)
        if self.get_stats()["lookup_misses"] > before:
            memory[key] = False
        return answer


@mutant(
    "LOOK-7",
    breaks="Remembers a False for the life of the request, stores or not.",
    source="vllm#49176: answers that outlive what they were about",
    also=frozenset({"LOOK-3", "LOOK-4"}),
)
def remembers_absence(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_RemembersAbsence))


class _LateAnswers(_WithMemory):
    """Asks at once, and hands out one question later what it was answered."""

    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._late: dict[str, dict[OffloadKey, bool]] = defaultdict(dict)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        told, late = self._memory[req_context.req_id], self._late[req_context.req_id]
        if key in late:
            told[key] = late.pop(key)
            return told[key]
        answer = super().lookup(key, req_context)
        if answer is None or key in told:
            return answer
        late[key] = answer
        return None

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._late.pop(req_context.req_id, None)
        super().on_request_finished(req_context)


@mutant(
    "LOOK-7",
    breaks="Hands out an answer from before the store after it.",
    source="vllm#49176: a cached lookup that is not told of what has happened since",
    also=frozenset({"LOOK-3"}),
)
def late_answers(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_LateAnswers))


class _HiddenByItsStore(_OneByOne):
    @override
    def open(self) -> None:
        super().open()
        self._absent: dict[str, set[OffloadKey]] = defaultdict(set)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        absent = self._absent[req_context.req_id]
        if key in self._lookups._storing:
            absent.add(key)
        return False if key in absent else super().lookup(key, req_context)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._absent.pop(req_context.req_id, None)
        super().on_request_finished(req_context)


@mutant(
    "LOOK-7",
    breaks="Answers False while a store is in flight, and remembers that answer.",
    source="LMCache#3532: what was stored in between is never announced",
    also=frozenset({"LOOK-3"}),
)
def hidden_by_its_store(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_HiddenByItsStore))


# -- LOOK-8 -------------------------------------------------------------------------------------


class _PresentAtSubmit(DictTier):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return key in self._storing or super().lookup(key, req_context)


@mutant(
    "LOOK-8",
    breaks="Enters a key in its index when the store is submitted.",
    source="Mooncake#3066: what is read is not what was written, and nothing says so",
)
def present_at_submit(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_PresentAtSubmit))


class _OwnStoresCount(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._own: dict[JobId, tuple[str, frozenset[OffloadKey]]] = {}

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._own[job.job_id] = (job.req_context.req_id, frozenset(job.keys))
        super().submit_store(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = tuple(super().get_finished_jobs())
        for result in results:
            self._own.pop(result.job_id, None)
        return results

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        own = [keys_ for req_id, keys_ in self._own.values() if req_id == req_context.req_id]
        answers = super().lookup_many(keys, req_context)
        return [
            answer or any(key in stored for stored in own) or answer
            for key, answer in zip(keys, answers, strict=True)
        ]


@mutant(
    "LOOK-8",
    breaks="Tells a request that what it is storing itself is there already.",
    source="a request that is preempted comes back for exactly what it has just stored",
)
def own_stores_count(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OwnStoresCount))
