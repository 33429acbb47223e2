"""Blocks that wait for their bytes, and requests whose end waits for their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import ReqContext
from kv_core.tiering._parking import Parking

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey

A, B = ReqContext("a"), ReqContext("b")
TIER_0 = frozenset({0})
TIERS = frozenset({0, 2})


@pytest.fixture
def parking() -> Parking:
    """Return an empty one."""
    return Parking()


def test_a_block_is_taken_once_for_each_request_that_parked_it(
    parking: Parking, keys: list[OffloadKey]
) -> None:
    """With the request, its tiers and its blocks, in the order in which they become readable."""
    parking.park(keys[:3], A, TIERS)
    parking.park(keys[1:2], B, TIER_0)
    taken = parking.take([keys[2], keys[1], keys[9]])
    assert [(p.context, p.tiers, wanted) for p, wanted in taken] == [
        (A, TIERS, [keys[2], keys[1]]),
        (B, TIER_0, [keys[1]]),
    ]
    assert len(parking) == 1
    assert parking.take([keys[2], keys[1]]) == []


def test_parking_twice_is_parking_once(parking: Parking, keys: list[OffloadKey]) -> None:
    """One block, one copy."""
    parking.park(keys[:2], A, TIERS)
    parking.park(keys[:2], A, TIERS)
    assert len(parking) == 2
    ((_, wanted),) = parking.take(keys[:2])
    assert wanted == keys[:2]
    assert not parking


def test_nothing_is_taken_from_nothing(parking: Parking, keys: list[OffloadKey]) -> None:
    """Nor kept."""
    parking.park([], A, TIERS)
    assert parking.take(keys) == []
    assert (len(parking), bool(parking)) == (0, False)


def test_the_end_of_a_request_is_held_until_its_last_block(
    parking: Parking, keys: list[OffloadKey]
) -> None:
    """By the tiers that want its blocks, and only by those."""
    parking.park(keys[:2], A, TIERS)
    assert parking.hold_end("a") == TIERS
    ((parked, _),) = parking.take(keys[:1])
    assert not parked.is_over
    ((parked, _),) = parking.take(keys[1:2])
    assert parked.is_over


def test_a_request_without_parked_blocks_is_not_held(
    parking: Parking, keys: list[OffloadKey]
) -> None:
    """Neither one that never had any, nor one whose blocks are all gone."""
    assert parking.hold_end("a") == frozenset()
    parking.park(keys[:1], A, TIERS)
    parking.take(keys[:1])
    assert parking.hold_end("a") == frozenset()


def test_a_live_request_is_not_over(parking: Parking, keys: list[OffloadKey]) -> None:
    """It may park more."""
    parking.park(keys[:1], A, TIERS)
    ((parked, _),) = parking.take(keys[:1])
    assert not parked.is_over


def test_a_request_can_be_given_up(parking: Parking, keys: list[OffloadKey]) -> None:
    """Others keep what they parked; nothing of it is left behind."""
    parking.park(keys[:2], A, TIERS)
    parking.park(keys[:1], B, TIER_0)
    parking.hold_end("a")
    given_up = parking.give_up("a")
    assert given_up is not None
    assert given_up.is_over
    assert parking.give_up("a") is None
    assert [p.context for p, _ in parking.take(keys[:2])] == [B]
    assert not parking


def test_clearing_forgets_everything(parking: Parking, keys: list[OffloadKey]) -> None:
    """And says whose end was held."""
    parking.park(keys[:2], A, TIERS)
    parking.park(keys[:1], B, TIER_0)
    parking.hold_end("b")
    assert [(p.context, p.is_over) for p in parking.clear()] == [(A, False), (B, True)]
    assert not parking
    assert parking.take(keys[:2]) == []
