"""Shared pieces of the tests of the engine's interfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.engine import KVCacheGroupConfig, OffloadingConfig
from kv_core.keys import GroupGeometry, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACE = Namespace(
    model="m",
    model_fingerprint="f",
    revision="r",
    dtype="bfloat16",
    kv_layout="nhd",
    groups=(GroupGeometry(16, 1024, 2),),
    block_bytes=1024,
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="0",
)


@pytest.fixture
def make_config() -> Callable[..., OffloadingConfig]:
    """Return a function that makes a config of groups with these block sizes in tokens."""

    def make(*group_tokens: int, **fields: Any) -> OffloadingConfig:
        groups = tuple(
            KVCacheGroupConfig(tokens_per_block=tokens, layer_names=(f"layer.{index}",))
            for index, tokens in enumerate(group_tokens)
        )
        return OffloadingConfig(
            groups=groups,
            worker_block_bytes=1024,
            tokens_per_cache_block=fields.pop("tokens_per_cache_block", 16),
            namespace=NAMESPACE,
            engine_id="engine-0",
            **fields,
        )

    return make
