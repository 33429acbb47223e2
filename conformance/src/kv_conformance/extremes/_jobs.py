"""Tiers that carry jobs out in an unusual order, or report them in an unusual way."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from kv_conformance.extremes._extreme import extreme
from kv_conformance.reference import FolderHarness, FolderTier, folder_spec
from kv_core.tierkit._pool import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from kv_conformance.harness import Harness, Opening
    from kv_core.contract import JobId, JobResult

    Task = Callable[[], None]


class _LastFirstQueue:
    """In the place of the pool's queue: loads before stores, and of each the youngest first."""

    def __init__(self, max_stores: int) -> None:
        self._loads: OrderedDict[Task, None] = OrderedDict()
        self._stores: OrderedDict[Task, None] = OrderedDict()
        self._max_stores = max_stores
        self._stores_out = 0

    def __len__(self) -> int:
        return len(self._loads) + len(self._stores)

    def put(self, tasks: Iterable[Task], *, loads: bool) -> None:
        (self._loads if loads else self._stores).update(dict.fromkeys(tasks))

    def take(self, *, stores_first: bool) -> tuple[Task, Lane] | None:
        may_store = bool(self._stores) and self._stores_out < self._max_stores
        if self._loads and not (stores_first and may_store):
            return self._loads.popitem(last=True)[0], Lane.LOAD
        if may_store:
            self._stores_out += 1
            return self._stores.popitem(last=True)[0], Lane.STORE
        return None

    def done(self, lane: Lane) -> None:
        if lane is Lane.STORE:
            self._stores_out -= 1

    def withdraw(self, task: Task) -> bool:
        for queue in (self._loads, self._stores):
            if task in queue:
                del queue[task]
                return True
        return False


class _LastFirst(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._pool._queue = cast("Any", _LastFirstQueue(self.config.io_threads - 1))

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return list(super().get_finished_jobs())[::-1]


@extreme(does="Serves the youngest job first, and reports the last result first.")
def last_first(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_LastFirst, name="last-first"))


class _AllOrNothing(FolderTier):
    """Knows outcomes of jobs only."""

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return (replace(result, successful_keys=()) for result in super().get_finished_jobs())


@extreme(does="Never names the keys of a failed job that succeeded, and returns an iterator.")
def all_or_nothing(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_AllOrNothing, name="all-or-nothing"))


class _CancelsAtDrain(FolderTier):
    """Waits for nothing that has not begun."""

    @override
    def drain_jobs(self) -> Collection[JobId]:
        self.check_process()
        self._ledger.cancel("cancelled by a drain")
        return super().drain_jobs()


@extreme(
    does="A drain cancels whatever has not begun, in a tier that is in order, too.",
    relies_on=frozenset({"DRAIN-3"}),
)
def cancels_at_drain(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CancelsAtDrain, name="cancels-at-drain"))


class _OnePollLate(FolderTier):
    """A job is finished when the poll after its last transfer says so."""

    @override
    def open(self) -> None:
        super().open()
        self._late: list[JobResult] = []

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        late, self._late = self._late, list(super().get_finished_jobs())
        return late

    @override
    def drain_jobs(self) -> Collection[JobId]:
        unfinished = super().drain_jobs()
        self._late += super().get_finished_jobs()
        return unfinished

    @override
    def has_pending_work(self) -> bool:
        return bool(self._late) or super().has_pending_work()


@extreme(does="Reports the results of a step in one batch with the next, unless it was drained.")
def one_poll_late(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_OnePollLate, name="one-poll-late"))


class _TwoThreadsHarness(FolderHarness):
    @override
    def settings(self, opening: Opening) -> Mapping[str, Any]:
        return {**super().settings(opening), "io_threads": 2}


@extreme(does="Has two threads for all transfers, one of which never stores.")
def two_threads(workdir: Path) -> Harness:
    """Make the harness."""
    return _TwoThreadsHarness(workdir, folder_spec(name="two-threads"))
