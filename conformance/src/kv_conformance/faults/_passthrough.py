"""The operations of a file system that hands everything on to a folder, faults permitting.

**Who owns what.** Threads of libfuse call the operations, several at once; the thread that reads
commands calls ``inject`` and ``heal``. ``_short`` is a bool that it alone replaces. Descriptors
belong to the kernel's open files: made in ``open`` and ``create``, closed in ``release``.

Which methods there are, their names and arguments are mfusepy's. None of it is imported: it calls
whatever object has them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from typing import TYPE_CHECKING, Any, Final, final

from kv_conformance.faults._gate import FaultGate
from kv_conformance.harness import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Passthrough"]

_STATUS_FIELDS: Final = (
    "st_mode",
    "st_ino",
    "st_nlink",
    "st_uid",
    "st_gid",
    "st_rdev",
    "st_size",
    "st_blocks",
    "st_blksize",
)
_TIMES: Final = ("st_atime", "st_mtime", "st_ctime")
_SPACE_FIELDS: Final = (
    "f_bsize",
    "f_frsize",
    "f_blocks",
    "f_bfree",
    "f_bavail",
    "f_files",
    "f_ffree",
    "f_favail",
    "f_namemax",
)

# What stands in the place of nanoseconds (utimensat(2)), with zero seconds before it.
_UTIME_NOW: Final = (1 << 30) - 1
_UTIME_OMIT: Final = (1 << 30) - 2


@final
class Passthrough:
    """A folder as a file system, with faults.

    Closing is never held nor failed: the kernel closes the files of a process that was killed,
    and a process stuck in that could not even be seen to have died. (There is no ``flush`` for
    the same reason.)

    Args:
        backing: The folder.
        on_ready: Called once, when the file system is mounted.
    """

    use_ns = True

    def __init__(self, backing: str, on_ready: Callable[[], None]) -> None:
        self._backing = backing
        self._on_ready = on_ready
        self._gate = FaultGate()
        self._short = False

    # -- faults, called by the thread that reads commands ---------------------------------------

    def inject(self, fault: Fault) -> None:
        """Misbehave from now on."""
        self._short = fault is Fault.SHORT
        self._gate.inject(fault)

    def heal(self) -> None:
        """Behave again. Idempotent."""
        self._short = False
        self._gate.heal()

    def _real(self, path: str | None, *, writing: bool = False) -> str:
        """Pass the gate and return the path in the folder.

        ``writing`` is for what needs room: only that fails on a full disk.
        """
        self._gate.enter(writing=writing)
        if path is None:
            # libfuse has no name any more for what was unlinked while it was open.
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self._backing + path

    def _some(self, count_bytes: int) -> int:
        # Never 0 for more than 0: that would be the end of the file.
        return (count_bytes + 1) // 2 if self._short else count_bytes

    # -- life -----------------------------------------------------------------------------------

    def init(self, path: str) -> None:  # noqa: ARG002 - mfusepy's signature
        """Say that the file system is there."""
        self._on_ready()

    # -- files ----------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        # Direct I/O is between the caller and the kernel: libfuse's buffers have no alignment.
        return os.open(self._real(path), (flags & ~os.O_DIRECT) | os.O_CLOEXEC | os.O_NOFOLLOW)

    def create(self, path: str, mode: int, flags: int) -> int:
        """Create a file.

        On a full disk, too: a name is cheap, and it is what is left behind when the bytes do not
        fit that a writer has to clean up.
        """
        flags = (flags & ~os.O_DIRECT) | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._real(path), flags, mode)

    def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:  # noqa: ARG002
        """Read bytes."""
        self._gate.enter(writing=False)
        return os.pread(fh, self._some(size), offset)

    def write(self, path: str | None, data: bytes, offset: int, fh: int) -> int:  # noqa: ARG002
        """Write bytes."""
        self._gate.enter(writing=True)
        return os.pwrite(fh, memoryview(data)[: self._some(len(data))], offset)

    def release(self, path: str | None, fh: int) -> int:  # noqa: ARG002
        """Close a file, whatever the fault."""
        os.close(fh)
        return 0

    def fsync(self, path: str | None, datasync: int, fh: int) -> int:  # noqa: ARG002
        """Write a file through to the disk."""
        self._gate.enter(writing=False)
        (os.fdatasync if datasync else os.fsync)(fh)
        return 0

    def flock(self, path: str | None, fh: int, op: int) -> int:  # noqa: ARG002
        """Lock a file. In the folder, where those who do not come through the mount see it, too.

        A lock that has to be waited for takes a thread of libfuse while it is not free.
        """
        self._gate.enter(writing=False)
        fcntl.flock(fh, op)
        return 0

    def fallocate(self, path: str | None, mode: int, offset: int, size: int, fh: int) -> int:  # noqa: ARG002
        """Reserve room, in the one mode that Python has a call for."""
        self._gate.enter(writing=True)
        if mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        os.posix_fallocate(fh, offset, size)
        return 0

    # -- status ---------------------------------------------------------------------------------

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, Any]:
        """Return the status of a file."""
        if fh is not None:
            self._gate.enter(writing=False)
            status = os.fstat(fh)
        else:
            status = os.lstat(self._real(path))
        fields: dict[str, Any] = {name: getattr(status, name) for name in _STATUS_FIELDS}
        fields.update({name: getattr(status, f"{name}_ns") for name in _TIMES})
        return fields

    def access(self, path: str, amode: int) -> int:
        """Check permissions."""
        if not os.access(self._real(path), amode):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        """Return the free space of the folder, on a full disk as well.

        As under a quota: whoever looks first whether there is room must cope with being wrong.
        """
        status = os.statvfs(self._real(path))
        return {name: getattr(status, name) for name in _SPACE_FIELDS}

    def chmod(self, path: str | None, mode: int) -> int:
        """Change the mode."""
        os.chmod(self._real(path), mode)
        return 0

    def chown(self, path: str | None, uid: int, gid: int) -> int:
        """Change the owner."""
        os.lchown(self._real(path), uid, gid)
        return 0

    def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:  # noqa: ARG002
        """Change the length."""
        os.truncate(self._real(path), length)
        return 0

    def utimens(self, path: str | None, times: tuple[int, int] | None = None) -> int:
        """Change the times, in nanoseconds."""
        real = self._real(path)
        status = os.lstat(real)
        accessed, modified = times or (_UTIME_NOW, _UTIME_NOW)
        ns = (_time_ns(accessed, status.st_atime_ns), _time_ns(modified, status.st_mtime_ns))
        os.utime(real, ns=ns, follow_symlinks=False)
        return 0

    # -- folders and names ----------------------------------------------------------------------

    def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:  # noqa: ARG002
        """Return the names in a folder."""
        real = self._real(path)
        entries = [(".", os.lstat(real)), ("..", os.lstat(os.path.dirname(real)))]
        with os.scandir(real) as found:
            for entry in found:
                try:
                    entries.append((entry.name, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    # Removed since it was listed.
                    continue
        for name, status in entries:
            yield name, {"st_mode": status.st_mode, "st_ino": status.st_ino}, 0

    def fsyncdir(self, path: str | None, datasync: int, fh: int) -> int:  # noqa: ARG002
        """Write a folder through to the disk."""
        descriptor = os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        """Make a folder. It takes a block of its own, so it does not fit on a full disk."""
        os.mkdir(self._real(path, writing=True), mode)
        return 0

    def mknod(self, path: str, mode: int, dev: int) -> int:
        """Make a special file."""
        os.mknod(self._real(path), mode, dev)
        return 0

    def symlink(self, target: str, source: str) -> int:
        """Make a symbolic link at ``target`` that says ``source``."""
        os.symlink(source, self._real(target))
        return 0

    def readlink(self, path: str) -> str:
        """Return what a symbolic link says."""
        return os.readlink(self._real(path))

    def link(self, target: str, source: str) -> int:
        """Give ``source`` the second name ``target``."""
        os.link(self._real(source), self._backing + target, follow_symlinks=False)
        return 0

    def rename(self, old: str, new: str) -> int:
        """Rename, atomically (the flags of renameat2 do not get here)."""
        os.rename(self._real(old), self._backing + new)
        return 0

    def unlink(self, path: str) -> int:
        """Remove a name."""
        os.unlink(self._real(path))
        return 0

    def rmdir(self, path: str) -> int:
        """Remove a folder."""
        os.rmdir(self._real(path))
        return 0


def _time_ns(asked: int, found: int) -> int:
    if asked == _UTIME_NOW:
        return time.time_ns()
    return found if asked == _UTIME_OMIT else asked
