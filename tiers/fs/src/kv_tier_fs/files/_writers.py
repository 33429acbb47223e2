"""Temporary files of live writers, and the removal of what dead ones left behind.

A writer holds an exclusive ``flock`` on ``<id>.lock`` for as long as it lives; the kernel drops
it when the process ends, however it ends. Its temporary files are in ``<id>/`` next to the lock.
Whoever gets the lock of another writer knows that writer to be dead.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import secrets
import shutil
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from kv_tier_fs._folders import FILE_MODE, make_folder

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Writer", "reclaim_dead_writers"]

_LOCK_SUFFIX: Final = ".lock"

# What is removed is named by a file that anybody may have put there: nothing like ".." passes.
_WRITER: Final = re.compile(r"[0-9]+-[0-9a-f]{16}")


def _lock_file(path: Path, *, create: bool) -> int | None:
    """Open and lock a file; ``None`` when somebody has it or it is no longer there."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        if create:
            os.fchmod(descriptor, FILE_MODE)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the opening and the locking, a reclaimer may have removed the file.
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


@final
class Writer:
    """One live writer: a locked file, a folder of temporary files, a counter.

    All methods but :meth:`close` are thread-safe.
    """

    def __init__(self, writers_dir: Path) -> None:
        self._names = itertools.count()
        # Temporary files to be removed, by whichever thread takes one from here.
        self._discarded: deque[str] = deque()
        descriptor = None
        while descriptor is None:
            name = f"{os.getpid()}-{secrets.token_hex(8)}"
            self._lock_path = writers_dir / f"{name}{_LOCK_SUFFIX}"
            descriptor = _lock_file(self._lock_path, create=True)
        self._descriptor: int | None = descriptor
        self._folder = writers_dir / name
        self._made: os.stat_result | None = None
        try:
            make_folder(self._folder)
            self._made = os.lstat(self._folder)
        except BaseException:
            self.close()
            raise

    def temporary_path(self) -> str:
        """Return a path that no writer has used or will use."""
        return f"{self._folder}/{next(self._names)}.tmp"

    def discard(self, path: str) -> None:
        """Remove a temporary file: now, or at a :meth:`clean_up` when the storage fails now."""
        self._discarded.append(path)
        self.clean_up()

    def clean_up(self) -> None:
        """Remove the temporary files that were discarded and are still there."""
        while self._discarded:
            try:
                path = self._discarded.popleft()
            except IndexError:
                # Another thread was faster.
                return
            try:
                if self._is_there():
                    os.unlink(path)  # noqa: PTH108 - a plain string, per block
            except FileNotFoundError:
                continue
            except OSError:
                self._discarded.append(path)
                return

    def close(self) -> None:
        """Remove the temporary files and give the lock up. Idempotent.

        Raises:
            OSError: The lock file cannot be removed. It is no longer locked, so that it passes
                for one of a dead writer.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            with suppress(OSError):
                if self._is_there():
                    shutil.rmtree(self._folder, ignore_errors=True)
            # The lock goes last: while it exists, its holder is alive.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(self._lock_path)):
                    self._lock_path.unlink()
        finally:
            os.close(descriptor)

    def _is_there(self) -> bool:
        """Say whether the folder is the one that was made: a link may lead its path elsewhere.

        Raises:
            OSError: That cannot be found out now.
        """
        try:
            return self._made is not None and os.path.samestat(self._made, os.lstat(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            return False


def reclaim_dead_writers(writers_dir: Path) -> int:
    """Remove what writers that are dead left behind, and nothing of those alive.

    Returns:
        Number of dead writers found.
    """
    reclaimed = 0
    for lock_path in sorted(writers_dir.glob(f"*{_LOCK_SUFFIX}")):
        writer = lock_path.name.removesuffix(_LOCK_SUFFIX)
        if not _WRITER.fullmatch(writer):
            continue
        try:
            descriptor = _lock_file(lock_path, create=False)
        except OSError:
            # Of another user, or taken away meanwhile: not ours to judge.
            continue
        if descriptor is None:
            continue
        try:
            shutil.rmtree(writers_dir / writer, ignore_errors=True)
            with suppress(FileNotFoundError):
                lock_path.unlink()
            reclaimed += 1
        finally:
            os.close(descriptor)
    return reclaimed
