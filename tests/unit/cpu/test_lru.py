"""The policy that evicts what was not used for longest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_core.cpu.policies import LRUCachePolicy

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey


def _filled(keys: list[OffloadKey], ref_counts: list[int]) -> LRUCachePolicy:
    policy = LRUCachePolicy(len(ref_counts), ref_counts)
    for block_id in range(len(ref_counts)):
        policy.insert(keys[block_id], block_id)
    return policy


def test_the_oldest_insertion_goes_first(keys: list[OffloadKey]) -> None:
    """Without any use, order of insertion is order of eviction."""
    policy = _filled(keys, [0] * 4)
    assert policy.evict(2, ()) == [(keys[0], 0), (keys[1], 1)]
    assert len(policy) == 2


def test_a_touched_prefix_dies_from_its_tail(keys: list[OffloadKey]) -> None:
    """After touch([b0..bn]), b0 is the most recent and bn goes first."""
    policy = _filled(keys, [0] * 4)
    policy.touch(keys[:3])
    assert policy.evict(4, ()) == [(keys[3], 3), (keys[2], 2), (keys[1], 1), (keys[0], 0)]


def test_pinned_written_and_protected_keys_stay(keys: list[OffloadKey]) -> None:
    """Eviction skips what must not go, and takes the next."""
    policy = _filled(keys, [1, -1, 0, 0, 0])
    assert policy.evict(2, {keys[2]}) == [(keys[3], 3), (keys[4], 4)]
    assert dict(policy.items()) == {keys[0]: 0, keys[1]: 1, keys[2]: 2}


def test_too_few_candidates_change_nothing(keys: list[OffloadKey]) -> None:
    """All or nothing: a call that cannot find enough leaves every key where it was."""
    policy = _filled(keys, [0, 1, 0])
    assert policy.evict(3, ()) is None
    assert policy.evict(2, {keys[0]}) is None
    assert policy.evict(4, ()) is None
    assert [key for key, _ in policy.items()] == keys[:3]


def test_nothing_to_evict_is_an_empty_list(keys: list[OffloadKey]) -> None:
    """Zero victims always exist."""
    assert _filled(keys, [1]).evict(0, ()) == []


def test_unknown_keys_are_no_use(keys: list[OffloadKey]) -> None:
    """A touch of absent keys does not make them present."""
    policy = _filled(keys, [0, 0])
    policy.touch(keys[10:12])
    assert len(policy) == 2
    assert policy.get(keys[10]) is None


def test_removal_forgets_the_key(keys: list[OffloadKey]) -> None:
    """A key whose store failed is absent."""
    policy = _filled(keys, [-1, 0])
    policy.remove(keys[0])
    assert policy.get(keys[0]) is None
    assert policy.get(keys[1]) == 1
