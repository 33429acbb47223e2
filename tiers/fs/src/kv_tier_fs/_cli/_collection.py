"""Collects by hand: what dead writers left, what is too old, what is too much."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_tier_fs._cli._stores import LOCK_TIMEOUT_S
from kv_tier_fs._root import check_root
from kv_tier_fs.segments._file_lock import FileLock
from kv_tier_fs.segments._folder import SPACE_LOCK_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kv_tier_fs._cli._stores import Store

__all__ = ["Collected", "collect"]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did, or would do.

    Attributes:
        namespaces: Folders of namespaces that went as a whole.
        files: Segments and block files that went besides.
        freed_bytes: Space that came back.
        disk_bytes: What is left of the namespaces that were looked at.
    """

    namespaces: tuple[str, ...]
    files: int
    freed_bytes: int
    disk_bytes: int


def collect(
    root: Path,
    stores: Sequence[Store],
    *,
    capacity_bytes: int | None,
    unused_for_s: float | None,
    dry_run: bool,
) -> Collected:
    """Remove namespaces that nobody used for long, then the least recently used files.

    Holds the lock of the root: no engine makes or removes a segment meanwhile. What engines are
    writing stays, and what they have open goes on being readable for them.

    Args:
        root: Root folder.
        stores: Namespaces that may lose something.
        capacity_bytes: Most that they shall take together; ``None`` for no bound.
        unused_for_s: How long nobody has used a namespace that goes; ``None``: all stay.
        dry_run: Whether to remove nothing.

    Raises:
        TierOpenError: The folder is not this user's, or everybody can write to it.
        TimeoutError: Engines held the lock all the time.
        OSError: Something cannot be removed.
    """
    check_root(root)
    with FileLock.take(root, root / SPACE_LOCK_NAME, LOCK_TIMEOUT_S):
        before_bytes = sum(store.disk_bytes() for store in stores)
        gone, kept = [], []
        for store in stores:
            if unused_for_s is not None and _is_unused(store, unused_for_s):
                gone.append(store.name)
                if not dry_run:
                    store.remove()
            else:
                kept.append(store)
        if not dry_run:
            for store in kept:
                store.reclaim()
        used_bytes = sum(store.disk_bytes() for store in kept)
        files = 0
        if capacity_bytes is not None:
            victims = [victim for store in kept for victim in store.victims()]
            for victim in sorted(victims, key=lambda victim: victim.used_s):
                if used_bytes <= capacity_bytes:
                    break
                if not dry_run:
                    victim.remove()
                files += 1
                used_bytes -= victim.disk_bytes
        return Collected(tuple(gone), files, before_bytes - used_bytes, used_bytes)


def _is_unused(store: Store, unused_for_s: float) -> bool:
    if store.is_open():
        return False
    return store.latest_touch_s() < time.time() - unused_for_s
