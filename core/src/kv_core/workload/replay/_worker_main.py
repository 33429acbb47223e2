"""The process of one worker of a replay: ``python -m kv_core.workload.replay._worker_main FD``.

Everything happens on the main thread, one message at a time. The process ends when the other end
of its connection is closed, so it never outlives its scheduler, however that one ended.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from kv_core.connector import TieringOffloadingSpec
from kv_core.cpu import SharedOffloadRegion
from kv_core.device.copy import host_registrar_of
from kv_core.errors import KVCoreError
from kv_core.workload.replay._memory import open_gpu_memory
from kv_core.workload.replay._messages import BlockCheck, WorkerFailure, WorkerReady, WorkerStart
from kv_core.workload.replay._worker import StepOrders, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main"]


def main(descriptor: int) -> int:
    """Follow the scheduler at the other end of a connection until it is closed.

    Args:
        descriptor: The connection.

    Returns:
        The exit status: 0 unless the worker failed, which the scheduler has been told.
    """
    with Connection(descriptor) as connection:
        try:
            _follow(connection)
        except KVCoreError as error:
            # Its message says all; anything else is a defect, whose traceback is of use.
            _send(connection, WorkerFailure(str(error)))
            return 1
        except Exception as error:
            _send(connection, WorkerFailure(f"{type(error).__name__}: {error}"))
            raise
    return 0


def _follow(connection: Connection) -> None:
    messages = _messages(connection)
    with ExitStack() as opened:
        for start in messages:
            if not isinstance(start, WorkerStart):
                raise TypeError(f"expected to be told how to start, found {start!r}")
            worker = _open(start, opened)
            _send(connection, WorkerReady(*worker.devices))
            break
        for message in messages:
            if isinstance(message, StepOrders):
                _send(connection, worker.run_step(message))
            elif isinstance(message, BlockCheck):
                _send(connection, worker.count_wrong_bytes(message.blocks))
            else:
                raise TypeError(f"expected orders, found {message!r}")


def _open(start: WorkerStart, opened: ExitStack) -> Worker:
    # If the scheduler is killed before all have attached, there is still a name.
    opened.callback(
        SharedOffloadRegion.remove_leftover,
        start.offloading.engine_id,
        Path(start.offloading.extra_config["shm_dir"]),
    )
    # A pool that does not fit is to be refused before the primary tier is mapped.
    memory = open_gpu_memory(start.gpu_blocks, start.block_bytes, rank=start.rank)
    spec = TieringOffloadingSpec(
        start.offloading,
        copy_backend=memory.copy_backend,
        host_registrar=host_registrar_of(memory.tensor),
        role=start.role,
    )
    opened.callback(spec.shutdown)
    worker = Worker(
        spec,
        memory,
        start.block_bytes,
        rank=start.rank,
        num_workers=start.offloading.num_workers,
    )
    opened.callback(worker.shutdown)
    return worker


def _messages(connection: Connection) -> Iterator[object]:
    """Yield what the scheduler says until it has nothing more to say."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        yield message


def _send(connection: Connection, answer: object) -> None:
    try:
        connection.send(answer)
    except BrokenPipeError:
        # The scheduler has ended; the next message would be the end of the connection.
        return


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
