"""Hits and misses: exact on traces made of letters, balanced on all others."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.workload.replay import replay_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.plugins import TierRegistry
    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayConfig


def _tiers(name: str, folder: Path) -> list[dict[str, Any]]:
    tiers: dict[str, list[dict[str, Any]]] = {
        "none": [],
        "example": [{"type": "example"}],
        "fs": [{"type": "fs", "root_dir": str(folder / "blocks")}],
        "both": [{"type": "example", "max_blocks": 8}, {"type": "fs", "root_dir": str(folder)}],
    }
    return tiers[name]


def test_a_repeated_prompt_is_found_on_the_gpu(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """All blocks but the last, which is loaded: a block shared on the GPU is never written to."""
    trace = letters("abcd", "abcd")
    report = replay_trace(trace, make_config(trace, max_seqs=1, spare_gpu_blocks=8))
    assert report.problems() == []
    assert (report.blocks_requested, report.hits, report.misses) == (8, {"gpu": 3, "cpu": 1}, 4)
    assert report.tokens_saved == 4 * 16 - 1


def test_what_left_the_gpu_is_loaded_from_the_primary(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """The pool holds one request; its predecessor's prefix comes back from the CPU."""
    trace = letters("abcd", "wxyz", "abce")
    report = replay_trace(trace, make_config(trace, max_seqs=1))
    assert report.problems() == []
    assert (report.hits, report.misses, report.blocks_verified) == ({"gpu": 0, "cpu": 3}, 9, 3)
    # abcd, wxyz and e are stored, abc comes back.
    assert report.bytes_moved == {"gpu_to_cpu": 9 * 512, "cpu_to_gpu": 3 * 512}


def test_what_left_the_primary_is_loaded_from_the_tier(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    install_tier: Callable[[str], TierRegistry],
) -> None:
    """Eight slots hold two requests; the prefix of the first comes from below."""
    trace = letters("abcd", "lmno", "wxyz", "abce")
    config = make_config(trace, max_seqs=1, cpu_slots=8, secondary_tiers=[{"type": "test"}])
    report = replay_trace(trace, config, registry=install_tier("DictTier"))
    assert report.problems() == []
    assert report.hits == {"gpu": 0, "cpu": 0, "test": 3}
    assert report.bytes_moved["test_to_cpu"] == 3 * 4096
    assert report.bytes_moved["cpu_to_test"] == 13 * 4096
    assert report.latency_seconds["test_to_cpu"].count == 1


