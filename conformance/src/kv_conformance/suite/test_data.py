"""DATA: the bytes.

The rig watches the region in every test; the tests here make the situations in which a mistake
would show.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from kv_conformance.harness import SHORT_DEADLINES, Corruption, Fault
from kv_conformance.rig import expect
from kv_conformance.rig._process import few_descriptors
from kv_conformance.run._case import case
from kv_conformance.suite._sizes import opened_with_blocks
from kv_core.contract import Capability, JobErrorKind, make_offload_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import JobId, JobResult, OffloadKey

_HASH: Final = bytes.fromhex("3b") + bytes(range(0x41, 0x60))

# Faults in which everything, or something, fails at once. A stall is JOB-5.
_FAILING: Final = (Fault.ERROR, Fault.FULL, Fault.SHORT)

_DAMAGE: Final = (None, Corruption.EMPTY, Corruption.TRUNCATED, Corruption.OVERLONG)

_WRITERS: Final = 8
# Of a store that is declined, for lack of space for example.
_ATTEMPTS: Final = 20

# More than clients, pools and system calls like to take at once.
_LARGE_JOB: Final = 130
_READERS: Final = 32
# More than a tier has threads, each of which may keep one unfinished object for the next store.
_FULL_STORES: Final = 40
_TIDY_S: Final = 1.0
# What clients send along for other systems.
_PARAMS: Final[Mapping[str, object]] = {
    "do_remote_prefill": True,
    "do_remote_decode": True,
    "remote_block_ids": [1, 2],
    "remote_engine_id": "elsewhere",
    "remote_host": "host.invalid",
    "remote_port": 1,
}

# A window of a fraction of a millisecond is met within a few rounds.
_REPEATED_STORES: Final = 40


def _faults(rigs: Rigs) -> list[Fault]:
    return [fault for fault in _FAILING if fault in rigs.harness.faults]


def _done(keys: Sequence[OffloadKey], result: JobResult) -> list[OffloadKey]:
    return list(keys) if result.success else list(result.successful_keys)


def _in_parts(rig: Rig, keys: Sequence[OffloadKey]) -> list[Sequence[OffloadKey]]:
    return [keys[start : start + rig.job_keys] for start in range(0, len(keys), rig.job_keys)]


def _expect_absent_or_right(rig: Rig, keys: Iterable[OffloadKey]) -> None:
    """Load whatever can be loaded: the rig looks at the bytes."""
    for part in _in_parts(rig, list(keys)):
        rig.load(part)


def _until_given_up(rig: Rig, job_id: JobId) -> None:
    """Wait until the deadline of a job has passed, as far as the tier is concerned."""

    def given_up() -> bool:
        rig.step()
        # A job whose I/O cannot be withdrawn stays unreported, and is counted.
        return job_id in rig.results or rig.stats().get("stalled_jobs", 0) > 0

    rig.budget.until(
        given_up,
        "a job that hangs was neither reported nor counted as stalled",
        rig.limits.job_deadline_s,
        clause="JOB-5",
    )


# -- DATA-1 ----------------------------------------------------------------------------------------


@case("DATA-1")
def test_what_was_stored_is_what_is_loaded(rigs: Rigs) -> None:
    """Into other slots than it was stored from, in another order, and in parts."""
    rig = rigs.open(num_blocks=64)
    keys = rigs.keys(12)
    rig.stored(keys)
    rig.expect_loads(keys[::-1])
    rig.expect_loads(keys[3:5])
    rig.expect_loads(keys[:1])


@case("DATA-1")
def test_jobs_in_flight_do_not_mix_their_bytes(rigs: Rigs) -> None:
    """Stores and loads run side by side, in slots that change hands all the time."""
    rig = rigs.open(num_blocks=64)
    known = rigs.keys(8)
    rig.stored(known)
    for _round in range(4):
        size = min(4, rig.job_keys)
        fresh = rigs.keys(2 * size)
        stores = {rig.submit_store(part): part for part in (fresh[:size], fresh[size:])}
        loads = [rig.submit_load(known[at : at + size]) for at in (0, len(known) - size)]
        rig.wait_all([*stores, *loads])
        stored = [key for job, part in stores.items() for key in _done(part, rig.results[job])]
        rig.stored([key for key in fresh if key not in stored])
        known = fresh if len(fresh) >= size else known
        rig.expect_loads(known)


@case("DATA-1")
def test_every_block_of_a_large_job_is_moved(rigs: Rigs) -> None:
    """A long prompt is one job, as far as the tier takes it."""
    rig = rigs.open(num_blocks=4 * _LARGE_JOB, block_bytes=512, retention_blocks=_LARGE_JOB)
    keys = rigs.keys(min(_LARGE_JOB, rig.limits.min_retained_blocks))
    rig.stored(keys)
    rig.expect_loads(keys)


@case("DATA-1")
def test_many_loads_of_one_block_at_once_succeed(rigs: Rigs) -> None:
    """A popular prefix is wanted by many requests in the same step."""
    rig = rigs.open(num_blocks=128, block_bytes=512)
    keys = rigs.keys(min(2, rig.job_keys))
    rig.stored(keys)
    jobs = [rig.submit_load(keys, request=rig.new_request()) for _ in range(_READERS)]
    rig.wait_all(jobs)
    failed = [rig.results[job_id].error for job_id in jobs if not rig.results[job_id].success]
    expect(
        not failed,
        f"{len(failed)} of {len(jobs)} simultaneous loads of the same blocks failed: {failed[:1]}",
    )


@case("DATA-1")
def test_blocks_of_zeros_are_blocks(rigs: Rigs) -> None:
    """Several keys with the same bytes, which look like nothing: unused layers are like that."""
    rig = rigs.open()
    keys = rigs.keys(3)
    rig.region.zeros.update(keys)
    rig.stored(keys)
    expect(all(rig.resolve(keys)), "a block of zeros was stored and not found")
    rig.expect_loads(keys)
    if Capability.DELETE in rigs.spec.capabilities:
        rig.call("delete", keys[:1])
        rig.stored(rigs.keys(1))
        rig.expect_loads(keys[1:])


@case("DATA-1")
def test_what_a_client_sent_along_changes_no_bytes(rigs: Rigs) -> None:
    """Parameters that are meant for others leave stores, lookups and loads as they are."""
    rig = rigs.open()
    request = rig.new_request(**_PARAMS)
    keys = rigs.keys(min(3, rig.job_keys))
    rig.stored(keys, request=request)
    expect(
        all(rig.resolve(keys, request)),
        "a request with kv_transfer_params for another system did not find what it had stored",
    )
    loaded = rig.load(keys, request=request)
    expect(
        len(loaded.keys) == len(keys),
        f"{len(keys) - len(loaded.keys)} of {len(keys)} blocks were not loaded for a request with "
        f"kv_transfer_params for another system: {loaded.result.error}",
    )


# -- DATA-2 ----------------------------------------------------------------------------------------


@case("DATA-2")
def test_a_stored_block_was_read_before_the_report(rigs: Rigs) -> None:
    """Its slot is overwritten at the report, and the block is loaded later."""
    rig = rigs.open(num_blocks=64)
    rig.blame_bytes = "DATA-2"
    keys = rigs.keys(8)
    jobs = {rig.submit_store([key]): key for key in keys}
    rig.wait_all(jobs)
    rig.stored([key for job, key in jobs.items() if not rig.results[job].success])
    rig.expect_loads(keys)


@case("DATA-2")
def test_a_failed_store_is_not_tried_again_from_its_slot(rigs: Rigs) -> None:
    """Whatever becomes of its key after the storage has been healed, the slot is not read."""
    for fault in _faults(rigs):
        rig = rigs.open(faults=True, deadlines=SHORT_DEADLINES)
        keys = rigs.keys(4)
        rig.inject(fault)
        for part in _in_parts(rig, keys):
            rig.store(part)
        rig.heal()
        # Something to do, so that whatever was put off gets its turn.
        others = rigs.keys(4)
        rig.stored(others, clause="DATA-11")
        rig.expect_loads(others, clause="DATA-11")
        rig.resolve(keys, rig.new_request())
        _expect_absent_or_right(rig, keys)
        rig.close()


# -- DATA-3 ----------------------------------------------------------------------------------------


@case("DATA-3")
def test_a_load_writes_its_own_slots_only(rigs: Rigs) -> None:
    """Scattered slots, in no order, between slots that others are using."""
    rig = rigs.open(num_blocks=64)
    keys = rigs.keys(8)
    rig.stored(keys)
    size = min(4, rig.job_keys)
    # Of a row of slots every other one is in use by a store that runs at the same time.
    taken = sorted(rig.take_slots(rig.region.num_blocks))[: 2 * size]
    mine, others = taken[::2], taken[1::2]
    jobs = [
        rig.submit_load(keys[:size], slots=mine[::-1]),
        rig.submit_store(rigs.keys(size), slots=others),
    ]
    rig.wait_all(jobs)
    rig.expect_loads(keys)


@case("DATA-3")
def test_a_load_that_fails_in_part_writes_its_own_slots_only(rigs: Rigs) -> None:
    """Objects that are missing, cut off or over-long do not spill into other slots."""
    for damage in _DAMAGE:
        rig = rigs.open()
        keys = rigs.keys(min(5, rig.job_keys))
        rig.stored(keys)
        _damage(rig, keys[len(keys) // 2], damage)
        rig.load(keys)
        rig.shutdown()
        # What was written late is found as well.
        rig.close()


def _damage(rig: Rig, key: OffloadKey, how: Corruption | None) -> None:
    if how is None:
        rig.lose(key)
    else:
        rig.corrupt(key, how)


# -- DATA-4 ----------------------------------------------------------------------------------------


@case("DATA-4")
def test_a_store_does_not_write_its_slots(rigs: Rigs) -> None:
    """The slots hold what they held when the store is reported, whether it succeeds or fails."""
    rig = rigs.open(num_blocks=64)
    keys = rigs.keys(rig.job_keys)
    rig.stored(keys)
    # A second time: the tier may go another way for a block that is present.
    rig.stored(keys)
    rig.stored(rigs.keys(1))


@case("DATA-4")
def test_a_failed_store_does_not_write_its_slots(rigs: Rigs) -> None:
    """Nor does one that the storage refuses."""
    for fault in _faults(rigs):
        rig = rigs.open(faults=True, deadlines=SHORT_DEADLINES)
        rig.inject(fault)
        for part in _in_parts(rig, rigs.keys(4)):
            rig.store(part)
        rig.close()


# -- DATA-5 ----------------------------------------------------------------------------------------


@case("DATA-5")
def test_a_load_that_stalled_does_not_write_late(rigs: Rigs) -> None:
    """The storage comes back after the deadline, when the slot has a new owner."""
    rig = rigs.open(faults=True, deadlines=SHORT_DEADLINES)
    keys = rigs.keys(min(4, rig.job_keys))
    rig.stored(keys)
    rig.inject(Fault.STALL)
    job_id = rig.submit_load(keys)
    _until_given_up(rig, job_id)
    rig.heal()
    rig.wait(job_id, clause="JOB-5")
    rig.stored(rigs.keys(2), clause="DATA-11")
    # Its threads have ended then: whoever was to write has written.
    rig.shutdown()
    rig.check_memory()


@case("DATA-5")
def test_a_failed_load_is_not_made_good_later(rigs: Rigs) -> None:
    """A key that was missing is stored afterwards; the slot of the failed load stays as it is."""
    rig = rigs.open()
    keys = rigs.keys(min(4, rig.job_keys))
    rig.load(keys)
    rig.stored(keys)
    rig.resolve(keys, rig.new_request())
    rig.shutdown()
    rig.check_memory()


# -- DATA-6 ----------------------------------------------------------------------------------------


@case("DATA-6")
def test_a_load_names_only_what_it_loaded(rigs: Rigs) -> None:
    """Of several keys some are missing or damaged: the result does not name them."""
    # The first, one in the middle, the last, and all but one.
    for bad_places in ((0,), (2,), (4,), (0, 1, 3, 4)):
        rig = rigs.open()
        rig.blame_bytes = "DATA-6"
        keys = rigs.keys(5)
        rig.stored(keys)
        bad = [keys[place] for place in bad_places]
        for key, how in zip(bad, itertools.cycle((None, Corruption.TRUNCATED))):
            _damage(rig, key, how)
        for part in _in_parts(rig, keys):
            loaded = rig.load(part)
            lost = [key for key in loaded.keys if key in bad and key in bad[::2]]
            expect(
                not lost,
                f"{len(lost)} key(s) were reported as loaded although their objects are gone",
            )
        rig.close()


@case("DATA-6")
def test_a_store_names_only_what_it_stored(rigs: Rigs) -> None:
    """Some keys are present and the storage fails for others: what is named can be loaded."""
    for fault in _faults(rigs):
        rig = rigs.open(faults=True, deadlines=SHORT_DEADLINES)
        rig.blame_bytes = "DATA-6"
        present = rigs.keys(2)
        rig.stored(present)
        fresh = rigs.keys(2)
        # One of each in turn.
        keys = [key for pair in zip(fresh, present, strict=True) for key in pair]
        rig.inject(fault)
        named = [key for part in _in_parts(rig, keys) for key in _done(part, rig.store(part))]
        rig.heal()
        for part in _in_parts(rig, named):
            loaded = rig.load(part)
            expect(
                len(loaded.keys) == len(part),
                f"{len(part) - len(loaded.keys)} of {len(part)} key(s) were reported as stored "
                f"while the storage had the fault {fault.value!r}, and cannot be loaded after it: "
                f"{loaded.result.error}",
            )
        rig.close()


# -- DATA-7 ----------------------------------------------------------------------------------------


def _changed(place: int, bit: int) -> bytes:
    return _HASH[:place] + bytes([_HASH[place] ^ bit]) + _HASH[place + 1 :]


def _alike() -> dict[str, list[OffloadKey]]:
    """Return keys that a careless name takes for one another, by what is different about them."""
    group = make_offload_key
    return {
        "the group index": [
            group(_HASH, index)
            for index in (0, 1, 2, 10, 255, 256, 65_536, 1 << 24, 1 << 31, (1 << 32) - 1)
        ],
        "one bit of the hash": [
            group(_changed(place, bit), 0) for place, bit in ((0, 0x80), (0, 1), (15, 1), (31, 1))
        ],
        # As text these are upper and lower case of one letter.
        "the case of letters": [group(_HASH.lower(), 0), group(_HASH.upper(), 0)],
        "bytes after a NUL": [group(b"\0" + bytes([last]) * 31, 0) for last in (0, 1, 2)],
        "separators": [
            group(text.ljust(32, b"x"), 0)
            for text in (
                b"a/b",
                b"a_b",
                b"a\\b",
                b"a.b",
                b"a:b",
                b"a%2Fb",
                b"../b",
                b"a\nb",
                b"a b",
            )
        ],
        "what is no UTF-8": [group(byte * 32, 0) for byte in (b"\xff", b"\xfe", b"\x80")],
        "the length": [group(b"k" * length, 0) for length in (1, 2, 4, 8, 16, 31, 32, 33, 64)],
        "trailing bytes": [group(b"k" * 16 + tail, 0) for tail in (b"\0", b"\0\0", b" ", b"\n")],
        "where the hash ends and the group begins": [
            group(b"k" * 15 + b"\x11", 1),
            group(b"k" * 15, 111),
            group(b"k" * 15 + b"\0\0\0\1", 1),
        ],
    }


@case("DATA-7")
def test_keys_that_look_alike_are_distinct(rigs: Rigs) -> None:
    """Each keeps its own bytes, however little tells them apart."""
    for different, keys in _alike().items():
        rig = rigs.open(num_blocks=64)
        rig.blame_bytes = "DATA-7"
        rig.stored(keys[:1], clause="DATA-7")
        found = sum(rig.resolve(keys[1:], rig.new_request()))
        expect(
            not found,
            f"{found} key(s) were found after another was stored that differs in {different}",
        )
        rig.stored(keys[1:], clause="DATA-7")
        for part in _in_parts(rig, keys):
            loaded = rig.load(part)
            expect(
                len(loaded.keys) == len(part),
                f"{len(part) - len(loaded.keys)} of {len(part)} keys that differ in {different} "
                f"could not be loaded: {loaded.result.error}",
            )
        rig.close()


@case("DATA-7")
def test_what_becomes_of_a_block_touches_no_other_group(rigs: Rigs) -> None:
    """Of blocks with one hash, one is lost and retired, and one is deleted: the others stay."""
    rig = rigs.open()
    lost, deleted, *others = (make_offload_key(_HASH, index) for index in range(5))
    rig.stored([lost, deleted, *others])
    rig.lose(lost)
    rig.load([lost])
    if Capability.DELETE in rigs.spec.capabilities:
        rig.call("delete", [deleted])
        # Removal may follow later; it does when there is something to do.
        rig.stored(rigs.keys(1))
    expect(
        all(rig.resolve(others, rig.new_request())),
        "a block was not found after another group's block of the same hash was lost or deleted",
    )
    rig.expect_loads(others, clause="DATA-7")


# -- DATA-8 ----------------------------------------------------------------------------------------


@case("DATA-8")
def test_a_failed_store_leaves_nothing_wrong(rigs: Rigs) -> None:
    """After the fault each key is absent or right, whatever its store came to."""
    for fault in _faults(rigs):
        rig = rigs.open(num_blocks=64, faults=True, deadlines=SHORT_DEADLINES)
        rig.blame_bytes = "DATA-8"
        # One of them has an object already, which is not to be spoilt either.
        keys = rigs.keys(8)
        rig.stored(keys[:1])
        rig.inject(fault)
        for part in _in_parts(rig, keys):
            rig.store(part)
        rig.heal()
        _expect_absent_or_right(rig, keys)
        rig.stored(keys, clause="DATA-8")
        rig.expect_loads(keys)
        rig.close()


# -- DATA-9 ----------------------------------------------------------------------------------------


def _write_at_once(rig: Rig, key: OffloadKey, *, readers: bool) -> None:
    """Store a key with several jobs at once, while others load it, until every writer succeeded."""
    waiting = _WRITERS
    for _attempt in range(_ATTEMPTS):
        writers = [rig.submit_store([key]) for _ in range(waiting)]
        reading: list[JobId] = []
        while not rig.results.keys() >= set(writers):
            if readers:
                reading = [job for job in reading if job not in rig.results]
                if len(reading) < 2:
                    reading.append(rig.submit_load([key]))
            rig.wait(next(job for job in writers if job not in rig.results))
        rig.wait_all(reading)
        failed = [rig.results[job] for job in writers if not rig.results[job].success]
        for result in failed:
            # Full or throttled has nothing to do with the other writers.
            declined = result.error is not None and result.error.kind is JobErrorKind.DECLINED
            expect(
                declined,
                f"{len(failed)} of {len(writers)} simultaneous stores of one key failed: "
                f"{result.error}",
            )
        waiting = len(failed)
        if not waiting:
            return
    expect(not waiting, f"{waiting} of {_WRITERS} writers of one key were declined for ever")


@case("DATA-9")
def test_many_writers_of_one_key_all_succeed(rigs: Rigs) -> None:
    """Of several stores of one key at the same time none is in the way of another."""
    rig = rigs.open(num_blocks=64)
    rig.blame_bytes = "DATA-9"
    for key in rigs.keys(3):
        _write_at_once(rig, key, readers=False)
        rig.expect_loads([key])


@case("DATA-9")
def test_readers_never_see_a_torn_block(rigs: Rigs) -> None:
    """A key is loaded while it is stored: the load fails, or has all of the block."""
    rig = opened_with_blocks(rigs, 64 << 10, num_blocks=64)
    rig.blame_bytes = "DATA-9"
    for key in rigs.keys(6):
        _write_at_once(rig, key, readers=True)
        rig.stored([key])
        rig.expect_loads([key])


@case("DATA-9")
def test_a_store_that_is_stuck_publishes_nothing(rigs: Rigs) -> None:
    """Another instance, whose storage does not stall, finds the whole block or none."""
    if Capability.SHARED not in rigs.spec.capabilities:
        # No other instance sees what this one stores.
        return
    rig = rigs.open(faults=True, deadlines=SHORT_DEADLINES)
    reader = rigs.open(storage=rig.opening.storage, deadlines=SHORT_DEADLINES)
    reader.blame_bytes = "DATA-9"
    key = rigs.key()
    rig.inject(Fault.STALL)
    writing = rig.submit_store([key])
    # Where the stall is below both, this load is answered after it.
    reading = [reader.submit_load([key]) for _ in range(4)]
    # Long enough for the store to get stuck: its own deadline.
    _until_given_up(rig, writing)
    reader.poll()
    reading.append(reader.submit_load([key]))
    reader.poll()
    rig.heal()
    rig.wait(writing, clause="JOB-5")
    reader.wait_all(reading, clause="JOB-5")
    rig.stored([key], clause="DATA-11")
    reader.stored([key], clause="DATA-9")
    reader.expect_loads([key])


@case("DATA-9")
def test_a_block_stays_whole_while_it_is_stored_again(rigs: Rigs) -> None:
    """One instance repeats the store of a block that is there; another one loads it meanwhile."""
    if Capability.SHARED not in rigs.spec.capabilities:
        # Within one instance, the tier can keep its readers waiting.
        return
    rig = opened_with_blocks(rigs, 1 << 20, num_blocks=16)
    block_bytes = rig.opening.block_bytes
    reader = rigs.open(storage=rig.opening.storage, block_bytes=block_bytes, num_blocks=16)
    reader.blame_bytes = "DATA-9"
    keys = rigs.keys(2)
    rig.stored(keys)
    reader.until_found(keys, reader.limits.visibility_delay_s, clause="SHARE-1")
    for _ in range(_REPEATED_STORES):
        writing = [rig.submit_store([key]) for key in keys]
        error = reader.load(keys).result.error
        expect(
            error is None or error.kind not in (JobErrorKind.MISSING, JobErrorKind.DAMAGED),
            f"a block that was there could not be loaded while it was stored again: {error}",
        )
        rig.wait_all(writing, clause="JOB-5")


@case("DATA-9")
def test_writers_in_two_processes_all_succeed(rigs: Rigs) -> None:
    """Two processes store the same keys at the same time, and one of them loads meanwhile."""
    if Capability.SHARED not in rigs.spec.capabilities:
        return
    rig = rigs.open(num_blocks=64)
    rig.blame_bytes = "DATA-9"
    keys = rigs.keys(4)
    peer = rigs.peer(storage=rig.opening.storage, num_blocks=64)
    peer.opened()
    peer.begin_storing(keys * 4, at_once=4)
    for key in keys:
        _write_at_once(rig, key, readers=True)
    peer.until_reported(len(keys) * 4, clause="DATA-9")
    failed = [
        error for error in peer.failures if error is None or error.kind is not JobErrorKind.DECLINED
    ]
    expect(not failed, f"{len(failed)} store(s) failed while another process stored: {failed[:1]}")
    rig.stored(keys)
    rig.expect_loads(keys)


# -- DATA-10 ---------------------------------------------------------------------------------------


@case("DATA-10")
def test_a_bad_object_fails_its_load_and_is_retired(rigs: Rigs) -> None:
    """Missing, empty, cut off or over-long: only its key fails, is absent, and can be repaired."""
    for damage in _DAMAGE:
        what = "missing" if damage is None else damage.value
        rig = rigs.open()
        rig.blame_bytes = "DATA-10"
        keys = rigs.keys(min(4, rig.job_keys))
        bad, good = keys[len(keys) // 2], [*keys[: len(keys) // 2], *keys[len(keys) // 2 + 1 :]]
        rig.stored(keys)
        _damage(rig, bad, damage)
        loaded = rig.load(keys)
        expect(bad not in loaded.keys, f"a load of an object that is {what} was reported as loaded")
        rig.expect_loads(good)
        expect(
            not rig.finds(bad, rig.new_request()),
            f"a key was found again after its load failed because the object is {what}",
        )
        rig.stored([bad], clause="DATA-10")
        expect(
            rig.finds(bad, rig.new_request()),
            f"a key was not found although it was stored again after its object was {what}",
        )
        rig.expect_loads([bad])
        rig.close()


# -- DATA-11 ---------------------------------------------------------------------------------------


def _expect_working(rig: Rig, rigs: Rigs, known: Sequence[OffloadKey]) -> None:
    """After a fault everything works, for keys old and new."""
    fresh = rigs.keys(6)
    rig.stored([*known, *fresh], clause="DATA-11")
    rig.until_found([*known, *fresh], rig.limits.error_backoff_s, clause="DATA-11")
    rig.expect_loads([*known, *fresh])


@case("DATA-11")
def test_faults_of_the_storage_pass(rigs: Rigs) -> None:
    """Errors, a full storage, short transfers: jobs end, bytes are right, and all is well after."""
    for fault in _faults(rigs):
        rig = rigs.open(num_blocks=64, faults=True, deadlines=SHORT_DEADLINES)
        rig.blame_bytes = "DATA-11"
        known = rigs.keys(4)
        rig.stored(known)
        rig.inject(fault)
        for _round in range(3):
            # Enough of each for whatever is used up by a failure to run out.
            jobs = [rig.submit_store([key]) for key in rigs.keys(6)]
            jobs += [rig.submit_load([key]) for key in known]
            rig.wait_all(jobs, clause="DATA-11")
        # One by one: failed keys are asked for anew, so of several one may be open at all times.
        request = rig.new_request()
        for key in [*known, rigs.key()]:
            rig.resolve([key], request)
        rig.heal()
        _expect_working(rig, rigs, known)
        rig.close()


@case("DATA-11")
def test_stores_that_find_no_room_leave_none_taken(rigs: Rigs) -> None:
    """Not every one of them leaves an unfinished object behind: the storage would stay full."""
    if Fault.FULL not in rigs.harness.faults:
        return
    rig = rigs.open(num_blocks=64, faults=True)
    rig.stored(rigs.keys(2))
    before = rig.count_leftovers()
    rig.inject(Fault.FULL)
    jobs = [rig.submit_store([key]) for key in rigs.keys(_FULL_STORES)]
    rig.wait_all(jobs, clause="DATA-11")
    failed = sum(not rig.results[job_id].success for job_id in jobs)
    rig.heal()
    rig.stored(rigs.keys(2), clause="DATA-11")

    def tidy() -> bool:
        rig.step()
        return rig.count_leftovers() - before < max(1, failed)

    rig.budget.until(
        tidy,
        f"{failed} stores failed for lack of space, and each of them left an unfinished object",
        _TIDY_S,
        clause="DATA-11",
    )


@case("DATA-11")
def test_a_lack_of_descriptors_passes(rigs: Rigs) -> None:
    """No file or socket can be opened for a while: jobs end, and all is well after."""
    rig = rigs.open(num_blocks=64, deadlines=SHORT_DEADLINES)
    rig.blame_bytes = "DATA-11"
    known = rigs.keys(4)
    rig.stored(known)
    with few_descriptors(0):
        for _round in range(3):
            jobs = [rig.submit_store([key]) for key in rigs.keys(6)]
            jobs += [rig.submit_load([key]) for key in known]
            rig.wait_all(jobs, clause="DATA-11")
    _expect_working(rig, rigs, known)
