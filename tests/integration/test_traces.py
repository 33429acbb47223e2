"""Replays of the recorded traces, which lie outside of the repository."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.workload import read_trace
from kv_core.workload.replay import ReplayConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Command = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.traces


def assert_sound(report: dict[str, Any]) -> None:
    """Check what holds for every sound replay without faults."""
    hits = report["hits"]
    assert report["requests_finished"] == report["requests"]
    assert sum(hits.values()) + report["misses"] == report["blocks_requested"]
    loaded = sum(blocks for level, blocks in hits.items() if level != "gpu")
    assert report["blocks_verified"] == loaded + report["blocks_reloaded"]
    assert report["bytes_wrong"] == 0


def test_a_conversation_trace_over_a_restart(
    command: Command, traces: Path, tmp_path: Path
) -> None:
    """Every byte is right in both runs, and the second lives on what the first has stored."""
    file = tmp_path / "report.json"
    sizes = ["--block-bytes=4096", "--cpu-bytes=64MiB", "--limit=300"]
    tier = f"--tier=fs:root_dir={tmp_path}/blocks"
    trace = str(traces / "mooncake" / "conversation_trace.jsonl")
    status, _, err = command("replay", trace, *sizes, tier, "--restart", f"--json={file}")
    assert (status, err) == (0, "")
    first, second = json.loads(file.read_text())["runs"]
    assert_sound(first)
    assert_sound(second)
    assert first["hits"]["fs"] == 0
    # All full blocks of the first run are on disk, and CPU memory began empty.
    assert second["hits"]["fs"] > first["misses"] / 2
    assert second["misses"] < first["misses"] / 5


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize(
    ("name", "limit"), [("mooncake", 150), ("ragpulse", 150), ("claude-code", 60)]
)
def test_defaults_run_every_trace(
    name: str, limit: int, policy: str, command: Command, traces: Path, tmp_path: Path
) -> None:
    """No size has to be given for any of the traces, with any policy."""
    file = tmp_path / "report.json"
    options = [f"--limit={limit}", f"--policy={policy}", "--quiet", f"--json={file}"]
    status, out, err = command("replay", str(traces / name), *options, "--tier=example")
    assert (status, out, err) == (0, "", "")
    report = json.loads(file.read_text())
    assert report["requests"] == limit
    assert_sound(report)


@pytest.mark.parametrize("name", ["mooncake", "ragpulse", "claude-code"])
def test_the_largest_request_fits_the_default_pool(name: str, traces: Path) -> None:
    """Whole traces run on defaults, not only their beginnings."""
    trace, config = read_trace(traces / name), ReplayConfig()
    largest = max(
        request.prompt_tokens + min(request.output_tokens, config.max_output_tokens)
        for request in trace.requests
    )
    assert -(-largest // trace.block_tokens) < config.gpu_blocks


def test_the_largest_request_of_a_trace_is_named(command: Command, traces: Path) -> None:
    """A pool too small for the largest request of the whole trace is refused, naming it."""
    status, out, err = command("replay", str(traces / "mooncake"), "--gpu-blocks=200")
    assert (status, out) == (2, "")
    assert err.startswith("error: the largest request, 'mooncake-")
    assert err.count("\n") == 1
