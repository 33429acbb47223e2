"""The pool of GPU blocks: prefix reuse, sharing, order of reuse."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.errors import ConfigError
from kv_core.workload.replay import GpuBlockPool


def _hashes(word: str) -> list[bytes]:
    return [word[: end + 1].encode() for end in range(len(word))]


def _filled(pool: GpuBlockPool, word: str) -> list[int]:
    """Compute a prompt and release it again."""
    block_ids = pool.allocate(len(word))
    assert block_ids is not None
    for block_id, block_hash in zip(block_ids, _hashes(word), strict=True):
        pool.register(block_id, block_hash)
    pool.release(block_ids)
    return block_ids


def test_the_null_block_is_never_handed_out() -> None:
    """A pool of five blocks hands out four, from 1 on."""
    pool = GpuBlockPool(5)
    assert pool.num_blocks == pool.num_free == 4
    assert pool.allocate(4) == [1, 2, 3, 4]


def test_too_few_free_blocks_change_nothing() -> None:
    """An allocation is whole or does not happen."""
    pool = GpuBlockPool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []


def test_a_prefix_is_found_as_far_as_it_goes() -> None:
    """Matching stops at the first block that is not there."""
    pool = GpuBlockPool(10)
    a, ab, abc = _filled(pool, "abc")
    assert pool.match_prefix(_hashes("abxc")) == [a, ab]
    assert pool.match_prefix(_hashes("abc")) == [a, ab, abc]
    assert pool.match_prefix(_hashes("x")) == []


def test_released_content_can_be_used_again() -> None:
    """A free block with content leaves the free list while it is used."""
    pool = GpuBlockPool(4)
    found = _filled(pool, "abc")
    pool.acquire(found)
    assert pool.num_free == 0
    pool.release(found)
    assert pool.num_free == 3


def test_a_pool_that_no_memory_holds_is_refused() -> None:
    """As a setting that is too large, which it is."""
    with pytest.raises(ConfigError, match=r"books of a GPU pool of \d+ blocks .*--gpu-blocks"):
        GpuBlockPool(sys.maxsize)


def test_a_shared_block_is_free_when_its_last_user_is_gone() -> None:
    """Users are counted."""
    pool = GpuBlockPool(3)
    found = _filled(pool, "a")
    pool.acquire(found)
    pool.acquire(found)
    pool.release(found)
    assert pool.num_free == 1
    pool.release(found)
    assert pool.num_free == 2


def test_the_least_recently_freed_block_goes_first() -> None:
    """Blocks that never held anything go first, then the oldest content."""
    pool = GpuBlockPool(5)
    (a,), (b,) = _filled(pool, "a"), _filled(pool, "b")
    pool.acquire([a])
    pool.release([a])
    assert pool.allocate(3) == [3, 4, b]
    assert pool.match_prefix(_hashes("b")) == []
    assert pool.match_prefix(_hashes("a")) == [a]


def test_a_prefix_dies_from_its_tail() -> None:
    """Of one request's blocks, the last is handed out first."""
    pool = GpuBlockPool(4)
    a, ab, abc = _filled(pool, "abc")
    assert pool.allocate(1) == [abc]
    assert pool.match_prefix(_hashes("abc")) == [a, ab]


def test_handing_a_block_out_makes_its_content_unfindable() -> None:
    """What it held is gone from the moment it is allocated."""
    pool = GpuBlockPool(2)
    _filled(pool, "a")
    assert pool.allocate(1) == [1]
    assert pool.match_prefix(_hashes("a")) == []


def test_the_first_block_with_a_hash_keeps_it() -> None:
    """Two requests that compute the same block at once do not confuse the index."""
    pool = GpuBlockPool(3)
    first, second = pool.allocate(2) or []
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.match_prefix([b"a"]) == [first]
    pool.release([second])
    pool.release([first])
    assert pool.allocate(1) == [second]
    assert pool.match_prefix([b"a"]) == [first]


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(1, 6),
    words=st.lists(st.text("ab", min_size=1, max_size=4), max_size=12),
    keep=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_blocks_are_never_lost_nor_shared_by_accident(
    num_blocks: int, words: list[str], keep: list[bool]
) -> None:
    """Whatever is used and released, a block is free or has users, and all come back."""
    pool = GpuBlockPool(num_blocks + 1)
    content: dict[int, bytes] = {}
    held: list[list[int]] = []
    for word, is_kept in zip(words, keep, strict=False):
        hashes = _hashes(word)
        found = pool.match_prefix(hashes)
        assert [content[block_id] for block_id in found] == hashes[: len(found)]
        pool.acquire(found)
        new = pool.allocate(len(word) - len(found))
        if new is None:
            pool.release(found)
            continue
        used = {block_id for block_ids in held for block_id in block_ids}
        assert used.isdisjoint(new)
        for block_id, block_hash in zip(new, hashes[len(found) :], strict=True):
            content[block_id] = block_hash
            pool.register(block_id, block_hash)
        if is_kept:
            held.append([*found, *new])
        else:
            pool.release([*found, *new])
    for block_ids in held:
        pool.release(block_ids)
    assert pool.num_free == num_blocks
    assert sorted(pool.allocate(num_blocks) or []) == list(range(1, num_blocks + 1))


def test_the_free_queue_can_be_walked_in_the_order_of_reuse() -> None:
    """Content that was released is behind what never held anything, a prefix tail first."""
    pool = GpuBlockPool(6)
    a, ab, abc = _filled(pool, "abc")
    order = []
    block_id = pool.first_free()
    while block_id is not None:
        order.append(block_id)
        block_id = pool.next_free(block_id)
    assert order == [4, 5, abc, ab, a]
    assert pool.block_key(4) is None
    assert pool.block_key(ab) == b"ab" + bytes(4)
    assert pool.allocate(5) == order
    assert pool.first_free() is None


def test_blocks_can_be_released_to_where_they_were() -> None:
    """Blocks that were held for a moment at the head of the queue are not younger for it."""
    pool = GpuBlockPool(6)
    a, ab, abc = _filled(pool, "abc")
    assert pool.allocate(2) == [4, 5]
    pool.acquire([ab, abc])
    assert not pool.is_free(abc)
    pool.release([ab, abc], to_front=True)
    assert pool.is_free(abc)
    assert pool.match_prefix(_hashes("abc")) == [a, ab, abc]
    assert pool.allocate(3) == [abc, ab, a]
