"""One process of a server: a group of its own, ended by id, never outliving the tests.

Should the process that started it be killed, the kernel ends it (``PR_SET_PDEATHSIG``). The kernel
means the *thread* that started it: start servers on one that lives as long as they should.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from kv_conformance.harness import HarnessError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Daemon", "find_program"]

_TAIL_CHARACTERS: Final = 1000


@final
class Daemon:
    """A process that runs until it is killed.

    Args:
        name: What messages call it.
        log: File that takes what it prints.
    """

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start it, in the foreground of a session of its own."""
        setpriv = find_program("setpriv", "the package 'util-linux' has it")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a list, and no shell
                [setpriv, "--pdeathsig", "KILL", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def kill(self) -> None:
        """Kill its group, and wait for the end. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def freeze(self) -> None:
        """Freeze its group."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def log_tail(self) -> str:
        """Return the end of what it has printed."""
        with suppress(FileNotFoundError):
            return self._log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
        return ""

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)


def find_program(name: str, advice: str, folder: Path | None = None) -> str:
    """Return the path of a program.

    Args:
        name: The program.
        advice: What to do when it is missing.
        folder: Where to look first.

    Raises:
        HarnessError: It is not there.
    """
    found = shutil.which(name, path=str(folder)) if folder is not None else None
    found = found or shutil.which(name)
    if found is None:
        raise HarnessError(f"the program {name!r} is missing: {advice}")
    return found
