"""A failing tier costs a recompute, never a request, a block or the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import JobId, JobResult, ReqContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey


def _begin_load(engine: Engine, *keys: OffloadKey) -> JobId:
    engine.tier.has(*keys)
    assert engine.ask("a", *keys) == ["pending"] * len(keys)
    engine.end_step()
    return engine.tier.loads[-1].job_id


def test_a_failed_load_is_not_tried_again_for_the_same_request(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """vllm#49176: the next answer is no hit, and one load stays one load."""
    _begin_load(engine, keys[0])
    engine.tier.finish(engine.tier.loads[0], good=())
    for _ in range(20):
        assert engine.ask("a", keys[0]) == ["miss"]
        engine.end_step()
    assert len(engine.tier.loads) == 1
    assert engine.stats["promotions_failed"] == 1


def test_another_request_may_try_again(engine: Engine, keys: list[OffloadKey]) -> None:
    """Whether it makes sense is the tier's to say (LOOK-4)."""
    _begin_load(engine, keys[0])
    engine.tier.finish(engine.tier.loads[0], good=())
    engine.end_step()
    assert engine.ask("b", keys[0]) == ["pending"]


def test_after_a_failure_the_next_tier_is_asked(
    start: Callable[..., Engine],
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """A copy further down is as good."""
    engine = start(num_tiers=2)
    _begin_load(engine, keys[0])
    engine.tiers[1].has(keys[0])
    engine.tiers[0].finish(engine.tiers[0].loads[0], good=())
    assert engine.ask("a", keys[0]) == ["pending"]
    engine.end_step()
    engine.tiers[1].finish_all()
    assert engine.ask("a", keys[0]) == ["hit"]
    assert engine.load("a", keys[0]) == [expected(keys[0])]


def test_a_partial_failure_loses_only_the_keys_that_failed(
    engine: Engine,
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """vllm#50321: the others are hits, with the right bytes."""
    _begin_load(engine, *keys[:4])
    engine.tier.finish(engine.tier.loads[0], good=[keys[0], keys[3]])
    assert engine.ask("a", *keys[:4]) == ["hit", "miss", "miss", "hit"]
    assert engine.load("a", keys[0], keys[3]) == [expected(keys[0]), expected(keys[3])]
    assert engine.stats["promotions"] == engine.stats["promotions_failed"] == 2


def test_a_claim_of_keys_that_were_not_in_the_job_is_void(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """LMCache#3006: no buffer that was not asked for, and none twice, becomes readable."""
    job_id = _begin_load(engine, keys[0])
    engine.tier.results.append(JobResult(job_id, False, (keys[7], keys[7])))
    assert engine.ask("a", keys[0], keys[7]) == ["miss", "miss"]
    assert engine.reports[0].blocks_succeeded == 0


@pytest.mark.parametrize("method", ["submit_load", "lookup", "get_finished_jobs"])
def test_a_raising_tier_costs_a_miss(engine: Engine, keys: list[OffloadKey], method: str) -> None:
    """llm-d-kv-cache#514, vllm#39732: nothing is raised out of a step, ever."""
    engine.tier.has(keys[0])
    engine.tier.raising.add(method)
    engine.ask("a", keys[0])
    engine.end_step()
    engine.tier.finish_all()
    engine.end_step()
    engine.tier.raising.clear()
    engine.tier.answers.clear()
    expected = "hit" if method == "get_finished_jobs" else "miss"
    assert engine.ask("a", keys[0]) == [expected]
    assert engine.stats["tier.tier0.contained_exceptions"] >= 1


def test_a_tier_that_raises_everywhere_leaves_a_working_cpu_manager(
    engine: Engine,
    keys: list[OffloadKey],
    expected: Callable[[OffloadKey], bytes],
) -> None:
    """Every method raises, shutdown included; blocks are stored and loaded all the same."""
    engine.tier.raising.update(
        name
        for name in dir(engine.tier)
        if not name.startswith("_") and callable(getattr(engine.tier, name))
    )
    engine.manager.on_new_request(ReqContext("a"))
    engine.store("a", keys[0])
    engine.manager.touch(keys[:1], ReqContext("b"))
    assert engine.ask("b", *keys[:2]) == ["hit", "miss"]
    assert engine.load("b", keys[0]) == [expected(keys[0])]
    engine.finish("a")
    engine.end_step("b")
    assert not engine.manager.has_pending_work()
    assert list(engine.manager.take_events()) == []
    assert engine.stats["tier.tier0.contained_exceptions"] == 9
    engine.manager.reset_cache()
    engine.manager.shutdown()
    assert engine.log[-1] == "primary.shutdown"


def test_a_lost_result_ends_in_time_and_a_late_one_is_used(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """vllm#49829: past the deadline the request runs; the slot waits for the tier."""
    _begin_load(engine, keys[0])
    engine.clock.advance(31)
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.manager.has_pending_work()
    engine.end_step()
    engine.finish("a")
    # Long past its deadline, it is no reason to step an idle engine.
    assert not engine.manager.has_pending_work()
    engine.tier.finish_all()
    assert engine.ask("b", keys[0]) == ["hit"]
    assert engine.stats["promotions_adopted"] == 1


def test_a_result_that_comes_twice_counts_once(engine: Engine, keys: list[OffloadKey]) -> None:
    """dynamo#5012: the second one changes neither pins nor the share, and is counted."""
    _begin_load(engine, keys[0])
    result = engine.tier.finish(engine.tier.loads[0])
    engine.tier.results += [result, result]
    assert engine.ask("a", keys[0]) == ["hit"]
    assert engine.stats["share_blocks_used"] == 1
    assert engine.stats["blocks_pinned"] == 1
    assert engine.stats["tier.tier0.ignored_results"] == 2
    assert engine.stats["tier.tier0.contained_exceptions"] == 0


@pytest.mark.parametrize(
    "result",
    [JobResult(JobId(999), success=True), JobResult([], True), None, "done", 0],  # type: ignore[arg-type]
)
def test_what_is_no_result_of_a_job_is_ignored(
    engine: Engine, keys: list[OffloadKey], result: Any
) -> None:
    """Unknown ids and things that are no results do not keep the real one back."""
    _begin_load(engine, keys[0])
    engine.tier.results.append(result)
    engine.tier.finish_all()
    assert engine.ask("a", keys[0]) == ["hit"]
    assert engine.stats["tier.tier0.ignored_results"] == 1


def test_what_a_tier_reported_before_it_raised_is_not_lost(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """vllm#49947: a result that was handed over counts, whatever comes after it."""
    engine.store("x", keys[0])
    engine.store("x", keys[1])
    first, second = engine.tier.stores
    engine.tier.finish(first)
    engine.tier.results.append(RuntimeError("clean-up failed"))
    engine.tier.finish(second)
    engine.end_step()
    assert engine.stats["blocks_pinned"] == 1
    engine.end_step()
    assert engine.stats["blocks_pinned"] == 0


@pytest.mark.parametrize("claimed", [None, 5, [[]]])
def test_successful_keys_that_are_no_keys_are_no_success(
    engine: Engine, keys: list[OffloadKey], claimed: Any
) -> None:
    """The job has failed as a whole, and the exception stays inside."""
    job_id = _begin_load(engine, keys[0])
    engine.tier.results.append(JobResult(job_id, success=False, successful_keys=claimed))
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.stats["share_blocks_used"] == 0


@pytest.mark.parametrize("attribute", ["policy", "stats", "stuck"])
def test_a_tier_that_answers_none_is_a_tier_with_nothing_to_say(
    engine: Engine, attribute: str
) -> None:
    """Authors forget to return: no policy, no measurements, no stuck jobs."""
    setattr(engine.tier, attribute, None)
    engine.manager.on_new_request(ReqContext("a"))
    assert engine.stats["tier.tier0.jobs_in_flight"] == 0
    engine.manager.reset_cache()
    engine.manager.shutdown()
    assert engine.log[-1] == "primary.shutdown"


def test_an_answer_that_is_no_answer_is_read_as_truth(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """0 and 1 are no and yes; what cannot be read is no."""

    class Odd:
        def __bool__(self) -> bool:
            raise RuntimeError("odd")

    answers: dict[Any, Any] = engine.tier.answers
    answers.update({keys[0]: 0, keys[1]: 1, keys[2]: Odd()})
    assert engine.ask("a", *keys[:3]) == ["miss", "pending", "miss"]


def test_the_first_exception_of_a_kind_is_logged_with_its_traceback(
    start: Callable[..., Engine], keys: list[OffloadKey], caplog: pytest.LogCaptureFixture
) -> None:
    """One record for a thousand exceptions of one method."""
    engine = start(degrade_after_failures=2000)
    engine.tier.raising.add("lookup")
    for _ in range(999):
        engine.ask("a", keys[0])
    (record,) = caplog.records
    assert "tier0" in record.getMessage()
    assert "lookup" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is RuntimeError
    engine.ask("a", keys[0], keys[1])
    assert len(caplog.records) == 2


def test_an_interrupt_passes_through(engine: Engine, keys: list[OffloadKey]) -> None:
    """Only exceptions of the tier are contained, not those that are to end the process."""
    engine.store("a", keys[0])
    engine.tier.results.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.end_step()
