"""Folders of a namespace and of the processes that write to it.

``ROOT/<model>_<digits>/segments-v1/<writer>/``: a writer makes a folder of its own and holds the
lock in it for as long as it lives. Whoever gets the lock of another writer knows that writer to be
dead. Folders of writers are made and removed under the lock of the root only, so that nobody takes
one for dead that is about to live.

**Who owns what.** Any thread may call anything but :meth:`WriterFolder.close`.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from kv_core.errors import TierOpenError
from kv_tier_fs._description import Description
from kv_tier_fs._folders import make_folder
from kv_tier_fs._root import check_root, explained, make_root
from kv_tier_fs.segments._file_lock import FileLock
from kv_tier_fs.segments._format import FORMAT_VERSION
from kv_tier_fs.segments._listing import LAYOUT_FOLDER, list_writer

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.contract import Namespace
    from kv_tier_fs.segments._format import WriterId

__all__ = [
    "LOCK_NAME",
    "SPACE_LOCK_NAME",
    "NamespaceFolder",
    "WriterFolder",
    "remove_writer_folder",
]

LOCK_NAME: Final = "lock"
"""In the folder of a writer: locked for as long as the writer lives."""

SPACE_LOCK_NAME: Final = "space.lock"
"""In the root folder: locked while segments are made and removed, in any of its namespaces."""

_DESCRIPTION_NAME: Final = "config.json"
_LAYOUT: Final = "segments"


@final
class NamespaceFolder:
    """The folder of a namespace, checked.

    Args:
        root_dir: Root folder, absolute.
        namespace: Whose blocks.

    Attributes:
        root_dir: Root folder.
        path: Folder of this layout in it.
    """

    def __init__(self, root_dir: Path, namespace: Namespace) -> None:
        self.root_dir = root_dir
        self._namespace = namespace
        self._namespace_dir = root_dir / namespace.folder_name
        self.path = self._namespace_dir / LAYOUT_FOLDER

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the namespace."""
        return self._namespace.fingerprint

    def open(self, *, read_only: bool, timeout_s: float) -> None:
        """Make the folders where they are missing, and check what is there.

        Args:
            read_only: Make nothing. Folders of the namespace may then be missing: they come with
                the first writer.
            timeout_s: How long to wait for others that make or remove something.

        Raises:
            TierOpenError: The folders cannot be used, or hold something else.
        """
        with explained(self.root_dir):
            if not read_only:
                make_root(self.root_dir)
            check_root(self.root_dir)
            description = Description(self.path / _DESCRIPTION_NAME, _LAYOUT, FORMAT_VERSION)
            for folder in (self._namespace_dir, self.path):
                if not read_only:
                    make_folder(folder)
                if folder.is_symlink():
                    raise TierOpenError(
                        f"{folder} is a symbolic link, which this tier follows for root_dir "
                        "itself only. Remove the link, or make root_dir one"
                    )
            if description.check(self._namespace) or read_only:
                return
            with self.lock_space(timeout_s):
                self._remove_unfinished_descriptions()
                temporary = self.path / f"{_DESCRIPTION_NAME}.{secrets.token_hex(8)}"
                description.publish(self._namespace, temporary)

    def _remove_unfinished_descriptions(self) -> None:
        for path in self.path.glob(f"{_DESCRIPTION_NAME}.*"):
            path.unlink(missing_ok=True)

    def lock_space(self, timeout_s: float) -> FileLock:
        """Wait for the lock that orders the making and removing of segments.

        Raises:
            TimeoutError: Somebody else had it all the time.
        """
        return FileLock.take(self.root_dir, self.root_dir / SPACE_LOCK_NAME, timeout_s)

    def become_writer(self, timeout_s: float) -> WriterFolder:
        """Make the folder of a new writer, locked.

        Raises:
            TierOpenError: It cannot be made.
        """
        with explained(self.root_dir), self.lock_space(timeout_s):
            writer = secrets.token_bytes(16)
            folder = self.path / writer.hex()
            folder.mkdir(mode=0o700)
            try:
                make_folder(folder)
                # Nobody else knows of the folder: there is nothing to wait for.
                lock = FileLock.take(self.root_dir, folder / LOCK_NAME, timeout_s)
            except BaseException:
                remove_writer_folder(folder)
                raise
            return WriterFolder(folder, writer, lock)


@final
class WriterFolder:
    """The folder of this process.

    Attributes:
        path: The folder.
        writer: Id of the writer.
    """

    def __init__(self, path: Path, writer: WriterId, lock: FileLock) -> None:
        self.path = path
        self.writer = writer
        self._lock = lock

    def close(self) -> None:
        """Stop being alive. A folder without segments and removals goes. Idempotent."""
        listing = list_writer(self.path)
        if not listing.payloads and not listing.indexes:
            # The lock goes while it is held: who finds a folder without one knows it to be dead.
            with suppress(OSError):
                remove_writer_folder(self.path)
        self._lock.release()


def remove_writer_folder(folder: Path) -> None:
    """Remove the folder of a writer that has nothing in it but the lock.

    Raises:
        OSError: There is something else in it.
    """
    with suppress(FileNotFoundError):
        (folder / LOCK_NAME).unlink()
    with suppress(FileNotFoundError):
        folder.rmdir()
