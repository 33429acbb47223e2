"""What the commands know of the blocks of a namespace, whichever layout they are kept in."""

from __future__ import annotations

import fcntl
import json
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kv_core.contract import Namespace
from kv_core.errors import NamespaceError
from kv_tier_fs._beneath import open_beneath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_tier_fs._config import Layout

__all__ = ["LOCK_TIMEOUT_S", "Damage", "Report", "Store", "Victim", "is_locked"]

LOCK_TIMEOUT_S: Final = 30.0
"""How long to wait for engines that make or remove a segment."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a namespace holds.

    Attributes:
        blocks: Blocks that can be looked up.
        payload_bytes: Bytes of these blocks, of each copy where there are several.
        disk_bytes: Space that all of it takes, preallocated space included.
        files: Files with payloads.
        live_writers: Processes that have it open for writing.
        dead_writers: Folders of writers that have ended.
        oldest_write_s: When the oldest file with payloads was written, seconds since the epoch.
        latest_write_s: The same of the latest one.
        coldest_use_s: When the file was last used that has been unused for longest; ``None``
            where the layout records no use.
        latest_use_s: When a block was used last.
    """

    blocks: int = 0
    payload_bytes: int = 0
    disk_bytes: int = 0
    files: int = 0
    live_writers: int = 0
    dead_writers: int = 0
    oldest_write_s: float | None = None
    latest_write_s: float | None = None
    coldest_use_s: float | None = None
    latest_use_s: float | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was stored.

    Attributes:
        path: The file.
        key: The block; ``None`` when a whole file cannot be read, or a part of an index.
        problem: What was found.
        retire: Makes it unfindable; ``None`` where that is not for this tool to do.
    """

    path: Path
    key: OffloadKey | None
    problem: str
    retire: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Victim:
    """What can be removed as a whole.

    Attributes:
        used_s: When it was used last, or written where no use is recorded.
        disk_bytes: Space that this gives back.
        remove: Removes it. Fine when it is gone.
    """

    used_s: float
    disk_bytes: int
    remove: Callable[[], None]


class Store(ABC):
    """The blocks of one namespace in one layout.

    Args:
        root: Root folder, absolute.
        folder: Folder of the namespace.
        description_path: What the folder says of the namespace.

    Attributes:
        layout: Name of the layout.
        root: Root folder.
        folder: Folder of the namespace.
        description: Every field of the namespace; empty when it cannot be read.
        namespace: The same; ``None`` when it cannot be read.
        problem: Why it cannot be read.
    """

    layout: ClassVar[Layout]

    def __init__(self, root: Path, folder: Path, description_path: Path) -> None:
        self.root = root
        self.folder = folder
        self.description: dict[str, Any] = {}
        self.namespace: Namespace | None = None
        self.problem: str | None = None
        try:
            self.description = _read_description(description_path)
            self.namespace = Namespace.from_description(self.description)
        except (OSError, ValueError, NamespaceError) as error:
            self.problem = f"{description_path}: {error}"

    @property
    def name(self) -> str:
        """Name of the folder of the namespace."""
        return self.folder.name

    @abstractmethod
    def report(self) -> Report:
        """Count what is there."""

    @abstractmethod
    def check(self, advance: Callable[[int], None]) -> Iterator[Damage]:
        """Read every block and yield what is wrong.

        Args:
            advance: Called with payload bytes that have been looked at.
        """

    @abstractmethod
    def is_open(self) -> bool:
        """Say whether a process has the namespace open, as far as the layout knows."""

    @abstractmethod
    def disk_bytes(self) -> int:
        """Return the space that all of it takes, preallocated space included."""

    @abstractmethod
    def latest_touch_s(self) -> float:
        """Return when anything of it was written or used last, seconds since the epoch."""

    @abstractmethod
    def reclaim(self) -> None:
        """Put in order what dead writers left behind."""

    @abstractmethod
    def victims(self) -> Iterator[Victim]:
        """Yield what may be removed while engines run."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the namespace with all that is in it. Nobody may be using it."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Give back what retiring has opened. Idempotent."""


def is_locked(root: Path, path: Path, *, shared: bool = False) -> bool:
    """Say whether a process holds a lock. Works where nothing can be written.

    Args:
        root: Folder below which no symbolic link is followed.
        path: The file, below it.
        shared: Whether holders share the lock.
    """
    try:
        descriptor = open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        # Of a user whose locks we may not open: to be on the safe side, it does.
        return True
    try:
        # Shared where that conflicts, too: two who look do not see each other.
        how = fcntl.LOCK_EX if shared else fcntl.LOCK_SH
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read_description(path: Path) -> dict[str, Any]:
    """Return the fields of a namespace as its folder has them.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: It is no description.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))["namespace"]
    except (KeyError, TypeError) as error:
        raise ValueError("not a description of a namespace") from error
    if not isinstance(fields, dict):
        raise ValueError("not a description of a namespace")  # noqa: TRY004 - of the file's text
    return fields
