"""Bugs that operators of such systems have reported, each as a check with the right value.

Every check is run twice over: against the engine as it is, where it must pass, and, where a
switch puts the reported fault back, against the faulty engine, where it must fail. A check that
cannot see its bug is worth nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import JobErrorKind, JobResult, ReqContext
from kv_core.cpu import CPUPrimaryTierOffloadingManager
from kv_core.engine import CPULoadStoreSpec, PrepareStoreOutput
from kv_core.tiering import TieringOffloadingManager, _guard
from kv_core.tiering._guard import GuardedTier
from kv_core.tiering._health import TierHealth
from kv_core.tiering._patience import LookupPatience
from kv_core.tiering._promotions import Promotions
from kv_core.tiering._share import PrimaryShare

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey

    Start = Callable[..., Engine]
    Keys = list[OffloadKey]
    Check = Callable[[Start, Keys], None]
    Switch = Callable[[pytest.MonkeyPatch], None]

CHECKS: dict[str, Check] = {}
SWITCHES: dict[str, Switch] = {}


def report(*names: str) -> Callable[[Check], Check]:
    """Register the check of public reports under the first of them."""

    def register(check: Check) -> Check:
        CHECKS[names[0]] = check
        return check

    return register


def bug_of(*names: str) -> Callable[[Switch], Switch]:
    """Register the switch that puts the bug of each report back."""

    def register(switch: Switch) -> Switch:
        for name in names:
            assert name in CHECKS
            SWITCHES[name] = switch
        return switch

    return register


def _always(value: object) -> Callable[..., object]:
    """Return a function that returns a value."""
    return lambda *_: value


def _begin_load(engine: Engine, *keys: OffloadKey, req_id: str = "a") -> Any:
    engine.tier.has(*keys)
    assert engine.ask(req_id, *keys) == ["pending"] * len(keys)
    engine.end_step()
    return engine.tier.loads[-1]


# -- failed loads -------------------------------------------------------------------------------


@report("vllm#49176")
def check_a_failed_load_is_not_tried_for_ever(start: Start, keys: Keys) -> None:
    """One failed secondary load, and the doomed promotion was submitted again every step."""
    engine = start(degrade_after_failures=1000)
    job = _begin_load(engine, keys[0])
    engine.tier.finish(job, good=())
    for _ in range(20):
        assert engine.ask("a", keys[0]) == ["miss"]
        engine.end_step()
    assert len(engine.tier.loads) == 1


@bug_of("vllm#49176")
def _failures_are_not_remembered(patch: pytest.MonkeyPatch) -> None:
    original = Promotions._note_failed

    def forgetful(tier: Any, state: Any, keys: Any) -> None:
        original(tier, state, keys)
        state.failed.clear()

    patch.setattr(Promotions, "_note_failed", staticmethod(forgetful))


@report("llm-d-kv-cache#514", "vllm#39732")
def check_a_raising_tier_does_not_raise_out_of_a_step(start: Start, keys: Keys) -> None:
    """Any load failure crashed the worker."""
    engine = start()
    engine.tier.has(*keys[:2])
    engine.tier.raising = {"submit_load"}
    engine.ask("a", *keys[:2])
    engine.end_step()
    assert engine.ask("a", *keys[:2]) == ["miss", "miss"]
    engine.tier.raising = {"get_finished_jobs"}
    engine.store("x", keys[5])
    engine.end_step()
    engine.end_step()
    assert engine.tier_stat("contained_exceptions") == 2


@bug_of("llm-d-kv-cache#514")
def _exceptions_pass(patch: pytest.MonkeyPatch) -> None:
    def pass_on(self: GuardedTier, method: str, error: Exception) -> None:
        raise AssertionError(f"{method} raised") from error

    patch.setattr(GuardedTier, "_contained", pass_on)


@report("sglang#31315")
def check_one_bad_tier_is_not_asked_by_everybody(start: Start, keys: Keys) -> None:
    """exists() true, get() times out, and every request on that page repeated it."""
    engine = start()
    engine.tier.has(keys[0])
    for index in range(50):
        engine.ask(f"r{index}", keys[0])
        engine.end_step()
        if engine.tier.open_jobs:
            engine.tier.finish(engine.tier.loads[-1], good=(), kind=JobErrorKind.STALLED)
        engine.end_step()
    assert len(engine.tier.loads) == 3


@bug_of("sglang#31315")
def _failures_do_not_degrade(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TierHealth, "failed", _always(None))


@report("dynamo#15079")
def check_a_failed_transfer_is_no_hit(start: Start, keys: Keys) -> None:
    """Wrong KV was served, and metrics showed a full hit, while the transfer had failed."""
    engine = start()
    job = _begin_load(engine, keys[0])
    engine.tier.finish(job, good=())
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.tier_stat("engine_hits") == 0
    assert engine.tier_stat("engine_errors") == 1
    assert not engine.primary.is_ready(keys[0])


@bug_of("dynamo#15079")
def _every_result_is_a_success(patch: pytest.MonkeyPatch) -> None:
    def optimistic(job: Any, result: Any) -> None:
        job.succeeded = frozenset(job.metadata.keys)

    patch.setattr(_guard, "_read_result", optimistic)


@report("LMCache#2420")
def check_a_block_deleted_behind_our_back_costs_itself(start: Start, keys: Keys) -> None:
    """KeyError on a missing file killed the engine."""
    engine = start()
    for index in range(5):
        job = _begin_load(engine, keys[index], req_id=f"r{index}")
        engine.tier.finish(job, good=(), kind=JobErrorKind.MISSING)
        assert engine.ask(f"r{index}", keys[index]) == ["miss"]
        engine.end_step()
    assert engine.health() == "healthy"


@report("sglang#31881")
def check_a_promised_hit_that_is_declined_is_a_miss(start: Start, keys: Keys) -> None:
    """The reported hit length was never fetched; the request failed."""
    engine = start()
    engine.tier.has(*keys[:5])
    assert engine.ask("a", *keys[:5]) == ["pending"] * 4 + ["miss"]
    assert engine.tier_stat("engine_misses") == 1


@bug_of("sglang#31881")
def _declined_hits_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    original = GuardedTier.resolve

    def resolve(self: GuardedTier, key: Any, state: Any, outcome: str) -> None:
        if outcome != "misses":
            original(self, key, state, outcome)

    patch.setattr(GuardedTier, "resolve", resolve)


@report("sglang#38428")
def check_an_exception_ends_one_operation(start: Start, keys: Keys) -> None:
    """It killed the backup thread; queued backups and their memory were never released."""
    engine = start()
    engine.tier.raising = {"submit_store"}
    engine.store("x", keys[0])
    engine.tier.raising = set()
    engine.store("x", keys[1])
    engine.tier.finish_all()
    engine.end_step()
    assert set(engine.tier.blocks) == {keys[1]}
    assert engine.stats["blocks_pinned"] == 0


# -- partial and lost results -------------------------------------------------------------------


@report("vllm#50321")
def check_one_missing_key_costs_one_key(start: Start, keys: Keys) -> None:
    """One missing key threw away a whole promoted batch."""
    engine = start()
    job = _begin_load(engine, *keys[:4])
    engine.tier.finish(job, good=[keys[0], keys[1], keys[3]])
    assert engine.ask("a", *keys[:4]) == ["hit", "hit", "miss", "hit"]


@bug_of("vllm#50321")
def _all_or_nothing(patch: pytest.MonkeyPatch) -> None:
    original = _guard._read_result

    def strict(job: Any, result: Any) -> None:
        original(job, result)
        if not result.success:
            job.succeeded = frozenset()

    patch.setattr(_guard, "_read_result", strict)


@report("LMCache#3006")
def check_what_was_not_read_is_not_ready(start: Start, keys: Keys) -> None:
    """On partial allocation the disk backend returned buffers that were never filled."""
    engine = start()
    job = _begin_load(engine, *keys[:2])
    engine.tier.finish(job, good=())
    engine.tier.results[-1] = JobResult(job.job_id, False, (keys[9], keys[1], keys[1]))
    assert engine.ask("a", keys[0], keys[9]) == ["miss", "miss"]


@report("vllm#49947")
def check_a_result_that_was_handed_over_is_not_lost(start: Start, keys: Keys) -> None:
    """A raise in a clean-up swallowed the result; the block stayed pinned for ever."""
    engine = start()
    engine.store("x", keys[0])
    engine.tier.finish_all()
    engine.tier.results.append(RuntimeError("release_xfer_handle"))
    engine.end_step()
    assert engine.stats["blocks_pinned"] == 0
    assert engine.manager.num_jobs_in_flight == 0


@bug_of("vllm#49947")
def _an_exception_swallows_results(patch: pytest.MonkeyPatch) -> None:
    def finished(self: GuardedTier) -> list[Any]:
        try:
            results = list(self._manager.get_finished_jobs())
        except RuntimeError:
            return []
        return [job for job in map(self._take_report, results) if job is not None]

    patch.setattr(GuardedTier, "finished", finished)


@report("dynamo#5012", "dynamo#3730")
def check_each_job_has_one_result(start: Start, keys: Keys) -> None:
    """Completions that are lost or come twice; requests that are never freed."""
    engine = start()
    engine.store("x", keys[0])
    engine.store("y", keys[1])
    first = engine.tier.finish(engine.tier.stores[0])
    engine.tier.results += [first, first]
    engine.end_step()
    assert engine.tier_stat("ignored_results") == 2
    assert engine.stats["blocks_pinned"] == 1
    assert engine.tier_stat("engine_blocks_stored") == 1


@bug_of("dynamo#5012")
def _results_are_taken_twice(patch: pytest.MonkeyPatch) -> None:
    original = GuardedTier._take_report

    def take(self: GuardedTier, result: Any) -> Any:
        job = self.jobs.get(result.job_id)
        taken = original(self, result)
        if job is not None:
            self.jobs[result.job_id] = job
        return taken

    patch.setattr(GuardedTier, "_take_report", take)


@report("LMCache#5119")
def check_failures_show_within_one_poll(start: Start, keys: Keys) -> None:
    """A failing L2 reported healthy, and there was no failure metric."""
    engine = start(degrade_after_failures=1)
    engine.store("x", *keys[:2])
    engine.tier.finish(engine.tier.stores[0], good=[keys[0]])
    engine.end_step()
    assert engine.tier_stat("engine_blocks_failed") == 1
    assert engine.tier_stat("health") == 1


# -- stalls -------------------------------------------------------------------------------------


@report("vllm#49829")
def check_nobody_waits_for_a_stalled_job(start: Start, keys: Keys) -> None:
    """A stalled write left a block pending for ever; clients timed out after 300 s."""
    engine = start()
    _begin_load(engine, keys[0])
    assert engine.ask("b", keys[0]) == ["pending"]
    for _ in range(31):
        engine.clock.advance(1.0)
        engine.end_step()
    assert engine.ask("a", keys[0]) == engine.ask("b", keys[0]) != ["pending"]
    assert engine.ask("a", keys[0]) == ["miss"]


@bug_of("vllm#49829")
def _no_deadlines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Promotions, "expire", _always([]))
    patch.setattr(LookupPatience, "is_exhausted", _always(False))


@report("vllm#49820", "vllm#56828")
def check_a_dead_peer_is_noticed_once(start: Start, keys: Keys) -> None:
    """The consumer idled for 30 s per request, one request after the other."""
    engine = start()
    waited = []
    for index in range(6):
        engine.tier.has(keys[index])
        begun = engine.clock.now
        while engine.ask(f"r{index}", keys[index]) != ["miss"]:
            engine.end_step()
            engine.clock.advance(0.1)
        waited.append(engine.clock.now - begun)
        engine.finish(f"r{index}")
    assert waited[3:] == [0.0, 0.0, 0.0]


@bug_of("vllm#49820")
def _stalls_do_not_degrade(patch: pytest.MonkeyPatch) -> None:
    _failures_do_not_degrade(patch)
    patch.setattr(GuardedTier, "note_overdue", _always(None))


@report("LMCache#4385", "vllm#47282")
def check_a_late_load_writes_into_nobodys_block(start: Start, keys: Keys) -> None:
    """Returning sessions answered with other requests' content, and no error was logged."""
    engine = start(num_blocks=3)
    job = _begin_load(engine, keys[0])
    engine.clock.advance(10.0)
    engine.end_step()
    stored = [key for key in keys[5:8] if engine.offer("x", key) is not None]
    engine.manager.complete_store(stored, ReqContext("x"))
    before = engine.load("b", *stored)
    engine.tier.finish(job)
    assert engine.load("b", *stored) == before


