"""Makes folders that nobody else can read, whatever the umask."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FILE_MODE", "FOLDER_MODE", "make_folder", "make_folders"]

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700


def make_folder(path: str | Path) -> None:
    """Make one folder; fine when it exists.

    Raises:
        FileNotFoundError: Its parent does not exist.
    """
    try:
        os.mkdir(path, FOLDER_MODE)  # noqa: PTH102 - also called with plain strings, per block
    except FileExistsError:
        return
    os.chmod(path, FOLDER_MODE)  # noqa: PTH101 - as above


def make_folders(path: Path, *, below: Path) -> None:
    """Make a folder and its missing parents, as far up as ``below``, which is made as well."""
    if path != below:
        make_folders(path.parent, below=below)
    make_folder(path)
