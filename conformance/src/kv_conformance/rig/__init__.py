"""The rig: one tier over one region, driven as an engine drives it, and watched."""

from kv_conformance.rig._budget import Budget, Interrupted, OutOfTime
from kv_conformance.rig._calls import CallFinding, CallWatch, watch_calls
from kv_conformance.rig._findings import Broken, Findings, Violation, expect
from kv_conformance.rig._memory import Region
from kv_conformance.rig._peer import Peer
from kv_conformance.rig._process import Footprint
from kv_conformance.rig._rig import Loaded, Rig
from kv_conformance.rig._rigs import CannotOpenError, Rigs, SubjectType

__all__ = [
    "Broken",
    "Budget",
    "CallFinding",
    "CallWatch",
    "CannotOpenError",
    "Findings",
    "Footprint",
    "Interrupted",
    "Loaded",
    "OutOfTime",
    "Peer",
    "Region",
    "Rig",
    "Rigs",
    "SubjectType",
    "Violation",
    "expect",
    "watch_calls",
]
