"""Which blocks are offered, when, and what protects their GPU blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.connector import ScheduledRequest
from kv_core.engine import KVCacheGroupConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.connector.conftest import Connector, Request

    from kv_core.connector import Transfer
    from kv_core.contract import OffloadKey
    from kv_core.engine import OffloadingConfig

    GpuSide = Callable[[Transfer], tuple[list[int], tuple[int, ...], tuple[int, ...]]]


def test_the_calls_of_a_step_come_in_order(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Lookup, load; at the end scheduled, then finished requests; last the end of the step."""
    running, done, loading = (
        request_of("running", "A"),
        request_of("done", "B"),
        request_of("loading", "C"),
    )
    connector.manager.declines_all = True
    connector.compute(done, 16, [2])
    connector.manager.declines_all = False
    connector.scheduler.request_finished(done)
    connector.manager.hits(key("C"))
    connector.manager.calls.clear()
    connector.find(loading)
    connector.scheduler.update_state_after_alloc(loading, ([3],), 15)
    connector.step(ScheduledRequest(running, 0, 16, ([1],)), new=["running"])
    assert connector.manager.calls == [
        ("touch", "loading", (key("C"),)),
        ("lookup", "loading", (key("C"),)),
        ("prepare_load", "loading", (key("C"),)),
        ("prepare_store", "running", (key("A"),)),
        ("prepare_store", "done", (key("B"),)),
        ("on_request_finished", "done", ()),
        ("on_schedule_end", "running", ()),
    ]


