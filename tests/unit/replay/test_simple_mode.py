"""Replays in the simple modes: GPU and CPU memory, eager and lazy, with real bytes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.device.copy import HostCopyBackend
from kv_core.errors import ConfigError, InsufficientSpaceError
from kv_core.workload.replay import HostGpuMemory, ReplayConfig, ReplayEngine, replay_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_core.device.copy import CopyBackend, CopyBatch, CopyStream, CopyTicket
    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayReport

BLOCK: Final = 512
MODES: Final = ("simple-eager", "simple-lazy")

# Five blocks each, nothing shared, and then the first one again.
RETURNING: Final = ("abcde", "fghij", "klmno", "pqrst", "uvwxy", "abcde")


def config(mode: str, trace: Trace, *, cpu_blocks: int = 64, spare: int = 0, **fields: Any) -> Any:
    """Make a config whose sizes are given in blocks."""
    largest = max(-(-(r.prompt_tokens + r.output_tokens) // 16) for r in trace.requests)
    return ReplayConfig(
        mode=mode,
        block_bytes=BLOCK,
        cpu_bytes=cpu_blocks * BLOCK,
        gpu_blocks=1 + largest + spare,
        **{"max_seqs": 4, "tokens_per_step": 64, **fields},
    )


def replay(mode: str, trace: Trace, **sizes: Any) -> ReplayReport:
    """Replay, and check what holds for every sound replay."""
    report = replay_trace(trace, config(mode, trace, **sizes))
    assert report.problems() == []
    assert report.bytes_wrong == 0
    assert report.blocks_verified == report.hits["cpu"] + report.blocks_reloaded
    return report


@pytest.mark.parametrize("mode", MODES)
def test_what_the_gpu_has_evicted_comes_from_the_cpu(
    mode: str, letters: Callable[..., Trace]
) -> None:
    """The first prompt returns after others have taken its GPU blocks, and is not computed again.

    Lazy has stored it although nothing told it that it would be wanted.
    """
    trace = letters(*RETURNING)
    report = replay(mode, trace, spare=6, max_seqs=1)
    assert report.hits == {"gpu": 0, "cpu": 5}
    assert report.misses == 25
    assert report.bytes_moved["cpu_to_gpu"] == 5 * BLOCK


def test_lazy_stores_less_than_eager(letters: Callable[..., Trace]) -> None:
    """Eager stores all blocks that are computed, lazy those that the GPU gives up."""
    trace = letters(*RETURNING)
    stored = {
        mode: replay(mode, trace, spare=10, max_seqs=1).bytes_moved["gpu_to_cpu"] // BLOCK
        for mode in MODES
    }
    assert stored["simple-eager"] == 25
    assert 5 <= stored["simple-lazy"] < 25


@pytest.mark.parametrize("seed", [1, 2])
def test_lazy_stores_less_of_a_mixed_workload(seed: int, small_trace: Callable[..., Trace]) -> None:
    """With as many hits in both, or nearly: what is stored is what is evicted."""
    trace = small_trace(seed=seed)
    eager, lazy = (replay(mode, trace, spare=60, cpu_blocks=600) for mode in MODES)
    assert lazy.bytes_moved["gpu_to_cpu"] < eager.bytes_moved["gpu_to_cpu"]
    assert lazy.hits["cpu"] > 0
    assert lazy.requests_finished == eager.requests_finished == 40


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cpu_blocks", [1, 2, 7, 40])
def test_any_size_of_cpu_memory_is_sound(
    mode: str, cpu_blocks: int, small_trace: Callable[..., Trace]
) -> None:
    """Smaller than the GPU's, smaller than a prompt, with preemptions: every byte is right."""
    trace = small_trace(seed=cpu_blocks)
    report = replay(mode, trace, cpu_blocks=cpu_blocks, spare=3)
    assert report.stats["blocks_total"] == cpu_blocks
    assert report.stats["blocks_pinned"] == report.stats["blocks_writing"] == 0
    assert report.preemptions > 0


def test_eager_finds_what_the_connector_finds(small_trace: Callable[..., Trace]) -> None:
    """With memory for everything, two levels are two levels, whoever keeps the books."""
    trace = small_trace(seed=3)
    simple = replay("simple-eager", trace, cpu_blocks=3000, spare=5, max_seqs=1)
    full = replay_trace(
        trace,
        ReplayConfig(
            block_bytes=BLOCK,
            cpu_bytes=3000 * 4096,
            gpu_blocks=config("simple-eager", trace, spare=5).gpu_blocks,
            max_seqs=1,
            tokens_per_step=64,
        ),
    )
    assert simple.hits == full.hits
    assert simple.misses == full.misses


