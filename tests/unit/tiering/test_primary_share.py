"""The account of the share: what counts, once, and who gives way to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import ReqContext
from kv_core.tiering._requests import RequestState, RequestTable
from kv_core.tiering._share import PrimaryShare

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey
    from kv_core.cpu import CPUPrimaryTierOffloadingManager


@pytest.fixture
def primary(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> CPUPrimaryTierOffloadingManager:
    """Return a primary tier of 16 slots with blocks 0 to 9."""
    engine = start(num_blocks=16, num_tiers=0)
    engine.store("x", *keys[:10])
    return engine.primary


@pytest.fixture
def share(primary: CPUPrimaryTierOffloadingManager) -> PrimaryShare:
    """Return a share of four slots, leased for ten seconds at most."""
    return PrimaryShare(4, 10.0, primary)


@pytest.fixture
def old() -> RequestState:
    """Return the oldest of three requests."""
    return RequestState(ReqContext("old"), 0)


@pytest.fixture
def middle() -> RequestState:
    """Return the request between the other two."""
    return RequestState(ReqContext("middle"), 1)


@pytest.fixture
def young() -> RequestState:
    """Return the youngest of three requests."""
    return RequestState(ReqContext("young"), 2)


def _pinned(primary: CPUPrimaryTierOffloadingManager) -> float:
    return primary.get_stats()["blocks_pinned"]


def test_a_lease_pins_and_counts(
    share: PrimaryShare,
    primary: CPUPrimaryTierOffloadingManager,
    old: RequestState,
    keys: list[OffloadKey],
) -> None:
    """Each block once, however often it is named; both end together."""
    share.lease(old, [keys[0], keys[1], keys[0]], now=0.0)
    share.lease(old, keys[:2], now=1.0)
    assert (share.leased, share.used, _pinned(primary)) == (2, 2, 2)
    assert list(old.leases) == keys[:2]
    assert old.leased_at == 0.0
    share.end_leases(old)
    share.end_leases(old)
    assert (share.leased, share.used, _pinned(primary)) == (0, 0, 0)


def test_the_leading_blocks_that_fit_are_leased(
    share: PrimaryShare, old: RequestState, keys: list[OffloadKey]
) -> None:
    """Reservations and quarantined slots take their part."""
    share.reserved = 1
    share.quarantined = 1
    share.lease(old, keys[:4], now=0.0)
    assert list(old.leases) == keys[:2]
    assert share.used == share.limit == 4
    assert not share.has_room(old)


def test_a_slot_that_several_lease_counts_once(
    share: PrimaryShare,
    primary: CPUPrimaryTierOffloadingManager,
    old: RequestState,
    young: RequestState,
    keys: list[OffloadKey],
) -> None:
    """A shared prefix does not fill the share by itself; it is pinned until the last one ends."""
    share.lease(old, keys[:3], now=0.0)
    share.lease(young, keys[:4], now=0.0)
    assert share.leased == 4
    assert len(young.leases) == 4
    share.end_leases(old)
    assert (share.leased, _pinned(primary)) == (4, 4)
    share.end_leases(young)
    assert (share.leased, _pinned(primary)) == (0, 0)


def test_shared_blocks_are_leased_even_without_room(
    share: PrimaryShare, old: RequestState, young: RequestState, keys: list[OffloadKey]
) -> None:
    """They cost nothing; the first that would stops it."""
    share.lease(old, keys[:4], now=0.0)
    share.lease(young, [*keys[:2], keys[5], keys[3]], now=0.0)
    assert list(young.leases) == keys[:2]


def test_an_older_request_takes_leases_from_the_youngest(
    share: PrimaryShare,
    old: RequestState,
    middle: RequestState,
    young: RequestState,
    keys: list[OffloadKey],
) -> None:
    """The youngest first, its tail first."""
    share.lease(middle, keys[:2], now=0.0)
    share.lease(young, keys[2:4], now=0.0)
    assert share.has_room(old)
    assert list(young.leases) == [keys[2]]
    share.lease(old, keys[4:7], now=0.0)
    assert list(old.leases) == keys[4:7]
    assert list(middle.leases) == [keys[0]]
    assert not young.leases
    assert share.revoked == 3


def test_a_younger_request_takes_nothing(
    share: PrimaryShare, old: RequestState, young: RequestState, keys: list[OffloadKey]
) -> None:
    """Neither does a request take from itself."""
    share.lease(old, keys[:4], now=0.0)
    assert not share.has_room(young)
    assert not share.revoke_younger(old)
    assert len(old.leases) == 4


def test_a_revoked_lease_of_a_shared_slot_makes_no_room(
    share: PrimaryShare,
    old: RequestState,
    middle: RequestState,
    young: RequestState,
    keys: list[OffloadKey],
) -> None:
    """It goes on until a slot is free, or nothing younger is left."""
    share.lease(middle, keys[:4], now=0.0)
    share.lease(young, keys[:4], now=0.0)
    assert share.has_room(old)
    assert not young.leases
    assert list(middle.leases) == keys[:3]


def test_a_request_that_was_answered_in_this_step_can_be_spared(
    share: PrimaryShare, old: RequestState, young: RequestState, keys: list[OffloadKey]
) -> None:
    """Its blocks cannot be evicted before the end of the step anyway."""
    share.lease(young, keys[:2], now=0.0)
    young.step_hits.append(keys[0])
    assert not share.revoke_younger(old, spare_answered=True)
    assert share.revoke_younger(old)


def test_a_request_that_fills_the_share_waits_in_vain(
    share: PrimaryShare, old: RequestState, keys: list[OffloadKey]
) -> None:
    """Its own leases and reservations, and what is quarantined; not what others hold."""
    share.reserved = 4
    old.reserved = 1
    assert not share.is_filled_by(old)
    share.reserved = 1
    share.lease(old, keys[:2], now=0.0)
    assert not share.is_filled_by(old)
    share.quarantined = 1
    assert share.is_filled_by(old)


def test_leases_end_at_their_deadline(
    share: PrimaryShare,
    primary: CPUPrimaryTierOffloadingManager,
    old: RequestState,
    young: RequestState,
    keys: list[OffloadKey],
) -> None:
    """Ten seconds after the first of them, and there are no new ones for that wait."""
    share.lease(young, keys[:1], now=0.0)
    share.lease(old, keys[1:2], now=5.0)
    share.expire(now=10.0)
    assert share.leased == 2
    share.expire(now=10.1)
    assert (list(young.leases), list(old.leases)) == ([], [keys[1]])
    share.lease(young, keys[:1], now=10.2)
    assert share.leased == _pinned(primary) == 1


def test_after_its_wait_a_request_is_leased_blocks_again(
    share: PrimaryShare, young: RequestState, keys: list[OffloadKey]
) -> None:
    """The deadline is one of each wait, not of the request."""
    share.lease(young, keys[:1], now=0.0)
    share.expire(now=11.0)
    RequestTable().stop_waiting(young)
    share.lease(young, keys[:1], now=12.0)
    assert share.leased == 1
