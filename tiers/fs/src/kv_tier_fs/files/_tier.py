"""The tier itself: paths, publication and retirement of block files.

**Who owns what.** Pool threads call the block functions, for one key never two stores at once.
``_distrusted`` is a dict that they set and delete single items of; nothing iterates over it.
``_writer`` is replaced under ``_reopening`` when its folder is gone. Everything else is set in
:meth:`FsTier.open` and only read afterwards.
"""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from kv_core.errors import BlockDamagedError, BlockMissingError
from kv_core.tierkit import FreeSpace, ThreadedTier
from kv_tier_fs._beneath import folder_beneath
from kv_tier_fs.files._block_file import BlockFiles, identity_of
from kv_tier_fs.files._layout import FileLayout
from kv_tier_fs.files._open import open_storage, probe_io
from kv_tier_fs.files._trailer import TrailerFormat

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey
    from kv_tier_fs._config import FsConfig
    from kv_tier_fs.files._block_file import FileIdentity
    from kv_tier_fs.files._writers import Writer

__all__ = ["FsTier"]


_FOLDER_BYTES: Final = 4096


@final
class FsTier(ThreadedTier):
    """One checksummed file a block, published by rename."""

    config: FsConfig

    @override
    def open(self) -> None:
        self._writer: Writer | None = None
        # Objects of which a read failed, and which file that was. A store replaces them.
        self._distrusted: dict[OffloadKey, FileIdentity] = {}
        self._reopening = threading.Lock()
        self._root_dir = self.config.root_dir.absolute()
        self._root = str(self._root_dir)
        self._layout = FileLayout(self._root_dir, self.context.namespace)
        self._files = BlockFiles(
            TrailerFormat(self.context.namespace.fingerprint, self.context.block_bytes),
            root_dir=self._root,
            direct_io=self.config.direct_io,
        )
        self._space = FreeSpace(self._root, self.config.min_free_bytes, self.context.clock)
        self._writer = open_storage(self._root_dir, self._layout, self.context.namespace)
        probe_io(self._root_dir, self._files, self._writer, self._source)

    @override
    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    @override
    def exists(self, key: OffloadKey) -> bool:
        try:
            status = self._status(self._layout.block_path(key))
        except (FileNotFoundError, NotADirectoryError):
            return False
        # The trailer is checked by the load: a lookup must not cost a read.
        return stat.S_ISREG(status.st_mode) and status.st_size == self._files.file_bytes

    def _status(self, path: str) -> os.stat_result:
        with folder_beneath(self._root, path) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        path = self._layout.block_path(key)
        try:
            file = self._files.open(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise BlockMissingError(f"block {key.hex()} has no file {path}") from error
        with file:
            try:
                file.read(key, buffer)
            except BaseException:
                self._distrusted[key] = file.identity
                raise

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int:
        path = self._layout.block_path(key)
        if key not in self._distrusted and self._is_valid(path, key):
            return 0
        # The file may be the first of two folders. To count what is not taken costs one look at
        # the file system more, not to count what is would go below the floor.
        self._space.take(self._files.file_bytes + 2 * _FOLDER_BYTES)
        writer = self._writer_now()
        try:
            self._publish(writer, path, key, data)
        except FileNotFoundError:
            # The folders were removed under the running tier, to empty the cache perhaps.
            writer = self._reopen(writer)
            self._publish(writer, path, key, data)
        self._distrusted.pop(key, None)
        return len(data)

    def _is_valid(self, path: str, key: OffloadKey) -> bool:
        try:
            with self._files.open(path) as file:
                file.check_trailer(key)
        except (OSError, BlockDamagedError):
            return False
        return True

    def _publish(self, writer: Writer, path: str, key: OffloadKey, data: memoryview) -> None:
        temporary = writer.temporary_path()
        try:
            self._files.create(temporary, key, data)
            with folder_beneath(self._root, path, make=True) as (folder, name):
                os.rename(temporary, name, dst_dir_fd=folder)
        except BaseException:
            writer.discard(temporary)
            raise
        # The storage works: what could not be removed while it did not, can be now.
        writer.clean_up()

    @override
    def retire(self, key: OffloadKey) -> None:
        bad = self._distrusted.get(key)
        if bad is None:
            # Nothing was found. What is there by now, another process has just stored.
            return
        path = self._layout.block_path(key)
        writer = self._writer_now()
        try:
            self._remove(path, bad, writer)
        except FileNotFoundError:
            if self._is_there(path):
                # What is gone is the folder to move it to: a clean-up job removes empty folders.
                self._remove(path, bad, self._reopen(writer))
        del self._distrusted[key]

    def _is_there(self, path: str) -> bool:
        try:
            self._status(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _remove(self, path: str, bad: FileIdentity, writer: Writer) -> None:
        """Remove a file if it still is the bad one. Aside first: only there it cannot change."""
        aside = writer.temporary_path()
        with folder_beneath(self._root, path) as (folder, name):
            os.rename(name, aside, src_dir_fd=folder)
            if identity_of(os.lstat(aside)) != bad:
                # Another process has replaced the bad file since it was read: put it back.
                _put_back(aside, folder, name)
        writer.discard(aside)

    def _writer_now(self) -> Writer:
        if self._writer is None:
            raise AssertionError("block functions run between open() and close()")
        return self._writer

    def _reopen(self, lost: Writer) -> Writer:
        with self._reopening:
            if self._writer is lost:
                self._writer = open_storage(self._root_dir, self._layout, self.context.namespace)
                lost.close()
            return self._writer_now()


def _put_back(aside: str, folder: int, name: str) -> None:
    try:
        os.link(aside, name, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        # Replaced once more; that one is as good.
        pass
    except OSError:
        # No hard links here. A rename may replace an equal file, never a better one.
        os.rename(aside, name, dst_dir_fd=folder)
