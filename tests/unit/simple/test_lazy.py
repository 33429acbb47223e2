"""Lazy stores: blocks go to CPU memory when the GPU is about to evict them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.connector import ScheduledRequest
from kv_core.simple import FreeQueueCursor
from kv_core.workload.replay import GpuBlockPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.keys import OffloadKey

Engine = Any
Request = Any


def filled(pool: GpuBlockPool, letters: str) -> list[int]:
    """Hand out a block for each letter, name it, and release it: the queue gets them in order."""
    block_ids = pool.allocate(len(letters))
    assert block_ids is not None
    for block_id, letter in zip(block_ids, letters, strict=True):
        pool.register(block_id, letter.encode())
        pool.release([block_id])
    return block_ids


def everything(_key: OffloadKey) -> bool:
    """Want every block."""
    return True


def taken(cursor: FreeQueueCursor, limit: int = 99, known: str = "") -> list[int]:
    """Take blocks, of which those named are known."""
    return [block_id for block_id, _ in cursor.take(limit, lambda key: chr(key[0]) not in known)]


def test_only_the_head_of_the_queue_is_stored() -> None:
    """What is far from eviction stays where it is."""
    pool = GpuBlockPool(7)
    blocks = filled(pool, "abcdef")
    cursor = FreeQueueCursor(pool, 2)
    assert taken(cursor) == blocks[:2]


def test_blocks_without_a_name_count_as_ready() -> None:
    """They can be handed out as they are, like those that CPU memory has."""
    pool = GpuBlockPool(7)
    a, b, c = filled(pool, "abc")
    cursor = FreeQueueCursor(pool, 5)
    assert [*pool._free] == [4, 5, 6, a, b, c]
    assert taken(cursor, known="a") == [b]
    assert cursor.position == a


def test_the_cursor_goes_on_where_it_was() -> None:
    """As far as blocks left the head of the queue, and no further."""
    pool = GpuBlockPool(9)
    blocks = filled(pool, "abcdefgh")
    cursor = FreeQueueCursor(pool, 4)
    assert taken(cursor, known="abcdefgh") == []
    assert cursor.position == blocks[3]
    assert taken(cursor, known="abcdefgh") == []
    assert cursor.position == blocks[3]
    assert pool.allocate(2) == blocks[:2]
    cursor.note_used(blocks[:2])
    assert taken(cursor, known="") == blocks[4:6]


def test_the_cursor_restarts_when_its_block_left_the_queue() -> None:
    """It may be anywhere by now, so the walk begins at the head again."""
    pool = GpuBlockPool(7)
    blocks = filled(pool, "abcdef")
    cursor = FreeQueueCursor(pool, 2)
    taken(cursor, known="ab")
    assert cursor.position == blocks[1]
    pool.acquire([blocks[1]])
    assert taken(cursor, known="a") == [blocks[2]]
    assert cursor.position == blocks[0]


def test_a_block_that_left_and_came_back_is_behind_the_cursor_no_more() -> None:
    """It was used meanwhile, so it is at the end of the queue."""
    pool = GpuBlockPool(5)
    blocks = filled(pool, "abcd")
    cursor = FreeQueueCursor(pool, 1)
    taken(cursor, known="a")
    pool.acquire(blocks[:1])
    pool.release(blocks[:1])
    cursor.note_used(blocks[:1])
    assert cursor.position is None
    assert taken(cursor) == [blocks[1]]


def test_stored_blocks_come_back_as_ready() -> None:
    """They return to the head, and the cursor does not look at them again."""
    pool = GpuBlockPool(7)
    blocks = filled(pool, "abcdef")
    cursor = FreeQueueCursor(pool, 2)
    taken(cursor, known="a")
    assert cursor.position == blocks[0]
    pool.acquire([blocks[1]])
    cursor.stored([blocks[1]])
    pool.release([blocks[1]], to_front=True)
    cursor.returned([blocks[1]])
    assert taken(cursor) == []
    assert pool.first_free() == blocks[1]


def test_the_limit_leaves_the_cursor_before_the_next_block() -> None:
    """What finds no room now is the first to be looked at later."""
    pool = GpuBlockPool(7)
    blocks = filled(pool, "abcdef")
    cursor = FreeQueueCursor(pool, 4)
    assert taken(cursor, limit=1) == blocks[:1]
    pool.acquire(blocks[:1])
    assert taken(cursor, limit=0) == []
    assert taken(cursor, limit=9) == blocks[1:5]


# -- through the scheduler -----------------------------------------------------------------------


def test_the_target_is_what_two_steps_can_allocate(make_engine: Callable[..., Engine]) -> None:
    """Twice the blocks of the largest step, over all groups."""
    assert make_engine(max_batched_tokens=9).config.target_free == 2 * 3
    groups = make_engine().config.groups * 3
    assert make_engine(max_batched_tokens=9, groups=groups).config.target_free == 2 * 9


def test_nothing_is_stored_while_the_gpu_has_room(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Blocks of running requests and of a queue that is long enough are not touched."""
    engine = make_engine(lazy=True, gpu_blocks=16)
    request = make_request("r", "abcdef")
    assert engine.compute(request).store_event == -1
    engine.finish(request)
    assert engine.step().store_event == -1


