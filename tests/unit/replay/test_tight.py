"""Too little of everything: some request always goes on, and no byte is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_core.workload.replay import HostGpuMemory, ReplayEngine, replay_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.plugins import TierRegistry
    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayConfig


def test_requests_take_blocks_from_younger_ones(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """Outputs outgrow the pool: the youngest request starts over, and all finish."""
    words = ("abcd", "efgh", "ijkl", "mnop")
    trace = letters(*words, output_tokens=100)
    report = replay_trace(trace, make_config(trace, spare_gpu_blocks=4, decode_tokens_per_step=8))
    assert report.problems() == []
    assert report.preemptions > 0
    assert report.blocks_reloaded > 0
    # Counted at the first admission only, whatever happens later.
    assert (report.blocks_requested, report.misses) == (16, 16)


def test_loaded_prefixes_that_block_each_other_are_given_up(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """Requests that hold loaded prefixes and cannot run make room, the youngest first."""
    words = ("abcdefgh", "lmnopqrs")
    trace = letters(*words, *words * 3, output_tokens=40)
    report = replay_trace(trace, make_config(trace, spare_gpu_blocks=1, max_seqs=8))
    assert report.problems() == []


@pytest.mark.parametrize("cpu_slots", [1, 2, 7])
@pytest.mark.parametrize(
    "tier", ["DictTier", "UnsureTier", "EveryOtherKeyTier", "FailingLoadsTier"]
)
def test_a_primary_of_few_slots_always_finishes(
    small_trace: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    install_tier: Callable[[str], TierRegistry],
    cpu_slots: int,
    tier: str,
) -> None:
    """Promotions and stores share one, two or seven slots, and nobody starves."""
    trace = small_trace(num_requests=24)
    config = make_config(trace, cpu_slots=cpu_slots, max_seqs=6, secondary_tiers=[{"type": "test"}])
    report = replay_trace(trace, config, registry=install_tier(tier))
    assert report.problems() == []
    assert report.requests_finished == 24


@pytest.mark.parametrize("type_", ["example", "fs"])
@pytest.mark.parametrize("cpu_slots", [1, 2, 7])
def test_real_tiers_get_by_with_few_slots(
    small_trace: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    tmp_path: Any,
    type_: str,
    cpu_slots: int,
) -> None:
    """The same with tiers that work on threads of their own."""
    tier = {"type": type_, **({"root_dir": str(tmp_path / "b")} if type_ == "fs" else {})}
    trace = small_trace(num_requests=24)
    report = replay_trace(trace, make_config(trace, cpu_slots=cpu_slots, secondary_tiers=[tier]))
    assert report.problems() == []


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    words=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=8),
    last_tokens=st.integers(1, 16),
    output_tokens=st.sampled_from([0, 1, 16, 50]),
    tier=st.sampled_from([None, "DictTier", "UnsureTier", "EveryOtherKeyTier"]),
    fields=st.fixed_dictionaries(
        {
            "cpu_slots": st.sampled_from([1, 2, 3, 7, 30]),
            "spare_gpu_blocks": st.integers(0, 8),
            "block_bytes": st.sampled_from([8, 512, 1000, 4097]),
            "block_size_factor": st.integers(1, 3),
            "policy": st.sampled_from(["lru", "arc"]),
            "max_seqs": st.integers(1, 4),
            "tokens_per_step": st.sampled_from([1, 7, 16, 8192]),
            "decode_tokens_per_step": st.sampled_from([1, 16, 100]),
        }
    ),
)
def test_any_small_replay_is_sound(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    install_tier: Callable[[str], TierRegistry],
    words: list[str],
    last_tokens: int,
    output_tokens: int,
    tier: str | None,
    fields: dict[str, Any],
) -> None:
    """Whatever the sizes, all requests finish, the books balance and every byte is right."""
    trace = letters(*words, output_tokens=output_tokens, last_tokens=last_tokens)
    tiers = [] if tier is None else [{"type": "test"}]
    config = make_config(trace, secondary_tiers=tiers, stall_deadline_s=20.0, **fields)
    registry = None if tier is None else install_tier(tier)
    memory = HostGpuMemory(config.gpu_blocks, config.block_bytes)
    engine = ReplayEngine(trace, config, registry=registry, memory=memory)
    try:
        report = engine.run()
    finally:
        engine.shutdown()
    assert report.problems() == []
    assert report.blocks_requested == trace.num_block_references