@bug_of("LMCache#4385")
def _stalled_slots_are_freed(patch: pytest.MonkeyPatch) -> None:
    def free(self: Any, key: Any, block_id: int, generation: int) -> bool:
        self.complete_write(key, block_id, generation, success=False)
        return True

    patch.setattr(CPUPrimaryTierOffloadingManager, "abandon_write", free)


@report("Mooncake#778", "Mooncake#4239")
def check_a_load_that_outlives_its_wait_is_no_success(start: Start, keys: Keys) -> None:
    """Data may be wrong when a get outlives its lease."""
    engine = start()
    job = _begin_load(engine, keys[0])
    engine.clock.advance(10.0)
    engine.end_step()
    engine.tier.finish(job)
    engine.end_step()
    assert engine.tier_stat("engine_hits") == 0
    assert engine.manager.hit_level(keys[0], ReqContext("a")) == "cpu"


@report("vllm#45595", "llm-d-kv-cache#457")
def check_no_step_waits_for_a_tier(start: Start, keys: Keys) -> None:
    """A new request waited until all idle offloads were flushed."""
    engine = start(num_blocks=32)
    for index in range(20):
        engine.store("x", keys[index])
        engine.ask("a", keys[30])
        engine.end_step()
    assert len(engine.tier.open_jobs) == 20
    assert "tier0.drain_jobs" not in engine.log


