"""LOOK: what a lookup promises."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kv_conformance.harness import SHORT_DEADLINES, Corruption, Deadlines, Fault
from kv_conformance.rig import expect
from kv_conformance.run._case import case
from kv_core.contract import Capability, get_offload_block_hash, make_offload_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import OffloadKey, ReqContext

# Where lookups fail: a tier may try again until their deadline before it calls it an error.
# Too short for tests that expect a block to be found at the first attempt.
_ERRORS: Final = Deadlines(lookup_s=2.0)
# Longer than the test: it looks before the back-off has passed, however busy the machine is.
_LONG_BACKOFF: Final = Deadlines(error_backoff_s=30.0)
# Batches of services end at 100, 128, 256.
_LARGE_BATCH: Final = 300
# A longer back-off is not waited for.
_LONGEST_WAIT_S: Final = 5.0


def _expect_hidden(
    rig: Rig, key: OffloadKey, requests: Sequence[ReqContext], after_what: str
) -> None:
    """Look a key up in several steps and expect no True."""
    for _step in range(3):
        for request in requests:
            answers = (rig.ask(key, request), *rig.ask_many([key], request))
            expect(True not in answers, f"a lookup answered True after {after_what}")
        rig.step()
    for request in requests:
        expect(not rig.finds(key, request), f"a lookup answered True after {after_what}")


def _fails_to_load(rig: Rig, key: OffloadKey, request: ReqContext) -> bool:
    """Load a key; its bytes are checked if the load is reported as a success."""
    return not rig.load([key], request=request).keys


def _until_past(rig: Rig, moment: float, look: Callable[[], bool] | None = None) -> bool:
    """Go through steps up to a moment; return whether what was looked for came before."""
    seen = False

    def over() -> bool:
        nonlocal seen
        rig.step()
        seen = look is not None and look()
        return seen or time.monotonic() > moment

    rig.budget.until(over, "a moment passed", max(0.0, moment - time.monotonic()))
    return seen


# -- LOOK-1 -------------------------------------------------------------------------------------


@case("LOOK-1")
def test_a_key_that_was_never_stored_is_absent(rigs: Rigs) -> None:
    """Not found before anything is stored, nor beside keys that are."""
    rig = rigs.open()
    before = rigs.keys(4)
    expect(not any(rig.resolve(before)), "a key was found in an empty storage")
    rig.stored(rigs.keys(4))
    beside = rigs.keys(8)
    expect(not any(rig.resolve(beside, rig.new_request())), "a key that was not stored was found")


@case("LOOK-1")
def test_answers_come_in_the_order_of_the_questions(rigs: Rigs) -> None:
    """In a mixed batch no absent key gets the True of its neighbour."""
    rig = rigs.open()
    stored, absent = rigs.keys(4), rigs.keys(4)
    rig.stored(stored)
    mixed = [key for pair in zip(absent, stored, strict=True) for key in pair]
    answers = dict(zip(mixed, rig.resolve(mixed), strict=True))
    expect(
        not any(answers[key] for key in absent),
        "in a batch of present and absent keys an absent one was answered True",
    )


@case("LOOK-1")
def test_the_same_hash_in_another_group_is_absent(rigs: Rigs) -> None:
    """A block of one KV cache group says nothing of the other groups."""
    rig = rigs.open()
    stored = rigs.key(group_idx=1)
    rig.stored([stored])
    for group_idx in (0, 2, 257):
        other = make_offload_key(get_offload_block_hash(stored), group_idx)
        expect(
            not rig.finds(other),
            f"only group 1 was stored, and the same hash was found in group {group_idx}",
        )


@case("LOOK-1")
def test_a_key_whose_only_store_failed_is_not_promised(rigs: Rigs) -> None:
    """True only if the failed store has left the whole block there after all."""
    rig = rigs.open(faults=True)
    key = rigs.key()
    rig.inject(Fault.ERROR)
    result = rig.store([key])
    rig.heal()
    if result.success or key in result.successful_keys:
        return
    request = rig.new_request()
    if rig.finds(key, request):
        expect(
            not _fails_to_load(rig, key, request),
            "the only store of a key was reported as failed, and a lookup of it answered True, "
            "but it cannot be loaded",
        )


# -- LOOK-2 -------------------------------------------------------------------------------------


@case("LOOK-2")
def test_lookups_resolve_while_the_storage_hangs(rigs: Rigs) -> None:
    """Of keys that are there and keys that are not, on behalf of old and new requests."""
    rig = rigs.open(deadlines=SHORT_DEADLINES, faults=True)
    stored, absent = rigs.keys(2), rigs.keys(2)
    rig.stored(stored)
    rig.inject(Fault.STALL)
    rig.resolve([*stored, *absent])
    rig.resolve([*absent, *stored], rig.new_request())


@case("LOOK-2")
def test_a_question_outlives_the_request_that_asked_it_first(rigs: Rigs) -> None:
    """Two requests ask the same; the first one ends before it has its answer."""
    rig = rigs.open(deadlines=Deadlines(lookup_s=2.0))
    stored, absent = rigs.key(), rigs.key()
    rig.stored([stored])
    first, second = rig.new_request(), rig.new_request()
    rig.ask_many([stored, absent], first)
    rig.ask_many([stored, absent], second)
    rig.finish_request(first)
    rig.resolve([stored, absent], second)
    rig.resolve([stored, absent], rig.new_request())


# -- LOOK-3 -------------------------------------------------------------------------------------


@case("LOOK-3")
def test_a_stored_key_is_found(rigs: Rigs) -> None:
    """From the report of its store on, every request finds it."""
    rig = rigs.open()
    keys = rigs.keys(4)
    rig.stored(keys)
    expect(all(rig.resolve(keys)), "a stored key was not found")
    expect(all(rig.resolve(keys, rig.new_request())), "a new request did not find a stored key")
    _expect_found_alone(rig, keys[0], rig.new_request())


def _expect_found_alone(rig: Rig, key: OffloadKey, request: ReqContext) -> None:
    """Expect that ``lookup`` finds a key, without ``lookup_many``."""
    answer: bool | None = None

    def known() -> bool:
        nonlocal answer
        answer = rig.ask(key, request)
        rig.step()
        return answer is not None

    rig.budget.until(
        known, "a lookup did not resolve", rig.limits.lookup_deadline_s, clause="LOOK-2"
    )
    expect(answer, "`lookup_many` found a key and `lookup` did not")


@case("LOOK-3")
def test_a_stored_key_is_found_beside_absent_ones(rigs: Rigs) -> None:
    """A gap in a batch hides nothing behind it: groups and windows ask in any order."""
    rig = rigs.open()
    first, gap, last = rigs.keys(3)
    rig.stored([first, last])
    expect(
        rig.resolve([first, gap, last])[::2] == [True, True],
        "of three keys the first and the last are stored, and not both were found in one batch",
    )


@case("LOOK-3")
def test_a_stored_key_is_found_anywhere_in_a_large_batch(rigs: Rigs) -> None:
    """A long prompt asks for more keys than services take at once."""
    rig = rigs.open()
    stored = rigs.keys(3)
    rig.stored(stored)
    half = rigs.keys(_LARGE_BATCH // 2), rigs.keys(_LARGE_BATCH // 2)
    batch = [stored[0], *half[0], stored[1], *half[1], stored[2]]
    before = rig.stats().get("lookup_errors", 0.0)
    answers = dict(zip(batch, rig.resolve(batch), strict=True))
    found = [answers[key] for key in stored]
    # A slow storage may not answer all of it in time; then that is an error, and is counted.
    errors = rig.stats().get("lookup_errors", 0.0) - before
    expect(
        found.count(False) <= errors,
        f"of stored keys at the beginning, in the middle and at the end of a batch of {len(batch)},"
        f" {found.count(False)} were not found, and {errors:g} error(s) were counted",
    )


@case("LOOK-3")
def test_as_many_blocks_are_found_as_are_declared_to_be_retained(rigs: Rigs) -> None:
    """The last `min_retained_blocks`, as far as the test goes."""
    rig = rigs.open(retention_blocks=48)
    keys = rigs.keys(min(48, rig.limits.min_retained_blocks))
    rig.stored(keys)
    answers = rig.resolve(keys, rig.new_request())
    expect(
        all(answers),
        f"of the last {len(keys)} blocks stored {answers.count(False)} were not found, though "
        f"min_retained_blocks is {rig.limits.min_retained_blocks}",
    )


@case("LOOK-3")
def test_a_key_that_is_stored_again_stays_found(rigs: Rigs) -> None:
    """Storing what is present succeeds and changes nothing."""
    rig = rigs.open()
    keys = rigs.keys(2)
    rig.stored(keys)
    rig.stored(keys)
    rig.stored(keys[:1])
    expect(
        all(rig.resolve(keys, rig.new_request())),
        "a key was stored, stored again and then not found",
    )


# -- LOOK-4 -------------------------------------------------------------------------------------


@case("LOOK-4")
def test_a_lost_block_is_not_found_again(rigs: Rigs) -> None:
    """After the failed load, by no request, whether it began before or after."""
    rig = rigs.open()
    key = rigs.key()
    rig.stored([key])
    expect(rig.finds(key), "a stored key was not found", clause="LOOK-3")
    other = rig.new_request()
    rig.lose(key)
    if _fails_to_load(rig, key, rig.request):
        what = "the object was lost and its load failed"
        _expect_hidden(rig, key, [rig.request, other], what)
        _expect_hidden(rig, key, [rig.new_request()], what)


@case("LOOK-4")
def test_a_damaged_block_is_not_found_again(rigs: Rigs) -> None:
    """Nor once the back-off of errors has passed: it stays damaged."""
    rig = rigs.open()
    key = rigs.key()
    rig.stored([key])
    expect(rig.finds(key), "a stored key was not found", clause="LOOK-3")
    rig.corrupt(key, Corruption.TRUNCATED)
    if _fails_to_load(rig, key, rig.request):
        what = "the object was cut off and its load failed"
        _expect_hidden(rig, key, [rig.request, rig.new_request()], what)
        _until_past(rig, time.monotonic() + min(rig.limits.error_backoff_s, _LONGEST_WAIT_S))
        _expect_hidden(rig, key, [rig.request, rig.new_request()], what)


@case("LOOK-4")
def test_a_new_store_brings_a_lost_block_back(rigs: Rigs) -> None:
    """For the requests that saw the load fail, too, and it can be loaded."""
    rig = rigs.open()
    key = rigs.key()
    rig.stored([key])
    rig.lose(key)
    if _fails_to_load(rig, key, rig.request):
        rig.finds(key)
        rig.stored([key])
        expect(rig.finds(key), "a block was lost, stored again and not found by a running request")
        expect(rig.finds(key, rig.new_request()), "a block was lost, stored again and not found")
        rig.expect_loads([key])


@case("LOOK-4")
def test_no_request_alive_in_an_outage_is_promised_the_block_again(rigs: Rigs) -> None:
    """Neither the one whose load failed nor any other, also when the back-off has passed."""
    rig = rigs.open(faults=True)
    key = rigs.key()
    rig.stored([key])
    asked, silent = rig.new_request(), rig.new_request()
    for request in (rig.request, asked):
        expect(rig.finds(key, request), "a stored key was not found", clause="LOOK-3")
    rig.inject(Fault.ERROR)
    failed = _fails_to_load(rig, key, rig.request)
    reported = time.monotonic()
    rig.heal()
    if failed:
        what = "a load of the block had failed while the request was alive"
        _expect_hidden(rig, key, [rig.request, asked, silent], what)
        _until_past(rig, reported + min(rig.limits.error_backoff_s, _LONGEST_WAIT_S))
        _expect_hidden(rig, key, [rig.request, asked, silent], what)


@case("LOOK-4")
def test_after_an_outage_no_new_request_is_promised_the_block_before_the_backoff(
    rigs: Rigs,
) -> None:
    """The back-off is for the storage to recover, whoever asks."""
    rig = rigs.open(deadlines=_LONG_BACKOFF, faults=True)
    key = rigs.key()
    rig.stored([key])
    begin = time.monotonic()
    rig.inject(Fault.ERROR)
    failed = _fails_to_load(rig, key, rig.request)
    rig.heal()
    if not failed:
        return
    request = rig.new_request()
    for _step in range(4):
        found = rig.finds(key, request)
        waited_s = time.monotonic() - begin
        # The load cannot have failed before it was submitted.
        if waited_s < rig.limits.error_backoff_s:
            expect(
                not found,
                f"a lookup answered True {waited_s:.3f} s after a load of the block was submitted "
                f"and failed; error_backoff_s is {rig.limits.error_backoff_s:g}",
            )
        rig.step()


@case("LOOK-4", limit_s=120)
def test_an_outage_does_not_empty_a_persistent_tier(rigs: Rigs) -> None:
    """What could not be loaded for a while is found by new requests, and loaded."""
    rig = rigs.open(deadlines=_ERRORS, faults=True)
    keys = rigs.keys(3)
    rig.stored(keys)
    rig.inject(Fault.ERROR)
    for key in keys:
        rig.load([key])
    rig.heal()
    if Capability.PERSISTENT in rigs.spec.capabilities:
        rig.until_found(keys, rig.limits.error_backoff_s, clause="LOOK-4")
        rig.expect_loads(keys)


# -- LOOK-5 -------------------------------------------------------------------------------------


@case("LOOK-5")
def test_a_question_may_be_asked_once_and_never_again(rigs: Rigs) -> None:
    """The tier does not wait for the caller to come back, and later requests get answers."""
    rig = rigs.open(deadlines=Deadlines(lookup_s=8.0))
    stored, absent = rigs.keys(4), rigs.keys(4)
    rig.stored(stored)
    silent, ended = rig.new_request(), rig.new_request()
    rig.ask_many([*stored, *absent], silent)
    rig.ask_many([*stored, *absent], ended)
    rig.finish_request(ended)

    def idle() -> bool:
        rig.step()
        return not rig.call("has_pending_work")

    rig.budget.until(
        idle,
        "has_pending_work did not become False after a question that nobody repeats",
        rig.limits.lookup_deadline_s,
    )
    answers = rig.resolve([*stored, *absent], rig.new_request())
    expect(
        answers == [True] * 4 + [False] * 4,
        f"after a question that was not repeated, another request got {answers} for 4 stored and "
        "4 absent keys",
    )


# -- LOOK-6 -------------------------------------------------------------------------------------


@case("LOOK-6")
def test_an_error_of_the_storage_is_counted_as_an_error(rigs: Rigs) -> None:
    """A stored key that is answered False while everything fails is no miss."""
    rig = rigs.open(deadlines=_ERRORS, faults=True)
    keys = rigs.keys(4)
    rig.stored(keys)
    rig.inject(Fault.ERROR)
    _expect_errors(rig, keys)


@case("LOOK-6")
def test_a_question_that_the_storage_does_not_answer_is_counted_as_an_error(rigs: Rigs) -> None:
    """A storage that hangs has not said that the block is absent."""
    rig = rigs.open(deadlines=SHORT_DEADLINES, faults=True)
    keys = rigs.keys(2)
    rig.stored(keys)
    rig.inject(Fault.STALL)
    _expect_errors(rig, keys)


def _expect_errors(rig: Rig, keys: Sequence[OffloadKey]) -> None:
    """Ask for stored keys on behalf of a new request, and expect an error for each False."""
    before = rig.stats()
    absent = rig.resolve(keys, rig.new_request()).count(False)
    after = rig.stats()
    errors = after.get("lookup_errors", 0.0) - before.get("lookup_errors", 0.0)
    misses = after.get("lookup_misses", 0.0) - before.get("lookup_misses", 0.0)
    expect(
        (errors, misses) == (absent, 0),
        f"the storage failed, and {absent} stored key(s) were answered False: lookup_errors grew "
        f"by {errors:g} (expected {absent}), lookup_misses by {misses:g} (expected 0)",
    )


@case("LOOK-6", limit_s=120)
def test_an_error_of_the_storage_is_soon_forgotten(rigs: Rigs) -> None:
    """By the request that got the False, and by new ones."""
    rig = rigs.open(deadlines=_ERRORS, faults=True)
    keys = rigs.keys(3)
    rig.stored(keys)
    rig.inject(Fault.ERROR)
    rig.resolve(keys)
    rig.heal()
    rig.until_found(keys, rig.limits.error_backoff_s, clause="LOOK-6", fresh=False)
    rig.until_found(keys, rig.limits.error_backoff_s, clause="LOOK-6")


@case("LOOK-6", limit_s=120)
def test_an_answer_that_did_not_come_is_soon_forgotten(rigs: Rigs) -> None:
    """When the storage answers again, the running request and new ones find the block."""
    rig = rigs.open(deadlines=SHORT_DEADLINES, faults=True)
    keys = rigs.keys(3)
    rig.stored(keys)
    rig.inject(Fault.STALL)
    rig.resolve(keys)
    rig.heal()
    rig.until_found(keys, rig.limits.error_backoff_s, clause="LOOK-6", fresh=False)
    rig.until_found(keys, rig.limits.error_backoff_s, clause="LOOK-6")


# -- LOOK-7 -------------------------------------------------------------------------------------


@case("LOOK-7")
def test_a_store_ends_a_remembered_absence(rigs: Rigs) -> None:
    """For the request that stores, and for another one that was told False."""
    rig = rigs.open()
    keys = rigs.keys(3)
    other = rig.new_request()
    for request in (rig.request, other):
        expect(not any(rig.resolve(keys, request)), "found before it was stored", clause="LOOK-1")
    rig.stored(keys)
    expect(all(rig.resolve(keys)), "a request did not find what it had stored itself")
    expect(all(rig.resolve(keys, other)), "a running request did not find what another one stored")


@case("LOOK-7")
def test_an_answer_from_before_the_store_does_not_outlive_it(rigs: Rigs) -> None:
    """A question is under way when its key is stored; its False comes too late to be true."""
    rig = rigs.open()
    posted, unposted = rigs.key(), rigs.key()
    rig.ask(posted)
    rig.step()
    rig.ask(unposted)
    rig.stored([posted, unposted])
    # The first answer may be taken from what the store left, the second from what came late.
    for _step in range(3):
        expect(
            rig.resolve([posted, unposted]) == [True, True],
            "a key was asked for, stored, and then answered False",
        )
        rig.step()


@case("LOOK-7")
def test_a_question_during_the_store_does_not_hide_its_outcome(rigs: Rigs) -> None:
    """False and None are both fine until the report, and neither is afterwards."""
    rig = rigs.open()
    key = rigs.key()
    job_id = rig.submit_store([key])
    rig.ask(key)
    rig.step()
    rig.ask(key)
    if rig.wait(job_id).success:
        expect(rig.finds(key), "a key was asked for during its store, and answered False after it")


# -- LOOK-8 -------------------------------------------------------------------------------------


@case("LOOK-8")
def test_nothing_is_found_while_its_only_store_hangs(rigs: Rigs) -> None:
    """The storage does not move, so the store cannot end; no lookup may answer True."""
    rig = rigs.open(faults=True)
    key, now = rigs.key(), time.monotonic()
    rig.inject(Fault.STALL)
    job_id = rig.submit_store([key])

    def reported() -> bool:
        return job_id in rig.results

    def promised() -> bool:
        return not reported() and True in (rig.ask(key), *rig.ask_many([key]))

    if promised() or _until_past(rig, now + 0.1, promised):
        # A store that needs nothing of the storage has ended already, and says so soon.
        ended = _until_past(rig, time.monotonic() + 1.0, reported)
        expect(
            ended or key in rig.list_keys(),
            "a lookup answered True while the only store of its key was in flight, held up by "
            "the storage",
        )
    rig.heal()
    rig.wait(job_id)


# -- LOOK-9 -------------------------------------------------------------------------------------


@case("LOOK-9")
def test_an_absence_is_not_remembered_beyond_its_request(rigs: Rigs) -> None:
    """What came from elsewhere need not be seen by a request that was told False, but by others."""
    storage = rigs.storage()
    rig = rigs.open(storage=storage)
    writer = rig
    if Capability.SHARED in rigs.spec.capabilities:
        writer = rigs.open(storage=storage)
    keys = rigs.keys(3)
    expect(not any(rig.resolve(keys)), "found before it was stored", clause="LOOK-1")
    writer.stored(keys)
    # Either answer is fine for the old request.
    rig.resolve(keys)
    rig.until_found(keys, rig.limits.visibility_delay_s, clause="LOOK-9")
