"""The contract between the engine and a storage tier, version 1.

All that the author of a tier imports. ``docs/spec/tier-contract.md`` has the clauses; the
docstring of :class:`SecondaryTierManager` is written so that a tier can be implemented from it
alone. Most authors start from :mod:`kv_core.tierkit` instead, which keeps the hard promises for
them.
"""

from kv_core.contract._config import TierConfig, parse_tier_config
from kv_core.contract._context import Clock, MetricsSink, NullMetrics, TierContext
from kv_core.contract._events import OffloadingEvent
from kv_core.contract._jobs import JobError, JobErrorKind, JobId, JobMetadata, JobResult
from kv_core.contract._manager import (
    ABSENT,
    PRESENT,
    UNKNOWN,
    LookupAnswer,
    SecondaryTierManager,
)
from kv_core.contract._metrics import MetricDefinition, MetricKind
from kv_core.contract._primary import PrimaryView
from kv_core.contract._request import (
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from kv_core.contract._spec import (
    CONTRACT_VERSION,
    Capability,
    ContractVersion,
    TierLimits,
    TierSpec,
    TierUsage,
)
from kv_core.keys import (
    BlockHash,
    Namespace,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

__all__ = [
    "ABSENT",
    "CONTRACT_VERSION",
    "PRESENT",
    "UNKNOWN",
    "BlockHash",
    "Capability",
    "Clock",
    "ContractVersion",
    "JobError",
    "JobErrorKind",
    "JobId",
    "JobMetadata",
    "JobResult",
    "LookupAnswer",
    "MetricDefinition",
    "MetricKind",
    "MetricsSink",
    "Namespace",
    "NullMetrics",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingEvent",
    "PrimaryView",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SecondaryTierManager",
    "TierConfig",
    "TierContext",
    "TierLimits",
    "TierSpec",
    "TierUsage",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
    "parse_tier_config",
]
