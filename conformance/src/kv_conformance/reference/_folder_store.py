"""The client library of the folder tier: one object a file, published by rename.

All state is in the folder, so any number of processes may use one. No thread of its own; every
method may be called from any thread.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import struct
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from kv_core.errors import BlockDamagedError, BlockMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["FolderStore"]

_LENGTHS: Final = struct.Struct(">IH")


def _all(count: int) -> int:
    return count


class FolderStore:
    """Objects in a folder: payload, checksum, key, lengths.

    Args:
        folder: Is made when it does not exist.

    Attributes:
        allowed: How many of so many bytes one system call may move, for the gate.
    """

    allowed: Callable[[int], int] = staticmethod(_all)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count(1)
        self._temporary = folder / "writers" / f"{os.getpid()}-{id(self):x}"
        (folder / "blocks").mkdir(parents=True, exist_ok=True)
        self._temporary.mkdir(parents=True, exist_ok=True)
        # Held as long as this process lives: who can lock it knows that the writer is dead.
        self._alive = os.open(self._temporary / "alive", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._alive, fcntl.LOCK_EX)
            self.reclaim()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the writer's folder."""
        try:
            for leftover in self._temporary.iterdir():
                leftover.unlink()
        finally:
            # Also when there was no descriptor to list the folder with.
            os.close(self._alive)
            with suppress(OSError):
                self._temporary.rmdir()

    def reclaim(self) -> None:
        """Remove what dead writers have left behind."""
        for writer in (self.folder / "writers").iterdir():
            if writer == self._temporary:
                continue
            with suppress(OSError):
                descriptor = os.open(writer / "alive", os.O_RDWR)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    for leftover in writer.iterdir():
                        leftover.unlink()
                    writer.rmdir()
                finally:
                    os.close(descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of all writers of the folder."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # -- objects --------------------------------------------------------------------------------

    def path(self, key: bytes) -> Path:
        """Return the file of a key."""
        return self.folder / "blocks" / hashlib.sha256(key).hexdigest()

    def exists(self, key: bytes) -> bool:
        """Say whether there is an object."""
        return self.path(key).exists()

    def put(self, key: bytes, data: memoryview) -> None:
        """Write an object and publish it whole."""
        temporary = self._temporary / str(next(self._numbers))
        try:
            with temporary.open("xb", buffering=0) as file:
                self.write_all(file.fileno(), data)
                trailer = zlib.crc32(data).to_bytes(4, "big") + key
                self.write_all(
                    file.fileno(), memoryview(trailer + _LENGTHS.pack(len(data), len(key)))
                )
            temporary.replace(self.path(key))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def write_all(self, descriptor: int, data: memoryview) -> None:
        """Write until everything is written."""
        while data:
            data = data[os.write(descriptor, data[: self.allowed(len(data))]) :]

    def get(self, key: bytes, buffer: memoryview) -> None:
        """Fill a buffer with an object and check it.

        Raises:
            BlockMissingError: There is none.
            BlockDamagedError: It is not what was put.
        """
        try:
            descriptor = os.open(self.path(key), os.O_RDONLY)
        except FileNotFoundError as error:
            raise BlockMissingError(f"no object for {key.hex()}") from error
        try:
            expected = len(buffer) + 4 + len(key) + _LENGTHS.size
            if os.fstat(descriptor).st_size != expected:
                raise BlockDamagedError("the object has another length than it should")
            done = 0
            while done < len(buffer):
                rest = buffer[done:]
                count = os.readv(descriptor, [rest[: self.allowed(len(rest))]])
                if not count:
                    raise BlockDamagedError("the object ends early")
                done += count
            trailer = os.pread(descriptor, 4 + len(key), len(buffer))
            if trailer != zlib.crc32(buffer).to_bytes(4, "big") + key:
                raise BlockDamagedError("the object has other bytes than were put")
        finally:
            os.close(descriptor)

    def remove(self, key: bytes) -> bool:
        """Remove an object; say whether there was one."""
        try:
            self.path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def mark_used(self, key: bytes, time_ns: int) -> None:
        """Note when an object was used last, for all processes to see."""
        with suppress(FileNotFoundError):
            os.utime(self.path(key), ns=(time_ns, time_ns))

    def list_objects(self) -> list[tuple[bytes, int]]:
        """Return (key, time of the last use in ns) of every object that is whole enough."""
        found = []
        for entry in os.scandir(self.folder / "blocks"):
            with suppress(FileNotFoundError, OSError, ValueError, struct.error):
                with open(entry.path, "rb") as file:
                    status = os.fstat(file.fileno())
                    file.seek(-_LENGTHS.size, os.SEEK_END)
                    _, key_bytes = _LENGTHS.unpack(file.read(_LENGTHS.size))
                    file.seek(-_LENGTHS.size - key_bytes, os.SEEK_END)
                    key = file.read(key_bytes)
                if self.path(key).name == entry.name:
                    found.append((key, status.st_mtime_ns))
        return found

    def count_leftovers(self) -> int:
        """Return how many files of unfinished puts there are."""
        return sum(
            entry.name != "alive"
            for writer in (self.folder / "writers").iterdir()
            for entry in writer.iterdir()
        )
