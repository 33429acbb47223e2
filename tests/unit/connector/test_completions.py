"""What workers report, over several ranks; failures, resets, and when work is pending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_core.connector import ConnectorOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from tests.unit.connector.conftest import Connector, Request

    from kv_core.connector import Transfer
    from kv_core.contract import OffloadKey
    from kv_core.engine import OffloadingConfig


def _load(connector: Connector, request: Request, *keys: OffloadKey) -> Transfer:
    connector.manager.hits(*keys)
    tokens = connector.find(request)
    assert tokens
    connector.scheduler.update_state_after_alloc(request, ([1, 2, 3],), tokens)
    return connector.step().loads[0]


def test_reports_of_workers_add_up() -> None:
    """Counts are summed and failures united; neither operand changes."""
    first = ConnectorOutput({1: 1, 2: 1}, {2})
    second = ConnectorOutput({2: 1, 3: 1}, {3})
    total = first.aggregate(second)
    assert total == ConnectorOutput({1: 1, 2: 2, 3: 1}, {2, 3})
    assert first == ConnectorOutput({1: 1, 2: 1}, {2})


def test_a_store_counts_when_every_worker_has_reported_it(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Two of two, in one report or in two; half a block is never readable."""
    connector = connect(config(num_workers=2))
    first = connector.compute(request_of("r", "A"), 16, [1]).stores[0]
    second = connector.compute(request_of("s", "B"), 16, [2]).stores[0]
    connector.report(first)
    assert connector.manager.of("complete_store") == []
    connector.report(second, workers=2)
    connector.report(first)
    assert connector.manager.of("complete_store") == [(key("B"),), (key("A"),)]


