"""What a search for weak spots of the connector has found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.connector import OffloadingSettings, ScheduledRequest
from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.connector.conftest import Connector, Request

    from kv_core.contract import OffloadKey


def test_what_was_computed_with_old_weights_is_not_stored_under_a_new_epoch(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """vllm#9744: neither the blocks of a running request nor what it computes on top of them."""
    request = request_of("r", "A B C", prompt_tokens=50)
    connector.report(*connector.compute(request, 16, [1]).stores)
    connector.scheduler.reset(1)
    metadata = connector.step(ScheduledRequest(request, 16, 32, ([1, 2, 3],)))
    assert metadata.stores == ()
    assert len(connector.offered) == 1
    connector.scheduler.request_finished(request)
    assert connector.step().stores == ()


def test_a_request_that_starts_over_under_a_new_epoch_is_stored(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Preempted by the reset, or still waiting: all it computes is of the new weights."""
    request = request_of("r", "A B", prompt_tokens=40)
    connector.report(*connector.compute(request, 32, [1, 2]).stores)
    connector.scheduler.reset(1)
    connector.step(preempted=["r"])
    connector.step(ScheduledRequest(request, 0, 16, ([3],)))
    connector.step(ScheduledRequest(request, 16, 16, ([3, 4],)))
    assert connector.offered == [(key("A"), key("B")), (key("A"),), (key("B"),)]


def test_a_load_over_a_new_epoch_is_reported_as_failed(
    connector: Connector, request_of: Callable[..., Request], key: Callable[..., OffloadKey]
) -> None:
    """It brings KV of old weights; the request computes its blocks instead."""
    connector.manager.hits(key("A"))
    request = request_of("r", "A B", prompt_tokens=40)
    assert connector.find(request) == 16
    connector.scheduler.update_state_after_alloc(request, ([1, 2, 3],), 16)
    (load,) = connector.step().loads
    connector.scheduler.reset(1)
    report = connector.report(load)
    assert report.failed_req_ids == {"r"}
    assert report.loaded_req_ids == set()
    assert connector.manager.of("complete_load") == []


def test_a_name_that_is_taken_again_within_a_step_belongs_to_the_new_request(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """The manager hears of the end of the old one before the new one begins, and only once."""
    old = request_of("r", "A")
    connector.compute(old, 8, [1])
    connector.scheduler.request_finished(old)
    connector.find(request_of("r", "B"))
    assert connector.manager.of("on_request_finished") == [()]
    connector.step()
    assert connector.manager.of("on_request_finished") == [()]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("shm_dir", "/mnt/memory\0x"), ("shm_dir", "\ud800"), ("cpu_bytes_to_use", 10**400)],
)
def test_what_no_system_can_have_is_refused(setting: str, value: object) -> None:
    """It would fail later, with an error that names no setting."""
    with pytest.raises(ConfigError) as caught:
        OffloadingSettings.from_extra_config({"cpu_bytes_to_use": 4096, setting: value})
    assert caught.value.setting == setting