def test_a_partial_last_block_is_always_a_miss(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """It has no hash that an engine could cache, and still counts as requested."""
    trace = letters("abcd", "abcd", last_tokens=5)
    report = replay_trace(trace, make_config(trace, max_seqs=1, spare_gpu_blocks=8))
    assert (report.blocks_requested, report.hits, report.misses) == (8, {"gpu": 3, "cpu": 0}, 5)


def test_with_a_factor_the_prefix_on_the_gpu_may_end_within_a_block(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """Factor 2: three blocks are on the GPU, the fourth is the second half of a loaded block."""
    trace = letters("abcdef", "lm", "abcdefg")
    # Seven blocks: lm takes the spare one and the tail of abcdef, so abcd stays.
    report = replay_trace(trace, make_config(trace, max_seqs=1, block_size_factor=2))
    assert report.problems() == []
    assert sum(report.hits.values()) == 6
    assert report.hits["gpu"] % 2 == 1
    assert report.hits["cpu"] == report.blocks_verified == 6 - report.hits["gpu"]


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("tiers", ["none", "example", "fs", "both"])
@pytest.mark.parametrize(("cpu_slots", "spare"), [(9, 0), (400, 100)], ids=["tiny", "ample"])
def test_hits_and_misses_add_up(
    small_trace: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    tmp_path: Path,
    policy: str,
    factor: int,
    tiers: str,
    cpu_slots: int,
    spare: int,
) -> None:
    """On a mixed workload every block is found once or computed, and every byte is right."""
    trace = small_trace()
    config = make_config(
        trace,
        cpu_slots=cpu_slots,
        spare_gpu_blocks=spare,
        policy=policy,
        block_size_factor=factor,
        secondary_tiers=_tiers(tiers, tmp_path),
        max_seqs=4,
    )
    report = replay_trace(trace, config)
    assert report.problems() == []
    assert report.is_sound
    assert report.requests_finished == 40
    assert report.blocks_requested == trace.num_block_references
    assert sum(report.hits.values()) + report.misses == report.blocks_requested
    assert report.blocks_verified >= sum(
        blocks for level, blocks in report.hits.items() if level != "gpu"
    )
    assert (report.jobs_unfinished, report.loads_failed, report.stalled) == (0, 0, False)


@pytest.mark.parametrize("block_bytes", [1, 512, 1000, 4096, 4097])
@pytest.mark.parametrize("factor", [1, 3])
def test_any_block_size_keeps_its_bytes(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    tmp_path: Path,
    block_bytes: int,
    factor: int,
) -> None:
    """Sizes that are no multiple of a page survive primary, files and restart (vllm#55424)."""
    trace = letters("abcdefg", "lmnopqr")
    config = make_config(
        trace,
        max_seqs=1,
        block_bytes=block_bytes,
        block_size_factor=factor,
        secondary_tiers=[{"type": "fs", "root_dir": str(tmp_path / "blocks")}],
    )
    assert replay_trace(trace, config).misses == 14
    report = replay_trace(trace, config)
    assert report.problems() == []
    # Of seven blocks each, those that fill offloaded blocks.
    found = 2 * (7 // factor * factor)
    assert report.hits == {"gpu": 0, "cpu": 0, "fs": found}
    assert report.blocks_verified == found


def test_a_new_engine_finds_what_an_earlier_one_stored(
    small_trace: Callable[..., Trace], make_config: Callable[..., ReplayConfig], tmp_path: Path
) -> None:
    """After a restart on the same storage nothing is computed but partial last blocks."""
    trace = small_trace("shared-prefix")
    config = make_config(
        trace,
        cpu_slots=800,
        spare_gpu_blocks=800,
        secondary_tiers=[{"type": "fs", "root_dir": str(tmp_path / "blocks")}],
    )
    assert replay_trace(trace, config).hits["fs"] == 0
    again = replay_trace(trace, config)
    assert again.problems() == []
    full = [request.block_hashes[: request.prompt_tokens // 16] for request in trace.requests]
    assert again.misses == sum(
        request.num_blocks - len(hashes)
        for request, hashes in zip(trace.requests, full, strict=True)
    )
    assert again.hits["fs"] == len({block_hash for hashes in full for block_hash in hashes})


def test_another_block_size_finds_nothing_of_it(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig], tmp_path: Path
) -> None:
    """Blocks of another geometry are never found in the same storage (vllm#56772)."""
    trace = letters("abcd")
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "blocks")}]
    config = make_config(trace, secondary_tiers=tiers)
    replay_trace(trace, config)
    assert replay_trace(trace, replace(config, block_bytes=1000)).misses == 4
    assert replay_trace(trace, config).hits["fs"] == 4


def test_without_tiers_one_request_at_a_time_is_reproducible(
    small_trace: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """Nothing but the time of loads is left to chance, and with ample slots it decides nothing."""
    trace = small_trace("chat")
    config = make_config(trace, cpu_slots=600, max_seqs=1)
    first, second = replay_trace(trace, config), replay_trace(trace, config)
    assert first.problems() == second.problems() == []
    assert first.hits == second.hits
    assert first.hits["cpu"] > 0
    assert (first.misses, first.tokens_saved) == (second.misses, second.tokens_saved)
    assert first.bytes_moved == second.bytes_moved


def test_the_report_is_plain_json(
    small_trace: Callable[..., Trace], make_config: Callable[..., ReplayConfig], tmp_path: Path
) -> None:
    """It can be written and read back without loss, whatever the tiers report."""
    trace = small_trace(num_requests=10)
    report = replay_trace(trace, make_config(trace, secondary_tiers=_tiers("both", tmp_path)))
    written = report.to_json()
    assert json.loads(json.dumps(written)) == written
    assert written["requests_finished"] == 10
    assert set(written["latency_seconds"]["gpu_to_cpu"]) == {"count", "p50", "p90", "p99", "max"}


def test_progress_counts_finished_requests(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """The numbers rise to the number of requests."""
    trace = letters("ab", "cd", "ef")
    seen: list[int] = []
    replay_trace(trace, make_config(trace, max_seqs=1), progress=seen.append)
    assert seen == [1, 2, 3]


def test_an_empty_trace_is_a_sound_replay(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """No requests, no steps, no problems."""
    report = replay_trace(letters(), make_config(letters("a")))
    assert (report.is_sound, report.steps, report.blocks_requested) == (True, 0, 0)
