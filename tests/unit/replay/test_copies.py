"""Copies at the worst moment: late, never, or after the engine has gone on."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.device import OffloadingWorker
from kv_core.device.copy import HostCopyBackend
from kv_core.workload.replay import (
    HostGpuMemory,
    ReplayEngine,
    ReplayReport,
    _engine,
    replay_trace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from kv_core.device.copy import CopyBackend, CopyBatch, CopyStream, CopyTicket
    from kv_core.plugins import TierRegistry
    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayConfig


class LateTicket:
    """A copy that runs when somebody waits for it, or at the third question whether it is done."""

    error = None
    elapsed_seconds = 0.0

    def __init__(self, stream: LateStream, batch: CopyBatch) -> None:
        self.stream = stream
        self.batch = batch
        self.questions = 0

    def done(self) -> bool:
        """Be patient twice."""
        self.questions += 1
        if self.questions >= 3:
            self.wait()
        return self not in self.stream.queue

    def wait(self) -> None:
        """Run this copy and, in order, all before it."""
        while self in self.stream.queue:
            self.stream.run_first()


class LateStream:
    """A queue of copies that are as late as the protocol allows."""

    def __init__(self, real: CopyStream, *, copies: bool) -> None:
        self.real = real
        self.copies = copies
        self.queue: list[LateTicket] = []

    def submit(self, batch: CopyBatch) -> CopyTicket:
        """Queue a copy."""
        self.queue.append(LateTicket(self, batch))
        return self.queue[-1]

    def run_first(self) -> None:
        """Carry out the oldest copy, or drop it."""
        ticket = self.queue.pop(0)
        if self.copies:
            self.real.submit(ticket.batch).wait()

    def close(self) -> None:
        """Carry out the rest."""
        while self.queue:
            self.run_first()
        self.real.close()


class LateMemory:
    """Pages in host memory, with late copies; loads may be dropped altogether."""

    def __init__(self, config: ReplayConfig, *, drop_loads: bool = False) -> None:
        self._pages = HostGpuMemory(config.gpu_blocks, config.block_bytes)
        self._drop_loads = drop_loads
        self.tensor = self._pages.tensor
        self.fill = self._pages.fill
        self.read = self._pages.read

    def poison(self, block_ids: Collection[int]) -> None:
        """Destroy the content of blocks."""
        self._pages.poison(block_ids)

    def copy_backend(self, cpu_tensors: Sequence[npt.NDArray[np.int8]]) -> CopyBackend:
        """Return a back end of late streams."""
        drop_loads, host = self._drop_loads, HostCopyBackend()

        class LateBackend:
            name = "late"

            def open_stream(self, name: str) -> CopyStream:
                copies = not (drop_loads and name == "cpu-to-gpu")
                return LateStream(host.open_stream(name), copies=copies)

        return LateBackend()


def _run(trace: Trace, config: ReplayConfig, **options: Any) -> ReplayReport:
    engine = ReplayEngine(trace, config, memory=LateMemory(config, **options))
    try:
        return engine.run()
    finally:
        engine.shutdown()


def _crowded(letters: Callable[..., Trace]) -> Trace:
    """Return requests that share prefixes, outgrow the pool and come back."""
    words = ("abcd", "abef", "lmno", "lmpq")
    return letters(*words, *words, output_tokens=70)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("spare", [0, 3, 9])
def test_late_copies_keep_their_bytes(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    factor: int,
    spare: int,
) -> None:
    """However late a copy runs, its source is not overwritten before (vllm#45704, vllm#47282)."""
    trace = _crowded(letters)
    config = make_config(
        trace, spare_gpu_blocks=spare, block_size_factor=factor, decode_tokens_per_step=8
    )
    report = _run(trace, config)
    assert report.problems() == []
    assert report.blocks_verified > 0


def test_a_store_that_loses_the_race_is_seen(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the engine did not wait for stores before it reuses their blocks, bytes would be wrong."""

    def forget(worker: OffloadingWorker, job_ids: Iterable[int]) -> None:
        del worker, job_ids

    monkeypatch.setattr(OffloadingWorker, "wait", forget)
    trace = _crowded(letters)
    report = _run(trace, make_config(trace, decode_tokens_per_step=8))
    assert report.bytes_wrong > 0


def test_a_load_that_moves_nothing_is_seen(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """GPU blocks are poisoned when they are handed out: nothing passes for a load."""
    trace = letters("abcd", "wxyz", "abcd")
    report = _run(trace, make_config(trace, max_seqs=1, block_bytes=4096), drop_loads=True)
    assert report.hits == {"gpu": 0, "cpu": 4}
    assert report.bytes_wrong > 0.98 * 4 * 4096


class NapClock:
    """Stands in for the replay's clock: time passes only while it naps, a tenth of a second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.monotonic_ns = time.monotonic_ns

    def perf_counter(self) -> float:
        """Return the seconds slept so far."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += 0.1


def test_a_slow_tier_is_not_taken_for_a_stall(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    install_tier: Callable[[str], TierRegistry],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job of a tier that ends is progress, also when nothing else moves any more."""
    clock = NapClock()
    monkeypatch.setattr(_engine, "time", clock)
    trace = letters("abcd", "efgh", "ijkl", "mnop")
    config = make_config(trace, stall_deadline_s=10.0, secondary_tiers=[{"type": "test"}])
    memory, registry = LateMemory(config), install_tier("TrickleTier")
    engine = ReplayEngine(trace, config, registry=registry, memory=memory)
    report = engine.run()
    engine.shutdown()
    assert report.problems() == []
    assert clock.now_s > config.stall_deadline_s
    assert report.bytes_moved["cpu_to_test"] == 16 * 4096


def test_a_replay_leaves_nothing_behind(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No thread, no file of the region, nothing logged as an error: the region was unmapped."""
    before = set(threading.enumerate())
    trace = letters("abcd", "abcd")
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "blocks")}]
    with caplog.at_level(logging.WARNING):
        replay_trace(trace, make_config(trace, secondary_tiers=tiers))
    assert set(threading.enumerate()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["blocks"]
    assert caplog.records == []


def test_an_interrupted_replay_leaves_nothing_behind(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever ends the run, everything is released."""
    before = set(threading.enumerate())

    def interrupt(finished: int) -> None:
        raise KeyboardInterrupt

    trace = letters("abcd", "efgh", "ijkl")
    with pytest.raises(KeyboardInterrupt):
        replay_trace(trace, make_config(trace), progress=interrupt)
    assert set(threading.enumerate()) == before
    assert caplog.messages == []


def test_shutdown_can_be_repeated(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """Also without a run."""
    engine = ReplayEngine(letters("ab"), make_config(letters("ab")))
    engine.shutdown()
    engine.shutdown()