# -- eviction between lookup and load -----------------------------------------------------------


@report("vllm#39702", "vllm#42289", "vllm#54914", "vllm#43884", "vllm#50454")
def check_a_hit_stays_loadable(start: Start, keys: Keys) -> None:
    """'expected N hit tokens, got 0', once eviction had started."""
    engine = start()
    engine.store("x", *keys[:8])
    engine.tier.finish_all()
    engine.end_step()
    assert engine.ask("a", *keys[:8]) == ["hit"] * 8
    engine.tier.has(keys[20])
    engine.ask("b", keys[20])
    engine.offer("c", *keys[21:24])
    assert all(engine.primary.is_ready(key) for key in keys[:8])
    assert len(engine.load("a", *keys[:8])) == 8


@bug_of("vllm#39702")
def _hits_are_not_protected(patch: pytest.MonkeyPatch) -> None:
    original = CPUPrimaryTierOffloadingManager.lookup

    def lookup(self: Any, key: Any, req_context: Any) -> Any:
        answer = original(self, key, req_context)
        self._step_hits.clear()
        return answer

    patch.setattr(CPUPrimaryTierOffloadingManager, "lookup", lookup)


@report("sglang#28468", "llm-d-kv-cache#504")
def check_a_block_in_flight_is_not_evicted(start: Start, keys: Keys) -> None:
    """Host memory was used after it was freed; copies were made from freed buffers."""
    engine = start(num_blocks=2)
    engine.store("x", *keys[:2])
    assert engine.offer("y", *keys[2:4]) is None
    engine.tier.finish_all()
    assert engine.offer("y", *keys[2:4]) is not None


