"""Temporary files: whose they are, and which of them nobody will ever finish.

The name of a temporary file says which process writes it: host, start of the host, process and
start of the process. On the same host the kernel tells whether that one still lives. Of another
host nothing is known, so its files are left alone until they are old.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from kv_tier_fsspec._blocks import ABSENT_ERRORS

if TYPE_CHECKING:
    from kv_core.tierkit.objects import ObjectNames

__all__ = ["ABANDONED_AFTER_S", "Writer", "reclaim_leftovers", "temporaries_folder"]

ABANDONED_AFTER_S: Final = 24 * 3600.0
"""Age at which the temporary file of another host is taken for abandoned."""

_NAME: Final = re.compile(r"(?P<host>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d+)-\d+-\d+\.tmp")
_serial: Final = itertools.count()


def temporaries_folder(names: ObjectNames) -> str:
    """Return the folder of temporary files; beside the blocks, so that a rename is one."""
    return f"{names.folder}/unfinished"


@final
class Writer:
    """Names the temporary files of one open tier.

    Args:
        names: Where the tier's objects lie.
    """

    def __init__(self, names: ObjectNames) -> None:
        pid = os.getpid()
        tier = next(_serial)
        lead = f"{_this_host()}-{pid}-{_started_at(pid)}-{tier}"
        self._lead = f"{temporaries_folder(names)}/{lead}"
        self._count = itertools.count()

    def temporary_name(self) -> str:
        """Return a name that nobody else uses."""
        return f"{self._lead}-{next(self._count)}.tmp"


def reclaim_leftovers(fs: Any, names: ObjectNames) -> None:
    """Remove the temporary files of writers that have ended. Keeps those of living ones."""
    try:
        found = fs.ls(temporaries_folder(names), detail=True)
    except ABSENT_ERRORS:
        return
    for entry in found:
        match = _NAME.fullmatch(entry["name"].rpartition("/")[2])
        if match is None or _may_live(match, entry):
            continue
        # Another process may be doing the same.
        with suppress(*ABSENT_ERRORS):
            fs.rm_file(entry["name"])


def _may_live(match: re.Match[str], entry: dict[str, Any]) -> bool:
    if match["host"] == _this_host():
        return _started_at(int(match["pid"])) == int(match["start"])
    changed = entry.get("mtime")
    if isinstance(changed, datetime):
        changed = changed.timestamp()
    if not isinstance(changed, (int, float)):
        return True
    return time.time() - changed < ABANDONED_AFTER_S


def _this_host() -> str:
    """Return a name of this host since its start. Process ids mean something only there."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    namespace = ""
    with suppress(OSError):
        # Containers on one host number their processes separately.
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it names no path
    told = f"{socket.gethostname()} {boot} {namespace}"
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def _started_at(pid: int) -> int:
    """Return when a process started, in the kernel's ticks; 0 when there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    # The name of the program, in brackets, may hold anything.
    fields = status.rpartition(")")[2].split()
    is_dead = fields[0] in {"Z", "X"}
    return 0 if is_dead else int(fields[19])
