"""Workloads: recorded and synthetic request traces, block contents and their judge.

* :func:`synthetic_trace` and the readers make a :class:`Trace`: requests with arrival times,
  lengths and one chained hash for each block of the prompt.
* :func:`fill_block` writes the content that belongs to a key; :class:`BlockChecker` finds every
  byte that does not belong, by code of its own.
"""

from __future__ import annotations

from kv_core.workload._checker import BlockChecker
from kv_core.workload._content import POISON_BYTE, fill_block, poison
from kv_core.workload._synthetic import SyntheticKind, SyntheticShape, synthetic_trace
from kv_core.workload._trace import HASH_BYTES, Trace, TraceRequest

__all__ = [
    "HASH_BYTES",
    "POISON_BYTE",
    "BlockChecker",
    "SyntheticKind",
    "SyntheticShape",
    "Trace",
    "TraceRequest",
    "fill_block",
    "poison",
    "synthetic_trace",
]
