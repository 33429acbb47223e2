"""CAP and TOUCH: a capacity, and what goes when it is reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_conformance.harness import Fault, HarnessError
from kv_conformance.rig import Broken, expect
from kv_conformance.run._case import case
from kv_core.contract import Capability

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import OffloadKey

_CAPACITY: Final = 12
# A tier may round the capacity it is asked for; not to anything.
_MOST_CAPACITY: Final = 512
_COME_AND_GO: Final = 1000
_AT_A_TIME: Final = 16
# A count may follow a little after a report.
_SOON_S: Final = 1.0


def _open(rigs: Rigs, *, storage: str | None = None, faults: bool = False) -> Rig:
    return rigs.open(
        storage=storage,
        capacity_blocks=_CAPACITY,
        retention_blocks=1,
        faults=faults,
        num_blocks=64,
    )


def _capacity(rig: Rig) -> int:
    """Return how many blocks the tier may hold, by its own word where it gives one."""
    capacity = 2 * _CAPACITY
    if Capability.USAGE in rig.subject_type.spec.capabilities:
        usage = rig.call("usage")
        limits = [usage.capacity_blocks]
        if usage.capacity_bytes is not None:
            limits.append(usage.capacity_bytes // rig.opening.block_bytes)
        capacity = min((limit for limit in limits if limit is not None), default=capacity)
    if not _CAPACITY // 2 <= capacity <= _MOST_CAPACITY:
        raise HarnessError(
            f"capacity_blocks={_CAPACITY} of {rig.opening.block_bytes} bytes was asked for, and "
            f"the tier opens with room for {capacity}: its settings do not follow "
            "Opening.capacity_blocks, and its capacity cannot be tested"
        )
    return capacity


class _Watch:
    """Counts what is there at one moment, whatever comes and goes meanwhile."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._capacity = _capacity(rig)

    def look(self) -> None:
        """Count once.

        Raises:
            Broken: There is more than the tier may hold.
        """
        # A listing takes time. What is in both of two was there between them.
        if len(self._rig.list_keys()) > self._capacity:
            both = self._rig.list_keys() & self._rig.list_keys()
            expect(
                len(both) <= self._capacity,
                f"the storage holds {len(both)} blocks, and the capacity is {self._capacity}",
            )


def _store_concurrently(
    rig: Rig, keys: Sequence[OffloadKey], look: Callable[[], None] | None = None
) -> None:
    """Store keys, one a job, several jobs at a time, whatever becomes of them."""
    waiting = list(keys)

    def some_ended() -> bool:
        before = len(rig.jobs_in_flight)
        rig.step()
        if look is not None:
            look()
        return not rig.jobs_in_flight or len(rig.jobs_in_flight) < before

    while waiting or rig.jobs_in_flight:
        while waiting and len(rig.jobs_in_flight) < _AT_A_TIME:
            rig.submit_store([waiting.pop()])
        # One wait for each that ends: a long one would look less and less often.
        rig.budget.until(some_ended, "concurrent stores did not end", rig.limits.job_deadline_s)


@case("CAP-1")
def test_the_capacity_holds_under_concurrent_stores(rigs: Rigs) -> None:
    """At every moment, and the last block is there in the end."""
    rig = _open(rigs)
    watch = _Watch(rig)
    _store_concurrently(rig, rigs.keys(8 * _capacity(rig)), watch.look)
    watch.look()
    key = rigs.key()
    rig.stored([key])
    expect(rig.finds(key), "the last block that was stored in a full tier was not found")
    watch.look()


def _fill(rigs: Rigs, rig: Rig) -> list[OffloadKey]:
    """Store as many blocks as there is room for, one after the other."""
    keys = rigs.keys(_capacity(rig))
    for key in keys:
        rig.stored([key])
    return keys


def _expect_order(rigs: Rigs, rig: Rig, used: Sequence[OffloadKey], how: str) -> None:
    """Store more until unused blocks have gone: the used ones must be the last to go."""
    everything = rig.list_keys()
    unused = everything - set(used)
    for _ in range(2 * _capacity(rig)):
        rig.stored(rigs.keys(1))
        here = rig.list_keys()
        gone = set(used) - here
        if gone & everything and unused & here:
            raise Broken(
                f"a block that was {how} has gone, while {len(unused & here)} that nobody had used "
                "since before are still there",
            )
        if not unused & here:
            return


