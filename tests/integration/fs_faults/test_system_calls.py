"""System calls that fail, one kind after the other: the tier stays consistent and goes on.

Covers DATA-11 with the kernel's own errors: a process is traced while it stores and loads.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    Inject = Callable[..., AbstractContextManager[Any]]
    Work = Callable[..., Any]

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("strace") is None, reason="needs root and strace"
    ),
]

# What a store may do to the storage. Python's pwritev is the system call pwritev2. Its write and
# read are what the worker speaks to the test with, so they are left alone.
WRITING: Final = (
    "pwritev2",
    "pwrite64",
    "fallocate",
    "ftruncate",
    "fdatasync",
    "fsync",
    "mkdir",
    "rename",
    "openat",
    "flock",
)
READING: Final = ("preadv2", "pread64", "openat", "fstat,newfstatat,statx")
REMOVING: Final = ("unlink", "unlinkat", "rmdir", "rename", "ftruncate", "flock")
ERRORS: Final = {"openat": ("EMFILE", "EACCES"), "flock": ("EINTR", "ENOLCK")}
SETTINGS: Final = {"error_backoff_s": 0.01, "io_threads": 4}

OLD: Final = range(16)
NEW: Final = range(100, 132)


def faults(calls: tuple[str, ...], *, otherwise: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each call with each error."""
    return [(call, error) for call in calls for error in ERRORS.get(call, otherwise)]


@pytest.mark.parametrize("when", ["1+", "2", "2+3"])
@pytest.mark.parametrize(("call", "error"), faults(WRITING, otherwise=("ENOSPC", "EIO")))
def test_a_failing_write_costs_its_blocks_only(
    work: Work, inject: Inject, call: str, error: str, when: str
) -> None:
    """Every store is answered truthfully; what was there stays, and what failed succeeds later."""
    worker = work(**SETTINGS)
    assert worker("store", blocks=list(OLD))["error"] is None
    stored: set[int] = set()
    with inject(worker.pid, f"{call}:error={error}:when={when}"):
        for first in range(NEW.start, NEW.stop, 8):
            answer = worker("store", blocks=list(range(first, first + 8)))
            stored.update(answer["stored"])
            assert (answer["error"] is None) == (len(answer["stored"]) == 8)
    assert set(worker.check([*OLD, *NEW])) >= {*OLD, *stored}
    assert worker("store", blocks=list(NEW))["error"] is None
    assert worker.check([*OLD, *NEW]) == [*OLD, *NEW]
    worker.end()
    assert work(**SETTINGS).check([*OLD, *NEW]) == [*OLD, *NEW]


@pytest.mark.parametrize(("call", "error"), faults(READING, otherwise=("EIO",)))
def test_a_failing_read_is_no_wrong_byte_and_no_loss(
    work: Work, inject: Inject, call: str, error: str
) -> None:
    """A load fails and the block stays, for whoever asks when the disk is well again (LOOK-4)."""
    worker = work(**SETTINGS)
    assert worker("store", blocks=list(OLD))["error"] is None
    names = call.split(",")
    with inject(worker.pid, *(f"{name}:error={error}:when=1+" for name in names)) as calls:
        answer = worker("load", blocks=list(OLD))
        assert answer["wrong"] == []
    if calls.injected and len(answer["loaded"]) < len(OLD):
        assert answer["error"] == "failed"
    worker.wait_for(OLD)
    assert worker.check(OLD) == list(OLD)


def test_a_disk_that_lies_about_writes_is_found_out(work: Work, inject: Inject) -> None:
    """A write that says it has moved everything, and has not, is a failed load (INT-1)."""
    block_bytes = 4096
    worker = work(**SETTINGS, block_bytes=block_bytes)
    assert worker("store", blocks=list(OLD))["error"] is None
    # Layout files writes a block and its trailer in one call, segments whole jobs.
    with inject(worker.pid, f"pwritev2:retval={block_bytes * 2}:when=1") as calls:
        worker("store", blocks=list(NEW[:8]))
    assert calls.injected
    assert set(worker.check([*OLD, *NEW[:8]])) >= set(OLD)
    assert worker("store", blocks=list(NEW[:8]))["error"] is None
    assert worker.check([*OLD, *NEW[:8]]) == [*OLD, *NEW[:8]]


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
