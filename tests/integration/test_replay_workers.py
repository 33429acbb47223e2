"""Replays whose workers are processes: right bytes on every rank, and nothing left at any end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kv_core.errors import WorkerError
from kv_core.workload import synthetic_trace
from kv_core.workload.replay import ReplayConfig, ReplayEngine, _processes, replay_trace
from kv_core.workload.replay._tiered import TieredLevels

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from kv_core.workload import Trace

    Command = Callable[..., tuple[int, str, str]]
    Start = Callable[..., subprocess.Popen[str]]
    WaitUntil = Callable[[subprocess.Popen[str], Callable[[], bool]], None]

DEADLINE_S = 60.0

# A worker that does what a defect in the layout would make it do: it is told its rank, and takes
# the other's place.
SWAPPED = """
import dataclasses, sys
from kv_core.workload.replay import _worker_main
original = _worker_main._open
def swapped(start, opened):
    role = start.role.of_worker(1 - start.rank)
    return original(dataclasses.replace(start, role=role), opened)
_worker_main._open = swapped
sys.exit(_worker_main.main(int(sys.argv[1])))
"""

# The pool of rank 1 does not fit.
TOO_LARGE = """
import sys
from kv_core.workload.replay import _memory, _worker_main
original = _memory._allocate
def allocate(num_blocks, block_bytes, rank):
    if rank == 1:
        raise MemoryError("no more")
    return original(num_blocks, block_bytes, rank)
_memory._allocate = allocate
sys.exit(_worker_main.main(int(sys.argv[1])))
"""

# A defect in a worker, at its tenth step.
DEFECT = """
import sys
from kv_core.workload.replay import _worker_main
original, steps = _worker_main.Worker.run_step, []
def run_step(self, orders):
    steps.append(1)
    if len(steps) == 10:
        raise IndexError("there is no block 17")
    return original(self, orders)
_worker_main.Worker.run_step = run_step
sys.exit(_worker_main.main(int(sys.argv[1])))
"""

# It does not even begin.
BROKEN = "import sys; sys.exit(7)"


@pytest.fixture
def shm_dir(tmp_path: Path) -> Path:
    """Return a folder for the shared region."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def trace() -> Trace:
    """Return a small workload."""
    return synthetic_trace("chat", seed=1, num_requests=40)


@pytest.fixture
def config(tmp_path: Path, shm_dir: Path) -> ReplayConfig:
    """Return a replay of two workers whose rows have padding, over a folder."""
    return ReplayConfig(
        workers=2,
        block_bytes=3000,
        gpu_blocks=400,
        cpu_bytes=2**20,
        secondary_tiers=[{"type": "fs", "root_dir": str(tmp_path / "storage")}],
        shm_dir=str(shm_dir),
    )


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that replaces the program of worker processes."""

    def replace(program: str) -> None:
        monkeypatch.setattr(_processes, "COMMAND", (sys.executable, "-c", program))

    return replace


@pytest.mark.parametrize("workers", [2, 4])
def test_every_rank_is_right_over_a_restart(
    workers: int, command: Command, tmp_path: Path, shm_dir: Path
) -> None:
    """The second run lives on the disk: every rank verified every loaded block, in both runs."""
    file = tmp_path / "report.json"
    sizes = ["--limit=60", "--block-bytes=3000", "--gpu-blocks=400", "--cpu-bytes=8MiB"]
    status, out, err = command(
        *("replay", "synthetic:chat", f"--workers={workers}", *sizes, f"--shm-dir={shm_dir}"),
        *(f"--tier=fs:root_dir={tmp_path}/storage", "--restart", "--quiet", f"--json={file}"),
    )
    assert (status, out, err) == (0, "", "")
    first, second = json.loads(file.read_text())["runs"]
    for report in (first, second):
        assert report["requests_finished"] == 60
        each = {"device": "cpu", "blocks_verified": report["blocks_verified"], "bytes_wrong": 0}
        assert report["workers"] == [each] * workers
    assert first["blocks_verified"] > 0
    assert second["hits"]["fs"] > first["misses"] / 2
    assert second["misses"] < first["misses"] / 2
    assert list(shm_dir.iterdir()) == []


@pytest.mark.traces
@pytest.mark.parametrize("name", ["mooncake/conversation_trace.jsonl", "ragpulse"])
def test_recorded_traces_are_right_on_every_rank(
    name: str, command: Command, traces: Path, tmp_path: Path
) -> None:
    """Slices of recorded workloads, over a restart."""
    file = tmp_path / "report.json"
    status, _, err = command(
        *("replay", str(traces / name), "--workers=2", "--limit=60", "--cpu-bytes=16MiB"),
        *(f"--tier=fs:root_dir={tmp_path}/storage", "--restart", f"--json={file}"),
    )
    assert (status, err) == (0, "")
    for report in json.loads(file.read_text())["runs"]:
        assert [worker["bytes_wrong"] for worker in report["workers"]] == [0, 0]
        assert report["workers"][1]["blocks_verified"] == report["blocks_verified"]
    assert report["hits"]["fs"] > 0


def test_swapped_ranks_are_reported(
    trace: Trace, config: ReplayConfig, double: Callable[[str], None]
) -> None:
    """Two processes that take each other's pages load what belongs to the other."""
    assert replay_trace(trace, config).problems() == []
    double(SWAPPED)
    report = replay_trace(trace, config)
    assert report.bytes_wrong_by_level["fs"] > 0
    assert all(worker.bytes_wrong > 0 for worker in report.workers)
    assert "on worker 1" in report.problems()[0]


