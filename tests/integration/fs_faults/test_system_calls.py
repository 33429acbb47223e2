"""System calls that fail, one kind after the other: the tier stays consistent and goes on.

Covers DATA-11 with the kernel's own errors: a process is traced while it stores and loads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    Inject = Callable[..., AbstractContextManager[Any]]
    Work = Callable[..., Any]

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("strace") is None, reason="needs root and strace"
    ),
]

# What a store does to the storage, by layout. Python's pwritev is the system call pwritev2; its
# write and read are what the worker speaks to the test with, so they are left alone.
WRITING: Final = {
    "files": ("pwritev2", "openat", "mkdirat", "renameat"),
    "segments": ("pwritev2", "pwrite64", "openat", "fallocate", "ftruncate", "flock", "fchmod"),
}
READING: Final = {"files": ("preadv2", "openat"), "segments": ("preadv2", "openat")}
REMOVING: Final = {"segments": ("unlink", "flock", "ftruncate", "fallocate", "openat", "fchmod")}
ERRORS: Final = {
    "openat": ("EMFILE", "EACCES"),
    "flock": ("EIO", "ENOLCK"),
    "ftruncate": ("EIO",),
    "fchmod": ("EPERM",),
    "unlink": ("EIO", "EROFS"),
}
SETTINGS: Final = {"error_backoff_s": 0.01, "io_threads": 4, "block_bytes": 4096}
# So that stores make, seal and remove segments of eight blocks all the time.
CAPACITY: Final = 64 * 4096 * 4
SMALL: Final = {
    "files": SETTINGS,
    "segments": {**SETTINGS, "capacity_bytes": CAPACITY},
}

OLD: Final = range(16)
NEW: Final = range(100, 132)


def faults(
    calls: Mapping[str, Sequence[str]], *, otherwise: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Return each layout with each of its calls and each error of that."""
    return [
        (layout, call, error)
        for layout, names in calls.items()
        for call in names
        for error in ERRORS.get(call, otherwise)
    ]


@pytest.fixture
def works(root: Path, start_worker: Callable[[dict[str, Any]], Any]) -> Callable[[str], Any]:
    """Return a function that starts a worker of a layout, with room for some dozens of blocks."""
    return lambda layout: start_worker({"root_dir": str(root), "layout": layout, **SMALL[layout]})


@pytest.mark.slice(9)
@pytest.mark.parametrize("when", ["1+", "2", "2+3"])
@pytest.mark.parametrize(("layout", "call", "error"), faults(WRITING, otherwise=("ENOSPC", "EIO")))
def test_a_failing_write_costs_its_blocks_only(
    works: Callable[[str], Any], inject: Inject, layout: str, call: str, error: str, when: str
) -> None:
    """Every store is answered truthfully; what was there stays, and what failed succeeds later."""
    worker = works(layout)
    assert worker("store", blocks=list(OLD))["error"] is None
    stored: set[int] = set()
    with inject(worker.pid, f"{call}:error={error}:when={when}") as calls:
        for first in range(NEW.start, NEW.stop, 8):
            answer = worker("store", blocks=list(range(first, first + 8)))
            stored.update(answer["stored"])
            assert (answer["error"] is None) == (len(answer["stored"]) == 8)
    # Every thread counts its calls from one.
    assert calls.injected or when != "1+"
    assert set(worker.check([*OLD, *NEW])) >= {*OLD, *stored}
    assert worker("store", blocks=list(NEW))["error"] is None
    assert worker.check([*OLD, *NEW]) == [*OLD, *NEW]
    worker.end()
    assert works(layout).check([*OLD, *NEW]) == [*OLD, *NEW]


