"""DEL and USE: removing blocks, and counting them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_conformance.harness import Deadlines, Fault
from kv_conformance.rig import expect
from kv_conformance.run._case import case
from kv_core.contract import Capability, TierUsage

if TYPE_CHECKING:
    from kv_conformance.rig import Rig, Rigs

# A count may follow a little after a report, as may the removal of a deleted object.
_SOON_S: Final = 1.0
# A deadline that is long for stores, and not too long to wait for a removal in vain.
_FREED_S: Final = 5.0


@case("DEL-1")
def test_deleted_keys_are_absent_at_once(rigs: Rigs) -> None:
    """For the request that has seen them and for a new one; others stay."""
    rig = rigs.open()
    kept, deleted = rigs.keys(3), rigs.keys(3)
    rig.stored([*kept, *deleted])
    rig.resolve([*kept, *deleted])
    rig.call("delete", deleted)
    answers = rig.ask_many(deleted)
    expect(True not in answers, "a key was found right after it was deleted")
    expect(not any(rig.resolve(deleted)), "a deleted key was found")
    expect(not any(rig.resolve(deleted, rig.new_request())), "a new request found a deleted key")
    expect(all(rig.resolve(kept)), "a key was not found after others were deleted")
    rig.expect_loads(kept)


@case("DEL-1")
def test_the_space_of_deleted_keys_is_freed(rigs: Rigs) -> None:
    """Their objects go, and stay gone for whoever opens the storage next."""
    rig = rigs.open(deadlines=Deadlines(job_s=_FREED_S))
    kept, deleted = rigs.keys(2), rigs.keys(4)
    rig.stored([*kept, *deleted])
    rig.call("delete", deleted)

    def freed() -> bool:
        rig.step()
        return not rig.list_keys() & set(deleted)

    rig.budget.until(freed, "deleted objects were not removed", rig.limits.job_deadline_s)
    rig.close()
    rig = rigs.open(storage=rig.opening.storage)
    expect(not any(rig.resolve(deleted)), "a deleted key was found after a second opening")


@case("DEL-1")
def test_deleted_keys_can_be_stored_again(rigs: Rigs) -> None:
    """At once, and they stay: the removal of the old object must not take the new one."""
    rig = rigs.open()
    keys = rigs.keys(4)
    for _ in range(3):
        rig.stored(keys, clause="DEL-1")
        expect(all(rig.resolve(keys)), "a key was not found that was stored after its deletion")
        rig.expect_loads(keys, clause="DEL-1")
        rig.call("delete", keys)
    rig.stored(keys, clause="DEL-1")
    rig.stored(rigs.keys(4))
    expect(all(rig.resolve(keys, rig.new_request())), "a key that was stored again did not stay")
    rig.expect_loads(keys, clause="DEL-1")


@case("DEL-1")
def test_deleting_what_is_not_there_is_fine(rigs: Rigs) -> None:
    """Unknown keys, keys that are gone already, and none at all."""
    rig = rigs.open()
    kept, gone = rigs.key(), rigs.key()
    rig.stored([kept, gone])
    rig.call("delete", [])
    rig.call("delete", rigs.keys(2))
    rig.call("delete", [gone])
    rig.call("delete", [gone])
    expect(rig.finds(kept), "a key was not found after unknown ones were deleted")
    expect(not rig.finds(gone), "a key that was deleted twice was found")


def _usage(rig: Rig) -> TierUsage:
    usage = rig.call("usage")
    if not isinstance(usage, TierUsage):
        rig.findings.fail("USE-1", f"usage returned {usage!r}, no TierUsage")
    return usage


def _expect_equal(rig: Rig, when: str) -> None:
    """Expect that usage soon equals the listing."""

    def equal() -> bool:
        rig.step()
        return _usage(rig).blocks == len(rig.list_keys())

    rig.budget.until(
        equal,
        f"{when}, usage counted {_usage(rig).blocks} blocks and {len(rig.list_keys())} were there; "
        "they did not become equal",
        min(_SOON_S, rig.limits.job_deadline_s),
        grace_s=2.0,
    )
    usage = _usage(rig)
    least = usage.blocks * rig.opening.block_bytes
    expect(
        usage.bytes >= least if usage.blocks else usage.bytes == 0,
        f"{when}, usage counts {usage.bytes} bytes for {usage.blocks} blocks of "
        f"{rig.opening.block_bytes} bytes",
    )
    for count, capacity in (
        (usage.blocks, usage.capacity_blocks),
        (usage.bytes, usage.capacity_bytes),
    ):
        expect(
            capacity is None or count <= capacity,
            f"{when}, usage counts {count}, with a capacity of {capacity}",
        )


@case("USE-1")
def test_usage_equals_the_listing(rigs: Rigs) -> None:
    """From the empty storage on, and when blocks are stored twice, lost and found to be lost."""
    rig = rigs.open()
    _expect_equal(rig, "after the opening")
    keys = rigs.keys(6)
    rig.stored(keys)
    _expect_equal(rig, "after stores")
    rig.stored(keys)
    _expect_equal(rig, "after stores of what was there")
    rig.lose(keys[0])
    rig.load([keys[0]])
    _expect_equal(rig, "after a lost block was noticed")
    rig.stored([keys[0]])
    if Capability.DELETE in rig.subject_type.spec.capabilities:
        rig.call("delete", keys[:2])
        _expect_equal(rig, "after deletions")
        rig.call("delete", keys)
        _expect_equal(rig, "after everything was deleted")
    rig.stored(keys)
    rig.close()
    rig = rigs.open(storage=rig.opening.storage)
    _expect_equal(rig, "after a second opening")


@case("USE-1")
def test_usage_equals_the_listing_after_an_outage(rigs: Rigs) -> None:
    """Stores of old and of new blocks have failed, and taken nothing and added nothing."""
    rig = rigs.open(faults=True)
    old = rigs.keys(4)
    rig.stored(old)
    rig.inject(Fault.ERROR)
    for key in [*old, *rigs.keys(2)]:
        rig.store([key])
    rig.heal()
    _expect_equal(rig, "after stores of old and of new blocks in an outage")


@case("USE-1")
def test_usage_tells_the_capacity(rigs: Rigs) -> None:
    """Where there is one; usage never exceeds it, however much is stored."""
    rig = rigs.open(capacity_blocks=12, retention_blocks=1)
    usage = _usage(rig)
    if Capability.BOUNDED in rig.subject_type.spec.capabilities:
        expect(
            usage.capacity_blocks is not None or usage.capacity_bytes is not None,
            "the tier is BOUNDED, and usage tells no capacity",
        )
    rig.stored(rigs.keys(30))
    _expect_equal(rig, "after more stores than a small capacity has room for")
