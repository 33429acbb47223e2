"""Three levels: the primary tier in CPU memory and any number of secondary tiers below it.

Stores cascade: once a block is confirmed in the primary tier, every secondary tier is given a
copy. Loads promote: a block found in a secondary tier is read into a reserved slot of the
primary tier, from where the worker copies it to the GPU.
"""

from kv_core.tiering._config import EngineReset, TieringConfig
from kv_core.tiering._health import HealthState
from kv_core.tiering._manager import TieringOffloadingManager
from kv_core.tiering._observer import JobObserver, JobReport
from kv_core.tiering._options import TierMode, TierOptions
from kv_core.tiering._requests import PARAMS_KEY
from kv_core.tiering._single import JobOutcome, SingleTier

__all__ = [
    "PARAMS_KEY",
    "EngineReset",
    "HealthState",
    "JobObserver",
    "JobOutcome",
    "JobReport",
    "SingleTier",
    "TierMode",
    "TierOptions",
    "TieringConfig",
    "TieringOffloadingManager",
]
