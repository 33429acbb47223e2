"""Drives vLLM's file system tier on commands from standard input. Run by its own interpreter.

One JSON object a line, and one line in answer. Imports nothing of kv-core: the environment of
vLLM need not have it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

# What the tier says goes elsewhere: standard output is for the answers.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import vllm  # noqa: E402
from vllm.v1.kv_offload.base import ReqContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.fs import io, manager  # noqa: E402

_POLL_S = 0.001


class Child:
    """The tier that is open, if one is, and the memory."""

    def __init__(self, descriptor: int) -> None:
        self.mapping = mmap.mmap(descriptor, 0)
        self.job_ids = itertools.count(1)
        self.request = ReqContext(req_id="benchmark")
        self.tier: Any = None

    def open(self, root: str, block_bytes: int) -> dict[str, Any]:
        """Open the tier as it ships, on an empty folder."""
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("0",), group_id=0),),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="benchmark",
            model=OffloadingModelConfig(name="example/model", dtype="bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=1,
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=True,
            ),
        )
        rows = (len(self.mapping) // block_bytes, block_bytes)
        self.tier = manager.FileSystemTierManager(
            SimpleNamespace(config=config, blocks_per_chunk=1),
            memoryview(self.mapping).cast("B", rows),
            "fs",
            root_dir=root,
        )
        self.tier.on_new_request(self.request)
        return {"direct": self.tier._use_o_direct}

    def move(self, batches: list[tuple[list[int], list[int]]], *, load: bool) -> dict[str, Any]:
        """Submit all jobs and wait for all results."""
        jobs = [
            TransferJob(
                job_id=next(self.job_ids),
                keys=[
                    make_offload_key(hashlib.sha256(key.to_bytes(8, "big")).digest(), 0)
                    for key in keys
                ],
                chunk_ids=np.array(slots, dtype=np.int64),
                is_promotion=load,
                req_context=self.request,
            )
            for keys, slots in batches
        ]
        submit = self.tier.submit_load if load else self.tier.submit_store
        start = time.perf_counter()
        for job in jobs:
            submit(job)
        waiting, failed = len(jobs), 0
        while waiting:
            results = list(self.tier.get_finished_jobs())
            waiting -= len(results)
            failed += sum(not result.success for result in results)
            if not results:
                time.sleep(_POLL_S)
        return {"seconds": time.perf_counter() - start, "failed": failed}

    def close(self) -> dict[str, Any]:
        """Shut the tier down."""
        self.tier.shutdown()
        self.tier = None
        return {}


def main() -> None:
    """Answer commands until there are no more."""
    child = Child(int(sys.argv[1]))
    hello = {"version": vllm.__version__, "extension": io._HAS_FSIO_C}
    _answer(hello)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("command")
        _answer(getattr(child, name)(**command))


def _answer(message: dict[str, Any]) -> None:
    _answers.write(json.dumps(message) + "\n")
    _answers.flush()


if __name__ == "__main__":
    main()
