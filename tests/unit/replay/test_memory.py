"""Pages of the GPU pool, in host memory and in torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_core.device import tensor_address
from kv_core.device.copy import CopyBatch
from kv_core.workload import POISON_BYTE, BlockChecker
from kv_core.workload.replay import GpuMemory, HostGpuMemory, ReplayEngine, TorchGpuMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayConfig

BLOCK_BYTES = 1000


@pytest.fixture(params=["host", pytest.param("torch", marks=pytest.mark.torch)])
def memory(request: pytest.FixtureRequest) -> GpuMemory:
    """Return a pool of six pages of an odd size."""
    if request.param == "host":
        return HostGpuMemory(6, BLOCK_BYTES)
    pytest.importorskip("torch")
    return TorchGpuMemory(6, BLOCK_BYTES, "cpu")


def test_a_filled_block_holds_what_its_key_demands(memory: GpuMemory) -> None:
    """The judge, which has its own idea of the content, agrees on every byte."""
    checker = BlockChecker()
    memory.fill(2, b"key two")
    memory.fill(3, b"key three")
    assert checker.count_wrong_bytes(b"key two", memory.read(2)) == 0
    assert checker.count_wrong_bytes(b"key three", memory.read(3)) == 0
    assert checker.count_wrong_bytes(b"key two", memory.read(3)) > BLOCK_BYTES // 2


def test_poison_destroys_the_named_blocks_only(memory: GpuMemory) -> None:
    """Every byte of them, and none of their neighbours."""
    for block_id in range(6):
        memory.fill(block_id, bytes([block_id]))
    memory.poison({1, 4})
    checker = BlockChecker()
    for block_id in range(6):
        if block_id in {1, 4}:
            assert bytes(memory.read(block_id)) == bytes([POISON_BYTE]) * BLOCK_BYTES
        else:
            assert checker.count_wrong_bytes(bytes([block_id]), memory.read(block_id)) == 0


def test_poisoning_nothing_is_fine(memory: GpuMemory) -> None:
    """A step that allocates nothing poisons nothing."""
    memory.fill(0, b"k")
    memory.poison(set())
    assert BlockChecker().count_wrong_bytes(b"k", memory.read(0)) == 0


def test_its_copies_reach_the_primary_tier(memory: GpuMemory) -> None:
    """The back end copies between the pool and strided rows of the CPU side."""
    rows = np.zeros((4, 4096), dtype=np.int8)
    slots = rows[:, :BLOCK_BYTES]
    stream = memory.copy_backend([slots]).open_stream("test")
    memory.fill(5, b"key")
    source = tensor_address(memory.tensor) + 5 * BLOCK_BYTES
    target = tensor_address(slots) + 2 * 4096
    batch = CopyBatch(*(np.array([n], dtype=np.int64) for n in (source, target, BLOCK_BYTES)))
    stream.submit(batch).wait()
    stream.close()
    assert BlockChecker().count_wrong_bytes(b"key", rows[2, :BLOCK_BYTES].view(np.uint8)) == 0
    assert not rows[[0, 1, 3]].any()
    assert not rows[2, BLOCK_BYTES:].any()


@pytest.mark.torch
def test_a_replay_runs_over_torch_memory(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """The whole engine over a torch tensor delivers right bytes and lets the region go."""
    pytest.importorskip("torch")
    trace = letters("abcde", "vwxyz", "abcde", "vwxyz", last_tokens=1)
    config = make_config(trace, max_seqs=1, block_bytes=BLOCK_BYTES, block_size_factor=2)
    memory = TorchGpuMemory(config.gpu_blocks, config.block_bytes, "cpu")
    engine = ReplayEngine(trace, config, memory=memory)
    report = engine.run()
    engine.shutdown()
    assert report.problems() == []
    assert report.hits == {"gpu": 0, "cpu": 8}
    assert report.blocks_verified == 8
