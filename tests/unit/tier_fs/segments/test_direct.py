"""Direct I/O: used where it works, given up once and with one warning where it does not."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from kv_tier_fs.segments._direct import DirectIO, transfer

if TYPE_CHECKING:
    from pathlib import Path


def _refuse(flags: int) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no direct I/O here")
    return os.open(os.devnull, os.O_RDWR | flags)


def test_a_refusal_at_open_is_given_up_for_one_direction(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file system without direct reads gets one warning with the errno; writes stay direct."""
    direct = DirectIO(4096, wanted=True)
    for _ in range(2):
        os.close(direct.open(_refuse, writing=False))
    assert (direct.reads, direct.writes) == (False, True)
    (record,) = caplog.records
    assert "for reading blocks of 4096 bytes here (errno 22, EINVAL)" in record.getMessage()


def test_other_errors_at_open_are_raised() -> None:
    """Only EINVAL speaks of direct I/O."""

    def missing(_: int) -> int:
        raise OSError(errno.ENOENT, "missing")

    direct = DirectIO(4096, wanted=True)
    with pytest.raises(OSError, match="missing"):
        direct.open(missing, writing=True)
    assert direct.writes


def test_direct_io_can_be_left_out() -> None:
    """With direct_io set to false it is not tried."""
    flags: list[int] = []

    def opener(more: int) -> int:
        flags.append(more)
        return os.open(os.devnull, os.O_RDONLY)

    os.close(DirectIO(4096, wanted=False).open(opener, writing=False))
    assert flags == [0]


def test_a_refusal_at_a_transfer_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that direct I/O cannot move because of their size are moved without it."""
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    direct = DirectIO(1000, wanted=True)
    try:
        data = memoryview(bytes(range(250)) * 4)
        assert transfer(direct, descriptor, [data], 0, writing=True) == 1000
    finally:
        os.close(descriptor)
    assert path.read_bytes() == data
    assert (direct.reads, direct.writes, len(caplog.records)) == (True, False, 1)


def test_a_refusal_that_another_thread_has_dealt_with_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINVAL from a call that began before another thread gave direct I/O up is no failure."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    preadv = os.preadv
    refusals = iter([True, False])

    def refuse_once(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if next(refusals):
            raise OSError(errno.EINVAL, "too late")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse_once)
    descriptor = os.open(path, os.O_RDONLY)
    buffer = bytearray(100)
    try:
        direct = DirectIO(100, wanted=True)
        assert transfer(direct, descriptor, [memoryview(buffer)], 0, writing=False) == 100
    finally:
        os.close(descriptor)
    assert buffer == b"x" * 100


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    """A batch beyond IOV_MAX is moved in several calls."""
    blocks = [memoryview(number.to_bytes(4, "big")) for number in range(2500)]
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    direct = DirectIO(4, wanted=False)
    target = [memoryview(bytearray(4)) for _ in blocks]
    try:
        assert transfer(direct, descriptor, blocks, 0, writing=True) == 10_000
        assert transfer(direct, descriptor, target, 0, writing=False) == 10_000
    finally:
        os.close(descriptor)
    assert target == blocks
