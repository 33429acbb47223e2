"""Specs of separate processes: the scheduler's has the manager, the workers' have the handlers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_core.connector import CPUOffloadingSpec, RegionRole, TieringOffloadingSpec
from kv_core.contract import OffloadKey, ReqContext
from kv_core.device import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec
from kv_core.errors import EngineStateError, RegionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kv_core.engine import OffloadingConfig

PAGE_BYTES = 4096
BLOCKS = 4
ROLE = RegionRole(nonce=bytes(range(16)))


@pytest.fixture
def make_spec(
    config: Callable[..., OffloadingConfig], tmp_path: Path
) -> Iterator[Callable[[RegionRole | None], CPUOffloadingSpec]]:
    """Return a maker of specs for two workers, which are shut down at the end."""
    made: list[CPUOffloadingSpec] = []
    size = BLOCKS * 2 * PAGE_BYTES
    engine = config(num_workers=2, cpu_bytes_to_use=size, shm_dir=str(tmp_path))

    def make(role: RegionRole | None) -> CPUOffloadingSpec:
        made.append(CPUOffloadingSpec(engine, role=role))
        return made[-1]

    yield make
    for spec in reversed(made):
        spec.shutdown()
    assert list(tmp_path.iterdir()) == []


def pool(value: int) -> CanonicalKVCaches:
    """Return a GPU pool of two blocks, in host memory, full of one byte."""
    tensor = np.full((2, PAGE_BYTES), value, dtype=np.int8)
    return CanonicalKVCaches(
        (CanonicalKVCacheTensor(tensor, PAGE_BYTES),), ((CanonicalKVCacheRef(0, PAGE_BYTES),),)
    )


def test_each_worker_stores_into_its_own_page(
    make_spec: Callable[[RegionRole | None], CPUOffloadingSpec], tmp_path: Path
) -> None:
    """The scheduler, and so its tiers, see both pages of the row."""
    scheduler = make_spec(ROLE)
    view = scheduler.primary_view
    for rank in (0, 1):
        worker = make_spec(ROLE.of_worker(rank, deadline_s=5))
        (_, _, stores), _ = worker.get_handlers(pool(10 + rank))
        stores.transfer_async(0, (GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([2])))
        stores.wait([0])
        del stores
    with view.block(2) as row:
        assert bytes(row) == b"\x0a" * PAGE_BYTES + b"\x0b" * PAGE_BYTES
    with view.block(1) as row:
        assert bytes(row) == bytes(2 * PAGE_BYTES)
    assert len(list(tmp_path.iterdir())) == 1
    scheduler.wait_until_attached(5)
    assert list(tmp_path.iterdir()) == []


def test_the_scheduler_names_who_is_missing(
    make_spec: Callable[[RegionRole | None], CPUOffloadingSpec],
) -> None:
    """Waiting goes on where it ended."""
    scheduler = make_spec(ROLE)
    scheduler.get_manager()
    worker = make_spec(ROLE.of_worker(0, deadline_s=5))
    next(worker.get_handlers(pool(0)))
    with pytest.raises(RegionError, match="of 2 workers, 1 have not attached"):
        scheduler.wait_until_attached(0)
    other = make_spec(ROLE.of_worker(1, deadline_s=5))
    next(other.get_handlers(pool(0)))
    scheduler.wait_until_attached(5)


def test_a_worker_of_another_start_is_refused(
    make_spec: Callable[[RegionRole | None], CPUOffloadingSpec],
) -> None:
    """It would load what another generation of the engine has stored."""
    assert make_spec(RegionRole.of_scheduler()).primary_view.num_blocks == BLOCKS
    with pytest.raises(RegionError, match="its nonce is"):
        next(make_spec(ROLE.of_worker(0, deadline_s=0)).get_handlers(pool(0)))


def test_every_start_has_a_nonce_of_its_own() -> None:
    """Workers have their scheduler's."""
    first, second = RegionRole.of_scheduler(), RegionRole.of_scheduler()
    assert first.nonce != second.nonce
    assert first.of_worker(3).nonce == first.nonce
    assert (first.worker, first.of_worker(3).worker) == (None, 3)


def test_a_worker_has_no_manager(
    make_spec: Callable[[RegionRole | None], CPUOffloadingSpec],
) -> None:
    """A second ledger over the same slots would hand them out twice."""
    with pytest.raises(EngineStateError, match="worker 1 has no manager"):
        make_spec(ROLE.of_worker(1)).get_manager()


def test_the_scheduler_has_no_handlers(
    make_spec: Callable[[RegionRole | None], CPUOffloadingSpec],
) -> None:
    """They would write into the page of rank 0."""
    with pytest.raises(EngineStateError, match="of_worker"):
        next(make_spec(ROLE).get_handlers(pool(0)))


def test_without_a_role_there_is_nobody_to_wait_for(
    make_spec: Callable[[RegionRole | None], CPUOffloadingSpec],
) -> None:
    """One process is both, and the region is made without a name from the start."""
    spec = make_spec(None)
    spec.wait_until_attached(0)
    next(spec.get_handlers(pool(0)))
    spec.get_manager()


def test_a_failed_copy_of_any_worker_fails_the_block(
    config: Callable[..., OffloadingConfig], tmp_path: Path
) -> None:
    """Engines that do not carry failures learn of them from the region, once for each."""
    size = BLOCKS * 2 * PAGE_BYTES
    engine = config(num_workers=2, cpu_bytes_to_use=size, shm_dir=str(tmp_path))
    scheduler = TieringOffloadingSpec(engine, role=ROLE)
    worker = TieringOffloadingSpec(engine, role=ROLE.of_worker(1, deadline_s=5))
    manager, keys = scheduler.get_manager(), [OffloadKey(bytes([n] * 36)) for n in range(3)]
    context = ReqContext("r")
    output = manager.prepare_store(keys, context)
    assert output is not None
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    assert scheduler.take_failed(keys) == ()
    next(worker.get_handlers(pool(0)))
    worker.mark_failed([int(output.store_spec.block_ids[1])])
    assert scheduler.take_failed(keys) == [keys[1]]
    assert scheduler.take_failed(keys) == []
    worker.shutdown()
    scheduler.shutdown()


def test_a_worker_that_is_stopped_does_not_wait_for_its_scheduler(
    make_spec: Callable[[RegionRole | None], CPUOffloadingSpec],
) -> None:
    """Its engine may have failed to start, and nobody will create the region any more."""
    stop = threading.Event()
    stop.set()
    worker = make_spec(ROLE.of_worker(0, deadline_s=3600, stop=stop))
    with pytest.raises(RegionError, match="found no region"):
        next(worker.get_handlers(pool(0)))
