"""Tiers with unusual answers to lookups and requests."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kv_conformance.extremes._extreme import extreme
from kv_conformance.reference import (
    DictHarness,
    DictTier,
    FolderHarness,
    FolderTier,
    dict_spec,
    folder_spec,
)
from kv_conformance.reference._folder_harness import ALL_BUT_WITHDRAWAL
from kv_core.contract import Capability, OffloadPolicy, RequestOffloadingContext

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness
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

_TIMES: Final = 3
_QUESTIONS_A_STEP: Final = 16
_REQUESTS_REMEMBERED: Final = 4000


# -- when answers come ----------------------------------------------------------------------------


class _NoneFirst(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._asked: dict[str, dict[OffloadKey, int]] = defaultdict(dict)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        asked = self._asked[req_context.req_id]
        asked[key] = asked.get(key, 0) + 1
        return super().lookup(key, req_context) if asked[key] > _TIMES else None

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._asked.pop(req_context.req_id, None)
        super().on_request_finished(req_context)


@extreme(
    does="Answers None three times before it begins to find out.",
    relies_on=frozenset({"LOOK-5"}),
)
def none_first(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_NoneFirst))


class _FewQuestionsAStep(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._left = _QUESTIONS_A_STEP
        self._taken: dict[str, set[OffloadKey]] = defaultdict(set)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        taken = self._taken[req_context.req_id]
        if key not in taken:
            if not self._left:
                return None
            self._left -= 1
            taken.add(key)
        return super().lookup(key, req_context)

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        return [self.lookup(key, req_context) for key in keys]

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        super().on_schedule_end(context)
        self._left = _QUESTIONS_A_STEP

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._taken.pop(req_context.req_id, None)
        super().on_request_finished(req_context)


@extreme(
    does="Takes up sixteen questions a step, and none of them before the step ends.",
    relies_on=frozenset({"LOOK-5"}),
)
def few_questions_a_step(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_FewQuestionsAStep))


class _AnswersFromAnIndex(FolderTier):
    """What it has seen itself is all there is: no sharing."""

    answers_at_once = True

    @override
    def open(self) -> None:
        self._index: set[bytes] = set()
        super().open()
        self._index.update(key for key, _ in self.store.list_objects())

    @override
    def exists(self, key: OffloadKey) -> bool:
        return key in self._index

    @override
    def note_stored(self, key: OffloadKey) -> None:
        self._index.add(key)
        super().note_stored(key)

    @override
    def note_removed(self, key: OffloadKey) -> None:
        self._index.discard(key)
        super().note_removed(key)

    @override
    def retire(self, key: OffloadKey) -> None:
        self._index.discard(key)
        super().retire(key)

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        super().delete(keys)
        self._index.difference_update(keys)


@extreme(
    does="Answers every lookup at once, from an index in memory, whatever the storage does.",
    relies_on=frozenset({"LOOK-2"}),
)
def answers_from_an_index(workdir: Path) -> Harness:
    """Make the harness."""
    capabilities = ALL_BUT_WITHDRAWAL - {Capability.SHARED}
    return FolderHarness(workdir, folder_spec(_AnswersFromAnIndex, capabilities=capabilities))


# -- what is remembered ---------------------------------------------------------------------------


class _RemembersMisses(FolderTier):
    """Asks about an absent key once in the life of a request, and ends that with its own stores."""

    @override
    def open(self) -> None:
        super().open()
        self._absent: dict[str, set[OffloadKey]] = defaultdict(set)
        self._stores: dict[JobId, tuple[OffloadKey, ...]] = {}

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        absent = self._absent[req_context.req_id]
        if key in absent:
            return False
        before = self.get_stats()["lookup_misses"]
        answer = super().lookup(key, req_context)
        if self.get_stats()["lookup_misses"] > before:
            absent.add(key)
        return answer

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        return [self.lookup(key, req_context) for key in keys]

    @override
    def submit_store(self, job: JobMetadata) -> None:
        super().submit_store(job)
        self._stores[job.job_id] = job.keys

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = tuple(super().get_finished_jobs())
        for result in results:
            keys = self._stores.pop(result.job_id, ())
            for absent in self._absent.values():
                absent.difference_update(keys if result.success else result.successful_keys)
        return results

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._absent.pop(req_context.req_id, None)
        super().on_request_finished(req_context)


@extreme(
    does="Remembers every miss for the life of the request, until it stores the block itself.",
    relies_on=frozenset({"LOOK-9"}),
)
def remembers_misses(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_RemembersMisses))


class _RemembersEndedRequests(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._ended: deque[tuple[str, float]] = deque(maxlen=_REQUESTS_REMEMBERED)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._ended.append((req_context.req_id, self._clock()))
        super().on_request_finished(req_context)


@extreme(
    does="Keeps a log of the last 4000 requests that have ended.",
    relies_on=frozenset({"REQ-2"}),
)
def remembers_ended_requests(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_RemembersEndedRequests))


# -- what is asked for ----------------------------------------------------------------------------


class _WantsEveryBlock(DictTier):
    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        super().on_new_request(req_context)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)


@extreme(
    does="Asks to be offered every block of every request, also those that are stored already.",
    relies_on=frozenset({"REQ-1"}),
)
def wants_every_block(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_WantsEveryBlock))
