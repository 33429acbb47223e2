"""Our spec in vLLM's hands: its scheduler's part and its workers' part, in one process."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import sys
import threading
import time
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import pytest
import torch
from tests.vllm_env.conftest import (
    PageSpec,
    Script,
    _scripted_plugin,
    make_offloading_config,
    make_vllm_config,
)
from vllm.v1.kv_offload import base

from kv_core.plugins import TierRegistry
from kv_core.vllm._spec import KVCoreOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kv_core.contract import OffloadKey

PAGE_BYTES: Final = 5000
"""Not a multiple of a page of memory, so that rows have padding."""

GPU_BLOCKS: Final = 16
ROW_BYTES: Final = 8192
PATIENCE_S: Final = 20.0


class KVCacheConfig(SimpleNamespace):
    """Stands for vLLM's, with what the namespace reads."""


def content(key: bytes, rank: int) -> bytes:
    """Return what a rank's GPU block of this key holds."""
    return hashlib.shake_128(bytes([rank]) + bytes(key)).digest(PAGE_BYTES)


@final
class Engine:
    """Calls the parts as vLLM 0.32's connector does, for batches of whole blocks of one group.

    Attributes:
        config: vLLM's ``OffloadingConfig`` of rank 0.
        manager: What the scheduler has.
        workers: What each rank has.
        gpus: The KV cache of each rank: int8, shape ``(GPU_BLOCKS, PAGE_BYTES)``.
    """

    def __init__(
        self, config: Any, vllm_config: Any, kv_cache_config: Any, *, ranks: int = 1
    ) -> None:
        vllm_config.instance_id = "1"
        vllm_config.parallel_config.world_size = ranks
        vllm_config.parallel_config.distributed_executor_backend = "mp"
        self.config = config
        self.gpus = [torch.zeros((GPU_BLOCKS, PAGE_BYTES), dtype=torch.int8) for _ in range(ranks)]
        # In vLLM's order: workers first, which wait for the scheduler.
        self.specs = [self._spec(rank, ranks) for rank in range(ranks)]
        self.workers = [
            spec.get_worker(_canonical(gpu))
            for spec, gpu in zip(self.specs, self.gpus, strict=True)
        ]
        self.scheduler_spec = self._spec(0, ranks)
        self.manager = self.scheduler_spec.get_manager()
        self._requests: dict[str, Any] = {}
        self._next_job = 0
        self._order = random.Random(0)

    def _spec(self, rank: int, ranks: int) -> KVCoreOffloadingSpec:
        parallel = dataclasses.replace(
            self.config.parallel, rank=rank, world_size=ranks, tp_size=ranks
        )
        return KVCoreOffloadingSpec(dataclasses.replace(self.config, parallel=parallel))

    # -- requests and steps -----------------------------------------------------------------------

    def request(self, req_id: str, params: dict[str, Any] | None = None, **more: Any) -> Any:
        """Return a request, announced at its first use."""
        if req_id not in self._requests:
            self._requests[req_id] = base.ReqContext(req_id, params, **more)
            self.manager.on_new_request(self._requests[req_id])
        return self._requests[req_id]

    def end_request(self, req_id: str) -> None:
        """End a request."""
        self.manager.on_request_finished(self._requests.pop(req_id))

    def end_step(self, *new_req_ids: str, preempted: Sequence[str] = ()) -> None:
        """End a step of the scheduler."""
        self.manager.on_schedule_end(base.ScheduleEndContext(new_req_ids, preempted))

    def ask(self, req_id: str, *keys: OffloadKey) -> list[str]:
        """Look keys up; return vLLM's answers as words."""
        return [self.manager.lookup(key, self.request(req_id)).name for key in keys]

    def until_known(self, req_id: str, *keys: OffloadKey) -> list[str]:
        """Ask in step after step until all answers are final."""
        end, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while True:
            answers = self.ask(req_id, *keys)
            if not {"RETRY", "HIT_PENDING"} & set(answers):
                return answers
            assert time.monotonic() < end, f"still {answers}"
            self.end_step()
            pause.wait(0.001)

    # -- transfers --------------------------------------------------------------------------------

    def offer(self, req_id: str, keys: Sequence[OffloadKey]) -> tuple[int, list[OffloadKey]] | None:
        """Offer blocks and begin to store what is taken, from GPU blocks 0, 1, and so on.

        Returns:
            The job and its blocks; ``None`` when the offer was declined.
        """
        output = self.manager.prepare_store(list(keys), self.request(req_id))
        if output is None:
            return None
        taken = output.keys_to_store
        for rank, gpu in enumerate(self.gpus):
            for block, key in enumerate(taken):
                gpu[block] = torch.from_numpy(
                    np.frombuffer(content(key, rank), dtype=np.int8).copy()
                )
        pages = base.GPULoadStoreSpec(list(range(len(taken))), [len(taken)], [0])
        job_id = self._new_job()
        for worker in self.workers:
            assert worker.submit_store(job_id, pages, output.store_spec)
        return job_id, taken

    def finish_store(self, req_id: str, job_id: int, keys: Sequence[OffloadKey]) -> None:
        """Wait for the workers and report the end of a store as vLLM does: keys in a set."""
        self._wait(job_id)
        self.manager.complete_store(set(keys), self.request(req_id))

    def store(self, req_id: str, *keys: OffloadKey) -> list[OffloadKey]:
        """Store blocks and return those that were copied."""
        offered = self.offer(req_id, keys)
        assert offered is not None
        self.finish_store(req_id, *offered)
        return offered[1]

    def load(self, req_id: str, *keys: OffloadKey) -> list[list[bytes]]:
        """Load blocks into other GPU blocks; return for each rank what is in them then."""
        request = self.request(req_id)
        rows = self.manager.prepare_load(list(keys), request)
        first = GPU_BLOCKS - len(keys)
        pages = base.GPULoadStoreSpec(list(range(first, GPU_BLOCKS)), [len(keys)], [0])
        job_id = self._new_job()
        for worker in self.workers:
            assert worker.submit_load(job_id, rows, pages)
        self._wait(job_id)
        shuffled = list(keys)
        self._order.shuffle(shuffled)
        self.manager.complete_load(shuffled, request)
        return [[block.numpy().tobytes() for block in gpu[first:]] for gpu in self.gpus]

    def _new_job(self) -> int:
        self._next_job += 1
        return self._next_job

    def _wait(self, job_id: int) -> None:
        """Wait until every worker has reported a job, well: vLLM asserts it."""
        for worker in self.workers:
            worker.wait({job_id})
            results = worker.get_finished()
            assert [result.job_id for result in results] == [job_id]
            assert results[0].success

    # -- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Shut down in vLLM's order."""
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()


