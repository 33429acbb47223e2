"""Processes with vLLM in them: forked from one that has imported it, or started anew."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Fresh", "Launcher", "Process", "Zygote", "usual_environment"]

_HERE: Final = Path(__file__).parent
# Importing vLLM on a machine with much else to do.
_IMPORT_S: Final = 240.0


class Process(Protocol):
    """A process that leads a group of its own."""

    @property
    def pid(self) -> int:
        """Its id, and that of its group."""

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; ``None`` while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """


class Launcher(Protocol):
    """Starts ``python -m MODULE ARGUMENTS`` in vLLM's environment."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        log: Path,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Start a process.

        Args:
            argv: The module and its arguments.
            cwd: Where it runs.
            environment: All of its environment.
            log: Where its output goes.
            pass_fds: Descriptors for it, whose numbers there are added to its arguments.
        """


@final
class Fresh:
    """Starts interpreters that have imported nothing.

    Args:
        python: An interpreter with vLLM.
    """

    def __init__(self, python: Path) -> None:
        self._python = python

    def __call__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        log: Path,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Start a process: see :class:`Launcher`."""
        with log.open("wb") as output:
            return subprocess.Popen(
                [self._python, "-m", *argv, *map(str, pass_fds)],
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,
            )


@final
class Zygote:
    """Forks processes that have imported vLLM already. A context manager that ends it.

    Only variables of the environment that are read while vLLM is imported make a difference
    between these processes and fresh ones: they are in :func:`usual_environment`, and processes
    that want others are started anew.

    Args:
        python: An interpreter with vLLM.
        folder: For the log; must exist.

    Attributes:
        environment: What all its children must have in theirs.
    """

    def __init__(self, python: Path, folder: Path) -> None:
        self._fresh = Fresh(python)
        self._log = folder / "zygote.log"
        self.environment = usual_environment()
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_IMPORT_S)
        with other:
            self._process = self._fresh(
                ["engine_process.zygote"],
                cwd=folder,
                environment=self.environment,
                log=self._log,
                pass_fds=[other.fileno()],
            )

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        log: Path,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Start a process: see :class:`Launcher`."""
        if any(environment.get(name) != value for name, value in self.environment.items()):
            return self._fresh(argv, cwd=cwd, environment=environment, log=log, pass_fds=pass_fds)
        request = {"argv": list(argv), "cwd": str(cwd), "environment": dict(environment)}
        status, status_in = os.pipe()
        with log.open("wb") as output:
            try:
                socket.send_fds(
                    self._control,
                    [json.dumps(request).encode()],
                    [output.fileno(), status_in, *pass_fds],
                )
                reply: dict[str, Any] = json.loads(self._control.recv(1 << 12) or b"{}")
            except BaseException:
                os.close(status)
                raise
            finally:
                os.close(status_in)
        if "pid" not in reply:
            os.close(status)
            problem = reply.get("error", f"it has ended:\n{self._log.read_text()}")
            raise AssertionError(f"the process that has imported vLLM does not fork: {problem}")
        return _Forked(reply["pid"], status)

    def close(self) -> None:
        """End it. Its children have ended, or go on without it."""
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()


@final
class _Forked:
    """A child of a :class:`Zygote`, which waits for it and tells how it ended."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._pipe = os.fdopen(status, "rb", buffering=0)
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status: see :class:`Process`."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status: see :class:`Process`."""
        if self._status is None:
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._pipe:
                # Nothing but the end if the zygote was killed: nobody knows the status then.
                self._status = int(self._pipe.read(16) or b"-9")
        return self._status


def usual_environment() -> dict[str, str]:
    """Return the environment that all processes share."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return kept | {
        "PYTHONPATH": str(_HERE),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # A tiny model gains nothing from threads, and engines beside each other lose much.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # Compiling a function takes longer than all the answers that it is called for.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
