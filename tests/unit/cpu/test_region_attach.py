"""Workers find the region of their scheduler, and refuse every other one."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_core.cpu import PrimaryGeometry, SharedOffloadRegion, _region
from kv_core.cpu._attendance import CREATOR, Attendance, attached, ready
from kv_core.cpu._joining import Poll
from kv_core.cpu._region import region_name
from kv_core.cpu._region_file import RegionFile
from kv_core.cpu._trailer import TRAILER_BYTES, RegionTrailer
from kv_core.errors import ConfigError, RegionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMESPACE = "ab" * 32
NONCE = bytes(range(16))
OTHER_NONCE = bytes(16)
DEADLINE_S = 5.0


class Clock:
    """A clock that only sleeping moves; what is due happens in the next pause."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.due: list[Callable[[], object]] = []

    def sleep(self, seconds: float) -> None:
        """Pause, and let one thing happen meanwhile."""
        self.pauses.append(seconds)
        self.now += seconds
        if self.due:
            self.due.pop(0)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that all waits for a region use."""
    clock = Clock()
    monkeypatch.setattr(_region, "Poll", partial(Poll, clock=lambda: clock.now, sleep=clock.sleep))
    return clock


class Engine:
    """Creates and attaches with one configuration, and closes all of it."""

    def __init__(self, shm_dir: Path, geometry: PrimaryGeometry) -> None:
        self.shm_dir = shm_dir
        self.geometry = geometry
        self.path = shm_dir / region_name("engine-0")
        self.trailer = RegionTrailer.of(geometry, NAMESPACE, NONCE)
        self.regions: list[SharedOffloadRegion] = []

    def create(self, *, nonce: bytes = NONCE, keep_name: bool = True) -> SharedOffloadRegion:
        """Be the scheduler."""
        region = SharedOffloadRegion(
            "engine-0",
            self.geometry,
            namespace_fingerprint=NAMESPACE,
            nonce=nonce,
            shm_dir=self.shm_dir,
            keep_name=keep_name,
        )
        self.regions.append(region)
        return region

    def attach(
        self,
        worker: int,
        *,
        geometry: PrimaryGeometry | None = None,
        namespace: str = NAMESPACE,
        nonce: bytes = NONCE,
    ) -> SharedOffloadRegion:
        """Be a worker."""
        region = SharedOffloadRegion.attach(
            "engine-0",
            self.geometry if geometry is None else geometry,
            namespace_fingerprint=namespace,
            nonce=nonce,
            worker=worker,
            shm_dir=self.shm_dir,
            deadline_s=DEADLINE_S,
        )
        self.regions.append(region)
        return region

    def open(self) -> int:
        """Open the file of the region, as a process that has got no further."""
        return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def names(self) -> list[str]:
        """Return what has a name."""
        return [path.name for path in self.shm_dir.iterdir()]


@pytest.fixture
def engine(tmp_path: Path, geometry: PrimaryGeometry, clock: Clock) -> Iterator[Engine]:
    """Return an engine of two workers, whose waits take no time."""
    engine = Engine(tmp_path, geometry)
    yield engine
    for region in engine.regions:
        region.close()
    assert engine.names() == []


# -- bytes --------------------------------------------------------------------------------------


def test_a_worker_and_the_scheduler_share_bytes(engine: Engine) -> None:
    """Row b holds the page of worker 1 after that of worker 0, in every process."""
    scheduler = engine.create()
    workers = [engine.attach(0), engine.attach(1)]
    layers = [worker.create_next_view(worker.worker or 0, 3000) for worker in workers]
    layers[0][2], layers[1][2] = 10, 11
    with scheduler.create_kv_memoryview() as view:
        row = np.asarray(view)[2]
        assert [set(row[i : i + 3000].tolist()) for i in (0, 3000)] == [{10}, {11}]
        row[3000:6000] = 12
        del row
    assert (layers[1][2] == 12).all()
    assert (layers[0][2] == 10).all()
    assert not layers[0][:2].any()
    layers.clear()


def test_a_worker_hands_out_its_own_page_only(engine: Engine) -> None:
    """The page of another rank is another process's to write."""
    engine.create()
    with pytest.raises(RegionError, match="attached as worker 1; the page of worker 0"):
        engine.attach(1).create_next_view(0, 16)


