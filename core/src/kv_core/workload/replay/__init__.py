"""Replay of a request trace through the whole engine, with real bytes.

The replay engine behaves like an inference engine that computes nothing: it schedules requests
that overlap, keeps a paged pool of GPU blocks with prefix reuse, and drives the connector step
by step. Prefill writes bytes derived from each block's key; every block that a load delivers is
compared with them. There may be several workers, which are processes of their own then.
"""

from kv_core.workload.replay._config import ReplayConfig
from kv_core.workload.replay._engine import ReplayEngine, replay_trace
from kv_core.workload.replay._memory import GpuMemory, HostGpuMemory, TorchGpuMemory
from kv_core.workload.replay._pool import GpuBlockPool
from kv_core.workload.replay._report import LatencySummary, ReplayReport, WorkerSummary

__all__ = [
    "GpuBlockPool",
    "GpuMemory",
    "HostGpuMemory",
    "LatencySummary",
    "ReplayConfig",
    "ReplayEngine",
    "ReplayReport",
    "TorchGpuMemory",
    "WorkerSummary",
    "replay_trace",
]
