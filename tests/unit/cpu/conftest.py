"""Shared pieces of the tests of the primary tier."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from kv_core.contract import OffloadKey, ReqContext, make_offload_key
from kv_core.cpu import CPUOffloadingManager, CPUPrimaryTierOffloadingManager, PrimaryGeometry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROW_STRIDE = 4096


@pytest.fixture
def keys() -> list[OffloadKey]:
    """Return 64 distinct keys."""
    return [make_offload_key(hashlib.sha256(bytes([i])).digest(), 0) for i in range(64)]


@pytest.fixture
def request_a() -> ReqContext:
    """Return a request."""
    return ReqContext("a")


@pytest.fixture
def request_b() -> ReqContext:
    """Return another request."""
    return ReqContext("b")


@pytest.fixture
def store() -> Callable[[CPUOffloadingManager, Sequence[OffloadKey], str], list[int]]:
    """Return a function that stores keys for a request, to the end, and returns their slots."""

    def run(manager: CPUOffloadingManager, offered: Sequence[OffloadKey], req_id: str) -> list[int]:
        output = manager.prepare_store(offered, ReqContext(req_id))
        assert output is not None
        manager.complete_store(output.keys_to_store, ReqContext(req_id))
        block_ids: list[int] = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
        return block_ids

    return run


@pytest.fixture
def primary() -> Iterator[CPUPrimaryTierOffloadingManager]:
    """Return a primary tier of four slots over plain memory, with events."""
    view = memoryview(bytearray(4 * ROW_STRIDE)).cast("B", (4, ROW_STRIDE))
    manager = CPUPrimaryTierOffloadingManager(4, view, ROW_STRIDE, enable_events=True)
    yield manager
    manager.shutdown()


@pytest.fixture
def geometry() -> PrimaryGeometry:
    """Return the geometry of two workers with pages of 3000 bytes, four blocks."""
    return PrimaryGeometry(
        num_blocks=4,
        num_workers=2,
        worker_page_bytes=3000,
        row_stride=8192,
        block_bytes=8192,
    )
