"""The step protocol between an inference engine and the offloading engine, engine neutral.

The scheduler's half decides, once per step, what to load and what to store; the worker's half
carries it out. Both are plain objects: an engine calls them in the order that their docstrings
give, and passes the metadata from one to the other however it likes.
"""

from kv_core.connector._advice import Advice, config_advice
from kv_core.connector._effective import effective_config
from kv_core.connector._matching import RequestBlocks
from kv_core.connector._memory import memory_limit_bytes, staging_bytes
from kv_core.connector._protocol import (
    ConnectorMetadata,
    ConnectorOutput,
    KVRequest,
    ScheduledRequest,
    StepSchedule,
    Transfer,
)
from kv_core.connector._role import RegionRole
from kv_core.connector._scheduler import LoadReport, OffloadingConnectorScheduler
from kv_core.connector._settings import OffloadingSettings
from kv_core.connector._specs import (
    SPEC_FACTORY,
    CPUOffloadingSpec,
    HostBackedSpec,
    TieringOffloadingSpec,
)
from kv_core.connector._worker import OffloadingConnectorWorker

__all__ = [
    "SPEC_FACTORY",
    "Advice",
    "CPUOffloadingSpec",
    "ConnectorMetadata",
    "ConnectorOutput",
    "HostBackedSpec",
    "KVRequest",
    "LoadReport",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "OffloadingSettings",
    "RegionRole",
    "RequestBlocks",
    "ScheduledRequest",
    "StepSchedule",
    "TieringOffloadingSpec",
    "Transfer",
    "config_advice",
    "effective_config",
    "memory_limit_bytes",
    "staging_bytes",
]
