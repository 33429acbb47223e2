"""INT: bytes that change in the storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_conformance.harness import Corruption
from kv_conformance.rig import expect
from kv_conformance.run._case import case

if TYPE_CHECKING:
    from kv_conformance.rig import Rigs


@case("INT-1")
def test_a_flipped_bit_is_a_failed_load(rigs: Rigs) -> None:
    """Of that block alone; the failure is counted at once."""
    rig = rigs.open()
    rig.blame_bytes = "INT-1"
    good, bad = rigs.keys(2), rigs.key()
    rig.stored([*good, bad])
    rig.corrupt(bad, Corruption.FLIPPED)
    before = rig.stats().get("load_failures", 0)
    loaded = rig.load([bad])
    expect(not loaded.keys, "a block with a flipped bit was reported as loaded")
    failed = rig.stats().get("load_failures", 0) - before
    expect(failed == 1, f"load_failures moved by {failed:g} for one damaged block, expected 1")
    rig.expect_loads(good)


@case("INT-1")
def test_a_damaged_block_is_retired_and_can_be_replaced(rigs: Rigs) -> None:
    """It is not found again, neither now nor by a later request, until it is stored anew."""
    rig = rigs.open()
    rig.blame_bytes = "INT-1"
    key = rigs.key()
    rig.stored([key])
    rig.corrupt(key, Corruption.FLIPPED)
    rig.load([key])
    expect(not rig.finds(key), "a block that turned out damaged is still found")
    expect(not rig.finds(key, rig.new_request()), "a new request finds a damaged block")
    rig.stored([key], clause="INT-1")
    expect(rig.finds(key), "a damaged block that was stored anew is not found")
    rig.expect_loads([key])


@case("INT-1")
def test_a_store_does_not_rely_on_a_damaged_object(rigs: Rigs) -> None:
    """A store over an object that nobody knows to be damaged leaves a good one."""
    rig = rigs.open()
    rig.blame_bytes = "INT-1"
    key = rigs.key()
    rig.stored([key])
    rig.corrupt(key, Corruption.FLIPPED)
    rig.stored([key], clause="INT-1")
    loaded = rig.load([key])
    if not loaded.keys:
        # The damage may have gone unnoticed until now, but not any longer.
        rig.stored([key], clause="INT-1")
        rig.expect_loads([key])
