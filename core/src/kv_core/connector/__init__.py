"""The step protocol between an inference engine and the offloading engine, engine neutral.

The scheduler's half decides, once per step, what to load and what to store; the worker's half
carries it out. Both are plain objects: an engine calls them in the order that their docstrings
give, and passes the metadata from one to the other however it likes.
"""

from kv_core.connector._matching import RequestBlocks
from kv_core.connector._protocol import (
    ConnectorMetadata,
    ConnectorOutput,
    KVRequest,
    ScheduledRequest,
    StepSchedule,
    Transfer,
)
from kv_core.connector._scheduler import LoadReport, OffloadingConnectorScheduler
from kv_core.connector._specs import (
    SPEC_FACTORY,
    CPUOffloadingSpec,
    HostBackedSpec,
    TieringOffloadingSpec,
)
from kv_core.connector._worker import OffloadingConnectorWorker

__all__ = [
    "SPEC_FACTORY",
    "CPUOffloadingSpec",
    "ConnectorMetadata",
    "ConnectorOutput",
    "HostBackedSpec",
    "KVRequest",
    "LoadReport",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "RequestBlocks",
    "ScheduledRequest",
    "StepSchedule",
    "TieringOffloadingSpec",
    "Transfer",
]
