"""A real vLLM engine as a process that tests drive."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from ._processes import usual_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._processes import Launcher

__all__ = ["Answers", "Engine", "EngineDiedError", "EngineError"]

_START_S: Final = 240.0
_REPLY_S: Final = 180.0
_STOP_S: Final = 30.0
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the place to be checked


class EngineDiedError(AssertionError):
    """The engine process ended, or did not answer in time."""


class EngineError(AssertionError):
    """A command failed inside the engine process."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the engine answered to a batch of prompts.

    Attributes:
        tokens: The tokens of each answer.
        cached: How many tokens of each prompt came from a cache, the engine's own or ours.
        seconds: How long the batch took.
        processor_seconds: How long the engine's process computed for it, over all its threads.
        margin: How far the best token was ahead of the second at the closest; NaN if not asked.
    """

    tokens: list[list[int]]
    cached: list[int]
    seconds: float
    processor_seconds: float
    margin: float = field(default=float("nan"), compare=False)


@final
class Engine:
    """One engine process. A context manager that ends it.

    Args:
        launch: Starts processes.
        folder: For the process's log; must exist.
        models: Where models are kept.
        model: The kind of model.
        connector: vLLM's ``KVTransferConfig`` as a dictionary, or none.
        options: vLLM's engine arguments beyond the usual.
        environment: More environment variables.
        processes: Whether the engine core runs in a process of its own, as in production. It
            then steps by itself, and commands that take single steps are not to be had.
        events: Whether vLLM publishes the events of its caches.
    """

    def __init__(
        self,
        *,
        launch: Launcher,
        folder: Path,
        models: Path,
        model: str = "tiny",
        connector: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        processes: bool = False,
        events: bool = False,
    ) -> None:
        self._engine_id = f"test-{uuid.uuid4()}"
        self.log = Path(tempfile.mkstemp(prefix="engine-", suffix=".log", dir=folder)[1])
        command_out, command_in = os.pipe()
        reply_out, reply_in = os.pipe()
        try:
            self.process = launch(
                ["engine_process"],
                cwd=folder,
                environment=usual_environment()
                | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0"}
                | dict(environment or {}),
                log=self.log,
                pass_fds=[command_out, reply_in],
            )
        finally:
            os.close(command_out)
            os.close(reply_in)
        self._commands = os.fdopen(command_in, "wb", buffering=0)
        self._replies = os.fdopen(reply_out, "rb", buffering=0)
        self._rest = b""
        self._is_over = False
        try:
            self.info: dict[str, Any] = self.do(
                "start",
                deadline_s=_START_S,
                model=model,
                models=str(models),
                connector=connector and {"engine_id": self._engine_id, **connector},
                options=dict(options or {}),
                events=events,
            )
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.process.poll() is None:
            self.stop()
        self.kill()

    def do(self, command: str, *, deadline_s: float = _REPLY_S, **arguments: Any) -> Any:
        """Carry out a command and return its value.

        Raises:
            EngineError: It failed.
            EngineDiedError: The process ended or did not answer in time.
        """
        self.begin(command, **arguments)
        return self.end(deadline_s=deadline_s)

    def begin(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting for its reply: see :meth:`end`."""
        line = json.dumps({"do": command, **arguments}).encode() + b"\n"
        with suppress(BrokenPipeError):
            self._commands.write(line)

    def end(self, *, deadline_s: float = _REPLY_S) -> Any:
        """Wait for the reply to :meth:`begin` and return its value."""
        reply = json.loads(self._read_line(deadline_s))
        if "error" in reply:
            raise EngineError(
                f"{reply['error']['type']}: {reply['error']['message']}\n{self.tail()}"
            )
        return reply["value"]

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16, margins: bool = False
    ) -> Answers:
        """Answer prompts, all at once."""
        self.begin_generate(prompts, max_tokens=max_tokens, margins=margins)
        return self.end_generate()

    def begin_generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16, margins: bool = False
    ) -> None:
        """Begin to answer prompts: see :meth:`end_generate`."""
        self.begin(
            "generate",
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            margins=margins,
        )

    def end_generate(self, *, deadline_s: float = _REPLY_S) -> Answers:
        """Wait for what :meth:`begin_generate` began."""
        reply = self.end(deadline_s=deadline_s)
        return Answers(
            tokens=[answer["tokens"] for answer in reply["answers"]],
            cached=[answer["cached"] for answer in reply["answers"]],
            seconds=reply["seconds"],
            processor_seconds=reply["processor_seconds"],
            margin=reply.get("margin", float("nan")),
        )

    def metrics(self, like: str = "kv_") -> dict[str, float]:
        """Return vLLM's metrics whose names contain ``like``."""
        found: dict[str, float] = self.do("metrics")
        return {name: value for name, value in found.items() if like in name}

    def events(self) -> list[dict[str, Any]]:
        """Return the events published since the last call: kind, medium and number of blocks."""
        found: list[dict[str, Any]] = self.do("events")
        return found

    def reset(self, *, running: bool = False, connector: bool = False) -> bool:
        """Forget the engine's own cache, and on request that of the connector."""
        return bool(self.do("reset", running=running, connector=connector))

    def settle(self) -> None:
        """Step until the connector has nothing left to do: all stores have arrived."""
        self.do("settle")

    def stop(self) -> None:
        """Shut down as an operator would."""
        self.do("stop", deadline_s=_STOP_S)
        try:
            status = self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            raise EngineDiedError(self._postmortem("does not end")) from None
        assert status == 0, self.tail()

    def kill(self) -> None:
        """End the process and all its children, without a chance to clean up."""
        if self._is_over:
            return
        self._is_over = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._commands.close()
        self._replies.close()
        # In the tier mode the region is vLLM's, which outlives a process that is killed.
        for left in _SHARED_MEMORY.glob(f"vllm_offload_{self._engine_id}*"):
            left.unlink()

    def tail(self, lines: int = 40) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _read_line(self, deadline_s: float) -> bytes:
        end = time.monotonic() + deadline_s
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        while b"\n" not in self._rest:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise EngineDiedError(self._postmortem(f"did not answer in {deadline_s:g} s"))
            data = os.read(self._replies.fileno(), 1 << 16)
            if not data:
                raise EngineDiedError(self._postmortem("ended"))
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _postmortem(self, what: str) -> str:
        if self.process.poll() is None:
            # The stacks of all its threads go to the log.
            os.kill(self.process.pid, signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        return f"the engine process {what}. The end of its log:\n{self.tail(80)}"
