"""Threads that serve loads before stores, with one thread always free of stores.

**Who owns what.** The queue and the counters are guarded by ``_changed``'s lock, which is never
held while a task runs, so the submitting thread never waits for I/O. A task belongs to the queue
until a thread takes it or ``withdraw`` gets it back; exactly one of the two happens.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Generic, TypeVar, final

from kv_core.tierkit._threads import join_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Lane", "LoadFirstPool", "LoadFirstQueue"]

logger = logging.getLogger(__name__)

TaskT = TypeVar("TaskT")


class Lane(Enum):
    """What a task is, for the order in which tasks are served."""

    LOAD = auto()
    STORE = auto()
    CHORE = auto()


@final
class LoadFirstQueue(Generic[TaskT]):
    """First-in-first-out queues, and a limit on how many stores run at the same time.

    The limit is what keeps a load from waiting behind a backlog of stores: whoever serves the
    queue with more hands than the limit always has a hand for loads. Chores go before both.
    Not thread-safe.

    Args:
        max_stores: Most stores that are out at the same time.
        max_stores_beside_loads: The same while a load is out or waits; default the same number.
    """

    def __init__(self, max_stores: int, max_stores_beside_loads: int | None = None) -> None:
        self._max_stores = max_stores
        self._max_stores_beside_loads = min(max_stores, max_stores_beside_loads or max_stores)
        # Ordered by submission; a dict rather than a deque, so that withdrawing is cheap.
        self._loads: OrderedDict[TaskT, None] = OrderedDict()
        self._stores: OrderedDict[TaskT, None] = OrderedDict()
        self._chores: deque[TaskT] = deque()
        self._out = dict.fromkeys(Lane, 0)

    def __len__(self) -> int:
        return len(self._chores) + len(self._loads) + len(self._stores)

    def put(self, tasks: Iterable[TaskT], *, loads: bool) -> None:
        """Queue tasks of one direction, each a distinct object."""
        queue = self._loads if loads else self._stores
        for task in tasks:
            queue[task] = None

    def put_chore(self, task: TaskT) -> None:
        """Queue what is neither a load nor a store."""
        self._chores.append(task)

    def take(self, *, stores_first: bool) -> tuple[TaskT, Lane] | None:
        """Take the next task, or ``None`` when there is none that may run now.

        Returns:
            The task and its lane, which :meth:`done` is told when the task has ended.
        """
        found = self._take(stores_first)
        if found is not None:
            self._out[found[1]] += 1
        return found

    def _take(self, stores_first: bool) -> tuple[TaskT, Lane] | None:
        if self._chores:
            return self._chores.popleft(), Lane.CHORE
        beside_loads = self._loads or self._out[Lane.LOAD]
        most = self._max_stores_beside_loads if beside_loads else self._max_stores
        may_store = bool(self._stores) and self._out[Lane.STORE] < most
        if self._loads and not (stores_first and may_store):
            return self._loads.popitem(last=False)[0], Lane.LOAD
        if may_store:
            return self._stores.popitem(last=False)[0], Lane.STORE
        return None

    def done(self, lane: Lane) -> None:
        """Note that a task that was taken has ended."""
        self._out[lane] -= 1

    def withdraw(self, task: TaskT) -> bool:
        """Remove a load or store that nobody has taken yet. ``False``: it was taken."""
        for queue in (self._loads, self._stores):
            if task in queue:
                del queue[task]
                return True
        return False


@final
class LoadFirstPool:
    """Daemon threads over a :class:`LoadFirstQueue`.

    Half of the threads prefer loads and half prefer stores, so neither direction starves the
    other; with work of one kind only, all threads serve it, except that one thread is never
    busy with a store.

    A task is called without arguments and should contain its own errors; what it raises all the
    same is logged, and the thread lives on.

    Args:
        num_threads: Number of threads, at least two.
        name: Prefix of the threads' names.
        max_stores: Most stores that run at the same time; default all threads but one.
        max_stores_beside_loads: The same while there are loads; default the same number.

    Attributes:
        num_threads: Number of threads.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        name: str,
        max_stores: int | None = None,
        max_stores_beside_loads: int | None = None,
    ) -> None:
        if num_threads < 2:
            raise ValueError(
                f"a load-first pool needs at least 2 threads, one of them for loads, found "
                f"{num_threads}"
            )
        self.num_threads = num_threads
        self._queue: LoadFirstQueue[Callable[[], None]] = LoadFirstQueue(
            num_threads - 1 if max_stores is None else max(1, min(max_stores, num_threads - 1)),
            max_stores_beside_loads,
        )
        self._changed = threading.Condition(threading.Lock())
        self._stopping = False
        self._name = name
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. When one cannot be started, the others are stopped again."""
        try:
            for index in range(self.num_threads):
                thread = threading.Thread(
                    target=self._work,
                    args=(index % 2 == 1,),
                    name=f"{self._name}-{index}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.stop(None)
            raise

    def submit(self, tasks: Iterable[Callable[[], None]], *, loads: bool) -> None:
        """Queue tasks, each a distinct object. Returns at once."""
        with self._changed:
            self._queue.put(tasks, loads=loads)
            # One wake-up; each thread that takes a task wakes the next. The submitter is the
            # engine's scheduler, whose time is dearer than that of these threads.
            self._changed.notify()

    def submit_chore(self, task: Callable[[], None]) -> None:
        """Queue something to be done before all loads and stores. Returns at once."""
        with self._changed:
            self._queue.put_chore(task)
            self._changed.notify()

    def withdraw(self, task: Callable[[], None]) -> bool:
        """Take a task back. ``True``: it will never run. ``False``: it runs or has run."""
        with self._changed:
            return self._queue.withdraw(task)

    def stop(self, timeout_s: float | None) -> bool:
        """Let running tasks end, drop queued ones and join the threads. Idempotent.

        Args:
            timeout_s: Longest wait in seconds, or ``None``.

        Returns:
            Whether all threads have ended.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return join_all(self._threads, timeout_s)

    def _work(self, stores_first: bool) -> None:
        ended: Lane | None = None
        while True:
            with self._changed:
                if ended is not None:
                    self._queue.done(ended)
                while (taken := self._take(stores_first=stores_first)) is None:
                    if self._stopping:
                        return
                    self._changed.wait()
                if len(self._queue):
                    self._changed.notify()
            task, ended = taken
            try:
                task()
            except BaseException:
                # Nothing a task does may cost the pool a thread.
                logger.exception("a task of the pool raised")
            # A waiting thread must not keep its last task, and what that refers to, alive.
            del task, taken

    def _take(self, *, stores_first: bool) -> tuple[Callable[[], None], Lane] | None:
        return None if self._stopping else self._queue.take(stores_first=stores_first)
