"""The map of CPU memory: what is found, what is held, what goes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.errors import EngineStateError
from kv_core.keys import OffloadKey
from kv_core.simple import CpuBlockPool


def keys(letters: str) -> list[OffloadKey]:
    """Return a key for each letter."""
    return [OffloadKey(letter.encode()) for letter in letters]


def stored(pool: CpuBlockPool, letters: str) -> list[int]:
    """Store a key for each letter."""
    block_ids = pool.reserve(keys(letters))
    pool.publish(block_ids)
    return block_ids


def found(pool: CpuBlockPool, letters: str) -> str:
    """Return those letters that can be read."""
    return "".join(x for x in letters if pool.find(keys(x)[0]) is not None)


def test_a_block_being_stored_is_known_and_not_found() -> None:
    """Whoever would store it need not; whoever would load it cannot."""
    pool = CpuBlockPool(2)
    (block_id,) = pool.reserve(keys("a"))
    assert pool.is_known(keys("a")[0])
    assert found(pool, "a") == ""
    pool.publish([block_id])
    assert pool.find(keys("a")[0]) == block_id


def test_a_failed_store_leaves_nothing() -> None:
    """Its block is free, and its content was given up."""
    freed: list[int] = []
    pool = CpuBlockPool(2, block_freed=freed.append)
    block_ids = pool.reserve(keys("a"))
    pool.discard(block_ids)
    assert not pool.is_known(keys("a")[0])
    assert freed == block_ids
    assert pool.num_available == 2


def test_the_end_of_the_oldest_batch_goes_first() -> None:
    """Within a batch the head of the prefix is the most recent."""
    pool = CpuBlockPool(5)
    stored(pool, "abc")
    stored(pool, "de")
    stored(pool, "xy")
    assert found(pool, "abcdexy") == "adexy"


def test_a_use_makes_a_block_recent() -> None:
    """Touching counts, and so does the end of a load."""
    pool = CpuBlockPool(4)
    a, b, _, _ = stored(pool, "abcd")
    pool.touch(keys("d?"))
    pool.pin([a, b])
    pool.unpin([a, b])
    stored(pool, "xy")
    assert found(pool, "abcdxy") == "abxy"


def test_pinned_blocks_stay() -> None:
    """There is room for as many as may go, and the first keys get it."""
    pool = CpuBlockPool(3)
    a, b, _ = stored(pool, "abc")
    pool.pin([a, b])
    pool.pin([a])
    assert pool.num_available == 1
    assert len(pool.reserve(keys("xyz"))) == 1
    assert pool.is_known(keys("x")[0])
    assert not pool.is_known(keys("y")[0])
    pool.unpin([a, b])
    assert pool.num_available == 1
    pool.unpin([a])
    assert pool.num_available == 2
    with pytest.raises(EngineStateError, match=f"CPU block {a} is not pinned"):
        pool.unpin([a])


def test_protected_blocks_are_not_evicted() -> None:
    """They keep their order, as used just now."""
    pool = CpuBlockPool(3)
    stored(pool, "abc")
    assert len(pool.reserve(keys("xy"), protected=frozenset(keys("ab")))) == 1
    assert found(pool, "abc") == "ab"
    assert len(pool.reserve(keys("z"))) == 1
    assert found(pool, "ab") == "a"


@settings(max_examples=80, deadline=None)
@given(
    num_blocks=st.integers(1, 5),
    actions=st.lists(st.tuples(st.sampled_from("spfu"), st.text("abcdefg", max_size=4))),
)
def test_no_block_is_lost_or_has_two_contents(
    num_blocks: int, actions: list[tuple[str, str]]
) -> None:
    """Free, evictable, pinned and written blocks are all of them, whatever happens."""
    pool = CpuBlockPool(num_blocks)
    pinned: list[int] = []
    for action, letters in actions:
        distinct = keys("".join(dict.fromkeys(letters)))
        if action in "sf":
            block_ids = pool.reserve([key for key in distinct if not pool.is_known(key)])
            if action == "s":
                pool.publish(block_ids)
            else:
                pool.discard(block_ids)
        elif action == "p":
            readable = [block for key in distinct if (block := pool.find(key)) is not None]
            pool.pin(readable)
            pinned += readable
        else:
            pool.unpin(pinned)
            pinned = []
        stats = pool.get_stats()
        parts = ("blocks_free", "blocks_evictable", "blocks_pinned", "blocks_writing")
        assert sum(stats[part] for part in parts) == stats["blocks_total"] == num_blocks
        assert stats["blocks_pinned"] == len(set(pinned))
        assert pool.num_available == num_blocks - len(set(pinned))
