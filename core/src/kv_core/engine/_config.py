"""Engine-neutral description of what is offloaded and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_core.keys import Namespace

__all__ = ["KVCacheGroupConfig", "OffloadingConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroupConfig:
    """One group of layers that share a block table.

    Attributes:
        tokens_per_block: Tokens in one GPU block of the group.
        layer_names: Names of the layers, in order.
        sliding_window: Window in tokens, or ``None`` for full attention.
    """

    tokens_per_block: int
    layer_names: tuple[str, ...]
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingConfig:
    """All that the offloading engine needs to know of the inference engine.

    Attributes:
        groups: KV cache groups, in group order.
        worker_block_bytes: Bytes that one worker contributes to one *GPU* block, all layers.
        tokens_per_cache_block: Block size of the engine's prefix cache, in tokens.
        namespace: Identity of the bytes.
        engine_id: Unique name of the engine instance on this host; names the shared region.
        num_workers: Ranks that share the region.
        num_hosts: Hosts that the ranks are spread over; only one is possible.
        tensor_parallel_size: Ranks that split attention heads.
        pipeline_parallel_size: Ranks that split layers.
        prefill_context_parallel_size: Ranks that split the prompt.
        decode_context_parallel_size: Ranks that split the context at decode.
        enable_events: Whether to record offloading events.
        extra_config: What the user wrote in the connector's config.
        block_size_factor: GPU blocks in one offloaded block; follows from the groups and from
            ``block_size`` or ``blocks_per_chunk`` in the extra config.
    """

    groups: tuple[KVCacheGroupConfig, ...]
    worker_block_bytes: int
    tokens_per_cache_block: int
    namespace: Namespace
    engine_id: str
    num_workers: int = 1
    num_hosts: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_events: bool = False
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    block_size_factor: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_hosts != 1:
            raise ConfigError(
                f"the ranks of this engine are spread over {self.num_hosts} hosts, but the primary "
                "tier is the memory of one host, which all ranks must share. Keep the tensor and "
                "pipeline parallel ranks of an engine on one host and run one engine on each host "
                "(data parallel); engines share blocks through a secondary tier that is reachable "
                "from all hosts",
                setting="num_hosts",
            )
        if not self.groups:
            raise ConfigError("at least one KV cache group is needed", setting="groups")
        for index, group in enumerate(self.groups):
            if group.tokens_per_block < 1 or group.tokens_per_block % self.tokens_per_hash:
                raise ConfigError(
                    f"block size {group.tokens_per_block} of KV cache group {index} is not a "
                    f"multiple of the hash block size {self.tokens_per_hash} (cache block size "
                    f"{self.tokens_per_cache_block} x decode context parallel size "
                    f"{self.decode_context_parallel_size} x prefill context parallel size "
                    f"{self.prefill_context_parallel_size})",
                    setting=f"groups[{index}].tokens_per_block",
                )
        # Once: a wrong setting shows at construction, and every step asks for it per block.
        object.__setattr__(self, "block_size_factor", self._read_block_size_factor())

    @property
    def tokens_per_hash(self) -> int:
        """Tokens that one block hash covers."""
        return (
            self.tokens_per_cache_block
            * self.decode_context_parallel_size
            * self.prefill_context_parallel_size
        )

    def _read_block_size_factor(self) -> int:
        """Compute the factor from ``block_size`` or ``blocks_per_chunk``.

        Raises:
            ConfigError: Both are set, or the value does not fit the groups.
        """
        block_size = self.extra_config.get("block_size")
        factor = self.extra_config.get("blocks_per_chunk")
        if block_size is not None and factor is not None:
            raise ConfigError(
                "'block_size' and 'blocks_per_chunk' say the same thing in two ways; set one",
                setting="block_size",
            )
        if factor is not None:
            return _positive(factor, "blocks_per_chunk")
        if block_size is None:
            return 1
        size = _positive(block_size, "block_size")
        gpu_sizes = {group.tokens_per_block for group in self.groups}
        if len(gpu_sizes) > 1:
            raise ConfigError(
                f"'block_size' needs KV cache groups of one block size, found "
                f"{sorted(gpu_sizes)}; set 'blocks_per_chunk' instead",
                setting="block_size",
            )
        gpu_size = gpu_sizes.pop()
        if size % gpu_size:
            raise ConfigError(
                f"'block_size' {size} is not a multiple of the GPU block size {gpu_size} tokens",
                setting="block_size",
            )
        return size // gpu_size

    @property
    def offload_prompt_only(self) -> bool:
        """Whether only blocks of the prompt are offloaded. Default true."""
        value = self.extra_config.get("offload_prompt_only", True)
        if not isinstance(value, bool):
            raise ConfigError(
                f"'offload_prompt_only' must be true or false, found {value!r}",
                setting="offload_prompt_only",
            )
        return value

    def tokens_per_offloaded_block(self, group_idx: int) -> int:
        """Tokens in one offloaded block of a group."""
        return self.groups[group_idx].tokens_per_block * self.block_size_factor


def _positive(value: object, setting: str) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{setting!r} must be a positive integer, found {value!r}", setting=setting
        )
    return value
