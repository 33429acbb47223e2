"""The adapter that puts vLLM's own tiers under the suite: it translates, and does nothing else."""

from __future__ import annotations

import gc
import mmap
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from kv_conformance.harness import Opening
from kv_core.contract import (
    JobId,
    JobMetadata,
    JobResult,
    NullMetrics,
    PrimaryView,
    ReqContext,
    ScheduleEndContext,
    SecondaryTierManager,
    make_offload_key,
)
from kv_core.errors import ConfigError, TierOpenError
from kv_core.plugins import open_tier
from kv_core.tierkit.testing import example_namespace
from kv_core.vllm._compat import vllm_version
from kv_core.vllm.conformance import fs

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.contract import OffloadKey

BLOCK_BYTES: Final = 4096
BLOCKS: Final = 4
PATIENCE_S: Final = 30.0
OPENING: Final = Opening(storage="storage", block_bytes=BLOCK_BYTES)


@pytest.fixture(autouse=True)
def _published_version() -> None:
    """The harnesses are for the version that the published page is about."""
    if not vllm_version().startswith("0.32."):
        pytest.skip("what vLLM's own tiers do is published for 0.32")


def open_fs(workdir: Path, memory: mmap.mmap, **changes: Any) -> SecondaryTierManager:
    """Open vLLM's fs over some memory; ``None`` leaves a setting out."""
    harness = fs(workdir)
    view = memoryview(memory).cast("B", (BLOCKS, BLOCK_BYTES))
    settings = {**harness.settings(OPENING), **changes}
    return open_tier(
        harness.spec,
        name="vllm-fs",
        settings={name: value for name, value in settings.items() if value is not None},
        namespace=example_namespace(BLOCK_BYTES),
        primary=PrimaryView(view, BLOCK_BYTES),
        clock=time.monotonic,
        metrics=NullMetrics(),
    ).manager


def memory_is_free(memory: mmap.mmap) -> bool:
    """Say whether nobody holds a view: only then can it be unmapped."""
    # What an exception that is over holds is nobody's.
    gc.collect()
    try:
        memory.close()
    except BufferError:
        return False
    return True


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"no_such_setting": 1}, "no_such_setting"), ({"root_dir": None}, "root_dir")],
)
def test_settings_are_judged_by_vllm(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    """What Python says of vLLM's constructor is what the user is told."""
    memory = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
    with pytest.raises(ConfigError, match=rf"TypeError: .*FileSystemTierManager.*{name}"):
        open_fs(tmp_path, memory, **changes)


def test_a_wrong_type_is_passed_on(tmp_path: Path) -> None:
    """The adapter does not check what vLLM does not check."""
    memory = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
    tier: Any = open_fs(tmp_path, memory, enable_kv_events="no bool at all")
    assert tier.inner.events == []
    tier.shutdown()


def test_the_memory_is_given_back_after_the_shutdown(tmp_path: Path) -> None:
    """As vLLM's primary tier does: the view is released once the tier has ended."""
    memory = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
    tier = open_fs(tmp_path, memory)
    assert not memory_is_free(memory)
    tier.shutdown()
    del tier
    assert memory_is_free(memory)


def test_a_constructor_that_fails_holds_no_memory(tmp_path: Path) -> None:
    """Nor any thread of the adapter's."""
    memory, threads = mmap.mmap(-1, BLOCKS * BLOCK_BYTES), threading.active_count()
    (tmp_path / "file").touch()
    with pytest.raises(TierOpenError, match="vLLM's tier 'fs' cannot be opened"):
        open_fs(tmp_path, memory, root_dir=str(tmp_path / "file" / "root"))
    assert threading.active_count() == threads
    assert memory_is_free(memory)


def test_a_request_has_one_context(tmp_path: Path) -> None:
    """VLLM's tiers may keep state in it, from the announcement to the end."""
    tier: Any = open_fs(tmp_path, mmap.mmap(-1, BLOCKS * BLOCK_BYTES))
    seen: list[Any] = []
    inner_lookup = tier.inner.lookup

    def lookup(key: OffloadKey, context: Any) -> Any:
        seen.append(context)
        return inner_lookup(key, context)

    tier.inner.lookup = lookup
    request = ReqContext("request", {"tenant": "acme"})
    tier.on_new_request(request)
    for number in range(2):
        tier.lookup(make_offload_key(bytes([number] * 32), 0), request)
    assert seen[0] is seen[1]
    assert (seen[0].req_id, seen[0].kv_transfer_params) == ("request", {"tenant": "acme"})
    tier.shutdown()


def test_results_say_what_vllm_said(tmp_path: Path) -> None:
    """Of a load that failed in part: the keys that vLLM names, no reason, the blocks counted."""
    tier = open_fs(tmp_path, mmap.mmap(-1, BLOCKS * BLOCK_BYTES))
    request = ReqContext("request")
    tier.on_new_request(request)
    stored, absent = (make_offload_key(bytes([number] * 32), 0) for number in (1, 2))
    results: list[JobResult] = []
    for job_id, keys, is_load in ((1, (stored,), False), (2, (stored, absent), True)):
        slots = np.arange(len(keys), dtype=np.int32)
        job = JobMetadata(JobId(job_id), keys, slots, is_load, request, 0.0)
        (tier.submit_load if is_load else tier.submit_store)(job)
        end = time.monotonic() + PATIENCE_S
        while len(results) < job_id and time.monotonic() < end:
            tier.on_schedule_end(ScheduleEndContext())
            results += tier.get_finished_jobs()
    store, load = results
    assert (store.success, store.transfer_bytes) == (True, BLOCK_BYTES)
    assert (load.success, load.successful_keys, load.error) == (False, (stored,), None)
    assert tier.get_stats()["load_failures"] == 1
    tier.shutdown()
