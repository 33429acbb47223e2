"""The scheduler's part in the engine's rules: lost blocks, whole requests, epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.connector import ScheduledRequest
from kv_core.contract import OffloadPolicy, RequestOffloadingContext
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.connector.conftest import Connector, Request

    from kv_core.contract import OffloadKey
    from kv_core.engine import OffloadingConfig


def test_blocks_that_the_manager_lost_are_offered_again(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule 5: a promotion that was said to be known has failed; no hole stays in the prefix."""
    request = request_of("r", "A B C", prompt_tokens=60)
    connector.manager.known = {key("B")}
    connector.compute(request, 48, [1, 2, 3])
    connector.manager.known = set()
    lost = [{key("B")}]
    monkeypatch.setattr(
        connector.manager, "take_lost_keys", lambda: lost.pop() if lost else set(), raising=False
    )
    connector.compute(request, 49, [1, 2, 3, 4])
    connector.compute(request, 50, [1, 2, 3, 4])
    assert connector.offered == [(key("A"), key("B"), key("C")), (key("B"), key("C"))]


def test_lost_blocks_of_others_change_nothing(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only requests that have the block in their taken prefix go back."""
    request = request_of("r", "A B", prompt_tokens=40)
    connector.compute(request, 32, [1, 2])
    monkeypatch.setattr(connector.manager, "take_lost_keys", lambda: {key("Z")}, raising=False)
    connector.compute(request, 33, [1, 2, 3])
    assert connector.offered == [(key("A"), key("B"))]


@pytest.mark.parametrize("policy", list(OffloadPolicy))
def test_loaded_blocks_are_offered_to_tiers_that_want_whole_requests(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    monkeypatch: pytest.MonkeyPatch,
    policy: OffloadPolicy,
) -> None:
    """REQUEST_LEVEL begins at the first block; BLOCK_LEVEL after what was loaded."""
    monkeypatch.setattr(
        connector.manager, "on_new_request", lambda _: RequestOffloadingContext(policy)
    )
    request = request_of("r", "A B C", prompt_tokens=60)
    connector.manager.hits(key("A"), key("B"))
    tokens = connector.find(request)
    assert tokens == 32
    connector.scheduler.update_state_after_alloc(request, ([1, 2],), tokens)
    connector.report(connector.step().loads[0])
    connector.step(ScheduledRequest(request, 32, 16, ([1, 2, 3],)))
    expected = {
        OffloadPolicy.BLOCK_LEVEL: (key("C"),),
        OffloadPolicy.REQUEST_LEVEL: (key("A"), key("B"), key("C")),
    }
    assert connector.offered == [expected[policy]]


def test_scheduling_without_a_load_gives_promises_up(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """Rule 3: leases end when the request runs without them."""
    request = request_of("r", "A B")
    connector.find(request)
    connector.scheduler.update_state_after_alloc(request, ([1, 2],), 0)
    assert ("release", "r", ()) in connector.manager.calls


def test_epochs_only_go_up(connector: Connector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of other weights would be found again under an epoch that was used before."""
    epochs: list[int] = []
    monkeypatch.setattr(connector.manager, "reset", epochs.append)
    connector.scheduler.reset(3)
    for epoch in (3, 2):
        with pytest.raises(EngineStateError, match="does not follow epoch 3"):
            connector.scheduler.reset(epoch)
    connector.scheduler.reset(4)
    assert epochs == [3, 4]


@pytest.mark.parametrize(("means", "calls"), [("cache", ["cache"]), ("epoch", [1, 2])])
def test_the_engines_reset_means_what_was_configured(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    monkeypatch: pytest.MonkeyPatch,
    means: str,
    calls: list[object],
) -> None:
    """Rule 7: the primary alone, or everything, under one epoch after the other."""
    connector = connect(config(engine_reset=means))
    seen: list[object] = []
    monkeypatch.setattr(connector.manager, "reset", seen.append)
    monkeypatch.setattr(connector.manager, "reset_cache", lambda: seen.append("cache"))
    for _ in calls:
        connector.scheduler.reset_cache()
    assert seen == calls