@pytest.mark.slice(5)
@pytest.mark.parametrize("when", ["1+", "2+2"])
@pytest.mark.parametrize(("layout", "call", "error"), faults(REMOVING, otherwise=("ENOSPC", "EIO")))
def test_failures_while_room_is_made_keep_the_bound(
    works: Callable[[str], Any],
    root: Path,
    inject: Inject,
    layout: str,
    call: str,
    error: str,
    when: str,
) -> None:
    """Segments that cannot be removed or sealed now are later; meanwhile stores are declined."""
    worker = works(layout)
    for first in range(0, 240, 16):
        assert worker("store", blocks=list(range(first, first + 16)))["error"] is None
    with inject(worker.pid, f"{call}:error={error}:when={when}") as calls:
        for first in range(300, 460, 16):
            answer = worker("store", blocks=list(range(first, first + 16)))
            assert answer["error"] in (None, "declined", "failed")
            assert disk_bytes(root) <= CAPACITY
    assert calls.injected
    worker.check(range(460))
    for first in range(500, 820, 16):
        answer = worker("store", blocks=list(range(first, first + 16)))
        assert answer["error"] is None, answer
        assert disk_bytes(root) <= CAPACITY
    assert worker.check(range(804, 820)) == list(range(804, 820))
    worker.end()
    again = works(layout)
    assert set(again.check(range(804, 820))) == set(range(804, 820))
    assert disk_bytes(root) <= CAPACITY


def disk_bytes(root: Path) -> int:
    """Return what the files of segments take on the disk."""
    total = 0
    for path in [*root.rglob("*.seg"), *root.rglob("*.idx")]:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            total += max(status.st_size, status.st_blocks * 512)
    return total


@pytest.mark.parametrize(("layout", "call", "error"), faults(READING, otherwise=("EIO",)))
def test_a_failing_read_is_no_wrong_byte_and_no_loss(
    works: Callable[[str], Any], inject: Inject, layout: str, call: str, error: str
) -> None:
    """A load fails and the block stays, for whoever asks when the disk is well again (LOOK-4)."""
    worker = works(layout)
    assert worker("store", blocks=list(OLD))["error"] is None
    with inject(worker.pid, f"{call}:error={error}:when=1+") as calls:
        answer = worker("load", blocks=list(OLD))
        assert answer["wrong"] == []
    if calls.injected and len(answer["loaded"]) < len(OLD):
        assert answer["error"] == "failed"
    worker.wait_for(OLD)
    assert worker.check(OLD) == list(OLD)


def test_a_disk_that_lies_about_writes_is_found_out(work: Work, inject: Inject) -> None:
    """A write that says it has moved everything, and has not, is a failed load (INT-1)."""
    worker = work(**SETTINGS)
    assert worker("store", blocks=list(OLD))["error"] is None
    # Layout files writes a block and its trailer in one call, segments all blocks of a job.
    with inject(worker.pid, f"pwritev2:retval={2 * 4096}:when=1+") as calls:
        assert worker("store", blocks=[NEW[0], NEW[1]])["error"] is None
    assert calls.injected
    assert worker.check([*OLD, *NEW]) == list(OLD)
    assert worker("store", blocks=list(NEW))["error"] is None
    assert worker.check([*OLD, *NEW]) == [*OLD, *NEW]


@pytest.mark.slice(6)
@pytest.mark.parametrize("spare", range(12))
def test_a_process_out_of_descriptors_goes_on(work: Work, spare: int) -> None:
    """EMFILE is a failure of the moment, at whichever descriptor it comes (vllm#49176)."""
    worker = work(**SETTINGS)
    assert worker("store", blocks=list(OLD))["error"] is None
    worker("few_files", spare=spare)
    stored = set(worker("store", blocks=list(NEW))["stored"])
    loaded = worker("load", blocks=list(OLD))
    assert loaded["wrong"] == []
    worker("few_files", spare=-1)
    worker.wait_for(OLD)
    assert set(worker.check([*OLD, *NEW])) >= {*OLD, *stored}
    assert worker("store", blocks=list(NEW))["error"] is None
    assert worker.check([*OLD, *NEW]) == [*OLD, *NEW]
