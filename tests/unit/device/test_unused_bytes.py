"""A stored row holds the block's bytes and zeros: nothing of what its slot held before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_core.cpu import PrimaryGeometry, SharedOffloadRegion
from kv_core.device import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CpuGpuOffloadingHandlers,
)
from kv_core.device.copy import HostCopyBackend
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kv_core.engine import OffloadingHandler

FACTOR = 2
PAGES = (300, 500)  # of the two tensors
USED = ({0: 300}, {1: 450}, {0: 200, 1: 500})  # by each of three groups
STALE = 77


@pytest.fixture
def region(tmp_path: Path) -> Iterator[SharedOffloadRegion]:
    """Return a region of two workers, whose page 0 is the one in use."""
    geometry = PrimaryGeometry(4, 2, FACTOR * sum(PAGES), 4096, 4096)
    region = SharedOffloadRegion(
        "unused", geometry, namespace_fingerprint="0" * 64, shm_dir=tmp_path
    )
    yield region
    region.close()


@pytest.fixture
def handlers(region: SharedOffloadRegion) -> Iterator[CpuGpuOffloadingHandlers]:
    """Return handlers over GPU memory full of ones."""
    tensors = [CanonicalKVCacheTensor(np.ones((8, page), np.int8), page) for page in PAGES]
    groups = [tuple(CanonicalKVCacheRef(i, used) for i, used in group.items()) for group in USED]
    handlers = CpuGpuOffloadingHandlers(
        CanonicalKVCaches(tuple(tensors), tuple(groups)),
        [region.create_next_view(0, FACTOR * page) for page in PAGES],
        FACTOR,
        HostCopyBackend(),
    )
    yield handlers
    handlers.gpu_to_cpu.shutdown()
    handlers.cpu_to_gpu.shutdown()


def _fill(region: SharedOffloadRegion) -> None:
    """Let all slots have held blocks of others, up to the padding that nobody writes."""
    with region.create_kv_memoryview() as view:
        np.asarray(view)[:, : 2 * FACTOR * sum(PAGES)] = STALE


def _rows(region: SharedOffloadRegion) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    with region.create_kv_memoryview() as view:
        return np.array(view, dtype=np.uint8)


def _store(handler: OffloadingHandler, sizes: list[int], cpu_ids: list[int]) -> None:
    gpu = GPULoadStoreSpec(list(range(sum(sizes))), sizes, [0] * len(sizes))
    assert handler.transfer_async(1, (gpu, CPULoadStoreSpec(cpu_ids)))
    handler.wait([1])
    assert [result.success for result in handler.get_finished()] == [True]


@pytest.mark.parametrize("group", range(len(USED)))
def test_a_store_leaves_nothing_of_the_slot_before(
    region: SharedOffloadRegion, handlers: CpuGpuOffloadingHandlers, group: int
) -> None:
    """Tensors that the group does not use, and the padding of its pages, are zero."""
    _fill(region)
    sizes = [0] * len(USED)
    sizes[group] = 2 * FACTOR
    _store(handlers.gpu_to_cpu, sizes, [3, 1])
    expected = np.concatenate(
        [
            np.arange(page) < USED[group].get(i, 0)
            for i, page in enumerate(PAGES)
            for _ in range(FACTOR)
        ]
    )
    rows = _rows(region)
    for block in (3, 1):
        np.testing.assert_array_equal(rows[block, : len(expected)], expected)
    # Neither other slots, nor the other worker's page, nor the padding of the row.
    page = FACTOR * sum(PAGES)
    assert (rows[[0, 2], : 2 * page] == STALE).all()
    assert (rows[:, page : 2 * page] == STALE).all()
    assert not rows[:, 2 * page :].any()


def test_groups_of_one_store_clear_their_own_rows(
    region: SharedOffloadRegion, handlers: CpuGpuOffloadingHandlers
) -> None:
    """A store of several groups clears each row for the group that fills it."""
    _fill(region)
    _store(handlers.gpu_to_cpu, [FACTOR, FACTOR, FACTOR], [2, 0, 1])
    rows = _rows(region)
    for group, block in enumerate((2, 0, 1)):
        assert int(rows[block, : FACTOR * sum(PAGES)].sum()) == FACTOR * sum(USED[group].values())


def test_a_load_clears_nothing(
    region: SharedOffloadRegion, handlers: CpuGpuOffloadingHandlers
) -> None:
    """It reads rows that others may read at the same time."""
    _fill(region)
    before = _rows(region)
    gpu = GPULoadStoreSpec([0, 1], [2, 0, 0], [0, 0, 0])
    handlers.cpu_to_gpu.transfer_async(1, (CPULoadStoreSpec([0]), gpu))
    handlers.cpu_to_gpu.wait([1])
    np.testing.assert_array_equal(_rows(region), before)
