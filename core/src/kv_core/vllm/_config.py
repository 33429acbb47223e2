"""vLLM's description of what is offloaded, translated for our engine."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, Final

from kv_core.connector import OffloadingSettings
from kv_core.contract import Capability
from kv_core.cpu import PrimaryGeometry
from kv_core.engine import KVCacheGroupConfig, OffloadingConfig
from kv_core.errors import ConfigError
from kv_core.plugins import TierRegistry, check_tier
from kv_core.vllm._namespace import MODEL_ID_SETTING, namespace_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ENGINE_ID_PREFIX", "engine_config", "engine_settings", "region_nonce"]

ENGINE_ID_PREFIX: Final = "vllm-"
"""How the ids of vLLM's engines begin here, and so the names of their regions."""

_NONCE_BYTES: Final = 16

_CANONICAL_LAYOUT: Final = "canonical_layout"
_SIZE_SETTING: Final = "cpu_bytes_to_use"

# Settings that stand beside ours, and are read by vLLM's connector or for the namespace.
_READ_ELSEWHERE: Final = frozenset(
    {"self_describing_kv_events", _CANONICAL_LAYOUT, MODEL_ID_SETTING}
)

_OUTLIVE_AN_ENGINE: Final = frozenset({Capability.PERSISTENT, Capability.SHARED})


def engine_settings(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``kv_connector_extra_config`` that is for our engine.

    Raises:
        ConfigError: It asks for a layout of bytes that is vLLM's own.
    """
    if extra_config.get(_CANONICAL_LAYOUT):
        raise ConfigError(
            f"{_CANONICAL_LAYOUT!r} is a layout of vLLM's own offloading; the blocks of "
            "KVCoreOffloadingSpec hold the pages of all ranks side by side. Remove the setting",
            setting=_CANONICAL_LAYOUT,
        )
    ours = {name: value for name, value in extra_config.items() if name not in _READ_ELSEWHERE}
    size = ours.get(_SIZE_SETTING)
    if isinstance(size, float) and math.isfinite(size):
        # From vLLM's own option ``kv_offloading_size``, in GiB; it takes the whole bytes of it.
        ours[_SIZE_SETTING] = int(size)
    return ours


def engine_config(config: Any, parallel_config: Any) -> OffloadingConfig:
    """Translate vLLM's ``OffloadingConfig``, and check all settings.

    Args:
        config: As vLLM hands it to a spec.
        parallel_config: vLLM's ``ParallelConfig``.

    Raises:
        ConfigError: Settings are missing, unknown or invalid, do not fit the groups, or vLLM
            understands them differently; or the ranks cannot share memory.
        UnknownTierError: No installed package provides a tier type.
        NamespaceError: Something that makes bytes interchangeable is not known.
    """
    _require_one_scheduler(parallel_config)
    extra_config = engine_settings(config.extra_config)
    settings = OffloadingSettings.from_extra_config(extra_config)
    parallel, cache = config.parallel, config.cache
    geometry = PrimaryGeometry.fit(
        budget_bytes=settings.cpu_bytes_to_use,
        num_workers=parallel.world_size,
        worker_page_bytes=config.worker_kv_bytes_per_block * cache.blocks_per_chunk,
    )
    translated = OffloadingConfig(
        groups=tuple(
            KVCacheGroupConfig(
                tokens_per_block=group.tokens_per_block, layer_names=tuple(group.layer_names)
            )
            for group in config.groups
        ),
        worker_block_bytes=config.worker_kv_bytes_per_block,
        # vLLM's number has the context parallel sizes in it, so they are not multiplied again.
        tokens_per_cache_block=cache.tokens_per_hash,
        namespace=namespace_of(
            config, block_bytes=geometry.block_bytes, lasting=_has_lasting_tiers(settings)
        ),
        engine_id=f"{ENGINE_ID_PREFIX}{config.engine_id}",
        num_workers=parallel.world_size,
        num_hosts=getattr(parallel_config, "nnodes_within_dp", 1),
        tensor_parallel_size=parallel.tp_size,
        pipeline_parallel_size=parallel.pp_size,
        enable_events=config.enable_kv_cache_events,
        extra_config=extra_config,
    )
    if translated.block_size_factor != cache.blocks_per_chunk:
        raise ConfigError(
            f"vLLM puts {cache.blocks_per_chunk} GPU block(s) into an offloaded block, and "
            f"'block_size' or 'blocks_per_chunk' say {translated.block_size_factor}; give whole "
            "numbers",
            setting="blocks_per_chunk",
        )
    return translated


def _require_one_scheduler(parallel_config: Any) -> None:
    """Refuse engines in which every rank has a scheduler of its own."""
    backend = parallel_config.distributed_executor_backend
    if backend == "external_launcher" and parallel_config.world_size > 1:
        raise ConfigError(
            f"with 'distributed_executor_backend' {backend!r} each of the "
            f"{parallel_config.world_size} ranks has a scheduler of its own, and one has to speak "
            "for all of them here. Use the backend 'mp'",
            setting="distributed_executor_backend",
        )


def _has_lasting_tiers(settings: OffloadingSettings) -> bool:
    """Say whether any tier keeps blocks beyond this engine, or shares them with others."""
    registry = TierRegistry()
    checked = [
        check_tier(entry.type, name=entry.name, settings=entry.settings, registry=registry)
        for entry in settings.secondary_tiers
    ]
    return any(not _OUTLIVE_AN_ENGINE.isdisjoint(tier.spec.capabilities) for tier in checked)


def region_nonce(engine_id: str, instance_id: str) -> bytes:
    """Return the 16 bytes that the processes of one start have in common.

    vLLM draws both ids at each start, unless a user sets the first, and every process of the engine
    has them.

    Args:
        engine_id: From ``kv_transfer_config``.
        instance_id: Of the ``VllmConfig``.
    """
    return hashlib.sha256(f"{engine_id}\0{instance_id}".encode()).digest()[:_NONCE_BYTES]
