"""A file system that stalls: deadlines hold and the engine goes on, with a real mount (FUSE)."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_conformance.faults.fuse import FaultyFolder
from kv_conformance.harness import Fault
from kv_core.workload import synthetic_trace
from kv_core.workload.replay import ReplayConfig, ReplayEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts"),
]

REQUESTS: Final = 250
BLOCK: Final = 4096
# Short, so that every deadline passes while the storage stalls; not so short that a mount in user
# space on a busy machine misses them when it does not.
ENGINE: Final = {
    "promotion_deadline_s": 2.0,
    "store_deadline_s": 3.0,
    "request_lookup_deadline_s": 2.0,
    "degraded_backoff_s": 0.05,
    "degraded_backoff_max_s": 0.3,
    "quarantine_grace_s": 0.2,
}
TIER: Final = {
    "job_deadline_s": 2.0,
    "lookup_deadline_s": 1.0,
    "error_backoff_s": 0.05,
    "min_free_bytes": 1 << 20,
    "io_threads": 4,
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FaultyFolder]:
    """Return a mounted folder that can be made to stall; it is healed at the end."""
    with FaultyFolder(tmp_path / "backing", tmp_path / "mounted") as mounted:
        mounted.backing.chmod(0o700)
        yield mounted


def engine_on(folder: FaultyFolder, layout: str, **settings: Any) -> ReplayEngine:
    """Return an engine with a tier on the mounted folder and too little memory of its own."""
    tier = {"type": "fs", "root_dir": str(folder.mountpoint), "layout": layout, **TIER, **settings}
    config = ReplayConfig(
        gpu_blocks=128,
        cpu_bytes=1 << 20,
        block_bytes=BLOCK,
        secondary_tiers=[tier],
        engine_options=ENGINE,
    )
    return ReplayEngine(synthetic_trace("mixed", seed=3, num_requests=REQUESTS), config)


class Outage:
    """A fault from one number of finished requests to another.

    Attributes:
        has_begun: Whether the fault has been injected.
        is_over: Whether it has been healed.
    """

    def __init__(self, folder: FaultyFolder, fault: Fault, *, until: int | None) -> None:
        self._folder = folder
        self._fault = fault
        self._until = until
        self._finished = 0
        self.has_begun = self.is_over = False

    def note_finished(self, count: int) -> None:
        """Take note of the number of finished requests."""
        self._finished = count

    def look(self) -> None:
        """Begin or end, where it is time to."""
        if not self.has_begun and self._finished >= 60:
            self._folder.inject(self._fault)
            self.has_begun = True
        if self._until is not None and not self.is_over and self._finished >= self._until:
            self._folder.heal()
            self.is_over = True


def expect_sound(report: Any) -> None:
    """Require that every request has finished and no byte is wrong."""
    assert report.requests_finished == report.requests == REQUESTS
    assert report.bytes_wrong == 0
    assert sum(report.hits.values()) + report.misses == report.blocks_requested


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.ERROR, Fault.FULL, Fault.SHORT])
def test_an_engine_goes_on_through_an_outage(
    folder: FaultyFolder, layout: str, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests finish while nothing moves, and the tier serves again afterwards (vllm#49829)."""
    caplog.set_level("CRITICAL")
    engine = engine_on(folder, layout)
    outage = Outage(folder, fault, until=170)
    try:
        report = engine.run(outage.note_finished, outage.look)
    finally:
        folder.heal()
        engine.shutdown()
    assert outage.is_over
    expect_sound(report)
    # What was stored before, and what has been stored since, is as good as ever.
    again = engine_on(folder, layout)
    try:
        report = again.run()
    finally:
        again.shutdown()
    expect_sound(report)
    assert report.hits["fs"] > 0


def test_an_engine_ends_although_its_storage_never_comes_back(
    folder: FaultyFolder, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole rest of the trace is served without the tier, in little more than its time."""
    caplog.set_level("CRITICAL")
    engine = engine_on(folder, layout)
    outage = Outage(folder, Fault.STALL, until=None)
    began = time.monotonic()
    try:
        report = engine.run(outage.note_finished, outage.look)
        took_s = time.monotonic() - began
    finally:
        folder.heal()
        engine.shutdown()
    assert outage.has_begun
    expect_sound(report)
    assert took_s < 60
    assert report.stats["tier.fs.stalled_jobs"] > 0


@pytest.mark.parametrize("blocks", [1, 16])
def test_a_call_into_a_stalled_storage_returns_at_once(
    folder: FaultyFolder, layout: str, blocks: int, start_worker: Callable[..., Any]
) -> None:
    """Whatever is asked of a tier whose disk hangs is answered, if only by a failure (JOB-5)."""
    worker = start_worker(
        {"root_dir": str(folder.mountpoint), "layout": layout, **TIER, "block_bytes": BLOCK}
    )
    assert "ready" in worker.opened, worker.opened
    assert worker("store", blocks=list(range(16)))["error"] is None
    folder.inject(Fault.STALL)
    healing = threading.Timer(5.0, folder.heal)
    healing.start()
    began = time.monotonic()
    # With files, whether a block is there is itself a question to the disk.
    worker("find", blocks=list(range(blocks)))
    assert time.monotonic() - began < 2 * TIER["lookup_deadline_s"] + 1.0
    answer = worker("load", blocks=list(range(blocks)))
    assert answer["wrong"] == []
    answer = worker("store", blocks=list(range(100, 100 + blocks)))
    assert answer["error"] in (None, "failed", "stalled", "declined")
    healing.join()
    worker.wait_for(range(16))
    assert worker.check(range(16)) == list(range(16))
    worker.end()
