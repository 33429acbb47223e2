"""The workers of a replay as processes of their own.

All state belongs to the replay's thread. Each process is started anew (never forked from this one,
whose tiers have threads), leads a session of its own, so that Ctrl-C in a terminal reaches the
scheduler only, and has one connection. Closing the connection ends the process.
"""

from __future__ import annotations

import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from functools import reduce
from multiprocessing import Pipe
from multiprocessing.connection import wait
from os import dup
from typing import TYPE_CHECKING, Any, Final, final

from kv_core.connector import ConnectorOutput, memory_limit_bytes
from kv_core.errors import ConfigError, RegionError, WorkerError
from kv_core.units import format_bytes
from kv_core.workload.replay._messages import BlockCheck, WorkerFailure, WorkerStart
from kv_core.workload.replay._worker import StepOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from kv_core.connector import RegionRole
    from kv_core.engine import OffloadingConfig
    from kv_core.workload.replay._config import ReplayConfig
    from kv_core.workload.replay._report import Stopwatch
    from kv_core.workload.replay._worker import StepOrders

__all__ = ["WorkerProcesses"]

COMMAND: Final = (sys.executable, "-m", "kv_core.workload.replay._worker_main")
"""Starts one worker; the number of its connection's descriptor follows."""

_SLICE_S: Final = 0.1
_PATIENCE_AT_START_S: Final = 60.0
# The primary tier is there before they start. If it is not, the scheduler has ended.
_ATTACHING_S: Final = 2.0
# Each process makes the pages of the primary tier present for itself.
_POPULATED_BYTES_PER_S: Final = 2**29
_PATIENCE_AT_END_S: Final = 10.0
_PATIENCE_FOR_STATUS_S: Final = 5.0
# The system counts some waits in milliseconds, of 31 bits.
_LONGEST_PATIENCE_S: Final = 7 * 86400.0
# An interpreter with numpy and the engine, before it has any KV cache.
_PROCESS_BYTES: Final = 32 * 2**20
_TIMEVAL: Final = struct.Struct("@ll")