def test_a_worker_reads_all_rows_in_place(engine: Engine) -> None:
    """Pinning needs the address of all rows, in each process."""
    engine.create()
    with engine.attach(0).create_kv_memoryview() as view:
        assert (view.shape, view.readonly) == ((4, 8192), False)


# -- waiting ------------------------------------------------------------------------------------


def test_a_worker_waits_for_the_scheduler(engine: Engine, clock: Clock) -> None:
    """Processes start in any order."""
    clock.due = [lambda: None, engine.create]
    assert engine.attach(0).trailer == engine.trailer
    assert len(clock.pauses) == 2


def test_a_worker_waits_for_the_trailer(engine: Engine, clock: Clock) -> None:
    """No state of an unfinished region is taken for a finished one."""
    file = RegionFile.create(engine.path)
    packed = engine.trailer.pack()
    end = engine.geometry.region_bytes - TRAILER_BYTES
    clock.due = [
        lambda: Attendance(file.descriptor).take(CREATOR),
        lambda: file.allocate(engine.geometry.region_bytes),
        lambda: os.pwrite(file.descriptor, packed[:40], end),
        lambda: os.pwrite(file.descriptor, packed[:-1], end),
        lambda: os.pwrite(file.descriptor, packed, end),
    ]
    worker = engine.attach(1)
    assert len(clock.pauses) == 5
    worker.close()
    file.close()


def test_a_worker_does_not_wait_for_ever(engine: Engine, clock: Clock) -> None:
    """At the deadline the reason is said, and no second region is made."""
    with pytest.raises(RegionError, match=r"worker 1 found no region .* has not been created"):
        engine.attach(1)
    assert clock.now == pytest.approx(DEADLINE_S)
    assert engine.names() == []


def test_an_unfinished_region_is_given_up(engine: Engine) -> None:
    """A creator that hangs is not mistaken for one that is absent."""
    file = RegionFile.create(engine.path)
    Attendance(file.descriptor).take(CREATOR)
    with pytest.raises(RegionError, match="its creator has not finished it"):
        engine.attach(0)
    file.close()


def test_the_leftover_of_a_dead_scheduler_is_not_attached_to(engine: Engine, clock: Clock) -> None:
    """Not even with the right nonce; the worker waits for the next region instead."""
    rows = bytes(engine.geometry.num_blocks * engine.geometry.row_stride)
    leftover = rows + engine.trailer.pack().ljust(4096, b"\0")
    engine.path.write_bytes(leftover)
    with pytest.raises(RegionError, match="leftover of a process that has ended"):
        engine.attach(0)
    assert engine.path.read_bytes() == leftover
    clock.due = [engine.create]
    assert engine.attach(0).trailer == engine.trailer


def test_a_leftover_of_another_start_is_waited_out(engine: Engine, clock: Clock) -> None:
    """Workers may be faster than the scheduler that reclaims it (vllm#54002)."""
    other = RegionTrailer.of(engine.geometry, NAMESPACE, OTHER_NONCE).pack()
    engine.path.write_bytes(bytes(engine.geometry.region_bytes - 4096) + other.ljust(4096, b"\0"))
    clock.due = [engine.create]
    assert engine.attach(0).trailer == engine.trailer


