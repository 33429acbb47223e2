"""Layers below a tier's code that stall and fail on demand.

:class:`FaultGate` goes around a client object in this process. Storage that is reached through
the file system gets the real thing, :mod:`kv_conformance.faults.fuse`.
"""

from kv_conformance.faults._gate import FaultGate, GateError

__all__ = ["FaultGate", "GateError"]
