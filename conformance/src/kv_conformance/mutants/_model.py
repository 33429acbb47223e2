"""Mutants that need a history: of all tests, the model test alone goes far enough."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import DictHarness, DictTier, dict_spec
from kv_core.contract import JobError, JobErrorKind

if TYPE_CHECKING:
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import (
        JobMetadata,
        OffloadKey,
        ReqContext,
        TierContext,
    )


class _Resumes(DictTier):
    """Takes a short object for an upload that was interrupted, and goes on with it."""

    @override
    def _store_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        before = self.store.objects.get(key, b"")
        error = super()._store_block(key, block_id)
        data = self.store.objects[key]
        if len(before) < len(data):
            self.store.objects[key] = before + data[: len(data) - len(before)]
        return error


@mutant(
    "DATA-1",
    breaks="Resumes what looks like an unfinished object, with the wrong part of the block.",
    source="resumed uploads: the offset is counted in the object and not in the block",
)
def resumes_at_the_wrong_place(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_Resumes))


class _EndsWithItsRequest(DictTier):
    """Drops a block when the request ends that stored it a second time."""

    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._stores: Counter[OffloadKey] = Counter()
        self._owners: dict[OffloadKey, str] = {}
        self._hidden: set[OffloadKey] = set()

    @override
    def submit_store(self, job: JobMetadata) -> None:
        for key in job.keys:
            self._stores[key] += 1
            self._hidden.discard(key)
            if self._stores[key] > 1 and self._owners.get(key) != job.req_context.req_id:
                self._owners[key] = job.req_context.req_id
        super().submit_store(job)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        super().on_request_finished(req_context)
        self._hidden.update(
            key for key, owner in self._owners.items() if owner == req_context.req_id
        )

    @override
    def _load_block(self, key: OffloadKey, block_id: int) -> JobError | None:
        if key in self._hidden:
            return JobError(JobErrorKind.MISSING, "nobody holds the block any more")
        return super()._load_block(key, block_id)


@mutant(
    "DATA-1",
    breaks="Lets go of a block with the end of the request that was the second to store it.",
    source="ownership by request: references are counted for one owner too few",
)
def ends_with_its_request(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_EndsWithItsRequest))
