"""Mutants of the MET clauses."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_conformance.reference._dict_tier import _Job
    from kv_core.contract import (
        JobError,
        LookupAnswer,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
        TierContext,
    )


class _Miscounting(DictTier):
    """Has misses on top of those that there were."""

    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self.extra_misses = 0

    @override
    def get_stats(self) -> Mapping[str, float]:
        stats = super().get_stats()
        return {
            **stats,
            "lookup_queries": stats["lookup_queries"] + self.extra_misses,
            "lookup_misses": stats["lookup_misses"] + self.extra_misses,
        }


class _CountsEveryQuestion(_Miscounting):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        before = super().get_stats()["lookup_queries"]
        answer = super().lookup(key, req_context)
        if answer is False and super().get_stats()["lookup_queries"] == before:
            self.extra_misses += 1
        return answer


@mutant(
    "MET-1",
    breaks="Counts a miss for every question, also when a request repeats it.",
    source="vllm#30522: external queries counted twice",
)
def counts_every_question(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_CountsEveryQuestion))


class _CountsTheUnanswered(_Miscounting):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        answer = super().lookup(key, req_context)
        if answer is None:
            self.extra_misses += 1
        return answer


@mutant(
    "MET-1",
    breaks="Counts None as a miss.",
    source="vllm#57596: skipped requests counted as misses",
    also=frozenset({"LOOK-6"}),
)
def counts_the_unanswered(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_CountsTheUnanswered))


class _FailedLoadStaysAHit(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self.extra_hits = 0.0

    @override
    def _fail(self, job: _Job, key: OffloadKey, error: JobError) -> None:
        before = self._lookups.stats()["lookup_hits"]
        super()._fail(job, key, error)
        self.extra_hits += before - self._lookups.stats()["lookup_hits"]

    @override
    def get_stats(self) -> Mapping[str, float]:
        stats = super().get_stats()
        return {
            **stats,
            "lookup_hits": stats["lookup_hits"] + self.extra_hits,
            "lookup_misses": stats["lookup_misses"] - self.extra_hits,
        }


@mutant(
    "MET-1",
    breaks="Leaves a hit a hit when its load fails.",
    source="dynamo#15079: a full hit in the measurements while the transfer had failed",
)
def failed_load_stays_a_hit(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_FailedLoadStaysAHit))


class _TellsFailuresLater(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._told = {"store_failures": 0.0, "load_failures": 0.0}

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        stats = super().get_stats()
        self._told = {name: stats[name] for name in self._told}
        super().on_schedule_end(context)

    @override
    def get_stats(self) -> Mapping[str, float]:
        return {**super().get_stats(), **self._told}


@mutant(
    "MET-1",
    breaks="Measures at the end of a step what the next one is told of.",
    source="LMCache#5119: a failure must show within one poll",
)
def tells_failures_later(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_TellsFailuresLater))


class _SilentFailures(FolderTier):
    @override
    def get_stats(self) -> Mapping[str, float]:
        stats = super().get_stats()
        return {name: value for name, value in stats.items() if name.startswith("lookup_")}


@mutant(
    "MET-1",
    breaks="Counts lookups and nothing that fails.",
    source="LMCache#5119: no measurement of failures at all",
    also=frozenset({"JOB-5", "INT-1"}),
)
def silent_failures(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_SilentFailures))
