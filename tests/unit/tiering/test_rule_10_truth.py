"""Rule 10: events and metrics equal the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_core.contract import ReqContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine, RealEngine

    from kv_core.contract import OffloadKey


def _lookups(engine: Engine, index: int = 0) -> tuple[float, float, float, float]:
    return (
        engine.tier_stat("engine_queries", index),
        engine.tier_stat("engine_hits", index),
        engine.tier_stat("engine_misses", index),
        engine.tier_stat("engine_errors", index),
    )


def test_a_lookup_counts_once_when_it_is_known(engine: Engine, keys: list[OffloadKey]) -> None:
    """vllm#30522: unknown answers and repetitions count nothing; a hit counts once delivered."""
    engine.tier.answers[keys[0]] = None
    for _ in range(5):
        engine.ask("a", *keys[:2])
    assert _lookups(engine) == (1, 0, 1, 0)
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    assert _lookups(engine) == (1, 0, 1, 0)
    engine.tier.finish_all()
    engine.ask("a", *keys[:2])
    assert _lookups(engine) == (2, 1, 1, 0)


def test_another_request_is_another_lookup(engine: Engine, keys: list[OffloadKey]) -> None:
    """Each asks once."""
    for req_id in "abc":
        engine.ask(req_id, keys[0])
    assert _lookups(engine) == (3, 0, 3, 0)


def test_a_hit_whose_load_fails_is_an_error(engine: Engine, keys: list[OffloadKey]) -> None:
    """dynamo#15079: a failed transfer is never counted as a hit."""
    engine.tier.has(*keys[:2])
    engine.ask("a", *keys[:2])
    engine.end_step()
    engine.tier.finish(engine.tier.loads[0], good=[keys[0]])
    engine.end_step()
    assert _lookups(engine) == (2, 1, 0, 1)
    assert engine.ask("a", *keys[:2]) == ["hit", "miss"]
    assert _lookups(engine) == (2, 1, 0, 1)


def test_a_stalled_load_is_an_error_and_its_late_success_no_hit(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """The request that asked was not served."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    engine.clock.advance(10.0)
    engine.end_step()
    engine.tier.finish_all()
    engine.end_step()
    assert _lookups(engine) == (1, 0, 0, 1)


def test_a_hit_that_the_engine_declined_is_a_miss(engine: Engine, keys: list[OffloadKey]) -> None:
    """sglang#31881: before the request runs."""
    engine.tier.has(*keys[:5])
    assert engine.ask("a", *keys[:5])[-1] == "miss"
    assert _lookups(engine) == (1, 0, 1, 0)


def test_an_exception_is_an_error_and_no_miss(engine: Engine, keys: list[OffloadKey]) -> None:
    """It is asked again, and counted once."""
    engine.tier.raising.add("lookup")
    assert engine.ask("a", keys[0], keys[0]) == ["miss", "miss"]
    assert _lookups(engine) == (1, 0, 0, 1)
    assert len(engine.tier.lookups) == 2


def test_a_tier_that_is_not_asked_counts_nothing(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """vllm#57596: skipped because another one has it, or because it is degraded."""
    engine = start(num_tiers=2)
    engine.tiers[0].has(keys[0])
    engine.ask("a", keys[0])
    assert _lookups(engine, 1) == (0, 0, 0, 0)
    engine.tiers[1].raising.add("lookup")
    engine.ask("a", *keys[1:10])
    assert _lookups(engine, 1) == (3, 0, 0, 3)


def test_the_outcome_of_a_request_that_has_ended_still_counts(
    engine: Engine, keys: list[OffloadKey]
) -> None:
    """The tier was asked, and did its work."""
    engine.tier.has(keys[0])
    engine.ask("a", keys[0])
    engine.end_step()
    engine.finish("a")
    engine.tier.finish_all()
    engine.end_step()
    assert _lookups(engine) == (1, 1, 0, 0)


def test_hits_are_counted_by_level_once_delivered(engine: Engine, keys: list[OffloadKey]) -> None:
    """A promoted block is its tier's for the request that promoted it, the CPU's for others."""
    engine.store("x", keys[5])
    engine.promote("a", *keys[:2])
    engine.ask("a", *keys[:2])
    assert engine.stats["hits.tier0"] == engine.stats["hits.cpu"] == 0
    engine.load("a", keys[0], keys[1], keys[5])
    assert engine.ask("b", keys[0]) == ["hit"]
    engine.load("b", keys[0])
    assert (engine.stats["hits.tier0"], engine.stats["hits.cpu"]) == (2, 2)


def test_a_failed_load_to_the_gpu_counts_no_hit(engine: Engine, keys: list[OffloadKey]) -> None:
    """Neither do completions that come twice, or after the request."""
    engine.store("x", keys[0])
    context = ReqContext("a")
    engine.begin("a")
    engine.manager.prepare_load(keys[:1], context)
    engine.manager.complete_load(keys[:1], context, success=False)
    assert engine.stats["hits.cpu"] == 0
    engine.load("a", keys[0])
    engine.manager.complete_load(keys[:1], context)
    assert engine.stats["hits.cpu"] == 1
    engine.manager.prepare_load(keys[:1], context)
    engine.finish("a")
    engine.manager.complete_load(keys[:1], context)
    assert engine.stats["hits.cpu"] == 1


def test_the_books_of_a_real_tier_agree(
    start_real: Callable[..., RealEngine], keys: list[OffloadKey]
) -> None:
    """Engine and tier count the same lookups and blocks; events give the listing."""
    engine = start_real(num_blocks=16, enable_events=True)
    engine.has(*keys[:2])
    engine.store("x", *keys[10:13])
    assert engine.ask("a", *keys[:4]) == ["pending", "pending", "miss", "miss"]
    engine.until(lambda: engine.manager.num_jobs_in_flight == 0)
    assert engine.ask("a", *keys[:4]) == ["hit", "hit", "miss", "miss"]
    engine.load("a", *keys[:2])
    stats = engine.stats
    assert _lookups(engine) == (4, 2, 2, 0)
    for name in ("queries", "hits", "misses", "errors"):
        assert stats[f"tier.tier0.lookup_{name}"] == engine.tier_stat(f"engine_{name}")
    assert stats["hits.tier0"] == 2
    assert engine.tier_stat("engine_blocks_stored") == 3
    listing: set[OffloadKey] = set()
    for event in engine.manager.take_events():
        (listing.difference_update if event.removed else listing.update)(event.keys)
    assert listing == {*keys[:2], *keys[10:13]}