@pytest.mark.parametrize("mode", MODES)
def test_the_report_has_the_same_figures(mode: str, letters: Callable[..., Trace]) -> None:
    """Levels, hops, latencies, peaks and counters, as far as there is something to count."""
    report = replay(mode, letters(*RETURNING), spare=6, max_seqs=1)
    assert set(report.bytes_moved) == set(report.latency_seconds) == {"gpu_to_cpu", "cpu_to_gpu"}
    assert report.peaks["transfers_in_flight"] > 0
    assert report.peaks["jobs_in_flight"] == 0
    assert [(worker.device, worker.blocks_verified) for worker in report.workers] == [("cpu", 5)]
    assert report.tokens_saved == 79
    assert report.stats["blocks_cached"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_leaves_nothing(mode: str, letters: Callable[..., Trace]) -> None:
    """No thread outlives it."""
    threads = threading.enumerate()
    replay(mode, letters("ab", "abc"))
    assert threading.enumerate() == threads


# -- faults --------------------------------------------------------------------------------------


class FaultyMemory:
    """A GPU pool whose copies do something wrong."""

    def __init__(self, trace_config: ReplayConfig, fault: str) -> None:
        self._pool = HostGpuMemory(trace_config.gpu_blocks, trace_config.block_bytes)
        self._fault = fault
        self.tensor = self._pool.tensor
        self.fill, self.poison, self.read = self._pool.fill, self._pool.poison, self._pool.read

    def copy_backend(self, cpu_tensors: Sequence[npt.NDArray[np.int8]]) -> CopyBackend:
        """Return the faulty back end."""
        return FaultyBackend(self._fault)


class FaultyBackend:
    """Copies on host threads, of which some go wrong."""

    name = "faulty"

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def open_stream(self, name: str) -> CopyStream:
        """Open a stream of one direction."""
        stream = HostCopyBackend().open_stream(name)
        spoils = self._fault if self._fault.startswith(name) else ""

        class Faulty:
            count = 0

            def submit(self, batch: CopyBatch) -> CopyTicket:
                self.count += 1
                if spoils.endswith("refused") and self.count % 2:
                    raise OSError("no")
                if spoils.endswith("swapped"):
                    batch.sources[:] = batch.sources[::-1].copy()
                return stream.submit(batch)

            def close(self) -> None:
                stream.close()

        return Faulty()


@pytest.mark.parametrize("fault", ["store swapped", "load swapped"])
def test_wrong_bytes_are_seen(fault: str, letters: Callable[..., Trace]) -> None:
    """The same judge as in the other mode."""
    trace = letters(*RETURNING)
    sizes = config("simple-eager", trace, spare=6, max_seqs=1)
    engine = ReplayEngine(trace, sizes, memory=FaultyMemory(sizes, fault))
    report = engine.run()
    engine.shutdown()
    assert report.bytes_wrong > 0
    assert report.bytes_wrong_by_level == {"cpu": report.bytes_wrong}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", ["store refused", "load refused"])
def test_refused_copies_cost_a_recompute(
    mode: str, fault: str, small_trace: Callable[..., Trace]
) -> None:
    """Requests finish, with the right bytes."""
    trace = small_trace(seed=5)
    sizes = config(mode, trace, spare=30, cpu_blocks=300)
    engine = ReplayEngine(trace, sizes, memory=FaultyMemory(sizes, fault))
    report = engine.run()
    engine.shutdown()
    assert report.problems() == []
    assert report.hits["cpu"] > 0
    assert (report.loads_failed > 0) == (fault == "load refused")
    assert (report.stats["stores_failed"] > 0) == (fault == "store refused")


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "setting", "message"),
    [
        ({"mode": "simple"}, "mode", "offloading, simple-eager, simple-lazy; found 'simple'"),
        ({"cpu_bytes": 4095}, "cpu_bytes", "is 4095, but one block takes 4096 bytes"),
        ({"secondary_tiers": [{"type": "fs"}]}, "secondary_tiers", "has no tiers"),
        ({"block_size_factor": 2}, "block_size_factor", "each GPU block by itself"),
        ({"workers": 2}, "workers", "a single worker"),
        ({"policy": "arc"}, "policy", "least recently"),
        ({"engine_options": {"lease_share": 0.3}}, "engine_options", "no settings"),
    ],
)
def test_what_the_mode_cannot_do_is_refused(
    fields: dict[str, Any], setting: str, message: str
) -> None:
    """Nothing is ignored in silence."""
    with pytest.raises(ConfigError, match=message) as caught:
        ReplayConfig(**{"mode": "simple-lazy", **fields})
    assert caught.value.setting == setting


def test_the_smallest_memory_is_one_block_of_any_size() -> None:
    """Blocks are not rounded up to pages, as those of the primary tier are."""
    small = ReplayConfig(mode="simple-eager", block_bytes=1000, cpu_bytes=1000)
    assert small.simple_config(16).num_cpu_blocks == 1


def test_more_memory_than_there_is_is_refused(letters: Callable[..., Trace]) -> None:
    """Before anything is allocated, with the two sizes."""
    with pytest.raises(InsufficientSpaceError, match="--cpu-bytes") as caught:
        replay("simple-eager", letters("a"), cpu_blocks=2**50)
    assert caught.value.needed_bytes == 2**50 * BLOCK > caught.value.available_bytes
