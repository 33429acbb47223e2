"""The checker must be able to fail, and no tier can keep a replay from ending."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.workload.replay import replay_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.plugins import TierRegistry
    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayConfig, ReplayReport

    Run = Callable[..., ReplayReport]


@pytest.fixture
def run(
    letters: Callable[..., Trace],
    make_config: Callable[..., ReplayConfig],
    install_tier: Callable[[str], TierRegistry],
) -> Run:
    """Return a function that replays two prompts twice over a tier that both must come from."""

    def replay(tier: str, **fields: Any) -> ReplayReport:
        trace = letters("abcd", "lmno", "wxyz", "abcd", "lmno")
        fields = {"cpu_slots": 8, "max_seqs": 1, "secondary_tiers": [{"type": "test"}], **fields}
        return replay_trace(trace, make_config(trace, **fields), registry=install_tier(tier))

    return replay


def test_the_scenario_is_sound_with_a_correct_tier(run: Run) -> None:
    """What follows fails for the tier's sake, not for the scenario's."""
    report = run("DictTier")
    assert report.problems() == []
    assert report.hits == {"gpu": 0, "cpu": 0, "test": 8}


@pytest.mark.parametrize(
    "tier", ["FlippedByteTier", "HalfBlockTier", "NextSlotTier", "NoBytesTier", "OtherBlockTier"]
)
def test_wrong_bytes_are_found(run: Run, tier: str) -> None:
    """A tier that delivers anything but the block makes the replay unsound."""
    report = run(tier)
    assert report.bytes_wrong > 0
    assert not report.is_sound
    # A block that spoilt the primary tier may be delivered from there to somebody else.
    assert set(report.bytes_wrong_by_level) <= {"test", "cpu"}
    assert sum(report.bytes_wrong_by_level.values()) == report.bytes_wrong
    (problem,) = report.problems()
    assert problem.startswith(f"{report.bytes_wrong} byte(s) of loaded blocks are wrong (")
    assert f"{report.bytes_wrong_by_level['test']} from test" in problem


def test_wrong_bytes_are_counted_exactly(run: Run) -> None:
    """One flipped byte in each of eight loaded blocks: eight."""
    report = run("FlippedByteTier")
    assert (report.bytes_wrong, report.blocks_verified) == (8, 8)


def test_slots_are_poisoned_before_they_are_reused(run: Run) -> None:
    """What an earlier block left in a slot can never pass for what a tier delivers."""
    assert run("PoisonedSlotsTier").hits["test"] == 8


def test_memory_nobody_wrote_is_not_taken_for_a_block(run: Run) -> None:
    """A load that leaves its slots alone is wrong nearly everywhere."""
    report = run("NoBytesTier", block_bytes=4096)
    # A byte in 256 equals the poison by chance.
    assert report.bytes_wrong > 0.98 * report.blocks_verified * 4096


def test_wrong_blocks_are_not_shared(run: Run) -> None:
    """A block with wrong bytes is not offered to other requests from the GPU."""
    report = run("FlippedByteTier", spare_gpu_blocks=1)
    assert report.bytes_wrong == report.hits["test"]


def test_failed_loads_cost_a_recompute(run: Run) -> None:
    """All requests finish, no wrong byte, nothing counts as the tier's hit (vllm#49176)."""
    report = run("FailingLoadsTier")
    assert report.problems() == []
    assert (report.hits["test"], report.misses) == (0, 20)
    assert report.stats["promotions_failed"] > 0


def test_partly_failed_loads_keep_what_succeeded(run: Run) -> None:
    """Of a, ab, abc the first and the last arrive; the prefix that can be used is the first."""
    report = run("EveryOtherKeyTier")
    assert report.problems() == []
    assert report.hits["test"] == 2


def test_a_raising_tier_costs_its_hits_only(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Exceptions of a tier never end the replay (llm-d-kv-cache#514)."""
    with caplog.at_level(logging.CRITICAL):
        report = run("RaisingTier")
    assert report.problems() == []
    assert (report.hits["test"], report.misses) == (0, 20)


def test_unsure_lookups_are_asked_again(run: Run) -> None:
    """A tier that does not know yet gets a later step, and the same hits."""
    report = run("UnsureTier")
    assert report.problems() == []
    assert report.hits == {"gpu": 0, "cpu": 0, "test": 8}


def test_stores_that_are_never_reported_end_in_a_stall(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """All requests finish, and the replay says what had not ended, and is not sound."""
    report = run("SilentStoresTier", cpu_slots=64, stall_deadline_s=0.3)
    assert report.requests_finished == 5
    assert report.stalled
    assert report.jobs_unfinished > 0
    (problem,) = report.problems()
    assert problem.startswith("the replay gave up because nothing moved any more")
    assert f"{report.jobs_unfinished} transfer(s) and tier job(s) had not ended" in problem


def test_loads_that_are_never_reported_end_in_a_stall(run: Run) -> None:
    """Waiting requests are released by the engine's deadline; the lost jobs are named."""
    report = run(
        "SilentLoadsTier",
        stall_deadline_s=0.5,
        engine_options={"request_lookup_deadline_s": 0.05},
    )
    assert report.requests_finished == 5
    assert (report.stalled, report.bytes_wrong) == (True, 0)
    assert report.jobs_unfinished >= 1


def test_requests_that_never_ran_are_accounted_for(run: Run) -> None:
    """A replay that gives up while a request waits still balances its books."""
    report = run("SilentLoadsTier", stall_deadline_s=0.2)
    assert report.requests_finished < 5
    assert report.blocks_requested == report.misses + sum(report.hits.values()) == 20
    assert [problem.partition(";")[0] for problem in report.problems()] == [
        f"{5 - report.requests_finished} of 5 requests did not finish",
        "the replay gave up because nothing moved any more",
    ]
