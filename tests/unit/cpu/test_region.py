"""The shared memory of the primary tier."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_core.cpu import PrimaryGeometry, SharedOffloadRegion, _prefault, _region
from kv_core.cpu._region import region_name
from kv_core.cpu._trailer import TRAILER_BYTES, RegionTrailer
from kv_core.errors import InsufficientSpaceError, RegionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMESPACE = "ab" * 32


def _create(
    shm_dir: Path, geometry: PrimaryGeometry, *, keep_name: bool = False
) -> SharedOffloadRegion:
    return SharedOffloadRegion(
        "engine-0",
        geometry,
        namespace_fingerprint=NAMESPACE,
        shm_dir=shm_dir,
        keep_name=keep_name,
    )


@pytest.fixture
def region(tmp_path: Path, geometry: PrimaryGeometry) -> Iterator[SharedOffloadRegion]:
    """Return a region of four blocks of two workers."""
    region = _create(tmp_path, geometry)
    yield region
    region.close()


# -- rows ---------------------------------------------------------------------------------------


def test_layers_lie_at_the_offsets_of_the_layout(tmp_path: Path) -> None:
    """Two workers, two layers, p = L0 + L1, no padding: W1L1 of block b is at 2pb + p + L0."""
    first, second, num_blocks = 1024, 3072, 3
    page = first + second
    geometry = PrimaryGeometry(
        num_blocks=num_blocks,
        num_workers=2,
        worker_page_bytes=page,
        row_stride=2 * page,
        block_bytes=2 * page,
    )
    region = _create(tmp_path, geometry)
    views = [
        region.create_next_view(worker, layer) for worker in (0, 1) for layer in (first, second)
    ]
    for value, view in enumerate(views, start=1):
        view[:] = value
    rows = region.create_kv_memoryview()
    flat = rows.cast("B")
    expected = bytes([1] * first + [2] * second + [3] * first + [4] * second)
    for block in range(num_blocks):
        assert flat[2 * page * block : 2 * page * (block + 1)] == expected
    flat.release()
    rows.release()
    del views, view
    region.close()


def test_a_view_is_strided_over_the_rows(region: SharedOffloadRegion) -> None:
    """``int8``, one row a block, no copy."""
    view = region.create_next_view(1, 1000)
    assert (view.shape, view.strides, view.dtype) == ((4, 1000), (8192, 1), np.dtype(np.int8))
    assert view.flags.writeable


def test_the_rows_are_one_memoryview_without_the_trailer(region: SharedOffloadRegion) -> None:
    """Shape ``(num_blocks, row_stride)``, format ``B``, writable, all zero at first."""
    rows = region.create_kv_memoryview()
    assert (rows.shape, rows.format, rows.readonly) == ((4, 8192), "B", False)
    assert rows.tobytes() == bytes(4 * 8192)
    rows.release()


def test_a_worker_cannot_outgrow_its_page(region: SharedOffloadRegion) -> None:
    """Bytes beyond the page would be the next worker's."""
    region.create_next_view(0, 2000)
    with pytest.raises(RegionError, match=r"1001 bytes .* worker 0: 2000 of its 3000"):
        region.create_next_view(0, 1001)
    region.create_next_view(0, 1000)
    with pytest.raises(RegionError, match=r"3000 of its 3000"):
        region.create_next_view(0, 1)
    region.create_next_view(1, 3000)


@pytest.mark.parametrize("worker", [-1, 2])
def test_an_unknown_worker_is_refused(region: SharedOffloadRegion, worker: int) -> None:
    """Ranks start at 0."""
    with pytest.raises(RegionError, match=rf"no worker {worker}: .* in 0\.\.1"):
        region.create_next_view(worker, 1)


# -- closing ------------------------------------------------------------------------------------


def test_close_is_idempotent_and_final(tmp_path: Path, geometry: PrimaryGeometry) -> None:
    """A closed region hands out nothing and leaves nothing."""
    region = _create(tmp_path, geometry, keep_name=True)
    region.close()
    region.close()
    assert list(tmp_path.iterdir()) == []
    assert region.unlink_name() is False
    with pytest.raises(RegionError, match="is closed"):
        region.create_next_view(0, 1)
    with pytest.raises(RegionError, match="is closed"):
        region.create_kv_memoryview()