@case("CAP-2")
def test_the_least_recently_used_goes_first(rigs: Rigs) -> None:
    """A load is a use, and a later store of the same key is one."""
    rig = _open(rigs)
    keys = _fill(rigs, rig)
    here = [key for key in keys if key in rig.list_keys()]
    loaded = here[: len(here) // 4]
    again = here[len(here) // 4 : len(here) // 2]
    rig.expect_loads(loaded, clause="CAP-2")
    rig.stored(again)
    _expect_order(rigs, rig, [*loaded, *again], "loaded or stored again")


@case("CAP-2")
def test_the_oldest_goes_first(rigs: Rigs) -> None:
    """Without any use, in the order in which they came."""
    rig = _open(rigs)
    keys = _fill(rigs, rig)
    newer = [key for key in keys[len(keys) // 2 :] if key in rig.list_keys()]
    _expect_order(rigs, rig, newer, "stored later than others")


@case("CAP-2")
def test_a_block_that_comes_back_is_as_good_as_new(rigs: Rigs) -> None:
    """What was evicted and is stored again does not go before what was there all the time."""
    rig = _open(rigs)
    keys = _fill(rigs, rig)
    for _ in range(2 * _capacity(rig)):
        if keys[0] not in rig.list_keys():
            break
        rig.stored(rigs.keys(1))
    back = [key for key in keys[:2] if key not in rig.list_keys()]
    rig.stored(back)
    _expect_order(rigs, rig, back, "evicted and stored again")


@case("CAP-2")
def test_blocks_in_use_are_never_evicted(rigs: Rigs) -> None:
    """Blocks that are loaded over and over stay, while others come and go."""
    rig = _open(rigs)
    rig.blame_bytes = "CAP-2"
    _fill(rigs, rig)
    hot = rigs.keys(2)
    rig.stored(hot)
    # Between two loads of it, too few others come for a hot block to be the oldest.
    others = max(1, min(_CAPACITY, _capacity(rig)) // 4)
    for _ in range(6):
        load = [rig.submit_load([key]) for key in hot]
        stores = [rig.submit_store([key]) for key in rigs.keys(others)]
        rig.wait_all([*load, *stores])
        for job_id in load:
            expect(
                rig.results[job_id].success,
                f"a block in constant use was not loaded: {rig.results[job_id].error}",
            )


@case("CAP-3")
def test_what_is_there_counts_after_a_restart(rigs: Rigs) -> None:
    """A full storage is full when it is opened again, and stays within its capacity."""
    rig = _open(rigs)
    _fill(rigs, rig)
    rig.close()
    rig = _open(rigs, storage=rig.opening.storage)
    watch = _Watch(rig)
    watch.look()
    if Capability.USAGE in rig.subject_type.spec.capabilities:
        there, blocks = len(rig.list_keys()), rig.call("usage").blocks
        expect(
            blocks == there,
            f"{there} blocks were there at the opening, and usage counts {blocks}",
        )
    _store_concurrently(rig, rigs.keys(_capacity(rig)), watch.look)
    watch.look()


def _expect_room(rigs: Rigs, rig: Rig, what: str) -> None:
    """Expect that the account is right, and that there is room for what comes next."""
    spec = rig.subject_type.spec
    if Capability.USAGE in spec.capabilities:
        rig.budget.until(
            lambda: rig.call("usage").blocks == len(rig.list_keys()),
            f"{what}, usage did not equal the listing",
            min(_SOON_S, rig.limits.job_deadline_s),
            grace_s=2.0,
        )
    key = rigs.key()
    rig.stored([key], clause="CAP-4")
    expect(rig.finds(key), f"{what}, a new block was stored and not found")
    _Watch(rig).look()


@case("CAP-4", limit_s=120)
def test_a_thousand_blocks_come_and_go(rigs: Rigs) -> None:
    """Evicted by those that follow; the last of them deleted, where the tier can."""
    rig = _open(rigs)
    _store_concurrently(rig, rigs.keys(_COME_AND_GO))
    _expect_room(rigs, rig, f"after {_COME_AND_GO} stores")
    if Capability.DELETE not in rig.subject_type.spec.capabilities:
        return
    rig.call("delete", sorted(rig.list_keys()))
    rig.budget.until(
        lambda: not rig.list_keys(),
        "deleted blocks were not removed",
        rig.limits.job_deadline_s,
        clause="DEL-1",
    )
    _expect_room(rigs, rig, "after everything was deleted")


@case("CAP-4")
def test_stores_that_fail_take_no_room(rigs: Rigs) -> None:
    """More than the capacity fail; afterwards there is as much room as before."""
    rig = _open(rigs, faults=True)
    rig.inject(Fault.ERROR)
    _store_concurrently(rig, rigs.keys(2 * _capacity(rig)))
    rig.heal()
    _expect_room(rigs, rig, "after an outage")
    keys = rigs.keys(_CAPACITY // 2)
    rig.stored(keys, clause="CAP-4")
    found = rig.resolve(keys).count(True)
    expect(
        found == len(keys),
        f"after an outage, {found} of {len(keys)} blocks found room, with a capacity of "
        f"{_capacity(rig)}",
    )


@case("CAP-4")
def test_blocks_that_are_retired_give_their_room_back(rigs: Rigs) -> None:
    """Lost blocks are no longer counted once the tier has noticed."""
    rig = _open(rigs)
    for _ in range(3):
        keys = rigs.keys(_CAPACITY // 2)
        rig.stored(keys)
        here = [key for key in keys if key in rig.list_keys()]
        for key in here:
            rig.lose(key)
            rig.load([key])
    _expect_room(rigs, rig, "after blocks were lost")


@case("TOUCH-1")
def test_touched_blocks_outlive_untouched_ones(rigs: Rigs) -> None:
    """The oldest blocks are touched, on behalf of another request than stored them."""
    rig = _open(rigs)
    keys = _fill(rigs, rig)
    touched = [key for key in keys[: len(keys) // 2] if key in rig.list_keys()]
    rig.call("touch", touched, rig.new_request())
    _expect_order(rigs, rig, touched, "touched")


@case("TOUCH-1")
def test_touching_makes_no_block_appear(rigs: Rigs) -> None:
    """Unknown keys are ignored, in any number, and do not make the known ones go."""
    rig = _open(rigs)
    known, unknown = rigs.keys(2), rigs.keys(8 * _CAPACITY)
    rig.stored(known)
    rig.call("touch", unknown, rig.request)
    rig.call("touch", [], rig.request)
    rig.step()
    expect(not any(rig.resolve(unknown)), "a key that was only touched was found")
    expect(all(rig.resolve(known)), "a stored key was not found after others were touched")
