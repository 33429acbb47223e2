"""Places, pauses, pages and progress: what regions are prepared with."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from kv_core.cpu import PrimaryGeometry, SharedOffloadRegion, _prefault, _region_file
from kv_core.cpu._attendance import CREATOR, Attendance, attached, ready
from kv_core.cpu._joining import Poll
from kv_core.cpu._prefault import map_file, populate, worker_spans
from kv_core.cpu._progress import Progress
from kv_core.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = mmap.PAGESIZE


# -- places -------------------------------------------------------------------------------------


def test_a_place_is_taken_as_long_as_its_file_is_open(tmp_path: Path) -> None:
    """Whoever asks does not take it, and its end frees it."""
    path = tmp_path / "file"
    path.touch()
    mine, other = (Attendance(os.open(path, os.O_RDWR)) for _ in range(2))
    assert mine.take(CREATOR)
    assert mine.take(CREATOR)
    assert other.is_taken(CREATOR)
    assert not mine.is_taken(CREATOR)
    assert not other.take(CREATOR)
    os.close(mine.descriptor)
    assert not other.is_taken(CREATOR)
    assert other.take(CREATOR)
    os.close(other.descriptor)


def test_every_worker_has_two_places_of_its_own() -> None:
    """Nobody's place is the creator's or another's."""
    places = [CREATOR, *(place(w) for w in range(64) for place in (attached, ready))]
    assert len(set(places)) == len(places)


def test_a_kernel_without_such_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sandboxes lack them; one process works there."""
    path = tmp_path / "file"
    path.touch()

    def fail(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    with path.open("r+b") as file:
        attendance = Attendance(file.fileno())
        monkeypatch.setattr(fcntl, "fcntl", fail)
        for call in (attendance.take, attendance.is_taken):
            with pytest.raises(RegionError, match="run with one worker"):
                call(CREATOR)


# -- pauses -------------------------------------------------------------------------------------


def test_pauses_grow_and_end_at_the_deadline() -> None:
    """Short at first, because most waits are; never long; and not a moment too many."""
    now, pauses = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    poll = Poll(0.2, clock=lambda: now[0], sleep=sleep)
    while poll.pause():
        pass
    assert pauses[:7] == pytest.approx([0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05])
    assert max(pauses) == 0.05
    assert now[0] == pytest.approx(100.2)


def test_a_deadline_that_is_no_number_has_passed() -> None:
    """Nobody waits for ever by mistake; on purpose, by an infinite one."""
    pauses: list[float] = []
    assert Poll(float("nan"), clock=lambda: 0.0, sleep=pauses.append).pause() is False
    assert Poll(float("inf"), clock=lambda: 0.0, sleep=pauses.append).pause() is True
    assert pauses == [0.001]


def test_a_wait_that_is_stopped_ends_before_its_deadline() -> None:
    """A worker that is shut down while it waits for its scheduler does not hold it up."""
    stop = threading.Event()
    poll = Poll(3600.0, stop=stop)
    assert poll.pause() is True
    stop.set()
    assert poll.pause() is False


# -- pages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_bytes", "workers"),
    [(1, 1), (3000, 2), (PAGE, 3), (PAGE + 1, 3), (5 * PAGE, 2), (5 * PAGE - 7, 4)],
)
def test_spans_are_the_pages_of_a_worker(page_bytes: int, workers: int) -> None:
    """All pages that hold a byte of its part, no others, in order, and none twice."""
    stride = PrimaryGeometry.stride_of(page_bytes, workers)
    geometry = PrimaryGeometry(5, workers, page_bytes, stride, stride)
    for worker in range(workers):
        expected = {
            (block * stride + worker * page_bytes + byte) // PAGE
            for block in range(5)
            for byte in {*range(0, page_bytes, 512), page_bytes - 1}
        }
        spans = list(worker_spans(geometry, worker))
        assert all(offset % PAGE == length % PAGE == 0 < length for offset, length in spans)
        found = [
            p for offset, length in spans for p in range(offset // PAGE, (offset + length) // PAGE)
        ]
        assert found == sorted(expected)
        assert found[-1] < geometry.region_bytes // PAGE


def test_the_only_worker_has_one_span() -> None:
    """Rows without a gap are populated with few calls."""
    geometry = PrimaryGeometry(1000, 1, 2 * PAGE, 2 * PAGE, 2 * PAGE)
    assert list(worker_spans(geometry, 0)) == [(0, 2000 * PAGE)]


def _present_bytes(name: str) -> list[int]:
    """Return the bytes that each mapping of a file has in this process's page table."""
    text = Path("/proc/self/smaps").read_text()
    return [
        1024 * int(kilobytes)
        for kilobytes in re.findall(rf"{re.escape(name)}[^\n]*\n(?:.*\n)*?Rss: +(\d+) kB", text)
    ]


