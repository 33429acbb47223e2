"""The root folder: made, checked, and explained when it cannot be used."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kv_core.errors import TierOpenError
from kv_tier_fs._folders import make_folders

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["check_root", "explained", "make_root"]


def make_root(root_dir: Path) -> None:
    """Make the root folder, with its parents, when it does not exist.

    Raises:
        OSError: It cannot be made, or something else is there.
    """
    if root_dir.exists() and not root_dir.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root_dir))
    missing = root_dir
    while not missing.parent.exists():
        missing = missing.parent
    make_folders(root_dir, below=missing)


def check_root(root_dir: Path) -> None:
    """Refuse a folder that another user could put blocks into, or take them from.

    Raises:
        TierOpenError: It is owned by another user, or every user can write to it.
        OSError: It cannot be looked at.
    """
    status = root_dir.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root_dir))
    if status.st_uid != os.geteuid():
        raise TierOpenError(
            f"root_dir {root_dir} is owned by user id {status.st_uid}, and this process runs as "
            f"{os.geteuid()}: its owner could replace blocks by others. Change its owner, or "
            "choose another folder"
        )
    if status.st_mode & stat.S_IWOTH:
        raise TierOpenError(
            f"root_dir {root_dir} has mode {stat.S_IMODE(status.st_mode):04o}: every user can "
            f"write to it and replace blocks by others. Run 'chmod 700 {root_dir}', or choose "
            "another folder"
        )


@contextmanager
def explained(root_dir: Path) -> Iterator[None]:
    """Turn errors of the operating system into what was found and what to do.

    Raises:
        TierOpenError: Instead of any ``OSError``.
    """
    try:
        yield
    except TierOpenError:
        raise
    except OSError as error:
        reason = f"{error.strerror} (errno {error.errno}, {errno.errorcode.get(error.errno or 0)})"
        found = f"root_dir {root_dir} cannot be used: {reason} at {error.filename}"
        advice = "Choose a folder that this process can make and write"
        if error.errno is None:
            found, advice = f"root_dir {root_dir} cannot be used: {error}", "Try again"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            found = f"root_dir {root_dir} is on a full file system: {reason}"
            advice = "Free some space, or choose another folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            found = (
                f"root_dir {root_dir} is not writable for user id {os.geteuid()}: {reason} at "
                f"{error.filename}"
            )
            advice = "Change its owner or mode, or choose another folder"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            found = f"root_dir {root_dir} is not a directory: {reason} at {error.filename}"
            advice = "Name a folder, or a path where one can be made"
        raise TierOpenError(f"{found}. {advice}") from error
