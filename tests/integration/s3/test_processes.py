"""What a tier leaves in its process, and what a fork does to it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from kv_tier_s3._harness import S3Server

pytestmark = pytest.mark.s3

FORKING: Final = Path(__file__).with_name("forking.py")
KEYS: Final = [example_key(number) for number in range(8)]


@pytest.mark.parametrize("over_tls", [False, True])
def test_a_fork_takes_nothing_from_its_parent(
    seaweed: S3Server, engine: str, settings: Any, over_tls: bool
) -> None:
    """Its end closes no connection of the parent's, nor takes one out of its loop (LIFE-6)."""
    # One attempt only: a connection that was closed would be one too many.
    access = seaweed.tls_access if over_tls else seaweed.access
    patient = settings(access, job_deadline_s=8.0, read_timeout_s=8.0, max_attempts=1)
    done = subprocess.run(
        [sys.executable, str(FORKING), json.dumps(patient)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the parent works on\n"), done.stderr


def descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_opening_and_closing_leaves_nothing(
    seaweed: S3Server, settings: Any, open_tier: Any
) -> None:
    """No thread, no socket, no loop: also when it ends in the middle of jobs (LIFE-2, LIFE-3)."""

    def once() -> None:
        tier = open_tier(settings(seaweed.access, job_deadline_s=20.0))
        tier.submit_store(KEYS)
        tier.tier.lookup_many(KEYS, tier.request)
        tier.step()
        tier.close()

    # What the libraries keep once for the whole process is there after the first time.
    once()
    gc.collect()
    threads, before = threading.active_count(), descriptors()
    for _ in range(3):
        once()
    gc.collect()
    assert threading.active_count() <= threads
    assert descriptors() <= before


def test_a_shutdown_while_the_store_is_frozen_is_short(
    seaweed: S3Server, settings: Any, open_tier: Any
) -> None:
    """Requests are given up, and their memory is let go of: the region can be unmapped (ZC-3)."""
    tier = open_tier(settings(seaweed.access, job_deadline_s=5.0))
    assert tier.store(KEYS[:2]).success
    seaweed.freeze()
    try:
        tier.submit_load(KEYS[:2])
        tier.submit_store(KEYS)
        tier.tier.lookup_many([example_key(100 + n) for n in range(64)], tier.request)
        tier.step()
        threading.Event().wait(0.2)
        began = time.monotonic()
        unfinished = tier.tier.shutdown()
        took_s = time.monotonic() - began
    finally:
        seaweed.thaw()
    assert tuple(unfinished) == ()
    assert took_s < 5.0
    assert [t.name for t in threading.enumerate() if t.name.startswith("kv-cold")] == []


def test_calls_of_the_engine_return_at_once_while_the_store_is_frozen(
    seaweed: S3Server, settings: Any, open_tier: Any
) -> None:
    """Not one of them asks the store itself (BLOCK-1): judged by the processor's time, too."""
    tier = open_tier(settings(seaweed.access, job_deadline_s=5.0, lookup_deadline_s=4.0))
    seaweed.freeze()
    try:
        longest_s = 0.0
        for number in range(50):
            began = time.thread_time()
            tier.submit_store([example_key(1000 + number)])
            tier.tier.lookup_many(
                [example_key(5000 + number * 8 + n) for n in range(8)], tier.request
            )
            tier.step()
            longest_s = max(longest_s, time.thread_time() - began)
        began = time.monotonic()
        for number in range(20):
            tier.tier.lookup(example_key(9000 + number), tier.request)
        # Real time, of twenty calls: one that waited for the store would take its whole deadline.
        assert time.monotonic() - began < 2.0
        assert longest_s < 0.5
    finally:
        seaweed.thaw()