def test_close_names_views_that_are_still_alive(region: SharedOffloadRegion) -> None:
    """Unmapping under a live view would be a crash; after it is dropped, close works."""
    view = region.create_next_view(0, 1000)
    with pytest.raises(RegionError, match="drop every view"):
        region.close()
    view[:] = 1
    del view
    region.close()


# -- the name -----------------------------------------------------------------------------------


def test_the_name_is_gone_once_everybody_has_attached(region: SharedOffloadRegion) -> None:
    """Whatever kills the process now, no file stays (vllm#51579)."""
    assert not region.path.exists()


def test_a_kept_name_is_private_and_locked(tmp_path: Path, geometry: PrimaryGeometry) -> None:
    """Mode 0600, sized, locked by its owner, until the name is removed."""
    region = _create(tmp_path, geometry, keep_name=True)
    status = region.path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 4 * 8192 + 4096 + TRAILER_BYTES
    with region.path.open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert region.unlink_name() is True
    assert region.unlink_name() is False
    region.close()


def test_the_trailer_says_what_the_region_is(tmp_path: Path, geometry: PrimaryGeometry) -> None:
    """The last page holds counts, sizes, namespace and nonce."""
    region = _create(tmp_path, geometry, keep_name=True)
    found = RegionTrailer.unpack(region.path.read_bytes()[-TRAILER_BYTES:])
    assert found == region.trailer
    assert found == RegionTrailer(2, 4, 3000, 8192, NAMESPACE, region.trailer.nonce)
    region.close()


def test_two_regions_have_two_nonces(tmp_path: Path, geometry: PrimaryGeometry) -> None:
    """A nonce names one generation of the region."""
    first, second = _create(tmp_path, geometry), _create(tmp_path, geometry)
    assert first.trailer.nonce != second.trailer.nonce
    first.close()
    second.close()


def test_names_are_safe_and_distinct() -> None:
    """An engine id cannot leave the folder, and ids that look alike stay apart."""
    names = {region_name(engine_id) for engine_id in ("a/b", "a_b", "../a_b", "a b", "x" * 500)}
    assert len(names) == 5
    for name in names:
        assert "/" not in name
        assert len(name) < 100


def test_the_name_of_a_running_engine_is_refused(tmp_path: Path, geometry: PrimaryGeometry) -> None:
    """Two engines with one id do not share or steal memory."""
    region = _create(tmp_path, geometry, keep_name=True)
    with pytest.raises(RegionError, match="belongs to a running process"):
        _create(tmp_path, geometry)
    assert region.path.exists()
    region.close()


def test_a_leftover_of_a_dead_process_is_reclaimed(
    tmp_path: Path, geometry: PrimaryGeometry
) -> None:
    """The next start works without help (vllm#54002)."""
    leftover = tmp_path / region_name("engine-0")
    leftover.write_bytes(b"old" * 100)
    region = _create(tmp_path, geometry)
    rows = region.create_kv_memoryview()
    assert rows.tobytes() == bytes(4 * 8192)
    rows.release()
    assert not leftover.exists()
    region.close()


def test_a_dying_generation_leaves_the_name_of_its_successor(
    tmp_path: Path, geometry: PrimaryGeometry
) -> None:
    """Removal compares inodes (vllm#57422)."""
    old = _create(tmp_path, geometry, keep_name=True)
    old.path.rename(tmp_path / "elsewhere")
    new = _create(tmp_path, geometry, keep_name=True)
    assert old.unlink_name() is False
    old.close()
    assert new.path.exists()
    new.close()