# -- workers that end ---------------------------------------------------------------------------


def after_steps(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """Return what acts between two steps of a replay, once."""
    steps = iter(range(number + 1, 0, -1))

    def between_steps() -> None:
        if next(steps, None) == 1:
            act()

    return between_steps


def has_ended(process_id: int) -> bool:
    """Say whether a process runs no more. One without a parent may not be buried for a while."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in {"Z", "X"}


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait for something that other processes do."""
    ends_at = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.01)
    return True


def workers_of(engine: ReplayEngine) -> _processes.WorkerProcesses:
    """Return an engine's workers."""
    assert isinstance(engine._levels, TieredLevels)
    workers = engine._levels._workers
    assert isinstance(workers, _processes.WorkerProcesses)
    return workers


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_ends_the_replay(
    trace: Trace, config: ReplayConfig, shm_dir: Path, rank: int
) -> None:
    """The error says who and how; the other worker ends, and the next replay is right."""
    engine = ReplayEngine(trace, config)
    process_ids = workers_of(engine).process_ids
    kill = after_steps(5, lambda: os.kill(process_ids[rank], signal.SIGKILL))
    with pytest.raises(WorkerError, match=r"ended by SIGKILL .*--gpu-blocks") as caught:
        engine.run(between_steps=kill)
    assert caught.value.rank == rank
    assert f"worker {rank} (process {process_ids[rank]})" in str(caught.value)
    engine.shutdown()
    assert [has_ended(process_id) for process_id in process_ids] == [True, True]
    assert list(shm_dir.iterdir()) == []
    assert replay_trace(trace, config).problems() == []