@bug_of("sglang#28468")
def _cascades_do_not_pin(patch: pytest.MonkeyPatch) -> None:
    original = CPUPrimaryTierOffloadingManager.prepare_read
    unpin = CPUPrimaryTierOffloadingManager.complete_read

    def prepare(self: Any, keys: Any) -> Any:
        block_ids = original(self, keys)
        unpin(self, block_ids)
        return block_ids

    patch.setattr(CPUPrimaryTierOffloadingManager, "prepare_read", prepare)
    patch.setattr(CPUPrimaryTierOffloadingManager, "complete_read", _always(None))


@report("vllm#35931")
def check_every_pin_is_taken_back(start: Start, keys: Keys) -> None:
    """Locks of chunks that were never retrieved were not freed; memory grew."""
    engine = start()
    for index in range(8):
        engine.promote(f"r{index}", *keys[3 * index : 3 * index + 3])
        engine.end_step()
        assert engine.stats["share_blocks_leased"] == 3
        engine.finish(f"r{index}")
        assert engine.stats["blocks_pinned"] == engine.stats["share_blocks_leased"] == 0


@bug_of("vllm#35931")
def _leases_do_not_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrimaryShare, "end_leases", _always(None))


# -- starvation ---------------------------------------------------------------------------------


@report("vllm#49902", "vllm#49952", "vllm#50014")
def check_waiting_requests_leave_room_for_stores(start: Start, keys: Keys) -> None:
    """The CPU tier filled with unread promotions; stores of running requests were refused."""
    engine = start()
    engine.tier.has(*keys[:16])
    for index in range(4):
        engine.ask(f"r{index}", *keys[4 * index : 4 * index + 4])
    engine.end_step()
    engine.tier.finish_all()
    assert engine.offer("running", *keys[20:24]) is not None
    assert engine.ask("r0", *keys[:4]) == ["hit"] * 4


