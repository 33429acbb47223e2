"""Opens files below a folder without following a single symbolic link on the way.

``O_NOFOLLOW`` speaks of the last part of a path only. Whoever can write to a folder on the way
could otherwise turn a cache into a means to overwrite any file of this user.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["open_beneath"]

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
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER_FLAGS, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=at)
    finally:
        os.close(at)
