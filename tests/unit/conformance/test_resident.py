"""The memory that is measured for ZC-1 and ZC-2."""

from __future__ import annotations

import mmap
import sys
import threading

import numpy as np
import pytest

from kv_conformance.rig import _resident
from kv_conformance.rig._resident import SLACK_BYTES, MemoryWatch, tracing

_BYTES = 32 << 20


def test_a_copy_that_lives_for_a_moment_is_seen() -> None:
    """The peak is that of the allocator, and depends on no sample."""
    with tracing(), MemoryWatch() as watch:
        bytes(_BYTES)
    assert watch.extra_bytes >= _BYTES


def test_what_is_kept_is_no_copy() -> None:
    """Stored bytes are in the memory afterwards as well."""
    with tracing(), MemoryWatch() as watch:
        stored = bytearray(b"\1") * _BYTES
    assert watch.peak.beyond(watch.before) >= _BYTES
    assert watch.extra_bytes < SLACK_BYTES
    assert len(stored) == _BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux only")
def test_a_nameless_mapping_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers for direct I/O are mapped, and no allocator of Python knows of them."""
    sampled = threading.Event()
    read = _resident._resident

    def noted(*, nameless: bool) -> int:
        resident = read(nameless=nameless)
        if nameless and threading.current_thread() is not threading.main_thread():
            sampled.set()
        return resident

    monkeypatch.setattr(_resident, "_resident", noted)
    with tracing(), MemoryWatch() as watch, mmap.mmap(-1, _BYTES) as buffer:
        np.frombuffer(buffer, dtype=np.uint8).fill(1)
        # The first of these may have begun before.
        for _sample in range(2):
            sampled.clear()
            assert sampled.wait(30)
    assert watch.extra_bytes > _BYTES - SLACK_BYTES
