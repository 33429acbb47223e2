"""Real file systems that are full at every step: opening, making room, storing, publishing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Mount = Callable[[str, int], Path]
    Work = Callable[..., Any]

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts"),
]

KIB: Final = 1024
MIB: Final = 1024 * KIB
BLOCK: Final = 16 * KIB
SIZES: Final = {"tmpfs": 4 * MIB, "ext4": 16 * MIB}
MANY: Final = range(300)


def fill(folder: Path, leave_bytes: int) -> Path:
    """Write a file that leaves about so much free space, and return it."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file:
        status = os.statvfs(folder)
        wanted = status.f_bavail * status.f_frsize - leave_bytes
        if wanted > 0:
            os.posix_fallocate(file.fileno(), 0, wanted)
    return filler


def free_bytes(folder: Path) -> int:
    """Return the free space of a file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def store_many(worker: Any) -> tuple[list[int], set[str | None]]:
    """Store more than the disk has room for; return what was stored, and the errors."""
    stored: list[int] = []
    errors = set()
    for first in range(MANY.start, MANY.stop, 30):
        answer = worker("store", blocks=list(range(first, first + 30)))
        stored += answer["stored"]
        errors.add(answer["error"])
    return stored, errors


@pytest.mark.parametrize("kind", SIZES)
def test_a_disk_that_fills_up_declines_and_serves_what_it_has(
    start_worker: Any, mount: Mount, kind: str
) -> None:
    """Layout files ends at the end of the disk, loads what it has, and goes on with more room."""
    disk = mount(kind, SIZES[kind])
    settings = {"root_dir": str(disk / "root"), "layout": "files", "block_bytes": BLOCK}
    worker = start_worker(settings)
    filler = fill(disk, 2 * MIB)
    stored, errors = store_many(worker)
    assert errors == {None, "declined"}
    # All but a small part of what was free holds blocks.
    assert len(stored) * BLOCK > 1 * MIB
    assert worker.check(MANY) == stored
    filler.unlink()
    assert worker("store", blocks=[*MANY[-8:]])["error"] is None
    assert set(worker.check(MANY)) >= {*stored, *MANY[-8:]}
    worker.end()
    assert set(start_worker(settings).check(MANY)) >= {*stored, *MANY[-8:]}


@pytest.mark.parametrize("kind", SIZES)
def test_a_disk_that_fills_up_makes_room_by_itself(
    start_worker: Any, mount: Mount, kind: str
) -> None:
    """Layout segments gives up its oldest blocks at the floor of free space, without a capacity."""
    disk = mount(kind, SIZES[kind])
    settings = {"root_dir": str(disk / "root"), "layout": "segments", "block_bytes": BLOCK}
    worker = start_worker(settings)
    filler = fill(disk, 2 * MIB)
    stored, errors = store_many(worker)
    assert (stored, errors) == (list(MANY), {None})
    there = worker.check(MANY)
    assert len(there) * BLOCK > 1 * MIB
    # The youngest are there, and whatever went was older than they.
    assert there[-30:] == list(MANY[-30:])
    filler.unlink()
    assert worker("store", blocks=[*MANY[:8]])["error"] is None
    assert set(worker.check(MANY)) >= {*there, *MANY[:8]}
    worker.end()
    assert set(start_worker(settings).check(MANY)) >= {*there, *MANY[:8]}


@pytest.mark.slice(4)
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("leave_kib", [0, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256, 512])
def test_every_amount_of_room_is_survived(
    work: Work, layout: str, mount: Mount, kind: str, leave_kib: int
) -> None:
    """Whichever step the disk ends at, the tier opens or says why, and works when there is room."""
    disk = mount(kind, SIZES[kind])
    filler = fill(disk, leave_kib * KIB)
    worker = work(disk / "root", block_bytes=BLOCK)
    stored: list[int] = []
    there: list[int] = []
    if "raised" in worker.opened:
        assert worker.opened["raised"] == "TierOpenError"
        assert "is on a full file system" in worker.opened["message"]
    else:
        for block in range(12):
            answer = worker("store", blocks=[block])
            assert answer["error"] in (None, "declined"), answer
            stored += answer["stored"]
        there = worker.check(range(12))
        # Segments make room for the youngest; files decline when there is none.
        gone = len(stored) - len(there) if layout == "segments" else 0
        assert there == stored[gone:]
        # Of the space, no more is left than a block with its index and its folder takes.
        assert gone == 0 or len(there) >= max(1, leave_kib // 32)
        worker.end()
    filler.unlink()
    again = work(disk / "root", block_bytes=BLOCK)
    assert again.check(range(12)) == there
    assert again("store", blocks=list(range(12)))["error"] is None
    assert again.check(range(12)) == list(range(12))


@pytest.mark.parametrize("kind", SIZES)
def test_the_bound_is_kept_by_what_is_on_the_disk(
    start_worker: Any, mount: Mount, kind: str
) -> None:
    """Ten times the capacity goes through; the disk never holds more (vllm#54779, LMCache#4725)."""
    disk = mount(kind, SIZES[kind])
    before = free_bytes(disk)
    capacity = 2 * MIB
    settings = {"root_dir": str(disk / "root"), "layout": "segments", "block_bytes": BLOCK}
    worker = start_worker({**settings, "capacity_bytes": capacity})
    least = before
    for first in range(0, 10 * capacity // BLOCK, 16):
        answer = worker("store", blocks=list(range(first, first + 16)))
        assert answer["error"] is None
        least = min(least, free_bytes(disk))
    # Folders and locks are no part of the capacity.
    assert before - least <= capacity + 128 * KIB
    usage = worker("usage")
    assert usage["bytes"] <= usage["capacity_bytes"] == capacity
    assert usage["blocks"] * BLOCK > capacity // 2


@pytest.mark.parametrize("kind", SIZES)
def test_a_floor_of_free_space_holds(work: Work, mount: Mount, kind: str) -> None:
    """Whatever is stored, others find the free space that was promised to them."""
    disk = mount(kind, SIZES[kind])
    floor = 1 * MIB
    worker = work(disk / "root", block_bytes=BLOCK, min_free_bytes=floor, io_threads=2)
    for first in range(0, SIZES[kind] // BLOCK, 16):
        assert worker("store", blocks=list(range(first, first + 16)))["error"] in (None, "declined")
        # What is in flight when the floor is reached may go a little below; folders are not
        # counted, and a file for each block takes many.
        assert free_bytes(disk) > floor - 4 * BLOCK - 128 * KIB
