"""A process that has imported vLLM, and becomes ``python -m MODULE ARGUMENTS`` again and again.

Importing vLLM takes most of what an engine of the tests takes from its start to its end. This
process imports it once, does nothing with it, and forks. A child is what a new interpreter would be
after these imports: an environment, a working directory, a process group, output and descriptors of
its own, no thread, and nothing of kv-core, which comes by its entry points as in production.

One thread, which is what makes a fork safe; it is counted before each.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import socket
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["main"]

_LONGEST_BYTES: Final = 1 << 16
_MOST_DESCRIPTORS: Final = 16

# What an engine imports until its first answer, and none of which does anything but define.
_IMPORTS: Final = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.kv_offload.tiering.spec",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu.model_runner",
)
_NOT_INHERITED: Final = ("kv_core", "kv_tier_", "kv_conformance")


class _Child(NamedTuple):
    pid: int
    status: int
    """Descriptor to which the exit status is written, once, before it is closed."""


def main(control: socket.socket) -> None:
    """Fork children until the other end of the socket is closed.

    A request is a JSON object with ``argv`` (a module and its arguments), ``cwd`` and
    ``environment``, sent with descriptors: for output, for the exit status, and some for the child,
    whose numbers are added to its arguments. The reply is ``{"pid": ...}`` or ``{"error": ...}``.

    Args:
        control: A socket that keeps the borders of messages.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in _IMPORTS:
            import_module(module)
    # What all children share is not theirs to look through.
    gc.collect()
    gc.freeze()
    children: dict[int, _Child] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                poll.unregister(ready)
                os.close(ready)
                _report(children.pop(ready))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _LONGEST_BYTES, _MOST_DESCRIPTORS)
            if not message:
                return
            request = json.loads(message)
            output, status, *given = descriptors
            problem = _what_forbids_a_fork()
            if problem:
                _close([output, status, *given])
                control.send(json.dumps({"error": problem}).encode())
                continue
            pid = os.fork()
            if not pid:
                _close([control.detach(), status, *children])
                _close(child.status for child in children.values())
                _become(request, output, given)
                return
            # Here and there: whoever comes first, it is done when the client knows of the group.
            os.setpgid(pid, pid)
            _close([output, *given])
            end = os.pidfd_open(pid)
            children[end] = _Child(pid, status)
            poll.register(end, select.POLLIN)
            control.send(json.dumps({"pid": pid}).encode())


def _what_forbids_a_fork() -> str:
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        return f"{threads} threads are alive, and only one of them would be in a child"
    modules = [name for name in sys.modules if name.startswith(_NOT_INHERITED)]
    if modules:
        return f"{modules} would be there in a child before its plugins are loaded"
    return ""


def _become(request: dict[str, Any], output: int, given: list[int]) -> None:
    """Run a module as ``__main__`` and end with it."""
    os.setpgid(0, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv = [*request["argv"], *map(str, given)]
    sys.path[0] = request["cwd"]
    # At the very end the interpreter would look through everything that was imported: seconds.
    atexit.register(gc.freeze)
    runpy.run_module(request["argv"][0], run_name="__main__", alter_sys=True)


def _report(child: _Child) -> None:
    _, status = os.waitpid(child.pid, 0)
    # Nobody may be there to read it any more.
    with os.fdopen(child.status, "wb", buffering=0) as pipe:
        try:
            pipe.write(b"%d" % os.waitstatus_to_exitcode(status))
        except BrokenPipeError:
            return


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