def test_a_link_in_place_of_the_file_is_not_followed(
    tmp_path: Path, geometry: PrimaryGeometry
) -> None:
    """Nobody can make the engine write to, or remove, a file of its choice."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / region_name("engine-0")).symlink_to(target)
    with pytest.raises(RegionError, match="cannot be opened"):
        _create(tmp_path, geometry)
    assert target.read_bytes() == b"precious"


def test_something_else_under_the_name_is_refused(
    tmp_path: Path, geometry: PrimaryGeometry
) -> None:
    """A pipe is no leftover of a region, and opening it does not hang."""
    os.mkfifo(tmp_path / region_name("engine-0"))
    with pytest.raises(RegionError, match="not a regular file"):
        _create(tmp_path, geometry)


def test_an_absent_folder_is_a_clear_error(tmp_path: Path, geometry: PrimaryGeometry) -> None:
    """The path is named."""
    with pytest.raises(RegionError, match=r"cannot be created at .*absent"):
        _create(tmp_path / "absent", geometry)


CREATE_AND_WAIT = """
import sys, pathlib
from kv_core.cpu import PrimaryGeometry, SharedOffloadRegion
region = SharedOffloadRegion(
    "engine-0", PrimaryGeometry(4, 2, 3000, 8192, 8192), namespace_fingerprint="ab" * 32,
    shm_dir=pathlib.Path(sys.argv[1]), keep_name=sys.argv[2] == "keep")
