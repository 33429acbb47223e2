"""An event loop on a thread of its own, and what is fed to it from the calling thread.

**Who owns what.** The loop's thread runs all coroutines and owns ``_running`` and ``_asking``.
The queues are shared with the calling thread under ``_lock``, held for a few instructions only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import socket
import threading
import weakref
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from kv_core.tierkit._doorbell import Doorbell
from kv_core.tierkit._pool import Lane, LoadFirstQueue
from kv_core.tierkit._probes import QuestionQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from kv_core.contract import OffloadKey
    from kv_core.tierkit._jobs import Chunk
    from kv_core.tierkit._lookup import Question

__all__ = ["LoopExecutor", "LoopProber", "LoopThread"]

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_PROBE_TASKS: Final = 4


@final
class LoopThread:
    """Runs one event loop for as long as the tier is open."""

    def __init__(self, name: str) -> None:
        self.loop = _new_loop()
        try:
            self._doorbell = Doorbell(self.loop)
        except BaseException:
            self.loop.close()
            raise
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` was called, after which nothing is run any more."""
        return self._stopping

    def start(self) -> None:
        """Start the thread. Leaves no descriptor behind when that fails."""
        try:
            self._thread.start()
        except BaseException:
            self._close()
            raise

    def post(self, callback: Callable[[], object]) -> None:
        """Have the loop call something soon. Nothing happens after :meth:`stop`."""
        self._doorbell.ring(callback)

    def run(self, coroutine: Coroutine[Any, Any, ResultT], timeout_s: float) -> ResultT:
        """Run a coroutine on the loop and wait for it.

        Raises:
            TimeoutError: It did not end in time; it has been cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"no end after {timeout_s:g} s") from error

    def stop(self, timeout_s: float) -> bool:
        """Cancel what still runs, end the loop and join the thread.

        Returns:
            Whether the thread has ended.
        """
        self._stopping = True
        self.post(self.loop.stop)
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _main(self) -> None:
        while not self._stopping:
            try:
                self.loop.run_forever()
            except BaseException:
                # asyncio passes SystemExit of any task on to the thread. The tier lives on.
                logger.exception("a task of the tier raised out of its event loop")
        try:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            with suppress(RuntimeError):  # no thread to wait with; closing the loop lets it end
                self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self._close()

    def _close(self) -> None:
        self._doorbell.close()
        self.loop.close()


# The loops of this process, for the forks of it.
_loops: Final[weakref.WeakSet[asyncio.SelectorEventLoop]] = weakref.WeakSet()


def _leave_selectors() -> None:
    """Take the loops of the parent off the selectors that a fork shares with it.

    Connections that are collected in the fork, or closed at its end, would be taken out of the
    selector of the parent, which would wait for ever for what comes over them.
    """
    for loop in _loops:
        loop._selector = selectors.SelectSelector()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_leave_selectors)


def _new_loop() -> asyncio.AbstractEventLoop:
    # asyncio's own way leaves the selector's descriptor open when the next one is not to be had.
    selector = selectors.DefaultSelector()
    try:
        # A loop that gets no pair of sockets complains again when it is collected, half made.
        for end in socket.socketpair():
            end.close()
        loop = asyncio.SelectorEventLoop(selector)
    except BaseException:
        selector.close()
        raise
    _loops.add(loop)
    return loop


@final
class LoopExecutor:
    """Runs chunks as tasks, at most ``slots`` at a time and stores in at most half of them."""

    def __init__(
        self,
        thread: LoopThread,
        run: Callable[[Chunk], Coroutine[Any, Any, None]],
        finish: Callable[[Chunk], None],
        *,
        slots: int,
        withdraws_io: bool,
    ) -> None:
        self._thread = thread
        self._run = run
        self._finish = finish
        self._slots = slots
        self._withdraws_io = withdraws_io
        self._lock = threading.Lock()
        self._queue: LoadFirstQueue[Chunk] = LoadFirstQueue(max(1, slots // 2))
        self._woken = False
        self._running: dict[Chunk, asyncio.Task[None]] = {}
        self._stores_first = False

    def submit(self, chunks: Iterable[Chunk], *, loads: bool) -> None:
        """Queue chunks. Returns at once."""
        with self._lock:
            self._queue.put(chunks, loads=loads)
            if self._woken:
                return
            self._woken = True
        self._thread.post(self._pump)

    def withdraw(self, chunk: Chunk) -> bool:
        """Take a chunk back; ``True``: it will never run."""
        with self._lock:
            return self._queue.withdraw(chunk)

    def interrupt(self, chunk: Chunk) -> None:
        """Cancel a running chunk, if the tier can withdraw I/O. Returns at once."""
        if self._withdraws_io:
            self._thread.post(partial(self._cancel, chunk))

    def _cancel(self, chunk: Chunk) -> None:
        task = self._running.get(chunk)
        if task is not None:
            task.cancel()

    def _pump(self) -> None:
        with self._lock:
            self._woken = False
        while len(self._running) < self._slots:
            # In turn, so that neither direction starves.
            self._stores_first = not self._stores_first
            with self._lock:
                taken = self._queue.take(stores_first=self._stores_first)
            if taken is None:
                return
            chunk, lane = taken
            task = self._thread.loop.create_task(self._run(chunk))
            self._running[chunk] = task
            task.add_done_callback(partial(self._ended, chunk, lane))

    def _ended(self, chunk: Chunk, lane: Lane, task: asyncio.Task[None]) -> None:
        del self._running[chunk]
        with self._lock:
            self._queue.done(lane)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("a chunk of a job raised", exc_info=error)
        self._finish(chunk)
        self._pump()


@final
class LoopProber:
    """Asks questions in batches, a few batches at a time."""

    def __init__(
        self, thread: LoopThread, ask: Callable[[list[Question]], Coroutine[Any, Any, None]]
    ) -> None:
        self._thread = thread
        self._ask = ask
        self._lock = threading.Lock()
        self._queue = QuestionQueue()
        self._asking: set[asyncio.Task[None]] = set()
        self._ended_for_good = False

    def post(self, questions: Sequence[Question]) -> None:
        """Queue questions. Returns at once."""
        with self._lock:
            self._queue.put(questions)
        self._thread.post(self._pump)

    def withdraw(self, key: OffloadKey) -> None:
        """Drop the question about a key when it has not been taken up yet."""
        with self._lock:
            self._queue.withdraw(key)

    async def end(self) -> None:
        """Take up no more questions and cancel those in flight. On the loop."""
        self._ended_for_good = True
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(tuple(self._asking))

    def _pump(self) -> None:
        while not self._ended_for_good and len(self._asking) < _PROBE_TASKS:
            with self._lock:
                batch = self._queue.take()
            if not batch:
                return
            task = self._thread.loop.create_task(self._ask(batch))
            self._asking.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # A question without an answer runs into its deadline.
            logger.error("asking the backend raised", exc_info=error)
        self._pump()
