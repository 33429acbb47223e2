"""All that kv-core knows of vLLM's versions: where things are, and what they are called there.

No other module of kv-core imports vLLM's offloading, asks for its version, or tries one name after
another; ``kv_core.vllm.conformance`` alone also makes the spec of one version, to test its tiers.
Importing this module imports vLLM.

Differences between the versions it covers:

* 0.30 renamed ``TransferJob.block_ids`` to ``chunk_ids`` and ``OffloadPolicy.BLOCK_LEVEL`` to
  ``CHUNK_LEVEL``.
* 0.31 began to pass ``backpressure_detector`` to tiers, and takes ``JobResult.transfer_bytes``.
* 0.32 has ``CacheHitSource``: where a hit came from.
* 0.33 passes ``expedited`` to ``submit_load`` of a worker, and calls managers with a lock held.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import vllm
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

try:
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
except ImportError:
    BackpressureDetector = None

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_core.keys import OffloadKey

__all__ = [
    "TESTED_VERSIONS",
    "BackpressureDetector",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "JobResult",
    "LoadStoreSpec",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadPolicy",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingSpecFactory",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SecondaryTierFactory",
    "SecondaryTierManager",
    "TransferJob",
    "TransferResult",
    "block_level_policy",
    "chunk_bytes",
    "device",
    "free_slots",
    "hit_source",
    "init_tier",
    "job_result",
    "job_slots",
    "may_load_from_storage",
    "new_stats",
    "offloading_event",
    "registered_specs",
    "registered_tiers",
    "vllm_version",
    "warn_if_untested",
]

_LOGGER: Final = logging.getLogger(__name__)

TESTED_VERSIONS: Final = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""Minor versions of vLLM that the tests have seen."""

_warned = False


def vllm_version() -> str:
    """Return the version of the vLLM that is installed."""
    return str(vllm.__version__)


def device() -> str:
    """Return what the engine runs on, as far as attention back ends are chosen by it."""
    from vllm.platforms import current_platform

    name = str(current_platform.device_type)
    capability = current_platform.get_device_capability()
    return name if capability is None else f"{name}-{capability.as_version_str()}"


def warn_if_untested() -> None:
    """Log once in a process that this version of vLLM is none of the tested ones."""
    global _warned  # noqa: PLW0603 - once for the process, as vLLM's plugins are
    version = vllm_version()
    if _warned or version.startswith(tuple(f"{tested}." for tested in TESTED_VERSIONS)):
        return
    _warned = True
    _LOGGER.warning(
        "kv-core was tested with vLLM %s to %s, found %s. Should it fail to start, install a "
        "tested version or a newer kv-core",
        TESTED_VERSIONS[0],
        TESTED_VERSIONS[-1],
        version,
    )


def registered_specs() -> Collection[str]:
    """Return the names of the specs that vLLM knows."""
    names: Collection[str] = OffloadingSpecFactory._registry.keys()
    return names


def registered_tiers() -> Collection[str]:
    """Return the tier types that vLLM knows."""
    names: Collection[str] = SecondaryTierFactory._registry.keys()
    return names


def job_slots(job: Any) -> npt.NDArray[np.int32]:
    """Return the slots of a ``TransferJob``, in the order of its keys."""
    slots: npt.NDArray[np.int32] = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return slots


def block_level_policy() -> Any:
    """Return the policy of a request of which only new blocks are offered."""
    return getattr(OffloadPolicy, "CHUNK_LEVEL", None) or OffloadPolicy.BLOCK_LEVEL


def hit_source(level: str) -> Any:
    """Return vLLM's word for the level that a hit came from, where it has one.

    Args:
        level: ``"cpu"``, or the type of a tier.
    """
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    sources = {"cpu": CacheHitSource.HOST, "fs": CacheHitSource.DISK}
    return sources.get(level, CacheHitSource.EXTERNAL_UNSPECIFIED)


def init_tier(
    tier: Any, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, detector: Any
) -> None:
    """Call the constructor of ``SecondaryTierManager`` on one that is being made.

    Args:
        tier: The tier.
        offloading_spec: As vLLM has passed it.
        primary_kv_view: As vLLM has passed it.
        tier_type: As vLLM has passed it.
        detector: A ``BackpressureDetector``, or ``None``; this must be ``None`` before 0.31.
    """
    more = {} if detector is None else {"backpressure_detector": detector}
    SecondaryTierManager.__init__(tier, offloading_spec, primary_kv_view, tier_type, **more)


def chunk_bytes(offloading_spec: Any) -> int:
    """Return the bytes of a slot of the primary tier that hold anything, all ranks together."""
    copies = 1 if offloading_spec.replicated_layout else offloading_spec.config.parallel.world_size
    return int(offloading_spec.cpu_page_size_per_worker) * copies


def free_slots(offloading_spec: Any) -> list[int] | None:
    """Return the list of slots that the primary tier has got back, to be changed in place.

    ``None`` where this version has no such list.
    """
    manager = getattr(offloading_spec, "_manager", None)
    free = getattr(getattr(manager, "primary_tier", None), "_free_list", None)
    return free if isinstance(free, list) else None


def job_result(
    job_id: int,
    *,
    success: bool,
    successful_keys: tuple[OffloadKey, ...] | None,
    transfer_time_s: float,
    transfer_bytes: int,
) -> Any:
    """Return vLLM's ``JobResult``; ``successful_keys`` are those of a load that failed in part."""
    result = JobResult(job_id, success, successful_keys, transfer_time_s)
    if hasattr(result, "transfer_bytes"):
        result.transfer_bytes = transfer_bytes
    return result


def offloading_event(
    keys: Sequence[OffloadKey], tier: str | None, *, removed: bool, locality: Any = None
) -> Any:
    """Return vLLM's event of blocks that became present in a tier, or left it.

    Args:
        keys: The blocks.
        tier: Name of the tier; ``None`` is the primary tier.
        removed: Whether they left.
        locality: vLLM's ``Locality`` of the tier's storage, if anybody said so.
    """
    return OffloadingEvent(
        keys=list(keys),
        medium=Medium.CPU if tier is None else Medium.STORAGE,
        removed=removed,
        locality=locality,
        ownership=tier,
    )


def new_stats() -> Any:
    """Return an empty set of measurements, as the connector reports them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

    return OffloadingConnectorStats()


def may_load_from_storage(req_context: Any) -> bool:
    """Say whether a request's ``kv_load_tiers`` admit tiers below the CPU's memory."""
    tier_filter = getattr(req_context, "load_tier_filter", None)
    return tier_filter is None or bool(tier_filter.allows(Medium.STORAGE, None))
