"""Drive the tiering engine step by step, as an inference engine would, without a GPU.

One request computes three blocks, which are stored in CPU memory and in a tier; CPU memory
forgets them; a second request with the same prompt gets them back::

    python examples/embed_engine.py
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_core.connector import (
    ConnectorMetadata,
    OffloadingConnectorScheduler,
    OffloadingConnectorWorker,
    ScheduledRequest,
    StepSchedule,
    TieringOffloadingSpec,
)
from kv_core.device import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kv_core.engine import KVCacheGroupConfig, OffloadingConfig
from kv_core.keys import GroupGeometry, Namespace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TOKENS_PER_BLOCK = 16
BLOCK_BYTES = 4096
GPU_BLOCKS = 32


@dataclass
class Request:
    """What the connector wants to know of a request (``kv_core.connector.KVRequest``)."""

    req_id: str
    num_prompt_tokens: int
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens so far: this example generates none."""
        return self.num_prompt_tokens


def chained_hashes(prompt: str, num_blocks: int) -> list[bytes]:
    """Name each block by its content and everything before it, as a prefix cache does."""
    hashes, parent = [], b""
    for index in range(num_blocks):
        parent = hashlib.sha256(parent + f"{prompt}:{index}".encode()).digest()
        hashes.append(parent)
    return hashes


def offloading_config() -> OffloadingConfig:
    """Describe the model's KV cache and the tiers below the GPU."""
    namespace = Namespace(
        model="example/model",
        model_fingerprint="weights-2026-11",
        revision="main@4f1c2a",
        dtype="int8",
        kv_layout="flat-v1",
        groups=(
            GroupGeometry(
                tokens_per_block=TOKENS_PER_BLOCK, bytes_per_block=BLOCK_BYTES, num_layers=1
            ),
        ),
        block_bytes=BLOCK_BYTES,
        tokens_per_hash=TOKENS_PER_BLOCK,
        hash_algorithm="sha256",
        hash_seed="0",
    )
    return OffloadingConfig(
        groups=(KVCacheGroupConfig(tokens_per_block=TOKENS_PER_BLOCK, layer_names=("layers.0",)),),
        worker_block_bytes=BLOCK_BYTES,
        tokens_per_cache_block=TOKENS_PER_BLOCK,
        namespace=namespace,
        engine_id=f"embed-example-{os.getpid()}",
        extra_config={
            "cpu_bytes_to_use": 64 * BLOCK_BYTES,
            "secondary_tiers": [{"type": "example", "max_blocks": 1000}],
        },
    )


class Engine:
    """The smallest engine around the connector: one GPU tensor and a step."""

    def __init__(self) -> None:
        config = offloading_config()
        self.gpu = np.zeros((GPU_BLOCKS, BLOCK_BYTES), dtype=np.int8)
        self.spec = TieringOffloadingSpec(config)
        self.scheduler = OffloadingConnectorScheduler(config, self.spec.get_manager())
        self.worker = OffloadingConnectorWorker(self.spec)
        self.worker.register_kv_caches(
            CanonicalKVCaches(
                tensors=(CanonicalKVCacheTensor(self.gpu, BLOCK_BYTES),),
                group_data_refs=((CanonicalKVCacheRef(0, BLOCK_BYTES),),),
            )
        )

    def step(self, schedule: StepSchedule) -> set[str]:
        """Run one step and return the requests whose loads have ended."""
        metadata: ConnectorMetadata = self.scheduler.build_connector_meta(schedule)
        self.worker.handle_preemptions(metadata)
        self.worker.start_load_kv(metadata)
        # Here an engine runs its forward pass.
        report = self.scheduler.update_connector_output(self.worker.get_finished())
        return report.loaded_req_ids

    def settle(self) -> None:
        """Step without requests until every transfer has ended, as an idle engine does."""
        while self.scheduler.has_pending_work():
            self.step(StepSchedule())
            time.sleep(0.001)

    def close(self) -> None:
        """Release the workers, the tiers and the shared memory."""
        self.worker.shutdown()
        self.scheduler.shutdown()
        self.spec.shutdown()


def main() -> int:
    """Store with one request, load with another, compare the bytes."""
    engine = Engine()
    hashes = chained_hashes("the same long prompt", 3)

    first = Request("first", 3 * TOKENS_PER_BLOCK, hashes)
    matched, _ = engine.scheduler.get_num_new_matched_tokens(first, 0)
    print(f"first request: {matched} tokens can be loaded")
    engine.scheduler.update_state_after_alloc(first, ([1, 2, 3],), 0)
    computed = StepSchedule(
        scheduled=(ScheduledRequest(first, 0, first.num_tokens, ([1, 2, 3],)),),
        new_req_ids=frozenset({"first"}),
        allocated_block_ids=frozenset({1, 2, 3}),
    )
    # The forward pass of that step would write these.
    engine.gpu[1:4] = np.random.default_rng(0).integers(-128, 128, (3, BLOCK_BYTES), dtype=np.int8)
    engine.step(computed)
    engine.scheduler.request_finished(first)
    engine.settle()

    # CPU memory forgets, the tier does not.
    engine.scheduler.reset_cache()
    second = Request("second", 3 * TOKENS_PER_BLOCK + 1, hashes)
    matched = None
    while matched is None:
        matched, _ = engine.scheduler.get_num_new_matched_tokens(second, 0)
        if matched is None:
            # The tier is looking, or promoting: other requests would run meanwhile.
            engine.step(StepSchedule())
            time.sleep(0.001)
    print(f"second request: {matched} tokens can be loaded")
    engine.scheduler.update_state_after_alloc(second, ([4, 5, 6],), matched)
    print(f"they come from: {engine.scheduler.hit_levels(second)}")
    engine.step(StepSchedule(allocated_block_ids=frozenset({4, 5, 6})))
    engine.settle()
    same = bool((engine.gpu[4:7] == engine.gpu[1:4]).all())
    print(f"the bytes are the same: {same}")
    engine.close()
    return 0 if same and matched == 3 * TOKENS_PER_BLOCK else 1


if __name__ == "__main__":
    raise SystemExit(main())
