"""The thread that asks NIXL which objects are there, many in one call.

It has an agent of its own. The question blocks for as long as the store takes, and nothing else may
use an agent meanwhile.

**Who owns what.** The agent belongs to the thread. ``_queue`` and ``_stopping`` are guarded by the
lock of ``_changed``. The future of a question is resolved by the thread, once.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, final

from kv_tier_obj._mover import TransferError
from kv_tier_obj._nixl import PLUGIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_tier_obj._nixl import Agent

__all__ = ["ObjectProber"]

_MOST_NAMES: Final = 256
"""Names in one call: enough for NIXL's threads to be busy, and not too many to lose together."""


@final
class ObjectProber:
    """A thread with an agent of its own.

    Args:
        open_agent: Opens the agent; called on the thread.
        name: Name of the thread.

    Attributes:
        opened: Done when the agent is open; fails when it cannot be opened.
    """

    def __init__(self, open_agent: Callable[[], Agent], *, name: str) -> None:
        self.opened: Future[None] = Future()
        self._open_agent = open_agent
        self._changed = threading.Condition(threading.Lock())
        self._queue: list[tuple[Sequence[str], Future[list[bool]]]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    # -- any thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; it opens the agent."""
        self._thread.start()

    def ask(self, names: Sequence[str]) -> Future[list[bool]]:
        """Ask which objects are there. Returns at once; an error is :class:`TransferError`.

        What is asked while an earlier question is on its way goes with the next call. An error is
        that of all names in one call.
        """
        asked: Future[list[bool]] = Future()
        with self._changed:
            self._queue.append((names, asked))
            self._changed.notify()
        return asked

    def stop(self) -> None:
        """Ask nothing more. Returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def is_alive(self) -> bool:
        """Say whether the thread runs."""
        return self._thread.is_alive()

    # -- the thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        if not self.opened.set_running_or_notify_cancel():
            return
        try:
            agent = self._open_agent()
        except BaseException as error:  # noqa: BLE001 - told to whoever waits for the opening
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)
        while (questions := self._take()) is not None:
            self._answer(agent, questions)

    def _take(self) -> list[tuple[Sequence[str], Future[list[bool]]]] | None:
        with self._changed:
            while not self._queue and not self._stopping:
                self._changed.wait()
            if self._stopping:
                for _, asked in self._queue:
                    asked.cancel()
                self._queue.clear()
                return None
            count = names = 0
            for question, _ in self._queue:
                names += len(question)
                if count and names > _MOST_NAMES:
                    break
                count += 1
            taken, self._queue = self._queue[:count], self._queue[count:]
        # Nobody waits any more for what was cancelled.
        return [question for question in taken if question[1].set_running_or_notify_cancel()]

    def _answer(
        self, agent: Agent, questions: list[tuple[Sequence[str], Future[list[bool]]]]
    ) -> None:
        names = [name for question, _ in questions for name in question]
        if not names:
            return
        try:
            found = _query(agent, names)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            for _, asked in questions:
                asked.set_exception(TransferError(f"{type(error).__name__}: {error}"))
            return
        start = 0
        for question, asked in questions:
            stop = start + len(question)
            asked.set_result(found[start:stop])
            start = stop


def _query(agent: Agent, names: Sequence[str]) -> list[bool]:
    found = agent.query_memory([(0, 1, 0, name) for name in names], PLUGIN, PLUGIN)
    if len(found) != len(names):
        raise TransferError(f"{len(found)} answers to {len(names)} questions")
    return [answer is not None for answer in found]