@bug_of("vllm#49902")
def _no_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrimaryShare, "has_room", _always(True))
    original = PrimaryShare.__init__

    def unlimited(self: PrimaryShare, limit: int, *rest: Any) -> None:
        original(self, 10**6, *rest)

    patch.setattr(PrimaryShare, "__init__", unlimited)


@report("sglang#33862", "LMCache#2942")
def check_a_small_primary_makes_progress(start: Start, keys: Keys) -> None:
    """A host pool smaller than the device pool deadlocked; allocate() spun for ever."""
    engine = start(num_blocks=2)
    engine.tier.has(*keys[:12])
    left = {f"r{index}": keys[4 * index : 4 * index + 4] for index in range(3)}
    for _ in range(10):
        for req_id, blocks in tuple(left.items()):
            answers = engine.ask(req_id, *blocks)
            if answers[:2] == ["hit", "miss"]:
                engine.load(req_id, blocks[0])
                del left[req_id]
        engine.end_step()
        engine.tier.finish_all()
    assert not left


@bug_of("sglang#33862")
def _everybody_waits_for_himself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrimaryShare, "is_filled_by", _always(False))


# -- stores -------------------------------------------------------------------------------------


@report("vllm#26329")
def check_a_declined_store_is_said_to_be_declined(start: Start, keys: Keys) -> None:
    """Crashes some time after 'Cannot store blocks'."""
    engine = start(num_blocks=4)
    engine.offer("x", *keys[:3])
    assert engine.offer("a", *keys[3:6]) is None
    engine.manager.complete_store(keys[3:6], ReqContext("a"))
    assert engine.stats["blocks_writing"] == 3
    engine.manager.complete_store(keys[:3], ReqContext("x"))
    engine.tier.finish_all()
    assert engine.store("a", *keys[3:6])
    assert engine.ask("b", *keys[3:6]) == ["hit"] * 3


