"""Reading and writing single files: short transfers, refusals of direct I/O, odd files."""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.errors import BlockDamagedError
from kv_core.tierkit.testing import block_bytes_of, example_key
from kv_tier_fs.files import _block_file
from kv_tier_fs.files._block_file import BlockFiles
from kv_tier_fs.files._trailer import TrailerFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEY = example_key(1)
SIZE = 8192
FINGERPRINT = "ab" * 32


def files(*, direct_io: bool = False) -> BlockFiles:
    """Return files of the size of the tests."""
    return BlockFiles(TrailerFormat(FINGERPRINT, SIZE), root_dir="/", direct_io=direct_io)


@pytest.fixture
def slot() -> Iterator[memoryview]:
    """Return a page-aligned slot with the bytes of the key."""
    with mmap.mmap(-1, SIZE) as memory, memoryview(memory) as view:
        view[:] = block_bytes_of(KEY, SIZE)
        yield view


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return the path of a file that does not exist."""
    return str(tmp_path / "block.bin")


class ShortCalls:
    """Stands in for the os module: transfers move a limited number of bytes or fail."""

    def __init__(self, limit: int, errors: dict[int, int] | None = None) -> None:
        self.limit = limit
        self.errors = errors or {}
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _cut(self, call: Callable[..., int]) -> Callable[..., int]:
        def run(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            self.calls += 1
            code = self.errors.get(self.calls)
            if code is not None:
                raise OSError(code, os.strerror(code))
            if not self.limit:
                return 0
            room = self.limit
            cut = []
            for buffer in buffers:
                if room > 0:
                    cut.append(buffer[:room])
                room -= len(buffer)
            return call(descriptor, cut, offset)

        return run

    @property
    def pwritev(self) -> Callable[..., int]:
        """A pwritev that moves few bytes."""
        return self._cut(os.pwritev)

    @property
    def preadv(self) -> Callable[..., int]:
        """A preadv that moves few bytes."""
        return self._cut(os.preadv)


def read(reader: BlockFiles, path: str, slot: memoryview) -> None:
    """Read a block into a poisoned slot and check what it holds then."""
    slot[:] = b"\xee" * SIZE
    with reader.open(path) as file:
        file.read(KEY, slot)
    assert bytes(slot) == block_bytes_of(KEY, SIZE)


@pytest.mark.parametrize("direct_io", [False, True])
def test_a_file_is_payload_and_trailer(path: str, slot: memoryview, direct_io: bool) -> None:
    """The file has the specified length and mode and reads back."""
    tested = files(direct_io=direct_io)
    tested.create(path, KEY, slot)
    status = os.stat(path)  # noqa: PTH116
    assert status.st_size == SIZE + 4096
    assert status.st_mode & 0o7777 == 0o600
    read(tested, path, slot)
    assert (tested.direct_read, tested.direct_write) == (direct_io, direct_io)


@pytest.mark.parametrize("limit", [1000, 4096, SIZE, SIZE + 1])
def test_short_transfers_are_resumed(
    path: str, slot: memoryview, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that moves part of what it is asked is asked for the rest (Mooncake#3066)."""
    monkeypatch.setattr(_block_file, "os", ShortCalls(limit))
    tested = files()
    tested.create(path, KEY, slot)
    read(tested, path, slot)


