"""What worker processes are told, where their pools go, and how long anybody waits for them."""

from __future__ import annotations

import pickle
import sys
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.connector import ConnectorMetadata, RegionRole, Transfer
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec
from kv_core.errors import ConfigError, WorkerError
from kv_core.workload.replay import _memory, _processes, replay_trace
from kv_core.workload.replay._memory import open_gpu_memory
from kv_core.workload.replay._messages import WorkerStart
from kv_core.workload.replay._worker import StepOrders

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayConfig


def test_workers_are_not_told_of_tiers(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """Settings of tiers may hold secrets, and no worker opens a tier; all else is the same."""
    trace = letters("ab")
    config = make_config(trace, workers=2, secondary_tiers=[{"type": "acme", "secret": "hunter2"}])
    offloading = config.offloading_config(trace, "engine-0")
    role = RegionRole.of_scheduler()
    starts = WorkerStart.for_each(config, offloading, role, deadline_s=5.0)
    packed = [pickle.dumps(start) for start in starts]
    assert [b"hunter2" in data for data in packed] == [False, False]
    for rank, data in enumerate(packed):
        start = pickle.loads(data)  # noqa: S301 - made above
        assert start == starts[rank]
        assert start.role == RegionRole(nonce=role.nonce, worker=rank, deadline_s=5.0)
        assert start.offloading.namespace.fingerprint == offloading.namespace.fingerprint
        assert start.offloading.block_size_factor == offloading.block_size_factor


def test_orders_survive_the_way() -> None:
    """Block ids and their types arrive as they were sent."""
    spec = (CPULoadStoreSpec([4, 5]), GPULoadStoreSpec([1, 2], [2], [7]))
    metadata = ConnectorMetadata(loads=(Transfer(3, "r", spec),), flush_job_ids=frozenset({1}))
    orders = StepOrders(metadata, (9,), ((1, b"key"),))
    arrived = pickle.loads(pickle.dumps(orders))  # noqa: S301 - made here
    source, destination = arrived.metadata.loads[0].spec
    assert (source.block_ids.tolist(), source.block_ids.dtype) == ([4, 5], np.int32)
    assert (destination.group_sizes, destination.block_indices) == (
        spec[1].group_sizes,
        spec[1].block_indices,
    )
    assert (arrived.metadata.flush_job_ids, arrived.poison) == (frozenset({1}), (9,))


@pytest.mark.parametrize(("rank", "current"), [(None, []), (0, [0]), (1, [1]), (5, [1])])
def test_ranks_share_the_devices_there_are(
    rank: int | None, current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker process makes its device the current one; a replay of one worker leaves it."""
    chosen: list[int] = []
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, set_device=chosen.append
    )
    device_files = SimpleNamespace(glob=lambda _: ["nvidia0"])
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_memory, "Path", lambda _: device_files)
    monkeypatch.setattr(_memory, "TorchGpuMemory", lambda *arguments: arguments)
    memory: Any = open_gpu_memory(8, 512, rank=rank)
    assert memory == (8, 512, "cuda")
    assert chosen == current


def test_a_message_that_is_not_taken_does_not_block_for_ever() -> None:
    """A stopped process leaves a long order in the middle of the buffers."""
    ours, theirs = Pipe()
    with ours, theirs:
        _processes._limit_waits(ours, 0.05)
        with pytest.raises(BlockingIOError):
            ours.send_bytes(bytes(2**24))


def test_a_message_that_stops_in_the_middle_does_not_block_for_ever() -> None:
    """A process stopped while it answers has made the connection readable."""
    ours, theirs = Pipe()
    with ours, theirs:
        _processes._limit_waits(ours, 0.05)
        # The length of a message, and nothing of it.
        with open(theirs.fileno(), "wb", closefd=False, buffering=0) as raw:
            raw.write((100).to_bytes(4, "big"))
        assert ours.poll()
        with pytest.raises(BlockingIOError):
            ours.recv()


def test_workers_that_do_not_get_ready_are_named(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Processes that never attach are killed, and the region is gone."""
    sleeper = (sys.executable, "-c", "import signal; signal.pause()")
    monkeypatch.setattr(_processes, "COMMAND", sleeper)
    monkeypatch.setattr(_processes, "_PATIENCE_AT_START_S", 0.1)
    monkeypatch.setattr(_processes, "_PATIENCE_AT_END_S", 0.0)
    trace = letters("ab")
    with pytest.raises(WorkerError, match="of 2 workers, 0, 1 have not attached") as caught:
        replay_trace(trace, make_config(trace, workers=2))
    assert caught.value.rank is None
    assert list(tmp_path.iterdir()) == []


def test_more_processes_than_memory_holds_are_refused(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slip of the finger starts none, and is told how many there could be."""
    monkeypatch.setattr(_processes, "memory_limit_bytes", lambda: 100 * 2**20)
    monkeypatch.setattr(_processes, "COMMAND", ("must-not-be-started",))
    trace = letters("ab")
    with pytest.raises(ConfigError, match=r"'workers' is 4, .* Use at most 3 \(--workers\)"):
        replay_trace(trace, make_config(trace, workers=4))


def test_the_leftover_of_a_replay_killed_early_is_removed(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig], tmp_path: Path
) -> None:
    """Its id does not come again, and it had no workers yet that would have removed its name."""
    (tmp_path / "kv_core_replay-1-2_0123456789ab").write_bytes(bytes(4096))
    trace = letters("ab")
    assert replay_trace(trace, make_config(trace)).problems() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("patience_s", [float("inf"), 1e30])
def test_a_replay_may_wait_as_long_as_it_likes(
    patience_s: float,
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deadlines that the system cannot count to are shortened, not a crash."""
    monkeypatch.setattr(_processes, "COMMAND", (sys.executable, "-c", "import sys; sys.exit(7)"))
    trace = letters("ab")
    with pytest.raises(WorkerError, match="ended with status 7"):
        replay_trace(trace, make_config(trace, workers=2, stall_deadline_s=patience_s))
