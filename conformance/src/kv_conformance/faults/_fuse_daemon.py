"""The process that serves a :class:`~kv_conformance.faults.fuse.FaultyFolder`.

``python -m kv_conformance.faults._fuse_daemon BACKING MOUNTPOINT OWNER_PID``: says ``ready`` when
the folder is mounted, then obeys one word a line on standard input (the value of a ``Fault``,
``heal``, ``close``) and answers each with a line: ``done``, or what was wrong.

A process of its own, because the owner has threads that hang in this file system, and because it
has to outlive the owner by as long as it takes to unmount.

**Who owns what.** The main thread is in libfuse, which has threads of its own. The control thread
reads commands, watches the owner and ends the process.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, final

import mfusepy

from kv_conformance.faults._passthrough import Passthrough
from kv_conformance.harness import Fault

__all__ = ["main"]

_WATCH_S: Final = 0.1
_GRACE_S: Final = 0.5
_SIGKILL_BIT: Final = 1 << 8


def main(backing: str, mountpoint: str, owner: int) -> None:
    """Mount, and serve until told to close or until the owner is gone."""
    # Modes arrive with the umask of the caller applied.
    os.umask(0)
    control = _Control(mountpoint, owner)
    operations = Passthrough(backing, on_ready=lambda: _say("ready"))
    threading.Thread(target=control.run, args=(operations,), name="control", daemon=True).start()
    try:
        mfusepy.FUSE(
            operations,
            mountpoint,
            foreground=True,
            fsname="kv-conformance",
            # Changes that do not come through the mount are seen at once.
            entry_timeout=0,
            negative_timeout=0,
            attr_timeout=0,
            # A tier may tell files by their inode number.
            use_ino=True,
            # Otherwise libfuse renames the target of a rename out of the way when somebody has it
            # open, and there is a moment without any file of that name. The price: a file that
            # has lost its name cannot be asked for its status, only read and written.
            hard_remove=True,
            # Every read and write of a caller comes here, cut into requests of 1 MiB, and the
            # system call ends with the first request that moved less than asked: short counts
            # reach the caller, "half" being half of the first MiB. Not so without (measured on
            # Linux 6.18): short reads are filled up through the page cache, and a short write
            # with O_DIRECT becomes EIO.
            direct_io=True,
        )
    finally:
        control.served.set()


@final
class _Control:
    def __init__(self, mountpoint: str, owner: int) -> None:
        self.served = threading.Event()
        self._mountpoint = mountpoint
        self._owner = owner

    def run(self, operations: Passthrough) -> None:
        """Obey until the end, then heal, unmount and exit."""
        try:
            self._obey(operations)
        finally:
            operations.heal()
            subprocess.run(  # noqa: S603 - our own mount point
                ["fusermount3", "-u", "-z", "-q", self._mountpoint],  # noqa: S607
                check=False,
                stdin=subprocess.DEVNULL,
            )
            # Detached, but alive as long as somebody has a file open in it. What was held goes on;
            # what is still open after that fails.
            self.served.wait(_GRACE_S)
            os._exit(0)

    def _obey(self, operations: Passthrough) -> None:
        poll = select.poll()
        poll.register(sys.stdin.fileno(), select.POLLIN)
        with suppress(OSError, AttributeError):
            # Forks of the owner may have inherited the pipe, which then does not end with it.
            # Not every build of Python has the call.
            poll.register(os.pidfd_open(self._owner), select.POLLIN)
        stalled = False
        pending = b""
        while True:
            # A thread that was killed in a held operation does not end, and the process does not
            # end before it, so that neither pipe nor pidfd tell.
            events = poll.poll(_WATCH_S * 1000 if stalled else None)
            if stalled and _is_dying(self._owner):
                return
            for descriptor, _ in events:
                data = os.read(descriptor, 4096) if descriptor == sys.stdin.fileno() else b""
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    word = line.decode()
                    if word == "close":
                        _say("done")
                        return
                    stalled = word == Fault.STALL.value
                    _say(_carry_out(operations, word))


def _carry_out(operations: Passthrough, word: str) -> str:
    try:
        if word == "heal":
            operations.heal()
        else:
            operations.inject(Fault(word))
    except ValueError as error:
        return str(error)
    return "done"


def _is_dying(process: int) -> bool:
    """Say whether a process has been killed, even when a thread of it cannot end yet."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        return any(_has_been_killed(thread, leader=process) for thread in threads)
    except FileNotFoundError:
        return True


def _has_been_killed(thread: Path, leader: int) -> bool:
    try:
        text = (thread / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # Ended since it was listed, as threads do.
        return False
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    if int(fields["SigPnd"], 16) & _SIGKILL_BIT:
        return True
    return thread.name == str(leader) and fields["State"][0] in "ZX"


def _say(word: str) -> None:
    with suppress(BrokenPipeError):
        print(word, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
