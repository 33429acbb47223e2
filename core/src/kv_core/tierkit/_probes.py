"""Background threads that ask the backend whether keys are present.

**Who owns what.** ``_waiting`` and ``_stopping`` are guarded by ``_changed``'s lock, which is
never held while the backend is asked. Threads of their own, so that a backlog of transfers does
not delay lookups.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, final

from kv_core.tierkit._threads import join_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_core.contract import OffloadKey
    from kv_core.tierkit._lookup import Question

__all__ = ["PROBE_BATCH_KEYS", "ProbeThreads", "QuestionQueue"]

logger = logging.getLogger(__name__)

PROBE_BATCH_KEYS: Final = 32
"""Most keys one thread takes up at a time; the rest stays withdrawable."""


@final
class QuestionQueue:
    """Questions in order of posting, at most one a key. Not thread-safe.

    One a key, and withdrawable: while a backend hangs, requests come and go, and the queue must
    not grow with every one of them.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[OffloadKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, questions: Sequence[Question]) -> None:
        """Queue questions."""
        for key, generation in questions:
            self._waiting[key] = generation

    def withdraw(self, key: OffloadKey) -> None:
        """Drop the question about a key, if it is still queued."""
        self._waiting.pop(key, None)

    def take(self) -> list[Question]:
        """Take the next batch, empty when there is none."""
        count = min(PROBE_BATCH_KEYS, len(self._waiting))
        return [self._waiting.popitem(last=False) for _ in range(count)]


@final
class ProbeThreads:
    """Daemon threads that take up questions in batches.

    Args:
        ask: Called with one batch, on one of the threads. Should contain its own errors.
        num_threads: Number of threads.
        name: Prefix of the threads' names.
    """

    def __init__(
        self, ask: Callable[[list[Question]], None], *, num_threads: int, name: str
    ) -> None:
        self._ask = ask
        self._queue = QuestionQueue()
        self._changed = threading.Condition(threading.Lock())
        self._stopping = False
        self._num_threads = num_threads
        self._name = name
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. When one cannot be started, the others are stopped again."""
        try:
            for index in range(self._num_threads):
                thread = threading.Thread(
                    target=self._work, name=f"{self._name}-{index}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.stop(None)
            raise

    def post(self, questions: Sequence[Question]) -> None:
        """Queue questions. Returns at once."""
        with self._changed:
            self._queue.put(questions)
            self._changed.notify()

    def withdraw(self, key: OffloadKey) -> None:
        """Drop the question about a key when no thread has taken it up yet."""
        with self._changed:
            self._queue.withdraw(key)

    def stop(self, timeout_s: float | None) -> bool:
        """Drop queued questions and join the threads. Idempotent.

        Returns:
            Whether all threads have ended.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return join_all(self._threads, timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and not len(self._queue):
                    self._changed.wait()
                if self._stopping:
                    return
                batch = self._queue.take()
                if len(self._queue):
                    self._changed.notify()
            try:
                self._ask(batch)
            except BaseException:
                # A question without an answer runs into its deadline; the thread lives on.
                logger.exception("asking the backend about %d key(s) raised", len(batch))
