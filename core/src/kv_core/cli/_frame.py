"""What becomes of an error: one message for the user's, a traceback for ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Final

from kv_core.errors import KVCoreError

__all__ = ["EXIT_INTERRUPTED", "EXIT_PROBLEM", "report", "run_framed"]

EXIT_PROBLEM: Final = 2
"""Status after a problem that was explained, the same as for a wrong option."""

EXIT_INTERRUPTED: Final = 130
"""Status after Ctrl-C: 128 + SIGINT, as shells have it."""

_EXIT_BROKEN_PIPE: Final = 1


def report(message: str) -> None:
    """Write one message to stderr."""
    sys.stderr.write(f"{message}\n")


def run_framed(run: Callable[[], object]) -> int:
    """Run a command line and turn its end into an exit status.

    Errors of kv-core and of the operating system are said in one line: a file that is not there,
    a disk that is full. Every other exception is a defect of the program and passes through, so
    that its traceback is seen.
    """
    try:
        status = _status(run)
        # Here, not in the interpreter's shutdown, where a closed pipe would be complained about.
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (KVCoreError, OSError) as error:
        report(f"error: {error}")
        return EXIT_PROBLEM
    return status


def _status(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as end:
        if end.code is None:
            return 0
        if isinstance(end.code, int):
            return end.code
        report(str(end.code))
        return 1
    return 0
