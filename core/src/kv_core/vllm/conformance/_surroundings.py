"""What vLLM gives to a tier besides its settings: the spec of an engine, made from a namespace.

Everything of a namespace for which vLLM's configuration has a place goes there. The rest has no
place: vLLM does not tell its tiers the weights' identity and revision, nor counts their updates.
The hash algorithm and its seed have none either, and need none, as they are in vLLM's keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kv_core.keys import ALL_RANKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_core.contract import TierContext
    from kv_core.keys import Namespace

__all__ = ["spec_for"]

_ENGINE_ID: Final = "kv-core-conformance"


def spec_for(context: TierContext, settings: Mapping[str, Any]) -> TieringOffloadingSpec:
    """Return the spec of an engine that would have opened the tier.

    Args:
        context: What the tier is opened with.
        settings: The tier's own settings. Events are switched on for the engine when they are
            for the tier.
    """
    return TieringOffloadingSpec(
        OffloadingConfig(
            groups=tuple(_groups(context.namespace)),
            worker_kv_bytes_per_block=_worker_block_bytes(context),
            enable_kv_cache_events=bool(settings.get("enable_kv_events", False)),
            extra_config={
                "cpu_bytes_to_use": context.num_blocks * context.primary.row_stride,
                "secondary_tiers": [],
            },
            engine_id=_ENGINE_ID,
            model=OffloadingModelConfig(
                name=context.namespace.model, dtype=context.namespace.dtype
            ),
            cache=OffloadingCacheConfig(
                tokens_per_hash=context.namespace.tokens_per_hash,
                blocks_per_chunk=context.namespace.block_size_factor,
            ),
            parallel=_parallel(context.namespace),
            kv_cache_layout=context.namespace.kv_layout,
        )
    )


def _groups(namespace: Namespace) -> list[OffloadingGroupConfig]:
    groups, first_layer = [], 0
    for group_id, group in enumerate(namespace.groups):
        layers = range(first_layer, first_layer + group.num_layers)
        first_layer = layers.stop
        groups.append(
            OffloadingGroupConfig(
                tokens_per_block=group.tokens_per_block,
                layer_names=tuple(f"model.layers.{layer}.self_attn.attn" for layer in layers),
                group_id=group_id,
            )
        )
    return groups


def _parallel(namespace: Namespace) -> OffloadingParallelConfig:
    return OffloadingParallelConfig(
        rank=0 if namespace.rank == ALL_RANKS else namespace.rank,
        world_size=_world_size(namespace),
        tp_size=namespace.tensor_parallel_size,
        pp_size=namespace.pipeline_parallel_size,
        pcp_size=namespace.prefill_context_parallel_size,
        dcp_size=namespace.decode_context_parallel_size,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=namespace.layout_parallel_invariant,
    )


def _world_size(namespace: Namespace) -> int:
    # Decode context parallel ranks are among those of tensor parallelism.
    return (
        namespace.tensor_parallel_size
        * namespace.pipeline_parallel_size
        * namespace.prefill_context_parallel_size
    )


def _worker_block_bytes(context: TierContext) -> int:
    parts = _world_size(context.namespace) * context.namespace.block_size_factor
    return -(-context.primary.row_stride // parts)
