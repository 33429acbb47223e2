"""Opens files below a folder without following a single symbolic link on the way.

``O_NOFOLLOW`` speaks of the last part of a path only. Whoever can write to a folder on the way
could otherwise turn a cache into a means to overwrite any file of this user.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kv_tier_fs._folders import FOLDER_MODE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["folder_beneath", "open_beneath", "sync_folder"]

_FOLDER_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_beneath(root: Path, path: Path, flags: int, mode: int = 0) -> int:
    """Open a file below a folder, which itself may be a symbolic link.

    Args:
        root: The folder.
        path: The file, as a path that begins with ``root``.
        flags: Flags of ``os.open``; ``O_NOFOLLOW`` and ``O_CLOEXEC`` are added.
        mode: Mode of a file that is made.

    Returns:
        A file descriptor.

    Raises:
        OSError: The file cannot be opened; ``ELOOP`` or ``ENOTDIR``: a part of the path is a
            symbolic link.
    """
    *folders, name = path.relative_to(root).parts
    at = _walk(root, folders, make=False)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=at)
    finally:
        os.close(at)


@contextmanager
def folder_beneath(root: str, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Hold the folder of a file below another folder, for calls that take a ``dir_fd``.

    Args:
        root: The folder.
        path: The file, as a path that begins with ``root``.
        make: Whether to make folders that are missing.

    Yields:
        A descriptor of the folder that the file is in, and the file's name there.

    Raises:
        OSError: As for :func:`open_beneath`.
    """
    *folders, name = path[len(root.rstrip("/")) + 1 :].split("/")
    at = _walk(root, folders, make=make)
    try:
        yield at, name
    finally:
        os.close(at)


def _walk(root: str | Path, folders: Iterable[str], *, make: bool) -> int:
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            try:
                inner = os.open(folder, _FOLDER_FLAGS, dir_fd=at)
            except FileNotFoundError:
                if not make:
                    raise
                _make(folder, at)
                inner = os.open(folder, _FOLDER_FLAGS, dir_fd=at)
            os.close(at)
            at = inner
        return at
    except BaseException:
        os.close(at)
        raise


def _make(folder: str, at: int) -> None:
    try:
        os.mkdir(folder, FOLDER_MODE, dir_fd=at)
    except FileExistsError:
        return
    # Whatever the umask; it would have to be a folder of another user to fail.
    os.chmod(folder, FOLDER_MODE, dir_fd=at)


def sync_folder(root: Path, folder: Path) -> None:
    """Wait until the disk has the names in a folder below another one, or in that one itself.

    Raises:
        OSError: It may not have them.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY
    if folder == root:
        descriptor = os.open(root, flags | os.O_CLOEXEC)
    else:
        descriptor = open_beneath(root, folder, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