def test_each_process_makes_its_own_pages_present(tmp_path: Path) -> None:
    """A worker its part of the rows, the scheduler the whole once all are there."""
    geometry = PrimaryGeometry(8, 2, 16 * PAGE, 32 * PAGE, 32 * PAGE)
    scheduler = SharedOffloadRegion(
        "engine-0",
        geometry,
        namespace_fingerprint="ab" * 32,
        nonce=bytes(16),
        shm_dir=tmp_path,
        keep_name=True,
    )
    workers = []
    trailer_bytes = PAGE
    present = [_present_bytes(scheduler.path.name)]
    for worker in range(2):
        workers.append(
            SharedOffloadRegion.attach(
                "engine-0",
                geometry,
                namespace_fingerprint="ab" * 32,
                nonce=bytes(16),
                shm_dir=tmp_path,
                worker=worker,
            )
        )
        present.append(sorted(_present_bytes(scheduler.path.name)))
    scheduler.wait_until_attached(0)
    present.append(sorted(_present_bytes(scheduler.path.name)))
    half = 8 * 16 * PAGE
    assert present == [
        [trailer_bytes],
        [trailer_bytes, half],
        [trailer_bytes, half, half],
        # With the page of the marks.
        [half, half, 2 * half + PAGE + trailer_bytes],
    ]
    for region in (*workers, scheduler):
        region.close()


class Mapping:
    """Keeps what is advised."""

    def __init__(self, error: int | None = None) -> None:
        self.advised: list[tuple[int, int]] = []
        self._error = error

    def madvise(self, advice: int, offset: int, length: int) -> None:
        """Populate, or fail."""
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        self.advised.append((offset, length))


def test_pages_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them signals are handled and progress is seen."""
    monkeypatch.setattr(_prefault, "CHUNK_BYTES", 4 * PAGE)
    mapping, progress = Mapping(), Progress("pages", 11 * PAGE)
    populate(cast("Any", mapping), [(0, 9 * PAGE), (20 * PAGE, 2 * PAGE)], progress)
    assert mapping.advised == [
        (0, 4 * PAGE),
        (4 * PAGE, 4 * PAGE),
        (8 * PAGE, PAGE),
        (20 * PAGE, 2 * PAGE),
    ]
    assert progress.done_bytes == 11 * PAGE


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_memory_that_is_not_there_is_a_clear_error(code: int) -> None:
    """The bare message would be "Bad address" (vllm#54002)."""
    with pytest.raises(RegionError, match=r"cannot be made present: .* limit of the container"):
        populate(cast("Any", Mapping(code)), [(0, PAGE)], Progress("pages", PAGE))


def test_too_large_a_mapping_is_a_clear_error(tmp_path: Path) -> None:
    """The bytes are named."""
    path = tmp_path / "file"
    path.touch()
    with path.open("r+b") as file, pytest.raises(RegionError, match="4096 bytes cannot be mapped"):
        map_file(file.fileno(), 4096)


def test_memory_is_reserved_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is there at once; a signal undoes one chunk only."""
    calls: list[tuple[int, int, int]] = []
    reserve = os.posix_fallocate

    def record(descriptor: int, offset: int, length: int) -> None:
        calls.append((offset, length, os.fstat(descriptor).st_size))
        reserve(descriptor, offset, length)

    monkeypatch.setattr(_region_file, "CHUNK_BYTES", 3 * PAGE)
    monkeypatch.setattr(os, "posix_fallocate", record)
    file = _region_file.RegionFile.create(tmp_path / "file")
    file.allocate(8 * PAGE)
    size = 8 * PAGE
    assert calls == [(0, 3 * PAGE, size), (3 * PAGE, 3 * PAGE, size), (6 * PAGE, 2 * PAGE, size)]
    assert os.fstat(file.descriptor).st_blocks * 512 == size
    file.close()


# -- progress -----------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what has been logged."""
    caplog.set_level(logging.INFO, logger="kv_core.cpu._progress")
    return lambda: [record.getMessage() for record in caplog.records]


def test_progress_is_a_line_now_and_then(lines: Callable[[], list[str]]) -> None:
    """Not one for each chunk."""
    progress = Progress("pages present", 40 * 2**30)
    for _ in range(40):
        progress.add(2**30)
    assert lines() == ["pages present: 16 of 40 GiB", "pages present: 32 of 40 GiB"]


def test_little_memory_is_not_worth_a_line(lines: Callable[[], list[str]]) -> None:
    """It is there before anybody wonders."""
    Progress("pages present", 2**30).add(2**30)
    assert lines() == []