def test_all_finished_requests_are_offered_before_any_is_forgotten(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """The order of the step holds with two of them."""
    requests = [request_of("r", "A"), request_of("s", "B")]
    connector.manager.declines_all = True
    for index, request in enumerate(requests):
        connector.compute(request, 16, [1 + index])
    for request in requests:
        connector.scheduler.request_finished(request)
    connector.manager.calls.clear()
    connector.step()
    assert [(method, req_id) for method, req_id, _ in connector.manager.calls] == [
        ("prepare_store", "r"),
        ("prepare_store", "s"),
        ("on_request_finished", "r"),
        ("on_request_finished", "s"),
        ("on_schedule_end", ""),
    ]


# -- the cursor ---------------------------------------------------------------------------------


def test_only_blocks_that_became_full_are_offered_and_once(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    gpu_side: GpuSide,
) -> None:
    """Tokens up to computed + scheduled count; the cursor goes on from there."""
    request = request_of("r", "A B C", prompt_tokens=50)
    first = connector.compute(request, 31, [4, 5])
    second = connector.compute(request, 48, [4, 5, 6])
    third = connector.compute(request, 50, [4, 5, 6, 7])
    assert connector.offered == [(key("A"),), (key("B"), key("C"))]
    assert gpu_side(first.stores[0]) == ([4], (1,), (0,))
    assert gpu_side(second.stores[0]) == ([5, 6], (2,), (1,))
    assert third.stores == ()


def test_the_cursor_moves_over_known_and_filtered_blocks(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    gpu_side: GpuSide,
) -> None:
    """What is neither to be stored nor declined is not offered again; a transfer skips it."""
    connector.manager.known = {key("A"), key("C")}
    request = request_of("r", "A B C D", prompt_tokens=70)
    metadata = connector.compute(request, 48, [4, 5, 6])
    assert gpu_side(metadata.stores[0]) == ([5], (1,), (1,))
    connector.compute(request, 64, [4, 5, 6, 7])
    assert connector.offered[1] == (key("D"),)


def test_the_cursor_stops_at_a_declined_block(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """vllm#26329: no hole in a prefix; what comes behind is offered again with it."""
    connector.manager.declined = {key("B")}
    request = request_of("r", "A B C", prompt_tokens=50)
    connector.compute(request, 48, [4, 5, 6])
    connector.manager.declined = set()
    connector.manager.known = {key("C")}
    connector.compute(request, 48, [4, 5, 6])
    connector.compute(request, 48, [4, 5, 6])
    assert connector.offered == [(key("A"), key("B"), key("C")), (key("B"), key("C"))]
    assert connector.scheduler.stores_declined == 1


def test_a_declined_batch_is_offered_again_whole(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """vllm#26329: nothing has changed, and the next step tries again."""
    connector.manager.declines_all = True
    request = request_of("r", "A B", prompt_tokens=40)
    assert connector.compute(request, 32, [4, 5]).stores == ()
    connector.manager.declines_all = False
    assert len(connector.compute(request, 33, [4, 5, 6]).stores) == 1
    assert connector.offered == [(key("A"), key("B"))] * 2
    assert connector.scheduler.stores_declined == 1


def test_each_group_has_its_own_cursor(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    gpu_side: GpuSide,
) -> None:
    """Blocks are ordered by group; a group that was declined does not hold the other back."""
    groups = [KVCacheGroupConfig(tokens_per_block=16, layer_names=(name,)) for name in "xy"]
    connector = connect(config(*groups))
    connector.manager.declined = {key("A", 1)}
    request = request_of("r", "A B", prompt_tokens=40)
    metadata = connector.compute(request, 32, [1, 2], [3, 4])
    assert gpu_side(metadata.stores[0]) == ([1, 2, 4], (2, 1), (0, 1))
    connector.manager.declined = set()
    connector.compute(request, 33, [1, 2], [3, 4])
    assert connector.offered[1] == (key("A", 1), key("B", 1))


@pytest.mark.parametrize(("prompt_only", "offered"), [(True, "A"), (False, "A B C")])
def test_the_prompt_clamps_what_is_offered(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    prompt_only: bool,
    offered: str,
) -> None:
    """20 tokens of prompt hold one full block; blocks with output count only when asked for."""
    connector = connect(config(offload_prompt_only=prompt_only))
    request = request_of("r", "A B C", prompt_tokens=20)
    request.num_output_tokens = 40
    connector.compute(request, 60, [1, 2, 3, 4])
    assert connector.offered == [tuple(key(name) for name in offered.split())]


def test_scheduled_tokens_beyond_the_request_are_no_blocks(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Speculative tokens are not part of it."""
    connector = connect(config(offload_prompt_only=False))
    request = request_of("r", "A B", prompt_tokens=20)
    connector.compute(request, 40, [1, 2, 3])
    assert connector.offered == [(key("A"),)]


def test_null_blocks_are_skipped(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    gpu_side: GpuSide,
) -> None:
    """GPU block 0 stands for tokens that have left a window; half a block is none either."""
    connector = connect(config(blocks_per_chunk=2))
    request = request_of("r", "A B C D E F", prompt_tokens=100)
    metadata = connector.compute(request, 96, [0, 0, 0, 4, 5, 6])
    assert connector.offered == [(key("F"),)]
    assert gpu_side(metadata.stores[0]) == ([5, 6], (2,), (4,))


def test_what_was_loaded_is_not_offered(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """The cursor starts after offload hits."""
    connector.manager.hits(key("A"), key("B"))
    request = request_of("r", "A B C", prompt_tokens=50)
    assert connector.find(request) == 32
    connector.scheduler.update_state_after_alloc(request, ([1, 2],), 32)
    connector.report(*connector.step().loads)
    connector.compute(request, 48, [1, 2, 3])
    assert connector.offered == [(key("C"),)]


def test_what_only_the_gpu_had_is_offered(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """A GPU hit in front of loaded blocks may be gone below: no hole in the prefix there."""
    connector.manager.hits(key("B"))
    request = request_of("r", "A B C", prompt_tokens=50)
    assert connector.find(request, 16) == 16
    connector.scheduler.update_state_after_alloc(request, ([1, 2],), 16)
    connector.report(*connector.step().loads)
    connector.compute(request, 48, [1, 2, 3])
    assert connector.offered == [(key("A"), key("B"), key("C"))]


# -- requests that end --------------------------------------------------------------------------


def test_the_last_blocks_of_a_finished_request_come_one_step_later_and_are_flushed(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """The engine frees their GPU blocks at once, so the copy ends before anything else."""
    connector.manager.declines_all = True
    request = request_of("r", "A")
    connector.compute(request, 16, [1])
    connector.manager.declines_all = False
    assert connector.scheduler.request_finished(request) is False
    assert connector.scheduler.has_pending_work()
    metadata = connector.step()
    assert connector.offered[-1] == (key("A"),)
    assert metadata.flush_job_ids == {metadata.stores[0].job_id}


def test_an_aborted_request_offers_computed_tokens_only(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Blocks that were allocated but never computed hold no KV."""
    connector.manager.declines_all = True
    request = request_of("r", "A B C")
    connector.compute(request, 20, [1, 2, 3])
    connector.manager.declines_all = False
    connector.scheduler.request_finished(request)
    connector.step()
    assert connector.offered[-1] == (key("A"),)


def test_a_request_that_never_ran_offers_nothing(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """It is forgotten all the same."""
    request = request_of("r", "A")
    connector.find(request)
    connector.scheduler.request_finished(request)
    assert connector.step().stores == ()
    assert connector.manager.of("on_request_finished") == [()]
    assert not connector.scheduler.has_pending_work()


def test_the_end_of_an_unknown_request_is_fine(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """Neither an error nor work."""
    assert connector.scheduler.request_finished(request_of("r", "A")) is False
    assert connector.manager.calls == []
    assert not connector.scheduler.has_pending_work()


# -- what is flushed ----------------------------------------------------------------------------


def test_stores_of_preempted_requests_are_flushed(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """sglang#28468: all of theirs, whatever happens to the blocks; those of others are not."""
    mine, other = request_of("r", "A"), request_of("s", "B")
    (store,) = connector.compute(mine, 16, [1]).stores
    connector.compute(other, 16, [2])
    assert connector.step(preempted=["r"]).flush_job_ids == {store.job_id}


def test_a_store_whose_block_is_handed_out_again_is_flushed(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """llm-d-kv-cache#504: until the store has been reported, and not afterwards."""
    request = request_of("r", "A B")
    (store,) = connector.compute(request, 32, [1, 2]).stores
    assert connector.step(allocated=[3]).flush_job_ids == frozenset()
    assert connector.step(allocated=[2, 3]).flush_job_ids == {store.job_id}
    connector.report(store)
    assert connector.step(allocated=[2, 3]).flush_job_ids == frozenset()


def test_a_load_of_an_aborted_request_is_flushed_when_its_block_is_handed_out_again(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """LMCache#4385: a late write must not end up in another request's KV."""
    connector.manager.hits(key("A"))
    request = request_of("r", "A", prompt_tokens=20)
    connector.find(request)
    connector.scheduler.update_state_after_alloc(request, ([7],), 16)
    metadata = connector.step(allocated=[7])
    # Its own allocation is no reason to wait for it.
    assert metadata.flush_job_ids == frozenset()
    connector.scheduler.request_finished(request)
    assert connector.step(allocated=[7]).flush_job_ids == {metadata.loads[0].job_id}


def test_a_preempted_request_offers_nothing_of_its_old_blocks(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """vllm#26329: what was declined before is gone with them, until it is computed again."""
    connector.manager.declines_all = True
    request = request_of("r", "A")
    connector.compute(request, 16, [1])
    connector.manager.declines_all = False
    assert connector.step(preempted=["r"]).stores == ()
    connector.scheduler.request_finished(request)
    assert connector.step().stores == ()
    assert connector.offered == [(key("A"),)]


def test_a_resumed_request_offers_nothing_twice(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Its cursor survives the preemption."""
    request = request_of("r", "A B", prompt_tokens=40)
    connector.compute(request, 16, [1])
    connector.step(preempted=["r"])
    connector.compute(request, 32, [5, 6])
    assert connector.offered == [(key("A"),), (key("B"),)]
