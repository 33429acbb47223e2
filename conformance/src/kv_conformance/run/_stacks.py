"""Where the process stood when it died.

The interpreter's fault handler writes it down, C code that needs neither the interpreter's lock nor
memory; the supervisor reads it. It goes into a file beside the journal: pytest has put files of its
own in the place of standard error.
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_conformance.run._journal import Journal

__all__ = [
    "arm_watchdog",
    "catch_crashes",
    "disarm_watchdog",
    "stacks_path",
    "standing",
    "timed_out",
]

_MOST_FRAMES: Final = 5

_descriptors: dict[Path, int] = {}


def stacks_path(journal: Path) -> Path:
    """Return the file of stacks that belongs to a journal."""
    return journal.with_suffix(".stacks")


def _file(journal: Journal) -> int:
    path = stacks_path(journal.path)
    if path not in _descriptors:
        _descriptors[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return _descriptors[path]


def catch_crashes(journal: Journal) -> None:
    """Write down where the process stood when native code crashes."""
    faulthandler.enable(file=_file(journal))


def arm_watchdog(journal: Journal | None, limit_s: float) -> None:
    """End the process after so many seconds, whatever its threads do."""
    if journal is not None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_file(journal))


def disarm_watchdog() -> None:
    """Let the process live."""
    faulthandler.cancel_dump_traceback_later()


def timed_out(text: str) -> bool:
    """Say whether the watchdog has ended the process."""
    return text.startswith("Timeout (")


def standing(text: str) -> str:
    """Return the innermost frames of the thread that matters, or an empty text.

    That is the one that crashed; of a process that hung, the main thread, which comes last.
    """
    sections: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.endswith("(most recent call first):"):
            sections.append((line, []))
        elif sections and line.startswith("  File "):
            sections[-1][1].append(_shorter(line))
    if not sections:
        return ""
    current = [frames for title, frames in sections if title.startswith("Current thread")]
    frames = (current or [sections[-1][1]])[0]
    return ", called by ".join(_known(frames)[:_MOST_FRAMES])


def _shorter(line: str) -> str:
    """Turn ``File "a/b.py", line 3 in f`` into ``f (b.py:3)``."""
    place, _, function = line.strip().removeprefix("File ").rpartition(" in ")
    file, _, number = place.rpartition(", line ")
    return f"{function} ({Path(file.strip(chr(34))).name}:{number})"


def _known(frames: Iterable[str]) -> list[str]:
    """Leave frames out that say nothing: <string>, <frozen ...>."""
    return [frame for frame in frames if "(<" not in frame]
