"""ZC: the primary tier is used in place."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kv_conformance.harness import SHORT_DEADLINES, Fault
from kv_conformance.rig import Broken, expect
from kv_conformance.rig._resident import SLACK_BYTES, MemoryWatch, memory_now, tracing
from kv_conformance.run._case import case
from kv_conformance.suite._sizes import blocks_for, opened_with_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kv_conformance.rig import Rig, Rigs
    from kv_conformance.rig._resident import MemoryUse
    from kv_core.contract import OffloadKey

# Larger than the slack: the copy of one block is seen. Of tiers that take only smaller ones, the
# copy of all is.
_LARGE_BLOCK_BYTES: Final = 16 << 20
_LARGE_BYTES: Final = 256 << 20
_JOB_BLOCK_BYTES: Final = 4 << 20
_JOB_BYTES: Final = 64 << 20
_ROUNDS: Final = 6

# The last rows begin beyond 2 GiB, where an offset needs more than 31 bits.
_FAR_STRIDE: Final = 1 << 20
_FAR_BLOCKS: Final = 2056
_FAR_SLOTS: Final = (2055, 0, 2048, 7, 2047)

# (block_bytes, row_stride): padded rows, and sizes that no alignment fits.
_ODD_ROWS: Final = ((4096, 4608), (5000, 8192), (4097, 4097), (513, 640))


def _submit_all(
    rig: Rig, keys: Sequence[OffloadKey], slots: Sequence[int], *, load: bool
) -> list[OffloadKey]:
    """Submit everything at once, in the largest jobs that the tier takes, and wait.

    Returns:
        The keys that were not moved.
    """
    step = rig.limits.max_job_keys or len(keys)
    jobs = {}
    for start in range(0, len(keys), step):
        part, places = keys[start : start + step], slots[start : start + step]
        if load:
            jobs[rig.submit_load(part, slots=places)] = part
        else:
            jobs[rig.submit_store(part, slots=places, fill=False)] = part
    rig.wait_all(jobs)
    results = rig.results
    return [
        key
        for job, part in jobs.items()
        if not results[job].success
        for key in part
        if key not in results[job].successful_keys
    ]


def _expect_within(rig: Rig, extra_bytes: int, what: str) -> None:
    if rig.region.num_blocks * rig.region.block_bytes <= SLACK_BYTES:
        # Blocks so small that a copy of all of them is free, and the rig takes more than that.
        return
    staging_bytes = rig.limits.staging_bytes
    expect(
        extra_bytes <= staging_bytes + SLACK_BYTES,
        f"{what} took {extra_bytes / 2**20:.1f} MiB of memory on top of the region, of which "
        f"{rig.region.num_blocks * rig.region.block_bytes / 2**20:.0f} MiB are blocks; declared "
        f"is staging_bytes={staging_bytes}, and {SLACK_BYTES / 2**20:.0f} MiB are free. Move the "
        "blocks in place, or declare what is needed",
    )


# -- ZC-1 ----------------------------------------------------------------------------------------


@case("ZC-1")
def test_opening_copies_nothing(rigs: Rigs) -> None:
    """A larger region does not make the tier itself larger."""
    most = blocks_for(rigs, _LARGE_BYTES, _LARGE_BLOCK_BYTES)

    def opened(num_blocks: int) -> tuple[Rig, int]:
        gc.collect()
        before = memory_now()
        rig = opened_with_blocks(
            rigs, _LARGE_BLOCK_BYTES, num_blocks=num_blocks, retention_blocks=most
        )
        after = memory_now()
        own_bytes = after.resident - before.resident - rig.region.mapped_bytes
        return rig, max(own_bytes, after.traced - before.traced)

    with tracing():
        # What the tier keeps for itself, a pool of connections or of memory, is in both.
        small, small_bytes = opened(1)
        small.close()
        large, large_bytes = opened(most)
        _expect_within(large, large_bytes - small_bytes, "opening a tier over a larger region")


@case("ZC-1")
def test_stores_and_loads_copy_nothing(rigs: Rigs) -> None:
    """Stores and loads of 256 MiB at once stay within the memory that is declared."""
    most = blocks_for(rigs, _LARGE_BYTES, _LARGE_BLOCK_BYTES)
    rig = opened_with_blocks(rigs, _LARGE_BLOCK_BYTES, num_blocks=most, retention_blocks=most)
    keys = rigs.keys(most)
    # Bytes are checked as well; who gets only blocks of this size wrong breaks another promise.
    rig.blame_bytes = "GEO-1"
    with tracing():
        slots = rig.take_slots(most)
        for slot, key in zip(slots, keys, strict=True):
            rig.region.fill(slot, key)
        with MemoryWatch() as watch:
            missing = _submit_all(rig, keys, slots, load=False)
        _expect_within(rig, watch.extra_bytes, "a store")
        # A store may fail; what is measured next needs every block.
        if missing:
            rig.stored(missing)
        slots = rig.take_slots(most)[::-1]
        with MemoryWatch() as watch:
            _submit_all(rig, keys, slots, load=True)
        _expect_within(rig, watch.extra_bytes, "a load")


# -- ZC-2 ----------------------------------------------------------------------------------------


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no other thread of Python run unless this one waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5.0)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@case("ZC-2")
def test_submit_sets_no_bytes_aside(rigs: Rigs) -> None:
    """When a store has been submitted, memory holds no copy of its blocks but the stored ones."""
    most = blocks_for(rigs, _JOB_BYTES, _JOB_BLOCK_BYTES)
    rig = opened_with_blocks(rigs, _JOB_BLOCK_BYTES, num_blocks=most)
    keys = rigs.keys(most)
    slots = rig.take_slots(most)
    for slot, key in zip(slots, keys, strict=True):
        rig.region.fill(slot, key)
    with tracing():
        gc.collect()
        before = memory_now()
        with _undisturbed():
            step = rig.limits.max_job_keys or most
            jobs = [
                rig.submit_store(
                    keys[start : start + step], slots=slots[start : start + step], fill=False
                )
                for start in range(0, most, step)
            ]
            submitted = memory_now()
        rig.wait_all(jobs)
        after: MemoryUse = memory_now()
        # Stored at once, in memory: those are the blocks themselves, and there is no copy.
        _expect_within(rig, submitted.beyond(before, after), "the submit of a store")


@case("ZC-2")
def test_what_was_written_before_submit_is_stored(rigs: Rigs) -> None:
    """The same slots are stored from again and again, each time with other bytes."""
    rig = rigs.open(num_blocks=4)
    rig.blame_bytes = "ZC-2"
    for _round in range(_ROUNDS):
        # Each goes through all four slots, so that a slot is stored from twice before it is
        # loaded into.
        first, second = rigs.keys(4), rigs.keys(4)
        rig.stored(first)
        rig.stored(second)
        rig.expect_loads(first)
        rig.expect_loads(second)


# -- ZC-3 ----------------------------------------------------------------------------------------


def _expect_unmapped(rig: Rig) -> None:
    unfinished = rig.shutdown()
    if unfinished:
        raise Broken(f"shutdown left {len(unfinished)} job(s) unfinished", "LIFE-3")
    problem = rig.region.unmap()
    expect(problem is None, f"the region cannot be unmapped after the shutdown: {problem}")


@case("ZC-3")
def test_a_used_region_can_be_unmapped(rigs: Rigs) -> None:
    """Stores, loads and lookups leave no export of the view behind."""
    rig = rigs.open()
    keys = rigs.keys(6)
    rig.stored(keys)
    rig.resolve([*keys, rigs.key()])
    rig.expect_loads(keys)
    _expect_unmapped(rig)


@case("ZC-3")
def test_a_region_can_be_unmapped_after_failures(rigs: Rigs) -> None:
    """Nor do jobs that failed, and jobs that the shutdown broke off."""
    rig = rigs.open(num_blocks=64, faults=True, deadlines=SHORT_DEADLINES)
    keys = rigs.keys(4)
    rig.stored(keys)
    rig.load(rigs.keys(2))
    rig.inject(Fault.ERROR)
    rig.store(rigs.keys(2))
    rig.load(keys[:2])
    rig.heal()
    rig.inject(Fault.STALL)
    for start in range(0, 4, rig.job_keys):
        rig.submit_load(keys[start : start + rig.job_keys])
    for key in rigs.keys(24):
        rig.submit_store([key])
    rig.heal()
    _expect_unmapped(rig)


# -- ZC-4 ----------------------------------------------------------------------------------------


@case("ZC-4")
def test_padded_rows_and_odd_sizes_are_honoured(rigs: Rigs) -> None:
    """Bytes are right, and padding and guards stay as they are, for rows of any shape."""
    for block_bytes, row_stride in _ODD_ROWS:
        rig = opened_with_blocks(rigs, block_bytes, row_stride=row_stride)
        rig.blame_bytes = "ZC-4"
        keys = rigs.keys(rig.job_keys)
        rig.stored(keys, clause="ZC-4")
        rig.expect_loads(keys)
        rig.close()


@case("ZC-4")
def test_blocks_beyond_two_gibibytes_are_moved(rigs: Rigs) -> None:
    """In a region of usual size; of this one, only the few slots that are used take memory."""
    rig = opened_with_blocks(rigs, 4096, num_blocks=_FAR_BLOCKS, row_stride=_FAR_STRIDE)
    rig.blame_bytes = "ZC-4"
    rig.take_slots(_FAR_BLOCKS)
    keys = rigs.keys(len(_FAR_SLOTS))
    stores = [
        rig.submit_store([key], slots=[slot]) for key, slot in zip(keys, _FAR_SLOTS, strict=True)
    ]
    rig.wait_all(stores)
    loads = [
        rig.submit_load([key], slots=[slot])
        for key, slot, store in zip(keys, _FAR_SLOTS[::-1], stores, strict=True)
        # A store may fail.
        if rig.results[store].success
    ]
    rig.wait_all(loads)
    failed = [rig.results[job_id].error for job_id in loads if not rig.results[job_id].success]
    expect(not failed, f"{len(failed)} of {len(loads)} stored blocks were not loaded: {failed[:1]}")
