"""The tier over a blocking filesystem: local folders, SFTP, memory.

**Who owns what.** Pool threads call the block functions, for one key never two stores at once.
``_folders`` is a set that they add single names to and never iterate over, ``_abandoned`` a deque
that they add single names to and take them from. Everything else is set in
:meth:`BlockingFsspecTier.open` and only read afterwards.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_core.errors import BlockDamagedError, KVCoreError
from kv_core.tierkit import FreeSpace, ThreadedTier
from kv_core.tierkit.objects import TRAILER_BYTES, check_description, describe_namespace
from kv_tier_fsspec._blocks import ABSENT_ERRORS, Blocks, open_error
from kv_tier_fsspec._filesystem import masked_logs, publication_of
from kv_tier_fsspec._leftovers import Writer, reclaim_leftovers
from kv_tier_fsspec._protocols import Publication
from kv_tier_fsspec._sharing import share_filesystem

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey
    from kv_tier_fsspec._config import FsspecConfig
    from kv_tier_fsspec._sharing import Filesystems

__all__ = ["BlockingFsspecTier"]

# The whole block comes in one read, straight into the slot; a cache would be a copy.
_UNCACHED: Final = {"cache_type": "none"}

# Each of the two steps, whatever the deadline of a job: nobody waits for a block yet.
_OPENING_S: Final = 10.0


@final
class BlockingFsspecTier(ThreadedTier):
    """One checksummed object a block, stored in one request or published by rename."""

    config: FsspecConfig

    @override
    def open(self) -> None:
        self._logs = masked_logs(self.config)
        self._logs.begin()
        self._publication = publication_of(self.config)
        self._files: Filesystems = share_filesystem(self.config)
        self._blocks = Blocks.of(self.context, self._files.strip(self.config.url))
        self._folders: set[str] = set()
        self._abandoned: deque[str] = deque()
        self._staging = threading.BoundedSemaphore(
            self.config.most_transfers(self._blocks.format.object_bytes)
        )
        names = self._blocks.names
        self._writer = Writer(names)
        self._space: FreeSpace | None = None
        try:
            self._files.run(self._settle, patience_s=_OPENING_S)
            self._files.run(lambda fs: reclaim_leftovers(fs, names), patience_s=_OPENING_S)
        except KVCoreError:
            raise
        except Exception as error:  # noqa: BLE001 - libraries raise anything; it is told, not hidden
            raise open_error(
                self.config, error, f"reading and writing {names.description!r}"
            ) from None
        # The loggers that the driver has made for itself.
        self._logs.begin()
        if self.config.is_local:
            self._space = FreeSpace(names.folder, self.config.min_free_bytes, self.context.clock)

    def _settle(self, fs: Any) -> None:
        """Check the description that is there, or publish ours: the first read and write."""
        namespace, name = self.context.namespace, self._blocks.names.description
        try:
            found = fs.cat_file(name)
        except ABSENT_ERRORS:
            self._publish(fs, name, describe_namespace(namespace))
            found = fs.cat_file(name)
        check_description(found, namespace, where=name)

    @override
    def close(self) -> None:
        files = getattr(self, "_files", None)
        try:
            if files is not None:
                files.close()
        finally:
            logs = getattr(self, "_logs", None)
            if logs is not None:
                logs.end()

    @override
    def exists(self, key: OffloadKey) -> bool:
        name = self._blocks.names.block(key)
        try:
            found = self._files.run(lambda fs: fs.info(name))
        except ABSENT_ERRORS:
            return False
        return bool(found["type"] == "file" and found["size"] == self._blocks.format.object_bytes)

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        name = self._blocks.names.block(key)
        try:
            if self._publication is Publication.PUT:
                # What is stored in one request is read in one: an open file may be shared.
                with self._staging:
                    found = self._files.run(lambda fs: fs.cat_file(name))
                    self._blocks.take(key, found, buffer)
            else:
                self._files.run(lambda fs: self._read_file(fs, key, name, buffer))
        except ABSENT_ERRORS:
            raise self._blocks.missing(key) from None
        except IsADirectoryError as error:
            raise BlockDamagedError(f"block {key.hex()}: {name} is a folder") from error

    def _read_file(self, fs: Any, key: OffloadKey, name: str, buffer: memoryview) -> None:
        with fs.open(name, "rb", block_size=len(buffer), **_UNCACHED) as file:
            got = _fill(file, buffer)
            tail = _read_up_to(file, TRAILER_BYTES + 1)
        self._blocks.format.check_length(key, got + len(tail))
        self._blocks.format.check(key, buffer, tail)

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int:
        name = self._blocks.names.block(key)
        if self._files.run(lambda fs: self._is_stored(fs, key, name)):
            return 0
        if self._space is not None:
            self._space.take(self._blocks.format.object_bytes)
        with self._staging:
            parts: tuple[bytes | memoryview, ...]
            if self._publication is Publication.PUT:
                parts = (self._blocks.give(key, data),)
            else:
                parts = (data, self._blocks.format.trailer(key, data))
            self._files.run(lambda fs: self._publish(fs, name, *parts))
        return len(data)

    def _is_stored(self, fs: Any, key: OffloadKey, name: str) -> bool:
        start, end = self._blocks.tail_range()
        try:
            tail = fs.cat_file(name, start=start, end=end)
        except (OSError, ValueError):
            # Absent, or too short for the range; what is more serious, the store meets as well.
            return False
        return self._blocks.is_tail(key, tail)

    def _publish(self, fs: Any, name: str, *parts: bytes | memoryview) -> None:
        if self._publication is Publication.PUT:
            fs.pipe_file(name, b"".join(parts))
            return
        try:
            self._publish_by_rename(fs, name, parts)
        except ABSENT_ERRORS:
            # The folders were removed under the running tier, to empty the cache perhaps.
            self._folders.clear()
            self._publish_by_rename(fs, name, parts)
        self._remove_abandoned(fs)

    def _publish_by_rename(self, fs: Any, name: str, parts: tuple[bytes | memoryview, ...]) -> None:
        temporary = self._writer.temporary_name()
        for path in (name, temporary):
            self._make_folder(fs, path.rpartition("/")[0])
        try:
            with fs.open(temporary, "wb") as file:
                for part in parts[:-1]:
                    _write_all(file, part)
                # Where closing a file loses errors, the last part brings them to light.
                getattr(file, "finish", partial(_write_all, file))(parts[-1])
            self._rename(fs, temporary, name)
        except BaseException:
            try:
                fs.rm_file(temporary)
            except ABSENT_ERRORS:
                pass
            except Exception:  # noqa: BLE001 - whatever the storage says now, the first error counts
                self._abandoned.append(temporary)
            raise

    def _rename(self, fs: Any, temporary: str, name: str) -> None:
        if self.config.is_local:
            # fsspec's would copy where the system refuses to rename, which readers see happen, and
            # move into a folder of this name.
            Path(temporary).replace(name)
        else:
            fs.mv(temporary, name)

    def _remove_abandoned(self, fs: Any) -> None:
        """Remove what could not be removed when its store failed: now the storage answers."""
        try:
            name = self._abandoned.popleft()
        except IndexError:
            return
        try:
            fs.rm_file(name)
        except ABSENT_ERRORS:
            pass
        except Exception:  # noqa: BLE001 - the store that comes before it went well
            self._abandoned.append(name)

    def _make_folder(self, fs: Any, folder: str) -> None:
        if folder not in self._folders:
            fs.makedirs(folder, exist_ok=True)
            self._folders.add(folder)

    @override
    def retire(self, key: OffloadKey) -> None:
        name = self._blocks.names.block(key)
        try:
            self._files.run(lambda fs: fs.rm_file(name))
        except ABSENT_ERRORS:
            pass
        except IsADirectoryError:
            self._files.run(lambda fs: fs.rm(name, recursive=True))


def _fill(file: Any, buffer: memoryview) -> int:
    """Read into all of a buffer, or up to the end of the file; return the bytes read."""
    done = 0
    while done < len(buffer):
        got = file.readinto(buffer[done:])
        if not got:
            break
        done += got
    return done


def _read_up_to(file: Any, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = file.read(count - len(found))
        if not more:
            break
        found += more
    return found


def _write_all(file: Any, part: bytes | memoryview) -> None:
    """Write all of a part: a file without a buffer may take less than it is given."""
    rest = memoryview(part)
    while rest:
        # Files that take everything return nothing, or the number.
        taken = file.write(rest)
        rest = rest[len(rest) if taken is None else taken :]
