"""Mutants of BLOCK-1: each makes the engine's thread wait, in another call and another way."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderTier, folder_spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import (
        JobMetadata,
        LookupAnswer,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
    )


class _PreparesAtSubmit(FolderTier):
    """Makes the temporary file of a store before it hands the job over."""

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self.check_process()
        if self._store is not None and not self._closed:
            # Without a descriptor to spare it makes the file later.
            with suppress(OSError), open(self._store.folder / "prepared", "wb"):
                pass
        super().submit_store(job)


@mutant(
    "BLOCK-1",
    breaks="A submit creates a file.",
    source="llm-d-kv-cache#457: a submit that reaches for the storage",
)
def submits_create_files(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_PreparesAtSubmit))


class _WaitsForAnswers(FolderTier):
    """Gives the storage a moment to answer, rather than say that it does not know yet."""

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        answers = super().lookup_many(keys, req_context)
        if None in answers:
            self._lookups.end_step()
            threading.Event().wait(0.03)
            answers = super().lookup_many(keys, req_context)
        return answers


@mutant(
    "BLOCK-1",
    breaks="A lookup waits up to 30 ms for the answer of the storage.",
    source="vllm#46713, vllm#45765: ten seconds for the lookups of one step",
)
def lookups_wait_for_answers(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_WaitsForAnswers))


class _FlushesAtTheEnd(FolderTier):
    """Gives the jobs of a request a moment to end."""

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        super().on_request_finished(req_context)
        self._ledger.wait_until_idle(0.05)


@mutant(
    "BLOCK-1",
    breaks="The end of a request waits up to 50 ms for its jobs.",
    source="vllm#45595: a flush that others wait for",
)
def requests_end_with_a_flush(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_FlushesAtTheEnd))


class _ListsEachStep(FolderTier):
    """Looks for what other processes have stored at the end of each step."""

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        super().on_schedule_end(context)
        if self._store is not None and not self._closed:
            with suppress(OSError), os.scandir(self._store.folder / "blocks") as entries:
                self._count = sum(1 for _ in entries)


@mutant(
    "BLOCK-1",
    breaks="Lists the folder in every step.",
    source="vllm#46713: work on the scheduler's thread that grows with the cache",
)
def steps_list_the_storage(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ListsEachStep))


class _ResolvesNames(FolderTier):
    """Asks where its server is for each request."""

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        socket.getaddrinfo("127.0.0.1", 9)
        return super().on_new_request(req_context)


@mutant(
    "BLOCK-1",
    breaks="Resolves the name of its server for each request.",
    source="a name server that does not answer stops the engine for seconds",
)
def requests_resolve_names(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ResolvesNames))


class _DeletesAtOnce(FolderTier):
    """Removes objects where it is told to."""

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        done = threading.Event()
        super().delete(keys)
        if self._sweeper is not None:
            self._sweeper.submit(done.set)
            done.wait()


@mutant(
    "BLOCK-1",
    breaks="A delete waits until the objects are gone.",
    source="vllm#45765: calls that are quick as long as the storage is",
)
def deletes_wait(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DeletesAtOnce))