def test_one_failed_worker_fails_the_job(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """sglang#30321: whichever it is, and only once all have let go of the slot."""
    connector = connect(config(num_workers=2))
    store = connector.compute(request_of("r", "A"), 16, [1]).stores[0]
    connector.report(store, failed=True)
    assert connector.manager.of("complete_store failed") == []
    connector.report(store)
    assert connector.manager.of("complete_store failed") == [(key("A"),)]


def test_a_failed_store_is_offered_again(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """From the first block that failed: no permanent hole in a prefix."""
    request = request_of("r", "A B C", prompt_tokens=50)
    connector.compute(request, 16, [1])
    store = connector.compute(request, 48, [1, 2, 3]).stores[0]
    connector.report(store, failed=True)
    connector.compute(request, 49, [1, 2, 3, 4])
    assert connector.offered == [(key("A"),), (key("B"), key("C")), (key("B"), key("C"))]


def test_a_request_that_was_told_known_offers_a_failed_block_again(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Architecture rule 5: the block that it relied on was not stored after all."""
    writer, reader = request_of("w", "A"), request_of("r", "A B", prompt_tokens=40)
    store = connector.compute(writer, 16, [1]).stores[0]
    connector.manager.known = {key("A")}
    connector.compute(reader, 32, [1, 2])
    connector.manager.known = set()
    connector.report(store, failed=True)
    connector.compute(reader, 33, [1, 2, 3])
    assert connector.offered == [(key("A"),), (key("A"), key("B")), (key("A"), key("B"))]


def test_a_load_is_reported_to_the_engine(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Once, with its pins taken off."""
    load = _load(connector, request_of("r", "A", prompt_tokens=20), key("A"))
    report = connector.report(load)
    assert (report.loaded_req_ids, report.failed_req_ids) == ({"r"}, set())
    assert connector.manager.of("complete_load") == [(key("A"),)]


def test_a_failed_load_is_computed_and_offered_instead(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """vllm#49250: the engine is told, the pins go, and the blocks are offered like any other."""
    request = request_of("r", "A B", prompt_tokens=40)
    load = _load(connector, request, key("A"), key("B"))
    report = connector.report(load, failed=True)
    assert (report.loaded_req_ids, report.failed_req_ids) == (set(), {"r"})
    assert connector.manager.of("complete_load") == [(key("A"), key("B"))]
    connector.compute(request, 32, [1, 2])
    assert connector.offered == [(key("A"), key("B"))]


def test_the_load_of_a_request_that_is_gone_is_not_reported(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Its pins go; the engine, which has forgotten it, hears nothing."""
    request = request_of("r", "A", prompt_tokens=20)
    load = _load(connector, request, key("A"))
    connector.scheduler.request_finished(request)
    report = connector.report(load)
    assert report.loaded_req_ids == report.failed_req_ids == set()
    assert connector.manager.of("complete_load") == [(key("A"),)]


def test_a_report_of_an_unknown_transfer_is_ignored(
    connector: Connector,
    request_of: Callable[..., Request],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Late and repeated ones, too: a warning, and nothing else happens."""
    store = connector.compute(request_of("r", "A"), 16, [1]).stores[0]
    connector.report(store)
    connector.report(store)
    assert len(connector.manager.of("complete_store")) == 1
    assert f"transfer {store.job_id}" in caplog.text


# -- resets -------------------------------------------------------------------------------------


def test_a_reset_without_transfers_is_over_at_once(connector: Connector) -> None:
    """Nothing old is being written."""
    connector.scheduler.reset_cache()
    assert [method for method, _, _ in connector.manager.calls] == [
        "reset_cache",
        "on_reset_flushed",
    ]


def test_a_reset_is_over_when_the_transfers_from_before_it_are(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """vllm#48102: new ones, of which there are always some, do not delay it."""
    request = request_of("r", "A B C", prompt_tokens=50)
    old = connector.compute(request, 16, [1]).stores[0]
    load = _load(connector, request_of("l", "A", prompt_tokens=20), key("A"))
    connector.scheduler.reset_cache()
    new = connector.compute(request, 32, [1, 2]).stores[0]
    connector.report(old)
    assert connector.manager.of("on_reset_flushed") == []
    connector.report(load)
    assert connector.manager.of("on_reset_flushed") == [()]
    assert connector.manager.of("complete_store") == connector.manager.of("complete_load") == []
    connector.report(new)
    assert connector.manager.of("complete_store") == [(key("A"), key("B"))]
    assert not connector.scheduler.has_pending_work()


def test_running_requests_offer_their_blocks_again_after_a_reset(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """All cursors are at the start; a load that was under way still arrives."""
    request = request_of("r", "A B", prompt_tokens=40)
    connector.report(*connector.compute(request, 32, [1, 2]).stores)
    load = _load(connector, request_of("l", "A", prompt_tokens=20), key("A"))
    connector.scheduler.reset_cache()
    assert connector.report(load).loaded_req_ids == {"l"}
    connector.compute(request, 33, [1, 2, 3])
    assert connector.offered == [(key("A"), key("B"))] * 2


def test_what_finished_before_a_reset_is_not_offered_after_it(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """vllm#9744: KV of old weights must not come back into the emptied cache."""
    connector.manager.declines_all = True
    request = request_of("r", "A")
    connector.compute(request, 16, [1])
    connector.manager.declines_all = False
    connector.scheduler.request_finished(request)
    connector.scheduler.reset_cache()
    assert connector.step().stores == ()
    assert connector.manager.of("on_request_finished") == [()]


# -- the rest -----------------------------------------------------------------------------------


def test_work_is_pending_while_anything_is_under_way(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """A finished request, a transfer, or the manager's own work; an idle one has none."""
    assert not connector.scheduler.has_pending_work()
    connector.manager.pending = True
    assert connector.scheduler.has_pending_work()
    connector.manager.pending = False
    store = connector.compute(request_of("r", "A"), 16, [1]).stores[0]
    assert connector.scheduler.has_pending_work()
    assert connector.scheduler.num_jobs_in_flight == 1
    connector.report(store)
    assert not connector.scheduler.has_pending_work()


def test_shutdown_reaches_the_manager(connector: Connector) -> None:
    """The scheduler owns it."""
    connector.scheduler.shutdown()
    assert connector.manager.calls == [("shutdown", "", ())]