def test_an_evicted_block_is_found_in_cpu_memory(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """It was stored when it came near the head of the queue."""
    engine = make_engine(lazy=True, gpu_blocks=13, max_batched_tokens=12)
    for word in ("ab", "cd", "ef", "gh", "ij"):
        request = make_request(word, word)
        engine.report(engine.compute(request))
        engine.finish(request)
        engine.report(engine.step())
    assert engine.pool.match_prefix(make_request("q", "ab").block_hashes) == []
    assert engine.finds("ab") == 2
    assert engine.finds("ij") == 0


def test_a_lazy_store_keeps_the_order_of_eviction(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Stored blocks are as old as before: free again, at the head, tail of the prefix first."""
    engine = make_engine(lazy=True, gpu_blocks=9, max_batched_tokens=16)
    request = make_request("r", "abcd", 0)
    engine.compute(request)
    table = engine.tables["r"][0]
    engine.finish(request)
    metadata = engine.step()
    assert metadata.store_gpu_blocks == tuple(table)
    assert engine.pool.num_free == 4
    engine.report(metadata)
    assert [engine.pool.first_free(), engine.pool.num_free] == [table[-1], 8]
    assert engine.pool.allocate(4) == table[::-1]
    assert engine.finds("abcd") == 4


def test_half_of_the_free_blocks_can_be_handed_out(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """Blocks that are being stored are not free; a slow copy must not starve the engine."""
    engine = make_engine(lazy=True, gpu_blocks=9, max_batched_tokens=400)
    request = make_request("r", "abcdefgh", 0)
    engine.compute(request)
    engine.finish(request)
    metadata = [engine.step() for _ in range(3)]
    assert [len(step.store_gpu_blocks) for step in metadata] == [4, 0, 0]
    assert engine.pool.num_free == 4
    engine.report(metadata[0])
    assert len(engine.step().store_gpu_blocks) == 4


@pytest.mark.parametrize("failed", [False, True])
def test_a_block_found_while_it_is_stored_stays_with_its_user(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request], failed: bool
) -> None:
    """The store takes away its own reference only, also when it fails."""
    engine = make_engine(lazy=True, gpu_blocks=5, max_batched_tokens=400)
    request = make_request("r", "ab", 0)
    engine.compute(request)
    table = engine.tables["r"][0]
    engine.finish(request)
    metadata = engine.step()
    assert metadata.store_gpu_blocks == tuple(table)
    engine.pool.acquire(table)
    engine.report(metadata, failed=failed)
    assert engine.pool.num_free == 2
    assert engine.finds("ab") == (0 if failed else 2)
    assert engine.stat("stores_failed") == failed


def test_blocks_that_requests_use_again_are_not_counted(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """The cursor goes as far beyond them, also when the request has nothing to load."""
    engine = make_engine(lazy=True, gpu_blocks=9, max_batched_tokens=8)
    first, second = make_request("r", "abcd", 0), make_request("s", "wxyz", 0)
    for request in (first, second):
        engine.compute(request)
    tables = {request: engine.tables[request.req_id][0] for request in (first, second)}
    engine.finish(first)
    engine.finish(second)
    metadata = engine.step()
    assert metadata.store_gpu_blocks == tuple(tables[first])
    engine.report(metadata)
    assert engine.step().store_event == -1
    engine.pool.acquire(tables[first][:2])
    engine.scheduler.update_state_after_alloc(first, [tables[first][:2]], 0)
    engine.pool.release(tables[first][:2])
    assert engine.step().store_gpu_blocks == tuple(tables[second][2:])


def test_stores_that_fail_do_not_keep_an_idle_engine_busy(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """They are tried again when there is something to compute, wherever the cursor is then."""
    engine = make_engine(gpu_blocks=8, lazy=True)
    request, other = make_request("r", "abcd"), make_request("s", "x")
    table = engine.allocate(other, 1)
    engine.compute(request)
    engine.finish(request)
    first = engine.step()
    assert first.store_gpu_blocks != ()
    engine.report(first, failed=True)
    assert engine.step().store_gpu_blocks == ()
    assert not engine.scheduler.has_pending_work()
    again = engine.step(ScheduledRequest(other, 0, 4, table))
    assert again.store_gpu_blocks == first.store_gpu_blocks
