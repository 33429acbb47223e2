"""One SFTP session as a filesystem: fsspec's, where it can be used as it is.

fsspec's reads a file through a buffer that is copied for every piece, follows another way to make
folders that two processes cannot walk at once, and tells a folder from trouble nowhere.
"""

from __future__ import annotations

import errno
import os
from stat import S_ISDIR
from typing import TYPE_CHECKING, Any, Final, final

from fsspec import AbstractFileSystem
from fsspec.implementations.sftp import SFTPFileSystem
from paramiko.sftp import CMD_READ, int64

if TYPE_CHECKING:
    import paramiko
    from typing_extensions import Self

__all__ = ["SftpFilesystem"]

_PIECE_BYTES: Final = 1 << 15
"""Every server takes requests of this size."""
_MOST_IN_FLIGHT: Final = 32


@final
class SftpFilesystem(SFTPFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The files that one session sees. Of one thread at a time.

    Args:
        ftp: The session.
    """

    cachable = False

    def __init__(self, ftp: paramiko.SFTPClient) -> None:
        # Not that of the class above, which would connect.
        AbstractFileSystem.__init__(self, use_listings_cache=False)
        self.ftp = ftp

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,  # noqa: ARG002 - pieces have one size
        **_: Any,
    ) -> _SftpFile:
        return _SftpFile(self.ftp.open(path, mode, bufsize=0), path)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Return the bytes of a file from ``start`` to ``end``, as far as there are any."""
        found = bytearray()
        with self._open(path) as file:
            file.seek(start or 0)
            while end is None or len(found) < end - (start or 0):
                more = file.read(_PIECE_BYTES if end is None else end - (start or 0) - len(found))
                if not more:
                    break
                found += more
        return bytes(found)

    def ls(self, path: str, detail: bool = False, **_: Any) -> list[Any]:
        """Return what a folder holds. Leaves no answers behind, as reading ahead would."""
        found = [self._decode_stat(entry, path) for entry in self.ftp.listdir_attr(path)]
        return found if detail else sorted(entry["name"] for entry in found)

    def makedirs(self, path: str, exist_ok: bool = False, **_: Any) -> None:
        """Make a folder and those above it, while others do the same."""
        try:
            self._make_folder(path, exist_ok)
        except FileNotFoundError:
            parent = os.path.dirname(path)  # noqa: PTH120 - no path of this machine
            if parent in {"", path}:
                raise
            self.makedirs(parent, exist_ok=True)
            # Once: some servers say so of a folder that they do not want to make.
            self._make_folder(path, exist_ok)

    def _make_folder(self, path: str, exist_ok: bool) -> None:
        try:
            self.ftp.mkdir(path)
        except FileNotFoundError:
            raise
        except OSError:
            # "Failure": it is there, or something else is.
            if not exist_ok or not self._is_folder(path):
                raise

    def rm_file(self, path: str) -> None:
        """Remove a file.

        Raises:
            IsADirectoryError: It is a folder.
        """
        try:
            self.ftp.remove(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            if self._is_folder(path):
                raise IsADirectoryError(errno.EISDIR, "a folder", path) from error
            raise

    def rm(self, path: str, recursive: bool = False, **_: Any) -> None:
        """Remove a file or, with ``recursive``, a folder and what it holds."""
        if not (recursive and self._is_folder(path)):
            self.rm_file(path)
            return
        for entry in self.ls(path, detail=True):
            if entry["type"] == "directory":
                self.rm(entry["name"], recursive=True)
            else:
                self.ftp.remove(entry["name"])
        self.ftp.rmdir(path)

    def _is_folder(self, path: str) -> bool:
        try:
            mode = self.ftp.stat(path).st_mode
        except OSError:
            return False
        return mode is not None and S_ISDIR(mode)


@final
class _SftpFile:
    """An open file: read with many requests in flight, written without waiting for each answer."""

    def __init__(self, file: paramiko.SFTPFile, path: str) -> None:
        self._file = file
        self._path = path
        self._at = 0
        file.set_pipelined(True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def seek(self, offset: int) -> None:
        self._at = offset

    def read(self, size: int) -> bytes:
        found = bytearray(min(size, _PIECE_BYTES))
        with memoryview(found) as view:
            got = self.readinto(view)
        return bytes(found[:got])

    def readinto(self, buffer: memoryview) -> int:
        """Read into the front of a buffer; return the bytes read, 0 at the end of the file.

        paramiko's own way to have several requests in flight starts a thread for each file, which
        nobody can wait for, and takes the last answer for the end when it is not.
        """
        ftp, handle = self._file.sftp, self._file.handle
        window = buffer[: _PIECE_BYTES * _MOST_IN_FLIGHT]
        pieces = [
            window[start : start + _PIECE_BYTES] for start in range(0, len(window), _PIECE_BYTES)
        ]
        requests = [
            ftp._async_request(
                type(None), CMD_READ, handle, int64(self._at + number * _PIECE_BYTES), len(piece)
            )
            for number, piece in enumerate(pieces)
        ]
        done, is_whole, failure = 0, True, None
        for request, piece in zip(requests, pieces, strict=True):
            # All answers are taken, or they would be in the way of the next request's.
            try:
                _, answer = ftp._read_response(request)
            except EOFError:
                is_whole = False
                continue
            except OSError as error:
                failure = failure or error
                continue
            data = answer.get_string()
            if is_whole:
                piece[: len(data)] = data
                done += len(data)
                # What follows a short piece does not belong right behind it.
                is_whole = len(data) == len(piece)
        if failure is not None:
            self._explain(failure)
            raise failure
        self._at += done
        return done

    def write(self, data: memoryview) -> int:
        """Write a piece. Whether that went well shows at the latest in :meth:`finish`."""
        piece = data[:_PIECE_BYTES]
        self._file.write(bytes(piece))
        return len(piece)

    def finish(self, data: memoryview) -> None:
        """Write the last piece, and wait until the server has all of them.

        Not left to closing the file, which loses errors.
        """
        self._file.set_pipelined(False)
        self._file.write(bytes(data))

    def _explain(self, error: OSError) -> None:
        # A folder can be opened; SFTP has one word for all that fails afterwards.
        if S_ISDIR(self._file.stat().st_mode or 0):
            raise IsADirectoryError(errno.EISDIR, "a folder", self._path) from error