@final
class WorkerProcesses:
    """One process per rank, which the scheduler leads step by step.

    Attributes:
        devices: Where the GPU pool of each worker is.
        process_ids: Of each worker.
    """

    def __init__(
        self,
        config: ReplayConfig,
        offloading: OffloadingConfig,
        role: RegionRole,
        wait_until_attached: Callable[[float], None],
        stopwatch: Stopwatch,
    ) -> None:
        """Start all workers and wait until they are ready.

        Args:
            config: Sizes of the replay, and how long a worker may take for one order
                (``stall_deadline_s``).
            offloading: As the scheduler's.
            role: The scheduler's role.
            wait_until_attached: Waits so many seconds for the workers to attach to the primary
                tier and raises a ``RegionError`` if they have not.
            stopwatch: Where the time that the workers take is added up.

        Raises:
            ConfigError: So many processes would not fit into memory. None was started.
            WorkerError: A worker did not get ready. All of them have been ended.
        """
        _require_room(config.workers)
        self._stopwatch = stopwatch
        self._patience_s = min(config.stall_deadline_s, _LONGEST_PATIENCE_S)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        start_s = min(
            _PATIENCE_AT_START_S + config.cpu_bytes / _POPULATED_BYTES_PER_S, _LONGEST_PATIENCE_S
        )
        ends_at = time.monotonic() + start_s
        try:
            for start in WorkerStart.for_each(config, offloading, role, deadline_s=_ATTACHING_S):
                self._launch(start)
            self._await_attachment(wait_until_attached, ends_at)
            ready = self._collect(max(0.0, ends_at - time.monotonic()), "get ready")
        except BaseException:
            self.shutdown()
            raise
        self.devices = tuple(answer.device for answer in ready)
        self.process_ids = tuple(process.pid for process in self._processes)

    def _launch(self, start: WorkerStart) -> None:
        ours, theirs = Pipe()
        self._connections.append(ours)
        with theirs:
            _limit_waits(ours, self._patience_s)
            descriptor = theirs.fileno()
            self._processes.append(
                subprocess.Popen(  # noqa: S603 - our own command
                    [*COMMAND, str(descriptor)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(descriptor,),
                    start_new_session=True,
                )
            )
        self._send(len(self._processes) - 1, pickle.dumps(start))

    def _await_attachment(
        self, wait_until_attached: Callable[[float], None], ends_at: float
    ) -> None:
        """Wait for the workers to attach, and notice at once when one of them fails instead."""
        while True:
            try:
                wait_until_attached(_SLICE_S)
            except RegionError as error:
                for rank, process in enumerate(self._processes):
                    if process.poll() is not None:
                        raise self._ended(rank) from None
                if time.monotonic() >= ends_at:
                    raise WorkerError(
                        f"the workers did not get ready in time: {error.message}", rank=None
                    ) from error
            else:
                return

    # -- orders ---------------------------------------------------------------------------------

    def run_step(self, orders: StepOrders) -> StepOutcome:
        """Run one step on all workers; their reports are added up.

        Raises:
            WorkerError: A worker failed, ended, or took too long.
        """
        with self._stopwatch.measure("waiting for workers"):
            outcomes = self._order(orders)
        return StepOutcome(
            reduce(ConnectorOutput.aggregate, (outcome.output for outcome in outcomes)),
            [transfer for outcome in outcomes for transfer in outcome.transfers],
        )

    def count_wrong_bytes(self, blocks: Sequence[tuple[int, bytes]]) -> list[list[int]]:
        """Have each worker compare its pages of GPU blocks with what their keys demand.

        Raises:
            WorkerError: A worker failed, ended, or took too long.
        """
        return [counts for group in self._order(BlockCheck(tuple(blocks))) for counts in group]

    def _order(self, message: object) -> list[Any]:
        """Send a message to all workers and return their answers, in rank order."""
        packed = pickle.dumps(message)
        for rank in range(len(self._processes)):
            self._send(rank, packed)
        return self._collect(self._patience_s, "carry out an order")

    def _send(self, rank: int, packed: bytes) -> None:
        try:
            self._connections[rank].send_bytes(packed)
        except BlockingIOError:
            raise self._too_late([rank], self._patience_s, "take an order") from None
        except ConnectionError:
            raise self._ended(rank) from None

    def _collect(self, patience_s: float, deed: str) -> list[Any]:
        answers: dict[int, Any] = {}
        awaited = {connection: rank for rank, connection in enumerate(self._connections)}
        ends_at = time.monotonic() + patience_s
        while awaited:
            ready = wait(list(awaited), max(0.0, ends_at - time.monotonic()))
            if not ready:
                raise self._too_late(sorted(awaited.values()), patience_s, deed)
            for connection in ready:
                rank = awaited.pop(connection)  # type: ignore[call-overload] # only connections
                answers[rank] = self._receive(rank, deed)
        return [answers[rank] for rank in sorted(answers)]

    def _receive(self, rank: int, deed: str) -> Any:
        try:
            answer = self._connections[rank].recv()
        except BlockingIOError:
            raise self._too_late([rank], self._patience_s, deed) from None
        except (EOFError, ConnectionError):
            raise self._ended(rank) from None
        if isinstance(answer, WorkerFailure):
            raise WorkerError(f"{self._name(rank)} failed: {answer.reason}", rank=rank)
        return answer

    # -- what goes wrong ------------------------------------------------------------------------

    def _name(self, rank: int) -> str:
        return f"worker {rank} (process {self._processes[rank].pid})"

    def _too_late(self, ranks: list[int], patience_s: float, deed: str) -> WorkerError:
        names = ", ".join(map(self._name, ranks))
        for rank in ranks:
            # Whoever does not answer would not hear that it is to end, either.
            self._processes[rank].kill()
        return WorkerError(
            f"{names} did not {deed} within {patience_s:g} s and was killed. Look whether the "
            "machine was out of memory or the process was stopped",
            rank=ranks[0],
        )

    def _ended(self, rank: int) -> WorkerError:
        """Say how a worker ended. It may have told the reason before."""
        connection = self._connections[rank]
        try:
            if connection.poll():
                answer = connection.recv()
                if isinstance(answer, WorkerFailure):
                    return WorkerError(f"{self._name(rank)} failed: {answer.reason}", rank=rank)
        except (EOFError, OSError):
            # It had nothing to say.
            pass
        try:
            status = self._processes[rank].wait(_PATIENCE_FOR_STATUS_S)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = f"ended with status {status}" if status >= 0 else f"was ended by {_name(-status)}"
        return WorkerError(
            f"{self._name(rank)} {how} during the replay. Look at what it wrote before this; if "
            "the system killed it for lack of memory, give the pools fewer or smaller blocks "
            "(--gpu-blocks, --block-bytes)",
            rank=rank,
        )

    # -- the end --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End all workers; those that do not end by themselves are killed. Idempotent."""
        while self._connections:
            self._connections.pop().close()
        ends_at = time.monotonic() + _PATIENCE_AT_END_S
        while self._processes:
            process = self._processes[-1]
            try:
                process.wait(max(0.0, ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._processes.pop()


def _require_room(workers: int) -> None:
    """Refuse a number of processes, likely a slip, that would leave nothing for anybody else.

    Raises:
        ConfigError: Their interpreters alone take more memory than there is.
    """
    needed_bytes, limit_bytes = workers * _PROCESS_BYTES, memory_limit_bytes()
    if needed_bytes > limit_bytes:
        raise ConfigError(
            f"'workers' is {workers}, but so many processes take {format_bytes(needed_bytes)} "
            "before they have any KV cache, and there are "
            f"{format_bytes(limit_bytes)} of memory here. Use at most "
            f"{limit_bytes // _PROCESS_BYTES} (--workers)",
            setting="workers",
        )


def _limit_waits(connection: Connection, patience_s: float) -> None:
    """Let single reads and writes fail when the other end does nothing for so long.

    Waiting for a connection to become readable is not enough: a process can stop in the middle
    of a message, and before it has taken one that fills the buffers.
    """
    seconds = int(patience_s)
    limit = _TIMEVAL.pack(seconds, max(1, int((patience_s - seconds) * 1e6)))
    with socket.socket(fileno=dup(connection.fileno())) as twin:
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
