"""Finds the namespaces below a root folder, in both layouts."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from kv_core.errors import ConfigError
from kv_tier_fs._cli._file_store import FileStore
from kv_tier_fs._cli._segment_store import SegmentStore
from kv_tier_fs.segments._listing import LAYOUT_FOLDER

if TYPE_CHECKING:
    from pathlib import Path

    from kv_tier_fs._cli._stores import Store

__all__ = ["find_stores", "free_bytes"]

_NAMESPACE: Final = re.compile(r".+_[0-9a-f]{12}")


def find_stores(root: Path, only: str | None = None) -> list[Store]:
    """Return what a root folder holds, by name of the namespace.

    Args:
        root: The folder, absolute.
        only: Beginning of a folder's name, or of the digits at its end; ``None`` for all.

    Raises:
        ConfigError: There is no such folder, or nothing of that name in it.
    """
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder; name the 'root_dir' of a tier", setting="ROOT")
    stores: list[Store] = []
    for folder in sorted(root.iterdir()):
        if not _NAMESPACE.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        digits = folder.name.rpartition("_")[2]
        if only is not None and not (folder.name.startswith(only) or digits.startswith(only)):
            continue
        if (folder / LAYOUT_FOLDER).is_dir() and not (folder / LAYOUT_FOLDER).is_symlink():
            stores.append(SegmentStore(root, folder))
        if (folder / "writers").is_dir() or (folder / "config.json").is_file():
            stores.append(FileStore(root, folder))
    if only is not None and not stores:
        raise ConfigError(
            f"{root} has no namespace whose name begins with {only!r}; 'kv-core fs ls {root}' "
            "lists them",
            setting="--namespace",
        )
    return stores


def free_bytes(root: Path) -> int | None:
    """Return what the file system still takes, or ``None`` where that is not known."""
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize if status.f_blocks else None