print("created", flush=True)
sys.stdin.read()
"""


def _kill_after_creation(shm_dir: Path, name: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CREATE_AND_WAIT, str(shm_dir), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "created\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(timeout=30) == -signal.SIGKILL


def test_kill_between_creation_and_unlink_is_reclaimed(
    tmp_path: Path, geometry: PrimaryGeometry
) -> None:
    """The file of a killed creator is a leftover, and the next start takes its place."""
    _kill_after_creation(tmp_path, "keep")
    leftover = tmp_path / region_name("engine-0")
    trailer_of_the_dead = RegionTrailer.unpack(leftover.read_bytes()[-TRAILER_BYTES:])
    assert trailer_of_the_dead is not None
    region = _create(tmp_path, geometry, keep_name=True)
    assert region.trailer == RegionTrailer.unpack(leftover.read_bytes()[-TRAILER_BYTES:])
    assert region.trailer.nonce != trailer_of_the_dead.nonce
    region.close()
    assert list(tmp_path.iterdir()) == []


def test_kill_after_unlink_leaves_nothing(tmp_path: Path) -> None:
    """After everybody has attached there is no name to leak (vllm#51579)."""
    _kill_after_creation(tmp_path, "drop")
    assert list(tmp_path.iterdir()) == []


def test_kill_while_memory_is_taken_leaves_none(
    tmp_path: Path, geometry: PrimaryGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that keeps no name has none while its pages are allocated (vllm#51579)."""
    named: list[Path] = []

    def allocate(descriptor: int, offset: int, length: int) -> None:
        named.extend(tmp_path.iterdir())
        os.ftruncate(descriptor, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    _create(tmp_path, geometry).close()
    assert named == []


# -- space --------------------------------------------------------------------------------------


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Return a memory file system of 64 KiB."""
    mount_point = tmp_path / "shm"
    mount_point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount_point)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


@pytest.mark.privileged
def test_too_little_space_is_said_before_anything_is_mapped(
    small_tmpfs: Path, geometry: PrimaryGeometry
) -> None:
    """Needed and available bytes, what to do, and nothing left behind (vllm#54002)."""
    large = dataclasses.replace(geometry, num_blocks=8)
    with pytest.raises(InsufficientSpaceError, match="cpu_bytes_to_use") as caught:
        _create(small_tmpfs, large)
    assert caught.value.needed_bytes == 8 * 8192 + 4096 + TRAILER_BYTES
    assert caught.value.available_bytes == 65536
    assert list(small_tmpfs.iterdir()) == []
    region = _create(small_tmpfs, geometry)
    region.close()


@pytest.mark.privileged
def test_a_leftover_does_not_cost_the_space_of_its_successor(
    small_tmpfs: Path, geometry: PrimaryGeometry
) -> None:
    """The old region is reclaimed before the new one is measured (vllm#54002)."""
    (small_tmpfs / region_name("engine-0")).write_bytes(bytes(60_000))
    region = _create(small_tmpfs, dataclasses.replace(geometry, num_blocks=7))
    region.close()


def test_space_that_goes_while_it_is_taken_is_the_same_error(
    tmp_path: Path, geometry: PrimaryGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between check and allocation others may take the space."""

    def fail(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(InsufficientSpaceError) as caught:
        _create(tmp_path, geometry)
    assert caught.value.needed_bytes == 4 * 8192 + 4096 + TRAILER_BYTES
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_a_limit_has_space(
    tmp_path: Path, geometry: PrimaryGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory file system mounted without a size reports no blocks, which is not "full"."""
    unlimited = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda _descriptor: unlimited)
    _create(tmp_path, geometry).close()


def test_a_failed_mapping_leaves_nothing_behind(
    tmp_path: Path, geometry: PrimaryGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name, lock and pages are given back."""

    def fail(descriptor: int, size_bytes: int) -> None:
        raise RegionError("no mapping")

    monkeypatch.setattr(_region, "map_file", fail)
    with pytest.raises(RegionError, match="no mapping"):
        _create(tmp_path, geometry)
    assert list(tmp_path.iterdir()) == []


def test_kernels_without_populate_get_their_pages_by_reading(
    tmp_path: Path, geometry: PrimaryGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown advice is not an error."""
    monkeypatch.setattr(_prefault, "_MADV_POPULATE_WRITE", 9999)
    region = _create(tmp_path, geometry)
    view = region.create_next_view(0, 16)
    view[:] = 5
    assert int(view.sum()) == 4 * 16 * 5
    del view
    region.close()


# -- the trailer --------------------------------------------------------------------------------

TRAILER = RegionTrailer(2, 4, 3000, 8192, NAMESPACE, bytes(range(16)))


def test_a_trailer_survives_its_page() -> None:
    """Packing and unpacking give the same values."""
    assert RegionTrailer.unpack(TRAILER.pack().ljust(TRAILER_BYTES, b"\0")) == TRAILER
    TRAILER.require_equal(TRAILER)


def test_a_page_of_something_else_is_no_trailer() -> None:
    """Another magic, or another version, is refused, and said."""
    with pytest.raises(RegionError, match="begins with b'somethin'"):
        RegionTrailer.unpack(b"something else".ljust(TRAILER_BYTES, b"\0"))
    other_version = TRAILER.pack()[:8] + (99).to_bytes(4, "little")
    with pytest.raises(RegionError, match="version 99"):
        RegionTrailer.unpack(other_version.ljust(TRAILER_BYTES, b"\0"))


def test_a_trailer_that_is_being_written_is_not_read() -> None:
    """Whatever part of it another process sees, it is no trailer before it is complete."""
    packed = TRAILER.pack()
    for length in range(len(packed)):
        page = packed[:length].ljust(TRAILER_BYTES, b"\0")
        if 0 < length < 8:
            continue  # the magic is one aligned word, and is written as one
        assert RegionTrailer.unpack(page) is None


@pytest.mark.parametrize(
    "change",
    [
        {"num_workers": 3},
        {"num_blocks": 5},
        {"worker_page_bytes": 3001},
        {"row_stride": 4096},
        {"namespace_fingerprint": "cd" * 32},
        {"nonce": bytes(16)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_the_trailer_must_agree(change: dict[str, object]) -> None:
    """A process of another generation or shape is refused, and told what differs."""
    (name,) = change
    other = dataclasses.replace(TRAILER, **change)  # type: ignore[arg-type]
    with pytest.raises(RegionError, match=f"its {name} is"):
        other.require_equal(TRAILER)


@pytest.mark.parametrize(
    "change", [{"namespace_fingerprint": "xyz"}, {"nonce": b"short"}], ids=["namespace", "nonce"]
)
def test_a_malformed_identity_is_refused(change: dict[str, object]) -> None:
    """Padding or cutting it would make distinct identities equal."""
    with pytest.raises(RegionError, match="must"):
        dataclasses.replace(TRAILER, **change)  # type: ignore[arg-type]