def _canonical(gpu: torch.Tensor) -> Any:
    return base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(gpu, PAGE_BYTES)],
        [[base.CanonicalKVCacheRef(0, PAGE_BYTES)]],
    )


# -- fixtures ------------------------------------------------------------------------------------


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Return the maker of engines: settings, and how many slots and ranks."""
    engines: list[Engine] = []
    shm_dir = tmp_path / "shm"
    shm_dir.mkdir()

    def make(
        *,
        slots: int = 8,
        ranks: int = 1,
        events: bool = False,
        window: int | None = None,
        **settings: Any,
    ) -> Engine:
        row_bytes = ROW_BYTES if ranks == 1 else 12288
        extra = {
            "spec_name": "KVCoreOffloadingSpec",
            "cpu_bytes_to_use": slots * row_bytes,
            "shm_dir": str(shm_dir),
            **settings,
        }
        vllm_config = make_vllm_config(model)
        vllm_config.parallel_config = SimpleNamespace(nnodes_within_dp=1)
        page = PageSpec(sliding_window=window)
        kv_cache_config = KVCacheConfig(kv_cache_groups=[SimpleNamespace(kv_cache_spec=page)])
        config = make_offloading_config(extra, events=events)
        engines.append(Engine(config, vllm_config, kv_cache_config, ranks=ranks))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    assert list(shm_dir.iterdir()) == []


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[Script]:
    """Install the type ``scripted``; return the tiers that are opened of it."""
    opened: list[Script] = []
    monkeypatch.setitem(sys.modules, "kv_tier_scripted", _scripted_plugin(opened))
    point = EntryPoint("scripted", "kv_tier_scripted", "kv_core.tiers")
    for user in ("kv_core.vllm._config", "kv_core.connector._specs"):
        monkeypatch.setattr(f"{user}.TierRegistry", lambda: TierRegistry([point]))
    return opened
