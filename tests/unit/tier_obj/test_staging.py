"""Slots of staging memory: who gets the next one, and when one is free."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kv_tier_obj._staging import Staging

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def staging() -> Iterator[Staging]:
    """Four slots."""
    staging = Staging(4096, 4)
    yield staging
    staging.leave()


async def take(staging: Staging, *, stores: bool, until: asyncio.Event) -> None:
    """Hold a slot until told otherwise."""
    async with staging.slot(stores=stores):
        await until.wait()


async def turns() -> None:
    """Let all others run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_stores_have_half(staging: Staging) -> None:
    """Any number of stores holds half of the slots; loads get the others."""

    async def run() -> None:
        end = asyncio.Event()
        tasks = [asyncio.create_task(take(staging, stores=True, until=end)) for _ in range(10)]
        await turns()
        assert staging.free == 2
        tasks += [asyncio.create_task(take(staging, stores=False, until=end)) for _ in range(2)]
        await turns()
        assert staging.free == 0
        end.set()
        await asyncio.gather(*tasks)
        assert staging.free == 4

    asyncio.run(run())


def test_loads_come_first(staging: Staging) -> None:
    """A slot that becomes free goes to a load, whoever has waited longer."""

    async def run() -> None:
        end, order = asyncio.Event(), []

        async def use(stores: bool) -> None:
            async with staging.slot(stores=stores):
                order.append(stores)

        holders = [asyncio.create_task(take(staging, stores=False, until=end)) for _ in range(4)]
        await turns()
        waiting = [asyncio.create_task(use(stores)) for stores in (True, True, False)]
        await turns()
        end.set()
        await asyncio.gather(*holders, *waiting)
        assert order == [False, True, True]

    asyncio.run(run())


def test_a_slot_is_free_when_nobody_holds_it(staging: Staging) -> None:
    """One that NIXL still has is not lent, although its coroutine is gone."""

    async def run() -> None:
        async with staging.slot(stores=False) as slot:
            staging.hold(slot)
        assert staging.free == 3
        for _ in range(20):
            async with staging.slot(stores=False) as other:
                assert other != slot
        staging.drop(slot)
        assert staging.free == 4

    asyncio.run(run())


def test_who_is_cancelled_takes_no_slot_along(staging: Staging) -> None:
    """Neither one that waits, nor one that has just been given a slot."""

    async def run() -> None:
        end = asyncio.Event()
        holders = [asyncio.create_task(take(staging, stores=False, until=end)) for _ in range(4)]
        await turns()
        waiting = [asyncio.create_task(take(staging, stores=False, until=end)) for _ in range(3)]
        await turns()
        waiting[0].cancel()
        await turns()
        end.set()
        # The slots are given out as soon as the holders run; who gets one is cancelled before it
        # does.
        await asyncio.gather(*holders)
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert staging.free == 4

    asyncio.run(run())


def test_slots_do_not_overlap(staging: Staging) -> None:
    """Each has its own memory, at the address that NIXL is told."""
    for slot in range(4):
        with staging.view(slot) as view:
            view[:] = bytes([slot]) * 4096
    for slot in range(4):
        with staging.view(slot) as view:
            assert bytes(view) == bytes([slot]) * 4096


def test_one_slot_is_too_few() -> None:
    """A load needs one that no store has."""
    with pytest.raises(ValueError, match="too few"):
        Staging(4096, 1)