def test_a_scheduler_that_gives_up_is_not_attached_to(
    engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it does so between the worker's two looks."""
    scheduler = engine.create()
    take = Attendance.take

    def take_late(attendance: Attendance, place: int) -> bool:
        scheduler.close()
        return take(attendance, place)

    monkeypatch.setattr(Attendance, "take", take_late)
    with pytest.raises(RegionError, match="found no region"):
        engine.attach(0)


# -- refusing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_blocks": 5}, "its num_blocks is 4, expected 5"),
        ({"row_stride": 12288}, "its row_stride is 8192, expected 12288"),
        ({"worker_page_bytes": 2999}, "its worker_page_bytes is 3000, expected 2999"),
        ({"num_workers": 1}, "its num_workers is 2, expected 1"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else None,
)
def test_a_region_of_another_shape_is_refused(
    engine: Engine, clock: Clock, change: dict[str, int], named: str
) -> None:
    """At once, naming what differs; the region stays usable."""
    engine.create()
    other = dataclasses.replace(engine.geometry, **change)
    with pytest.raises(RegionError, match=named):
        engine.attach(0, geometry=other)
    assert clock.pauses == []
    engine.attach(0)


@pytest.mark.parametrize(
    ("identity", "named"),
    [
        ({"nonce": OTHER_NONCE}, f"its nonce is {NONCE.hex()}"),
        ({"namespace": "cd" * 32}, "its namespace_fingerprint is 'abab"),
    ],
    ids=["nonce", "namespace"],
)
def test_a_region_of_another_identity_is_refused(
    engine: Engine, clock: Clock, identity: dict[str, object], named: str
) -> None:
    """At once, naming what differs: its bytes are another model's, or another start's."""
    engine.create()
    with pytest.raises(RegionError, match=named):
        engine.attach(0, **identity)  # type: ignore[arg-type]
    assert clock.pauses == []


@pytest.mark.parametrize("worker", [-1, 2])
def test_a_rank_out_of_range_is_refused(engine: Engine, worker: int) -> None:
    """Ranks are 0 to the number of workers less one."""
    engine.create()
    with pytest.raises(RegionError, match=rf"no worker {worker}: .* has 2, .* in 0\.\.1"):
        engine.attach(worker)


def test_a_region_without_workers_is_refused(geometry: PrimaryGeometry) -> None:
    """Nobody could ever have attached to it."""
    with pytest.raises(ConfigError, match="'num_workers' must be a positive integer, found 0"):
        dataclasses.replace(geometry, num_workers=0)
    with pytest.raises(ConfigError, match="'num_workers' must be a positive integer, found 0"):
        PrimaryGeometry.fit(budget_bytes=2**20, num_workers=0, worker_page_bytes=4096)


def test_rows_shorter_than_their_pages_are_refused(geometry: PrimaryGeometry) -> None:
    """The last worker's page would reach into the next row."""
    with pytest.raises(ConfigError, match=r"rows of 4096 bytes are too short: .* 6000 bytes"):
        dataclasses.replace(geometry, row_stride=4096, block_bytes=4096)


def test_two_processes_cannot_be_one_worker(engine: Engine) -> None:
    """They would overwrite each other's pages."""
    engine.create()
    engine.attach(0)
    with pytest.raises(RegionError, match=r"another process is attached .* as worker 0"):
        engine.attach(0)


def test_a_worker_that_comes_late_is_refused(engine: Engine) -> None:
    """After all have attached there is no name, and a second region would be full of zeros."""
    scheduler = engine.create()
    first, _second = engine.attach(0), engine.attach(1)
    scheduler.wait_until_attached(0)
    first.close()
    with pytest.raises(RegionError, match="its name was removed when all of its workers had"):
        engine.attach(0)
    assert engine.names() == []


def test_a_link_in_place_of_the_region_is_not_followed(engine: Engine, tmp_path: Path) -> None:
    """Nobody can make a worker write to a file of its choice."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    engine.path.symlink_to(target)
    with pytest.raises(RegionError, match="cannot be opened"):
        engine.attach(0)
    assert target.read_bytes() == b"precious"
    engine.path.unlink()
    target.unlink()


def test_something_else_under_the_name_is_not_attached_to(engine: Engine) -> None:
    """A pipe is no region, and opening it does not hang."""
    os.mkfifo(engine.path)
    with pytest.raises(RegionError, match="not a regular file"):
        engine.attach(0)
    engine.path.unlink()


def test_a_failed_attach_gives_its_place_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of it: no place, no descriptor, and the region's name stays."""
    engine.create()
    descriptors = Path("/proc/self/fd")
    before = sorted(path.name for path in descriptors.iterdir())

    def fail(*_: object) -> None:
        raise RegionError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(_region, "populate", fail)
        with pytest.raises(RegionError, match="no memory"):
            engine.attach(0)
    assert sorted(path.name for path in descriptors.iterdir()) == before
    engine.attach(0)


# -- the scheduler waits ------------------------------------------------------------------------


def test_the_name_goes_when_the_last_worker_attaches(engine: Engine, clock: Clock) -> None:
    """Not before, and only then does the wait end (vllm#51579)."""
    names: list[int] = []

    def attach(worker: int) -> None:
        engine.attach(worker)
        names.append(len(engine.names()))

    scheduler = engine.create()
    clock.due = [partial(attach, 1), partial(attach, 0)]
    scheduler.wait_until_attached(DEADLINE_S)
    assert names == [1, 1]
    assert engine.names() == []
    scheduler.wait_until_attached(0)


def test_missing_workers_are_named_at_the_deadline(engine: Engine, clock: Clock) -> None:
    """The region stays as it is, and a worker that comes after all is welcome."""
    scheduler = engine.create()
    engine.attach(0)
    with pytest.raises(RegionError, match="of 2 workers, 1 have not attached to the region"):
        scheduler.wait_until_attached(DEADLINE_S)
    assert clock.now == pytest.approx(DEADLINE_S)
    engine.attach(1)
    scheduler.wait_until_attached(0)


def test_the_place_of_a_worker_that_died_can_be_taken(engine: Engine) -> None:
    """As long as others are missing, a restarted worker attaches under the same nonce."""
    scheduler = engine.create()
    engine.attach(0).close()
    engine.attach(1)
    with pytest.raises(RegionError, match="of 2 workers, 0 have not attached"):
        scheduler.wait_until_attached(0)
    engine.attach(0)
    scheduler.wait_until_attached(0)


def test_the_name_goes_before_pages_are_present(engine: Engine) -> None:
    """Making terabytes present takes minutes, in which a kill must not leave them behind."""
    scheduler = engine.create()
    engine.attach(1)
    descriptor = engine.open()
    slow = Attendance(descriptor)
    slow.take(attached(0))
    with pytest.raises(RegionError, match="of 2 workers, 0 have not made their pages present"):
        scheduler.wait_until_attached(0)
    assert engine.names() == []
    slow.take(ready(0))
    scheduler.wait_until_attached(0)
    os.close(descriptor)


def test_a_worker_that_dies_without_a_name_ends_the_wait(engine: Engine, clock: Clock) -> None:
    """Nobody can take its place, so there is nothing to wait for."""
    scheduler = engine.create()
    engine.attach(1)
    descriptor = engine.open()
    Attendance(descriptor).take(attached(0))
    clock.due = [lambda: os.close(descriptor)]
    with pytest.raises(RegionError, match="0 ended right after attaching"):
        scheduler.wait_until_attached(DEADLINE_S)
    assert len(clock.pauses) == 1


def test_a_region_without_a_name_is_not_waited_for(engine: Engine, clock: Clock) -> None:
    """Made for one process, or removed by somebody: no worker could ever come."""
    with pytest.raises(RegionError, match="no name to attach by"):
        engine.create(keep_name=False).wait_until_attached(DEADLINE_S)
    removed = engine.create()
    removed.path.unlink()
    with pytest.raises(RegionError, match="no name to attach by"):
        removed.wait_until_attached(DEADLINE_S)
    assert clock.pauses == []


def test_a_worker_neither_waits_nor_removes_the_name(engine: Engine) -> None:
    """Both are the creator's."""
    scheduler = engine.create()
    worker = engine.attach(0)
    with pytest.raises(RegionError, match="worker 0 cannot wait for the others"):
        worker.wait_until_attached(0)
    assert worker.unlink_name() is False
    worker.close()
    assert engine.names() == [scheduler.path.name]


def test_a_closed_region_does_not_wait(engine: Engine) -> None:
    """It has nothing left to wait for."""
    scheduler = engine.create()
    scheduler.close()
    with pytest.raises(RegionError, match="is closed"):
        scheduler.wait_until_attached(0)


def test_old_workers_leave_the_name_of_the_next_scheduler(engine: Engine) -> None:
    """A generation whose scheduler was killed ends beside its successor (vllm#57422)."""
    old = engine.create()
    worker = engine.attach(0)
    # What a kill does: memory and locks go, the name stays.
    assert old._mapping is not None
    old._mapping.close()
    os.close(old._file.descriptor)
    old._file.descriptor = -1
    new = engine.create(nonce=OTHER_NONCE)
    worker.close()
    old.close()
    assert engine.names() == [new.path.name]
    assert engine.attach(0, nonce=OTHER_NONCE).trailer == new.trailer


def test_workers_remove_the_name_of_a_dead_scheduler_only(engine: Engine) -> None:
    """Their engine's id may never come again, and its memory would stay."""
    scheduler = engine.create()
    assert not SharedOffloadRegion.remove_leftover("engine-0", engine.shm_dir)
    assert engine.names() == [engine.path.name]
    # As a killed process leaves it: no lock, and the name is there.
    os.close(scheduler._file.descriptor)
    scheduler._file.descriptor = -1
    scheduler.close()
    assert engine.names() == [engine.path.name]
    assert SharedOffloadRegion.remove_leftover("engine-0", engine.shm_dir)
    assert engine.names() == []
    assert SharedOffloadRegion.remove_leftover("engine-0", engine.shm_dir)
