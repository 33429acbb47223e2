"""A folder that stalls, fails, is full or moves short counts on demand.

For tiers that reach their storage through the file system. Linux only; needs the extra
``kv-conformance[fuse]`` and the programs and the library of FUSE 3.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, final

from kv_conformance.harness import Fault, HarnessError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FaultyFolder", "require_fuse"]

_DAEMON: Final = "kv_conformance.faults._fuse_daemon"
_LIBRARY: Final = "fuse3"
_DEVICE: Final = Path("/dev/fuse")
_REPLY_S: Final = 20.0
_END_S: Final = 5.0


def require_fuse() -> None:
    """Check that folders can be mounted here.

    Raises:
        HarnessError: Something is missing. The message says what to install.
    """
    if shutil.which("fusermount3") is None:
        raise HarnessError(
            "the program fusermount3 was not found, which mounts the file system that fails on "
            "demand: install FUSE 3 (Debian and Ubuntu: apt-get install fuse3)"
        )
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        raise HarnessError(
            f"{_DEVICE} cannot be opened for reading and writing by user id {os.geteuid()}, as "
            "FUSE needs: load the kernel module fuse, run as root, or start the container with "
            "--device /dev/fuse --cap-add SYS_ADMIN"
        )
    if importlib.util.find_spec("mfusepy") is None:
        raise HarnessError(
            "the Python package mfusepy is missing: pip install 'kv-conformance[fuse]'"
        )
    if ctypes.util.find_library(_LIBRARY) is None:
        raise HarnessError(
            "the library libfuse3 was not found: install FUSE 3 (Debian and Ubuntu: apt-get "
            "install fuse3)"
        )


@final
class FaultyFolder:
    """A second view of a folder, through a file system that misbehaves on demand.

    What is written through ``mountpoint`` is in ``backing`` and the other way round, at once: no
    cache is in between. Modes, times, hard links, locks (flock), direct I/O and renames over open
    files are those of ``backing``. Shared memory mappings are not to be had.

    ``STALL`` holds every operation, of all processes; a thread that is held ends with nothing but
    :meth:`heal`, and its process not before it. ``ERROR`` fails every operation with EIO.
    ``FULL`` fails what needs room with ENOSPC: writes and new folders, not the creation of a
    file. ``SHORT`` moves half the bytes of every read and write. Closing a file always succeeds.

    When the owner dies, however it dies, the fault is healed and the folder unmounted.

    Methods are called by one thread at a time. A context manager that closes it.

    Args:
        backing: The folder. Made when it does not exist.
        mountpoint: An empty folder, outside of ``backing``. Made when it does not exist.

    Attributes:
        backing: As given, absolute.
        mountpoint: As given, absolute.

    Raises:
        HarnessError: It cannot be mounted.
    """

    def __init__(self, backing: Path, mountpoint: Path) -> None:
        require_fuse()
        backing.mkdir(parents=True, exist_ok=True)
        mountpoint.mkdir(parents=True, exist_ok=True)
        # Resolved now: once it is mounted, that could hang.
        self.backing = backing.resolve()
        self.mountpoint = mountpoint.resolve()
        if self.mountpoint.is_relative_to(self.backing) or _is_mounted(self.mountpoint):
            raise HarnessError(
                f"{mountpoint} cannot be the second view of {backing}: it is inside of it, or "
                "something is mounted there. Choose an empty folder elsewhere"
            )
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", _DAEMON, self.backing, self.mountpoint, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            # Python would look for modules in the caller's folder.
            cwd="/",
            # mfusepy would rather take version 2 where that is installed as well.
            env={**os.environ, "FUSE_LIBRARY_NAME": _LIBRARY},
            # Ctrl-C is for the owner, which then closes this.
            start_new_session=True,
            bufsize=0,
        )
        try:
            self._expect("ready")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inject(self, fault: Fault) -> None:
        """Misbehave from now on, until :meth:`heal`. What has begun may still end well.

        Raises:
            HarnessError: The file system is gone.
        """
        self._command(fault.value)

    def heal(self) -> None:
        """End the fault. What was held goes on. Idempotent.

        Raises:
            HarnessError: The file system is gone.
        """
        self._command("heal")

    def close(self) -> None:
        """Heal, unmount and end the process behind it. Idempotent.

        Files that are still open in it fail afterwards.
        """
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            # The end of the pipe says as much as a word would, and cannot fail.
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if _is_mounted(self.mountpoint):
            subprocess.run(  # noqa: S603 - our own mount point
                ["fusermount3", "-u", "-z", "-q", str(self.mountpoint)],  # noqa: S607
                check=False,
            )
        self._complaints.close()

    def _command(self, word: str) -> None:
        if self._process is None or self._process.stdin is None:
            raise HarnessError(f"the file system at {self.mountpoint} has been closed")
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{word}\n".encode())
        self._expect("done")

    def _expect(self, word: str) -> None:
        found = self._read_line()
        if found == word:
            return
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip()
        raise HarnessError(
            f"the file system at {self.mountpoint} does not work: expected {word!r} from the "
            f"process behind it, found {found!r}. It said: {said or 'nothing'}"
        )

    def _read_line(self) -> str:
        if self._process is None or self._process.stdout is None:
            return ""
        line = b""
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        end = time.monotonic() + _REPLY_S
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return f"{line.decode()}... and nothing more for {_REPLY_S:g} s"
            data = self._process.stdout.read(256)
            if not data:
                break
            line += data
        return line.decode().strip()


def _is_mounted(path: Path) -> bool:
    # os.path.ismount would ask the file system, which may be stalled.
    escaped = str(path)
    for character in "\\ \t\n":
        escaped = escaped.replace(character, f"\\{ord(character):03o}")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split(" ")[4] == escaped for line in lines)
