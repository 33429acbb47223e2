"""The policy that adapts to its own mistakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.cpu.policies import ARCCachePolicy

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey


class Lab:
    """A policy whose slots the test states by hand; slots are numbered as they are inserted."""

    def __init__(self, num_blocks: int) -> None:
        self.ref_counts = [0] * num_blocks
        self.policy = ARCCachePolicy(num_blocks, self.ref_counts)
        self._free = list(range(num_blocks))

    def insert(self, keys: list[OffloadKey]) -> None:
        """Insert keys that are ready at once."""
        for key in keys:
            self.policy.insert(key, self._free.pop(0))

    def insert_into_t2(self, keys: list[OffloadKey]) -> None:
        """Insert keys and use each again, coldest first."""
        self.insert(keys)
        for key in keys:
            self.policy.touch([key])

    def evict(self, count: int, protected: tuple[OffloadKey, ...] = ()) -> list[OffloadKey] | None:
        """Evict and free the slots."""
        victims = self.policy.evict(count, protected)
        if victims is None:
            return None
        self._free += [block_id for _, block_id in victims]
        return [key for key, _ in victims]


def test_a_second_use_protects_from_scans(keys: list[OffloadKey]) -> None:
    """Keys used again are in T2; with a target of 0 all of T1 goes before any of them."""
    lab = Lab(4)
    lab.insert_into_t2(keys[:2])
    lab.insert(keys[2:4])
    assert lab.evict(3) == [keys[2], keys[3], keys[0]]


def test_a_use_of_a_block_being_written_is_no_second_use(keys: list[OffloadKey]) -> None:
    """Touching a T1 block that is not ready moves it in T1 and does not promote it."""
    lab = Lab(3)
    lab.insert(keys[:3])
    lab.ref_counts[0] = -1
    lab.policy.touch([keys[0]])
    lab.ref_counts[0] = 0
    assert lab.evict(3) == [keys[1], keys[2], keys[0]]


def test_the_target_starts_at_zero() -> None:
    """Before any ghost is hit, T1 is meant to be empty."""
    assert ARCCachePolicy(8, [0] * 8).target_t1_size == 0


def test_a_b1_hit_raises_the_target_by_the_ratio_of_the_ghosts(keys: list[OffloadKey]) -> None:
    """|B1| = 2, |B2| = 6, hit in B1: +3."""
    lab = Lab(10)
    lab.insert_into_t2(keys[:6])
    assert lab.evict(6) == keys[:6]
    lab.insert(keys[6:8])
    assert lab.evict(2) == keys[6:8]
    lab.policy.touch([keys[6]])
    assert lab.policy.target_t1_size == 3


def test_a_b1_hit_raises_the_target_by_at_least_one(keys: list[OffloadKey]) -> None:
    """With a small B2 the step is 1."""
    lab = Lab(10)
    lab.insert(keys[:4])
    lab.evict(4)
    lab.policy.touch([keys[0]])
    assert lab.policy.target_t1_size == 1


def test_a_b2_hit_lowers_the_target_by_the_ratio_of_the_ghosts(keys: list[OffloadKey]) -> None:
    """|B1| = 6, |B2| = 2, hit in B2: -3."""
    lab = Lab(10)
    lab.insert(keys[:6])
    lab.evict(6)
    for key in keys[:5]:
        lab.policy.touch([key])
    lab.insert_into_t2(keys[10:12])
    lab.evict(2)
    assert lab.policy.target_t1_size == 5
    lab.policy.touch([keys[10]])
    assert lab.policy.target_t1_size == 2


@pytest.mark.parametrize("hits", [3, 50])
def test_the_target_never_exceeds_the_capacity(keys: list[OffloadKey], hits: int) -> None:
    """The target is clamped to the number of slots."""
    lab = Lab(3)
    lab.insert(keys[:3])
    lab.evict(3)
    for _ in range(hits):
        lab.policy.touch([keys[0]])
    assert lab.policy.target_t1_size == 3


def test_the_target_never_falls_below_zero(keys: list[OffloadKey]) -> None:
    """The target is clamped at 0."""
    lab = Lab(3)
    lab.insert_into_t2(keys[:3])
    lab.evict(3)
    lab.policy.touch([keys[0]])
    assert lab.policy.target_t1_size == 0


def test_the_target_is_compared_as_an_integer(keys: list[OffloadKey]) -> None:
    """A target of 1.5 lets T1 shrink to one block only, like a target of 1."""
    lab = Lab(8)
    lab.insert_into_t2(keys[:1])
    lab.insert(keys[1:3])
    lab.policy.target_t1_size = 2.5
    assert lab.evict(2) == [keys[1], keys[0]]


def test_t1_gives_while_its_virtual_size_reaches_the_target(keys: list[OffloadKey]) -> None:
    """Each victim shrinks the size that the next choice looks at."""
    lab = Lab(8)
    lab.insert_into_t2(keys[:4])
    lab.insert(keys[4:8])
    lab.policy.target_t1_size = 3
    assert lab.evict(4) == [keys[4], keys[5], keys[0], keys[1]]


def test_t2_stands_in_for_a_t1_without_candidates(keys: list[OffloadKey]) -> None:
    """A T1 that is all pinned does not stop an eviction."""
    lab = Lab(4)
    lab.insert_into_t2(keys[:2])
    lab.insert(keys[2:4])
    lab.ref_counts[2] = lab.ref_counts[3] = 1
    assert lab.evict(1) == [keys[0]]


def test_t1_stands_in_for_a_t2_without_candidates(keys: list[OffloadKey]) -> None:
    """A T1 below its target still gives when T2 cannot."""
    lab = Lab(4)
    lab.insert_into_t2(keys[:2])
    lab.insert(keys[2:4])
    lab.policy.target_t1_size = 4
    lab.ref_counts[0] = lab.ref_counts[1] = 1
    assert lab.evict(1) == [keys[2]]


def test_too_few_candidates_change_nothing(keys: list[OffloadKey]) -> None:
    """Eviction simulates first: no key moves and no ghost appears when it fails."""
    lab = Lab(4)
    lab.insert_into_t2(keys[:2])
    lab.insert(keys[2:4])
    lab.ref_counts[0] = 1
    assert lab.evict(3, (keys[3],)) is None
    assert sorted(lab.policy.items()) == sorted(zip(keys[:4], range(4), strict=True))
    for key in keys[:4]:
        lab.policy.touch([key])
    assert lab.policy.target_t1_size == 0


def test_ghosts_are_not_present(keys: list[OffloadKey]) -> None:
    """A ghost has no slot and does not count."""
    lab = Lab(2)
    lab.insert(keys[:2])
    lab.evict(1)
    assert lab.policy.get(keys[0]) is None
    assert len(lab.policy) == 1


def test_a_returning_key_enters_t1_and_leaves_the_ghosts(keys: list[OffloadKey]) -> None:
    """A new key is in T1 whatever its past, and a later touch teaches nothing any more."""
    lab = Lab(2)
    lab.insert_into_t2(keys[:1])
    lab.evict(1)
    lab.insert(keys[:2])
    lab.policy.target_t1_size = 1
    lab.policy.touch([keys[0]])
    assert lab.policy.target_t1_size == 1
    assert lab.evict(1) == [keys[1]]


def test_a_returning_key_no_longer_counts_as_a_ghost(keys: list[OffloadKey]) -> None:
    """Four keys that came back leave B1 empty: a B2 hit then moves the target by 1, not 4."""
    lab = Lab(10)
    lab.insert(keys[:4])
    lab.evict(4)
    lab.insert_into_t2(keys[10:11])
    lab.evict(1)
    lab.insert(keys[:4])
    lab.policy.target_t1_size = 8
    lab.policy.touch([keys[10]])
    assert lab.policy.target_t1_size == 7


def test_ghost_lists_are_trimmed_to_the_capacity(keys: list[OffloadKey]) -> None:
    """The oldest ghosts go; a touch of one of them teaches nothing."""
    lab = Lab(2)
    for key in keys[:4]:
        lab.insert([key])
        lab.evict(1)
    lab.policy.touch(keys[:2])
    assert lab.policy.target_t1_size == 0
    lab.policy.touch([keys[2]])
    assert lab.policy.target_t1_size == 1


def test_a_used_ghost_outlives_an_unused_one(keys: list[OffloadKey]) -> None:
    """A ghost that was hit moves to the recent end."""
    lab = Lab(2)
    for key in keys[:2]:
        lab.insert([key])
        lab.evict(1)
    lab.policy.touch([keys[0]])
    lab.insert([keys[2]])
    lab.evict(2 - 1)
    target = lab.policy.target_t1_size
    lab.policy.touch([keys[1]])
    assert lab.policy.target_t1_size == target
    lab.policy.touch([keys[0]])
    assert lab.policy.target_t1_size == target + 1


def test_a_failed_store_leaves_no_ghost(keys: list[OffloadKey]) -> None:
    """Removal is not eviction: the policy made no mistake."""
    lab = Lab(2)
    lab.insert_into_t2(keys[:1])
    lab.insert(keys[1:2])
    lab.policy.remove(keys[0])
    lab.policy.remove(keys[1])
    lab.policy.touch(keys[:2])
    assert (len(lab.policy), lab.policy.target_t1_size) == (0, 0)
