"""Sizes of the simple mode, and what it refuses to start with."""

from __future__ import annotations

from typing import Any

import pytest

from kv_core.engine import KVCacheGroupConfig
from kv_core.errors import ConfigError
from kv_core.simple import RankMemory, SimpleOffloadConfig


def group(tokens: int = 16) -> KVCacheGroupConfig:
    """Return a full-attention group."""
    return KVCacheGroupConfig(tokens_per_block=tokens, layer_names=("layer",))


def config(**fields: Any) -> SimpleOffloadConfig:
    """Return a config of which some fields differ."""
    defaults: dict[str, Any] = {
        "groups": (group(),),
        "tokens_per_hash": 16,
        "gpu_blocks": 100,
        "ranks": (RankMemory(100 * 4096, 10 * 4096),),
        "max_batched_tokens": 100,
    }
    return SimpleOffloadConfig(**{**defaults, **fields})


def test_cpu_blocks_are_those_of_the_smallest_rank() -> None:
    """Every rank has the same number, in proportion to what a block takes there."""
    assert config().num_cpu_blocks == 10
    # 100 blocks of 4096 and of 1000 bytes: 10 and 40 blocks, less one byte.
    ranks = (RankMemory(409600, 40960), RankMemory(100000, 40000), RankMemory(409600, 40959))
    assert config(ranks=ranks[:2]).num_cpu_blocks == 10
    assert config(ranks=ranks).num_cpu_blocks == 9
    assert config(ranks=ranks).world_size == 3


def test_a_size_that_does_not_divide_works() -> None:
    """Three million and some bytes a block, no multiple of any page (vllm#55424)."""
    block_bytes = 3_098_112
    memory = RankMemory(50 * block_bytes, 7 * block_bytes + 1)
    assert config(gpu_blocks=50, ranks=(memory,)).num_cpu_blocks == 7


@pytest.mark.parametrize(
    ("fields", "setting", "message"),
    [
        (
            {"ranks": (RankMemory(409600, 4095),)},
            "ranks[0].cpu_bytes",
            "4095 .* one block has 4096",
        ),
        (
            {"ranks": (RankMemory(409600, 4096), RankMemory(409600, 0))},
            "ranks[1].cpu_bytes",
            "rank 1 may take 0 bytes",
        ),
        ({"ranks": (RankMemory(99, 4096),)}, "ranks[0].gpu_bytes", "99 bytes .* 100 GPU blocks"),
        ({"ranks": ()}, "ranks", "must not be empty"),
        ({"groups": ()}, "groups", "must not be empty"),
        ({"num_hosts": 2}, "num_hosts", "spread over 2 hosts.* one engine on each"),
        ({"gpu_blocks": 1}, "gpu_blocks", "at least 2, found 1"),
        ({"max_batched_tokens": 0}, "max_batched_tokens", "at least 1, found 0"),
        (
            {"groups": (group(16), group(24))},
            "groups[1].tokens_per_block",
            "24 .* multiple of .* 16",
        ),
    ],
)
def test_what_cannot_work_is_named(fields: dict[str, Any], setting: str, message: str) -> None:
    """The message says what was found and what to do, the error which setting it is."""
    with pytest.raises(ConfigError, match=message) as caught:
        config(**fields)
    assert caught.value.setting == setting
