"""Workloads: recorded and synthetic request traces, block contents and their judge.

* :func:`read_trace` and :func:`synthetic_trace` make a :class:`Trace`: requests with arrival
  times, lengths and one chained hash for each block of the prompt.
* :func:`fill_block` writes the content that belongs to a key; :class:`BlockChecker` finds every
  byte that does not belong, by code of its own.
"""

from __future__ import annotations

from kv_core.workload._checker import BlockChecker
from kv_core.workload._content import POISON_BYTE, fill_block, poison
from kv_core.workload._synthetic import SyntheticKind, SyntheticShape, synthetic_trace
from kv_core.workload._trace import HASH_BYTES, Trace, TraceRequest
from kv_core.workload.readers import TraceFormat, detect_format, read_trace

__all__ = [
    "HASH_BYTES",
    "POISON_BYTE",
    "BlockChecker",
    "SyntheticKind",
    "SyntheticShape",
    "Trace",
    "TraceFormat",
    "TraceRequest",
    "detect_format",
    "fill_block",
    "poison",
    "read_trace",
    "synthetic_trace",
]
