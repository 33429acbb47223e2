"""The region of the rig: what it sees, and how it tells wrong bytes apart."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from kv_conformance.rig._memory import Difference, Region, content_of
from kv_core.contract import make_offload_key

KEY = make_offload_key(b"a" * 32, 0)
OTHER = make_offload_key(b"a" * 32, 1)


@pytest.mark.parametrize("block_bytes", [513, 4096, 300_001])
def test_a_filled_slot_holds_the_bytes_of_its_key_only(block_bytes: int) -> None:
    """Contents made in pieces are those made at once, and every key has its own."""
    region = Region(2, block_bytes, block_bytes)
    region.fill(1, KEY)
    assert bytes(region.primary.block(1)) == content_of(KEY, block_bytes).tobytes()
    assert region.holds(1, KEY)
    assert region.difference(1, OTHER) is Difference.OTHER


def test_wrong_bytes_are_told_apart() -> None:
    """Poison was read late, untouched bytes were not written, the rest is somebody else's."""
    region = Region(3, 4096, 4096)
    region.poison(0)
    region.clear(1)
    region.fill(2, OTHER)
    assert [region.difference(slot, KEY) for slot in range(3)] == [
        Difference.POISON,
        Difference.UNTOUCHED,
        Difference.OTHER,
    ]


def test_a_load_that_ends_early_leaves_untouched_bytes() -> None:
    """Also when the first bytes are right."""
    region = Region(1, 4096, 4096)
    region.clear(0)
    region.primary.block(0)[:4000] = content_of(KEY, 4000).tobytes()
    assert region.difference(0, KEY) is Difference.UNTOUCHED


@pytest.mark.parametrize("num_blocks", [4, 600])
def test_changes_outside_of_the_slots_are_seen_once(num_blocks: int) -> None:
    """In regions with a shadow and in those that are too large for one."""
    region = Region(num_blocks, 4096, 5000)
    assert region.small is (num_blocks == 4)
    region.primary.view.cast("B")[4096] = 0
    assert region.unexpected_changes() == [("padding", 0)]
    assert region.unexpected_changes() == []


def test_a_slot_that_a_load_is_filling_may_change() -> None:
    """From its begin to its end, and no longer."""
    region = Region(4, 4096, 4096)
    region.begin_load([2])
    region.primary.block(2)[0] = 1
    assert region.unexpected_changes() == []
    region.end_load([2])
    region.primary.block(2)[0] = 2
    assert region.unexpected_changes() == [("slot", 2)]


def test_a_view_that_is_held_is_in_the_way_of_unmapping() -> None:
    """And one in a dead cycle is not."""
    region = Region(1, 4096, 4096)
    held = np.frombuffer(region.primary.block(0), dtype=np.uint8)
    assert region.unmap() is not None
    gc.disable()
    try:
        cycle: list[object] = [held]
        cycle.append(cycle)
        del held, cycle
        assert region.unmap() is None
    finally:
        gc.enable()
    assert region.unexpected_changes() == []


def test_a_huge_region_takes_no_memory_for_slots_that_nobody_uses() -> None:
    """Its guards are watched, its last slot lies beyond 2 GiB, and its rows stay as mapped."""
    region = Region(2056, 4096, 1 << 20)
    region.fill(2055, KEY)
    assert region.holds(2055, KEY)
    assert bytes(region.primary.block(2054)) == bytes(4096)
    assert region.unexpected_changes() == []
    np.frombuffer(region._memory, dtype=np.uint8)[-1] = 0
    assert region.unexpected_changes() == [("guard", -1)]
    assert region.unmap() is None


def test_a_key_of_zeros_has_no_other_bytes() -> None:
    """Its slot is all zero, and what was not written is told apart from that."""
    region = Region(2, 4096, 4096)
    region.zeros.add(KEY)
    region.fill(0, KEY)
    region.clear(1)
    assert bytes(region.primary.block(0)) == bytes(4096)
    assert region.holds(0, KEY)
    assert region.difference(1, KEY) is Difference.UNTOUCHED