def test_a_write_that_moves_nothing_is_an_error(
    path: str, slot: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No endless loop and no torn success (DATA-11)."""
    monkeypatch.setattr(_block_file, "os", ShortCalls(0))
    with pytest.raises(OSError, match="moved no bytes") as caught:
        files().create(path, KEY, slot)
    assert caught.value.errno == errno.EIO


def test_an_early_end_is_damage(
    path: str, slot: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that ends before the file should is damage, not success."""
    files().create(path, KEY, slot)
    monkeypatch.setattr(_block_file, "os", ShortCalls(0))
    with files().open(path) as file, pytest.raises(BlockDamagedError, match="ended after 0 of"):
        file.read(KEY, slot)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_errors_in_the_middle_come_through(
    path: str, slot: memoryview, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after a part was moved is that error."""
    monkeypatch.setattr(_block_file, "os", ShortCalls(4096, {2: code}))
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        files().create(path, KEY, slot)
    assert caught.value.errno == code


def test_refused_direct_writes_fall_back_once(
    path: str, slot: memoryview, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """EINVAL at the transfer means buffered I/O from now on, for writes only (LMCache#4364)."""
    monkeypatch.setattr(_block_file, "os", ShortCalls(1 << 30, {1: errno.EINVAL}))
    tested = files(direct_io=True)
    tested.create(path, KEY, slot)
    assert (tested.direct_read, tested.direct_write) == (True, False)
    monkeypatch.undo()
    read(tested, path, slot)
    tested.create(path + "2", KEY, slot)
    assert caplog.text.count("direct I/O does not work for writing blocks of 8192 bytes") == 1
    assert "errno 22, EINVAL" in caplog.text


def test_refused_direct_reads_fall_back_once(
    path: str, slot: memoryview, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reads fall back by themselves (Mooncake#2348)."""
    tested = files(direct_io=True)
    tested.create(path, KEY, slot)
    monkeypatch.setattr(_block_file, "os", ShortCalls(1 << 30, {1: errno.EINVAL}))
    read(tested, path, slot)
    read(tested, path, slot)
    assert (tested.direct_read, tested.direct_write) == (False, True)
    assert caplog.text.count("direct I/O does not work for reading") == 1


def test_an_odd_offset_says_nothing_about_direct_io(
    path: str, slot: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a short transfer the rest of one file is buffered; later files are direct again."""
    monkeypatch.setattr(_block_file, "os", ShortCalls(4096, {2: errno.EINVAL}))
    tested = files(direct_io=True)
    tested.create(path, KEY, slot)
    assert tested.direct_write
    monkeypatch.undo()
    read(tested, path, slot)


def test_direct_io_refused_at_open_falls_back(
    path: str, slot: memoryview, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that refuses the flag is written through the page cache."""
    real = os.open

    def refuse(name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    tested = files(direct_io=True)
    tested.create(path, KEY, slot)
    read(tested, path, slot)
    assert (tested.direct_read, tested.direct_write) == (False, False)
    assert caplog.text.count("direct I/O does not work") == 2


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_says_nothing_about_direct_io(
    path: str, caplog: pytest.LogCaptureFixture, make: Callable[[str], None]
) -> None:
    """A folder or pipe under a block's name does not cost all blocks their direct reads."""
    make(path)
    tested = files(direct_io=True)
    with tested.open(path) as file:
        assert not file.is_regular
    assert tested.direct_read
    assert caplog.text == ""


def test_a_file_that_cannot_be_examined_is_closed(
    path: str, slot: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale handle of a network file system costs no descriptor."""
    files().create(path, KEY, slot)
    opened = os.open("/dev/null", os.O_RDONLY)
    os.close(opened)

    def fail(descriptor: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            files().open(path)
    again = os.open("/dev/null", os.O_RDONLY)
    os.close(again)
    assert again == opened


def test_a_file_is_not_overwritten(path: str, slot: memoryview) -> None:
    """Temporary names are used once: an existing file is an error."""
    files().create(path, KEY, slot)
    with pytest.raises(FileExistsError):
        files().create(path, KEY, slot)


def test_a_pipe_is_damage_and_does_not_block(path: str, slot: memoryview) -> None:
    """Whatever lies under a block's name, no thread waits for it."""
    os.mkfifo(path)
    with files().open(path) as file, pytest.raises(BlockDamagedError, match="no file of"):
        file.read(KEY, slot)


def test_a_link_is_not_followed(tmp_path: Path, path: str, slot: memoryview) -> None:
    """A symbolic link does not lead the tier elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    files().create(str(elsewhere), KEY, slot)
    (tmp_path / "block.bin").symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"):
        files().open(path)