@bug_of("vllm#26329")
def _declined_is_known(patch: pytest.MonkeyPatch) -> None:
    original = CPUPrimaryTierOffloadingManager.prepare_store

    def prepare(self: Any, keys: Any, req_context: Any) -> Any:
        nothing = PrepareStoreOutput((), CPULoadStoreSpec(()))
        return original(self, keys, req_context) or nothing

    patch.setattr(CPUPrimaryTierOffloadingManager, "prepare_store", prepare)


@report("LMCache#4991")
def check_a_failed_store_is_absent_everywhere(start: Start, keys: Keys) -> None:
    """44-66 failed stores, and later hits on those keys gave gibberish."""
    engine = start()
    engine.offer("a", *keys[:2])
    engine.manager.complete_store(keys[:2], ReqContext("a"), success=False)
    assert engine.ask("b", *keys[:2]) == ["miss", "miss"]
    assert engine.tier.stores == []


@bug_of("LMCache#4991")
def _failed_copies_are_kept(patch: pytest.MonkeyPatch) -> None:
    original = CPUPrimaryTierOffloadingManager.finish_store

    def finish(self: Any, keys: Any, *, success: bool) -> Any:
        return original(self, keys, success=True)

    patch.setattr(CPUPrimaryTierOffloadingManager, "finish_store", finish)


# -- resets -------------------------------------------------------------------------------------


@report("vllm#48102")
def check_after_a_reset_nobody_waits_for_what_is_gone(start: Start, keys: Keys) -> None:
    """After reset_cache, active requests were deferred for ever."""
    engine = start()
    _begin_load(engine, keys[0])
    engine.offer("x", keys[1])
    engine.tier.has(keys[2])
    assert engine.ask("b", *keys[1:3]) == ["pending", "pending"]
    engine.manager.reset_cache()
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.ask("b", *keys[1:3]) == ["miss", "miss"]
    engine.manager.on_reset_flushed()
    assert engine.manager.num_jobs_in_flight == 0
    assert engine.stats["requests_waiting"] == engine.stats["share_blocks_used"] == 0
    assert engine.stats["blocks_free"] == 8


@bug_of("vllm#48102")
def _reservations_survive_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Promotions, "drop_queued", _always(None))


@report("vllm#9744")
def check_old_weights_are_unreachable(start: Start, keys: Keys) -> None:
    """KV of old weights was reused after a weight update, 17 updates old."""
    engine = start()
    engine.store("x", keys[0])
    engine.tier.finish_all()
    engine.end_step()
    engine.manager.reset(1)
    engine.manager.on_reset_flushed()
    assert engine.ask("a", keys[0]) == ["miss"]
    assert engine.tier.epoch == 1


@bug_of("vllm#9744")
def _tiers_stay_open_over_an_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieringOffloadingManager, "_open_again", lambda *args: args[1])


# -- metrics ------------------------------------------------------------------------------------


@report("vllm#30522", "vllm#57596")
def check_lookups_are_counted_once(start: Start, keys: Keys) -> None:
    """External queries were counted twice, and skipped requests as misses."""
    engine = start(num_tiers=2)
    engine.tiers[0].has(keys[0])
    for _ in range(3):
        engine.ask("a", *keys[:2])
        engine.end_step()
        engine.tiers[0].finish_all()
    assert engine.tier_stat("engine_queries", 0) == 2
    assert engine.tier_stat("engine_queries", 1) == 1


@bug_of("vllm#30522")
def _every_question_counts(patch: pytest.MonkeyPatch) -> None:
    def resolve(self: GuardedTier, key: Any, state: Any, outcome: str) -> None:
        self.counts[outcome] += 1

    patch.setattr(GuardedTier, "resolve", resolve)


# -- the tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_the_engine_does_not_have_the_bug(start: Start, keys: Keys, name: str) -> None:
    """What the report describes does not happen."""
    CHECKS[name](start, keys)


@pytest.mark.parametrize("name", SWITCHES)
def test_the_check_sees_the_bug(
    start: Start, keys: Keys, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the fault put back, the same check fails."""
    SWITCHES[name](monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[name](start, keys)
