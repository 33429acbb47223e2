"""Readers of recorded traces: Mooncake, Bailian, RAGPulse and Claude Code."""

from __future__ import annotations

from kv_core.workload.readers._detect import TraceFormat, detect_format
from kv_core.workload.readers._read import read_trace

__all__ = ["TraceFormat", "detect_format", "read_trace"]
