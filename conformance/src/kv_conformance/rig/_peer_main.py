"""What runs in the process of a peer: a rig of its own, driven over a pipe.

Started by :mod:`~kv_conformance.rig._peer` in a fresh interpreter. One thread; between two steps of
stores that go on in the background it looks for the next command.
"""

from __future__ import annotations

import traceback
from collections import deque
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, cast, final

from kv_conformance.harness import HarnessError
from kv_conformance.rig._budget import Budget, OutOfTime
from kv_conformance.rig._findings import Broken
from kv_conformance.rig._peer import PeerProblem
from kv_conformance.rig._rigs import Rigs, SubjectType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_conformance.harness import Harness
    from kv_conformance.rig._findings import Violation
    from kv_conformance.rig._peer import PeerOrder
    from kv_conformance.rig._rig import Rig
    from kv_core.contract import JobId, JobResult, OffloadKey

__all__ = ["run_peer"]

_PAUSE_S: Final = 0.001
_PATIENCE: Final = 20


def run_peer(descriptor: int) -> None:
    """Serve the other end of a pipe until it says so, or is closed."""
    _Peer(Connection(descriptor)).serve()


@final
class _Peer:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._storing: _Storing | None = None

    def serve(self) -> None:
        rigs: Rigs | None = None
        try:
            rigs, rig = self._open(self._pipe.recv())
            self._pipe.send(("answer", None))
            while (command := self._next_command()) is not None:
                method, arguments = command
                if method == "close":
                    break
                self._pipe.send(("answer", getattr(self, f"_{method}")(rig, *arguments)))
        except EOFError:
            # The suite is gone.
            return
        except BaseException as error:  # noqa: BLE001 - handed over to the suite
            self._pipe.send(("problem", _problem(error)))
        if rigs is not None:
            try:
                rigs.close()
            except BaseException as error:  # noqa: BLE001 - handed over to the suite
                self._pipe.send(("problem", _problem(error)))
        self._pipe.send(("closed", None))

    def _open(self, order: PeerOrder) -> tuple[Rigs, Rig]:
        # Imported here: the runner imports the rig.
        from kv_conformance.run._subjects import load_spec

        spec = load_spec(order.reference, order.workdir)
        subject_type = SubjectType(
            name=spec.type,
            origin=order.reference,
            spec=spec,
            # A peer looks at nothing behind the tier's back.
            harness=cast("Harness", None),
            reference=order.reference,
            workdir=order.workdir,
        )
        rigs = Rigs(subject_type, "peer", Budget(scale=order.scale), self._report)
        return rigs, rigs.open(**order.options)

    def _report(self, violation: Violation) -> None:
        self._pipe.send(("violation", violation))

    def _next_command(self) -> tuple[str, tuple[Any, ...]] | None:
        while self._storing is not None:
            moved = self._storing.advance()
            if self._storing.done:
                self._storing = None
            if self._pipe.poll(0 if moved else _PAUSE_S):
                break
        command: tuple[str, tuple[Any, ...]] | None = self._pipe.recv()
        return command

    # -- commands -------------------------------------------------------------------------------

    def _stored(self, rig: Rig, keys: Sequence[OffloadKey]) -> None:
        rig.stored(keys)

    def _store(self, rig: Rig, keys: Sequence[OffloadKey]) -> tuple[OffloadKey, ...]:
        stored: list[OffloadKey] = []
        for start in range(0, len(keys), rig.job_keys):
            part = keys[start : start + rig.job_keys]
            result = rig.store(part)
            stored.extend(part if result.success else result.successful_keys)
        return tuple(stored)

    def _load(self, rig: Rig, keys: Sequence[OffloadKey]) -> tuple[OffloadKey, ...]:
        loaded: list[OffloadKey] = []
        for start in range(0, len(keys), rig.job_keys):
            loaded.extend(rig.load(keys[start : start + rig.job_keys]).keys)
        return tuple(loaded)

    def _resolve(self, rig: Rig, keys: Sequence[OffloadKey]) -> list[bool]:
        # An own request for each question: an old one may remember.
        request = rig.new_request()
        answers = rig.resolve(keys, request)
        rig.finish_request(request)
        return answers

    def _begin_storing(self, rig: Rig, keys: Sequence[OffloadKey], at_once: int) -> None:
        self._storing = _Storing(rig, self._pipe, keys, at_once)


@final
class _Storing:
    """Stores keys one a job, a few jobs at a time, and tells the suite of each."""

    def __init__(
        self, rig: Rig, pipe: Connection, keys: Sequence[OffloadKey], at_once: int
    ) -> None:
        self._rig = rig
        self._pipe = pipe
        self._at_once = at_once
        self._waiting = deque((key, 1) for key in keys)
        self._running: dict[JobId, tuple[OffloadKey, int]] = {}

    @property
    def done(self) -> bool:
        return not self._waiting and not self._running

    def advance(self) -> bool:
        """Go through one step; return whether a job has ended."""
        while self._waiting and len(self._running) < self._at_once:
            key, attempt = self._waiting.popleft()
            self._running[self._rig.submit_store([key])] = (key, attempt)
        ended = self._rig.step()
        for result in ended:
            if (found := self._running.pop(result.job_id, None)) is not None:
                self._end(result, *found)
        return bool(ended)

    def _end(self, result: JobResult, key: OffloadKey, attempt: int) -> None:
        if result.success or key in result.successful_keys:
            self._pipe.send(("reported", key))
            return
        # Stores may fail, but not for ever.
        self._pipe.send(("failed", result.error))
        if attempt < _PATIENCE:
            self._waiting.append((key, attempt + 1))


def _problem(error: BaseException) -> PeerProblem:
    if isinstance(error, Broken):
        return PeerProblem("broken", error.message, error.clause)
    if isinstance(error, OutOfTime):
        return PeerProblem("late", error.message, error.clause)
    if isinstance(error, HarnessError):
        return PeerProblem("harness", str(error))
    return PeerProblem("harness", "".join(traceback.format_exception(error)))
