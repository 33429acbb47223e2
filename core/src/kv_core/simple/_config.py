"""Sizes of the simple mode, and what it refuses to start with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.engine import KVCacheGroupConfig

__all__ = ["RankMemory", "SimpleOffloadConfig"]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank.

    Attributes:
        gpu_bytes: Bytes of all KV cache tensors on its GPU.
        cpu_bytes: Bytes of CPU memory that the rank may take.
    """

    gpu_bytes: int
    cpu_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleOffloadConfig:
    """What the simple mode needs to know of the inference engine.

    Attributes:
        groups: KV cache groups, in group order.
        tokens_per_hash: Tokens that one block hash covers.
        gpu_blocks: Blocks of the GPU pool, the same on every rank.
        ranks: Memory of each rank. Every rank has CPU memory of its own.
        max_batched_tokens: Most tokens that the engine schedules in one step.
        lazy: Whether to store blocks when they are close to being evicted from the GPU, rather
            than as soon as they are computed.
        num_hosts: Hosts that the ranks are spread over; only one is possible.
        record_events: Whether to collect what becomes present in CPU memory and what leaves it.

    Raises:
        ConfigError: A number is out of range, CPU memory has no room for one block, or the
            ranks are on several hosts.
    """

    groups: tuple[KVCacheGroupConfig, ...]
    tokens_per_hash: int
    gpu_blocks: int
    ranks: Sequence[RankMemory]
    max_batched_tokens: int
    lazy: bool = False
    num_hosts: int = 1
    record_events: bool = False

    def __post_init__(self) -> None:
        if self.num_hosts != 1:
            raise ConfigError(
                f"the {len(self.ranks)} ranks of this engine are spread over {self.num_hosts} "
                "hosts, but the simple mode counts their reports within one. Keep the tensor and "
                "pipeline parallel ranks of an engine on one host, and run one engine on each "
                "(data parallel)",
                setting="num_hosts",
            )
        for name, least in (("tokens_per_hash", 1), ("gpu_blocks", 2), ("max_batched_tokens", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name!r} must be at least {least}, found {value}", setting=name)
        for name in ("groups", "ranks"):
            if not getattr(self, name):
                raise ConfigError(f"{name!r} must not be empty", setting=name)
        for index, group in enumerate(self.groups):
            if group.tokens_per_block < 1 or group.tokens_per_block % self.tokens_per_hash:
                raise ConfigError(
                    f"block size {group.tokens_per_block} of KV cache group {index} is not a "
                    f"multiple of the {self.tokens_per_hash} tokens that a block hash covers",
                    setting=f"groups[{index}].tokens_per_block",
                )
        for index, rank in enumerate(self.ranks):
            self._check_rank(index, rank)

    def _check_rank(self, index: int, rank: RankMemory) -> None:
        if rank.gpu_bytes < self.gpu_blocks:
            raise ConfigError(
                f"rank {index} has {rank.gpu_bytes} bytes of KV cache for {self.gpu_blocks} GPU "
                "blocks; a block has at least one byte",
                setting=f"ranks[{index}].gpu_bytes",
            )
        if _blocks_that_fit(self.gpu_blocks, rank) < 1:
            needed = -(-rank.gpu_bytes // self.gpu_blocks)
            raise ConfigError(
                f"rank {index} may take {rank.cpu_bytes} bytes of CPU memory, but one block has "
                f"{needed} there; give it room for at least one",
                setting=f"ranks[{index}].cpu_bytes",
            )

    @property
    def world_size(self) -> int:
        """Ranks that report each transfer."""
        return len(self.ranks)

    @property
    def num_cpu_blocks(self) -> int:
        """Blocks of CPU memory: as many as the rank with the least room can hold."""
        return min(_blocks_that_fit(self.gpu_blocks, rank) for rank in self.ranks)

    @property
    def target_free(self) -> int:
        """Blocks at the head of the GPU's free queue that lazy stores keep ready for reuse.

        Twice what one step can allocate, so that a step finds them stored while those of the
        next one are being stored.
        """
        return 2 * sum(
            -(-self.max_batched_tokens // group.tokens_per_block) for group in self.groups
        )


def _blocks_that_fit(gpu_blocks: int, rank: RankMemory) -> int:
    return gpu_blocks * rank.cpu_bytes // rank.gpu_bytes
