"""MET: measurements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kv_conformance.harness import Deadlines, Fault
from kv_conformance.rig import expect
from kv_conformance.run._case import case

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import OffloadKey, ReqContext

# Running and waiting requests of a busy server.
_CROWD: Final = 1200

_NAMES: Final = (
    "lookup_queries",
    "lookup_hits",
    "lookup_misses",
    "lookup_errors",
    "store_failures",
    "load_failures",
    "stalled_jobs",
)


def _measure(rig: Rig) -> dict[str, float]:
    """Return the shared measurements, and check what holds at any time."""
    stats = rig.stats()
    missing = [name for name in _NAMES if name not in stats]
    expect(not missing, f"get_stats lacks {', '.join(missing)}; it has {', '.join(stats) or '-'}")
    found = {name: stats[name] for name in _NAMES}
    broken = {name: value for name, value in found.items() if not _is_count(value)}
    expect(not broken, f"get_stats has values that are no counts: {broken}")
    queries, hits, misses, errors = (found[name] for name in _NAMES[:4])
    expect(
        queries == hits + misses + errors,
        f"lookup_queries is {queries:g}, but there are {hits:g} hits + {misses:g} misses + "
        f"{errors:g} errors",
    )
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def _expect_moved(
    rig: Rig, before: Mapping[str, float], what: str, **expected: float
) -> dict[str, float]:
    """Expect the named measurements to have moved by so much, and return what they are now."""
    after = _measure(rig)
    moved = {name: after[name] - before[name] for name in expected}
    expect(
        moved == expected,
        f"{what}: " + ", ".join(f"{name} {by:+g}" for name, by in moved.items()) + "; expected "
        f"{', '.join(f'{by:+g}' for by in expected.values())}",
    )
    return after


@case("MET-1")
def test_the_shared_measurements_are_there_from_the_start(rigs: Rigs) -> None:
    """All of them, as numbers, and nothing is counted for a tier that was not used."""
    found = _measure(rigs.open())
    expect(not any(found.values()), f"get_stats of a tier that was not used yet: {found}")


@case("MET-1")
def test_lookups_are_counted_once_per_request_and_key(rigs: Rigs) -> None:
    """Repeats add nothing; another request counts again."""
    rig = rigs.open()
    stored, absent = rigs.keys(3), rigs.keys(5)
    rig.stored(stored)
    keys = [*stored, *absent]
    for request in (rig.request, rig.new_request()):
        before = _measure(rig)
        _resolve_exactly(rig, stored, absent, request)
        after = _expect_moved(
            rig,
            before,
            "a request looked 3 present and 5 absent keys up",
            lookup_queries=8,
            lookup_hits=3,
            lookup_misses=5,
            lookup_errors=0,
        )
        for _step in range(2):
            rig.resolve(keys, request)
            rig.ask(keys[0], request)
            rig.ask(keys[-1], request)
            rig.step()
        _expect_moved(
            rig,
            after,
            "the same request asked for the same keys again",
            lookup_queries=0,
            lookup_hits=0,
            lookup_misses=0,
            lookup_errors=0,
        )


def _resolve_exactly(
    rig: Rig, stored: Sequence[OffloadKey], absent: Sequence[OffloadKey], request: ReqContext
) -> None:
    answers = rig.resolve([*stored, *absent], request)
    expect(all(answers[: len(stored)]), "a stored key was not found", clause="LOOK-3")
    expect(not any(answers[len(stored) :]), "an absent key was found", clause="LOOK-1")


@case("MET-1")
def test_a_crowd_of_requests_makes_nobody_count_again(rigs: Rigs) -> None:
    """The first of many that are alive at the same time repeats its question."""
    rig = rigs.open()
    key = rigs.key()
    rig.stored([key])
    first = rig.new_request()
    waiting = [first]

    def settled() -> bool:
        waiting[:] = [request for request in waiting if rig.ask(key, request) is None]
        rig.step()
        return not waiting

    def settle() -> None:
        rig.budget.until(
            settled, "a lookup did not resolve", rig.limits.lookup_deadline_s, clause="LOOK-2"
        )

    settle()
    for _ in range(_CROWD):
        waiting.append(rig.new_request())
        rig.ask(key, waiting[-1])
    settle()
    before = _measure(rig)
    rig.resolve([key], first)
    _expect_moved(
        rig,
        before,
        f"the first of more than {_CROWD} requests that are alive asked for the same key again",
        lookup_queries=0,
        lookup_hits=0,
    )


@case("MET-1")
def test_questions_without_an_answer_count_nothing(rigs: Rigs) -> None:
    """None is no query, however often; nor is a question of a request that ended before."""
    rig = rigs.open(faults=True)
    stored, absent = rigs.keys(2), rigs.keys(2)
    rig.stored(stored)
    keys = [*stored, *absent]
    before = _measure(rig)
    rig.inject(Fault.STALL)
    silent = rig.new_request()
    for _step in range(4):
        answers = rig.ask_many(keys, silent)
        rig.step()
    known = sum(answer is not None for answer in answers)
    _expect_moved(
        rig,
        before,
        f"the storage hangs, and {known} of 4 keys were answered with True or False",
        lookup_queries=known,
    )
    rig.finish_request(silent)
    rig.heal()
    asking = rig.new_request()
    rig.budget.until(
        lambda: all(_settled(rig, key, asking) for key in keys),
        "a lookup did not resolve after the storage had recovered",
        rig.limits.lookup_deadline_s,
        clause="LOOK-2",
    )
    _expect_moved(
        rig,
        before,
        f"a request ended with {known} of 4 answers, then another one got all 4",
        lookup_queries=known + 4,
    )


def _settled(rig: Rig, key: OffloadKey, request: ReqContext) -> bool:
    if rig.ask(key, request) is not None:
        return True
    rig.step()
    return False


@case("MET-1")
def test_hits_misses_and_errors_add_up_while_the_storage_fails(rigs: Rigs) -> None:
    """Every key of a request is one of the three, whatever happens."""
    rig = rigs.open(deadlines=Deadlines(lookup_s=2.0), faults=True)
    stored, absent = rigs.keys(2), rigs.keys(2)
    rig.stored(stored)
    rig.inject(Fault.ERROR)
    before = _measure(rig)
    request = rig.new_request()
    found = rig.resolve([*stored, *absent], request).count(True)
    after = _expect_moved(
        rig,
        before,
        f"the storage failed, and {found} of 4 keys were answered True",
        lookup_queries=4,
        lookup_hits=found,
    )
    rig.heal()
    rig.resolve([*stored, *absent], request)
    _expect_moved(rig, after, "the same request asked again later", lookup_queries=0)


@case("MET-1")
def test_a_hit_whose_load_fails_becomes_a_miss(rigs: Rigs) -> None:
    """And the failure is counted when the load is reported."""
    rig = rigs.open()
    kept, lost = rigs.keys(2)
    rig.stored([kept, lost])
    _resolve_exactly(rig, [kept, lost], [], rig.request)
    before = _measure(rig)
    rig.expect_loads([kept], clause="DATA-1")
    _expect_moved(rig, before, "a load succeeded", lookup_hits=0, lookup_misses=0, load_failures=0)
    rig.lose(lost)
    if not rig.load([lost]).keys:
        _expect_moved(
            rig,
            before,
            "a key was found, and its load failed",
            lookup_queries=0,
            lookup_hits=-1,
            lookup_misses=1,
            lookup_errors=0,
            load_failures=1,
        )


@case("MET-1")
def test_a_failed_load_without_a_lookup_is_counted(rigs: Rigs) -> None:
    """It moves the failures, and no hit that was never counted."""
    rig = rigs.open()
    before = _measure(rig)
    if not rig.load(rigs.keys(1)).keys:
        _expect_moved(
            rig,
            before,
            "a load of an absent key failed that nobody had looked up",
            lookup_queries=0,
            load_failures=1,
        )


@case("MET-1")
def test_failed_transfers_are_counted_when_they_are_reported(rigs: Rigs) -> None:
    """Stores and loads that fail with the storage move their counters, in blocks."""
    rig = rigs.open(faults=True)
    key = rigs.key()
    rig.stored([key])
    before = _measure(rig)
    rig.inject(Fault.ERROR)
    failed = int(not rig.store(rigs.keys(1)).success)
    before = _expect_moved(
        rig, before, f"{failed} store(s) of one block failed", store_failures=failed
    )
    failed = int(not rig.load([key]).result.success)
    _expect_moved(rig, before, f"{failed} load(s) of one block failed", load_failures=failed)
