"""The tier itself: paths, publication and retirement of block files.

**Who owns what.** Pool threads call the block functions, for one key never two stores at once.
``_distrusted`` is a dict that they set and delete single items of; nothing iterates over it.
Everything else is set in :meth:`FsTier.open` and only read afterwards.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, final

from typing_extensions import override

from kv_core.errors import BlockDamagedError, BlockMissingError
from kv_core.tierkit import ThreadedTier
from kv_tier_fs._block_file import BlockFiles
from kv_tier_fs._folders import make_folders
from kv_tier_fs._layout import FileLayout
from kv_tier_fs._open import open_storage, probe_io
from kv_tier_fs._trailer import TrailerFormat

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey
    from kv_tier_fs._block_file import FileIdentity
    from kv_tier_fs._config import FsConfig
    from kv_tier_fs._writers import Writer

__all__ = ["FsTier"]


@final
class FsTier(ThreadedTier):
    """One checksummed file a block, published by rename."""

    config: FsConfig

    @override
    def open(self) -> None:
        self._writer: Writer | None = None
        # Objects of which a read failed, and which file that was. A store replaces them.
        self._distrusted: dict[OffloadKey, FileIdentity] = {}
        root_dir = self.config.root_dir.absolute()
        self._layout = FileLayout(root_dir, self.context.namespace)
        self._files = BlockFiles(
            TrailerFormat(self.context.namespace.fingerprint, self.context.block_bytes),
            direct_io=self.config.direct_io,
        )
        self._writer = open_storage(root_dir, self._layout, self.context.namespace)
        probe_io(root_dir, self._files, self._writer, self._source)

    @override
    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    @override
    def exists(self, key: OffloadKey) -> bool:
        try:
            status = os.lstat(self._layout.block_path(key))
        except (FileNotFoundError, NotADirectoryError):
            return False
        # The trailer is checked by the load: a lookup must not cost a read.
        return status.st_size == self._files.file_bytes

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
        temporary = self._temporary_path()
        try:
            self._files.create(temporary, key, data)
            try:
                os.rename(temporary, path)  # noqa: PTH104 - plain strings, per block
            except FileNotFoundError:
                make_folders(Path(path).parent, below=self._layout.blocks_dir)
                os.rename(temporary, path)  # noqa: PTH104 - as above
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108 - as above
            raise
        self._distrusted.pop(key, None)
        return self._files.file_bytes

    def _is_valid(self, path: str, key: OffloadKey) -> bool:
        try:
            with self._files.open(path) as file:
                file.check_trailer(key)
                # A use, in the one time stamp that every mount option keeps.
                os.utime(file.descriptor)
        except (OSError, BlockDamagedError):
            return False
        return True

    @override
    def retire(self, key: OffloadKey) -> None:
        bad = self._distrusted.get(key)
        if bad is None:
            # Nothing was found. What is there by now, another process has just stored.
            return
        path = self._layout.block_path(key)
        aside = self._temporary_path()
        try:
            os.rename(path, aside)  # noqa: PTH104 - as above
        except FileNotFoundError:
            pass
        else:
            status = os.lstat(aside)
            if (status.st_dev, status.st_ino) != bad:
                # Another process has replaced the bad file since it was read: put it back.
                with suppress(FileExistsError):
                    os.link(aside, path, follow_symlinks=False)
            os.unlink(aside)  # noqa: PTH108 - as above
        del self._distrusted[key]

    def _temporary_path(self) -> str:
        if self._writer is None:
            raise AssertionError("block functions run between open() and close()")
        return self._writer.temporary_path()