def test_a_worker_that_hangs_ends_the_replay(
    trace: Trace, config: ReplayConfig, shm_dir: Path
) -> None:
    """A stopped process answers no order; it is killed after the deadline of the replay."""
    engine = ReplayEngine(trace, config)
    workers = workers_of(engine)
    process_ids = workers.process_ids
    # Only now: to start takes longer on a busy machine.
    workers._patience_s = 0.5
    stop = after_steps(5, lambda: os.kill(process_ids[1], signal.SIGSTOP))
    with pytest.raises(WorkerError, match=r"did not carry out an order within 0\.5 s") as caught:
        engine.run(between_steps=stop)
    engine.shutdown()
    assert caught.value.rank in {0, 1}
    assert [has_ended(process_id) for process_id in process_ids] == [True, True]
    assert list(shm_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            TOO_LARGE,
            r"worker 1 \(process \d+\) failed: a GPU pool .* cannot be allocated \(no more\)",
        ),
        (DEFECT, r"failed: IndexError: there is no block 17"),
        (BROKEN, r"worker \d \(process \d+\) ended with status 7"),
    ],
    ids=["too large", "defect", "broken"],
)
def test_a_worker_that_fails_says_why(
    trace: Trace,
    config: ReplayConfig,
    shm_dir: Path,
    double: Callable[[str], None],
    program: str,
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its own words, at the start and later, and nothing is left."""
    double(program)
    with pytest.raises(WorkerError, match=message):
        replay_trace(trace, config)
    assert list(shm_dir.iterdir()) == []
    # The traceback of a defect; words for everything else.
    assert ("Traceback" in capfd.readouterr().err) is (program is DEFECT)


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def arguments(tmp_path: Path, shm_dir: Path) -> list[str]:
    """Return a replay that runs much longer than a test waits."""
    small = ["--gpu-blocks=400", "--cpu-bytes=4MiB", "--quiet", f"--shm-dir={shm_dir}"]
    # The layout whose blocks can be counted from outside.
    tier = f"--tier=fs:root_dir={tmp_path}/storage,layout=files"
    return ["replay", "synthetic:chat", "--limit=4000", "--workers=2", tier, *small]


def children_of(process_id: int) -> list[int]:
    """Return the processes that a process has started."""
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if re.search(rf"\) \S {process_id} ", _read(path))
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture
def running(
    start: Start, wait_until: WaitUntil, arguments: list[str], tmp_path: Path
) -> tuple[subprocess.Popen[str], list[int]]:
    """Return a replay in the middle of its stores, and its workers."""
    process = start(*arguments)
    wait_until(process, lambda: sum(1 for _ in (tmp_path / "storage").rglob("*.bin")) > 50)
    workers = children_of(process.pid)
    assert len(workers) == 2
    return process, workers


def test_the_command_reports_a_killed_worker(
    running: tuple[subprocess.Popen[str], list[int]], shm_dir: Path
) -> None:
    """Status 2 and one line; the shared memory and the other worker are gone."""
    process, workers = running
    os.kill(workers[1], signal.SIGKILL)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (2, "")
    assert re.fullmatch(r"error: worker \d \(process \d+\) was ended by SIGKILL .*\n", err)
    assert [has_ended(worker) for worker in workers] == [True, True]
    assert list(shm_dir.iterdir()) == []


def test_workers_do_not_outlive_a_killed_scheduler(
    running: tuple[subprocess.Popen[str], list[int]], shm_dir: Path
) -> None:
    """Their connection ends with it, without a word of theirs."""
    process, workers = running
    process.kill()
    assert process.communicate(timeout=DEADLINE_S) == ("", "")
    assert eventually(lambda: all(map(has_ended, workers)))
    assert list(shm_dir.iterdir()) == []


def test_a_scheduler_killed_at_its_start_leaves_nothing(
    start: Start, wait_until: WaitUntil, arguments: list[str], shm_dir: Path
) -> None:
    """As a rule the region has a name and no worker yet; workers remove it, and end."""
    process = start(*arguments)
    wait_until(process, lambda: len(children_of(process.pid)) == 2)
    workers = children_of(process.pid)
    process.kill()
    assert eventually(lambda: all(map(has_ended, workers)))
    assert list(shm_dir.iterdir()) == []
    # They may have something to say: that there is nothing to attach to.
    assert "Traceback" not in process.communicate(timeout=DEADLINE_S)[1]


def test_an_interrupt_ends_workers_quietly(
    running: tuple[subprocess.Popen[str], list[int]], shm_dir: Path
) -> None:
    """Ctrl-C goes to the whole group, and means the scheduler: it ends its workers."""
    process, workers = running
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=DEADLINE_S) == ("", "")
    assert process.returncode == 130
    assert [has_ended(worker) for worker in workers] == [True, True]
    assert list(shm_dir.iterdir()) == []
