"""Tiers over NIXL and a store in memory."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import TierDriver
from kv_tier_obj import ObjConfig, _tier
from kv_tier_obj._tier import ObjTier

from ._fakes import FakeClient, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_core.contract import Clock

BLOCK_BYTES = 4096


class Open(Protocol):
    """Opens tiers, which are shut down at the end of the test."""

    def __call__(
        self, *, clock: Clock | None = None, row_stride: int | None = None, **settings: Any
    ) -> TierDriver:
        """Open one."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A store that the tiers of the test reach; nothing forbidden has happened at the end."""
    world = World()
    monkeypatch.setattr(_tier, "open_agent", world.open_agent)
    monkeypatch.setattr(ObjTier, "make_client", lambda _: FakeClient(world))
    yield world
    assert world.violations == []


@pytest.fixture
def open_tier(world: World) -> Iterator[Open]:
    """Return what opens tiers."""
    with ExitStack() as stack:

        def open_tier(
            *, clock: Clock | None = None, row_stride: int | None = None, **settings: Any
        ) -> TierDriver:
            config = parse_tier_config("obj", ObjConfig, {"bucket": "kv-cache", **settings})
            more: dict[str, Any] = {} if clock is None else {"clock": clock}
            driver = TierDriver(
                ObjTier,
                config,
                num_blocks=64,
                block_bytes=BLOCK_BYTES,
                row_stride=row_stride,
                tier_name="obj",
                **more,
            )
            stack.callback(world.let_go)
            return stack.enter_context(driver)

        yield open_tier
        # Before the tiers are shut down: what is stuck would keep their threads.
        world.let_go()
        world.raises.clear()
        world.query_gate.set()
