"""Facts of the recorded traces, which lie outside of the repository."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.workload import Trace, detect_format, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.traces


@pytest.fixture(scope="module")
def mooncake(recorded_traces: Path) -> Trace:
    """Return the conversation trace."""
    return read_trace(recorded_traces / "mooncake" / "conversation_trace.jsonl")


@pytest.fixture(scope="module")
def ragpulse(recorded_traces: Path) -> Trace:
    """Return the trace of the university assistant."""
    return read_trace(recorded_traces / "ragpulse")


@pytest.fixture(scope="module")
def claude_code(recorded_traces: Path) -> Trace:
    """Return all sessions as one trace."""
    return read_trace(recorded_traces / "claude-code")


def infinite_cache_token_hit_rate(trace: Trace, first: int) -> float:
    """Return the share of prompt tokens found in a cache that forgets nothing.

    Only full blocks are cached, and requests count from number ``first`` on.
    """
    cached: set[bytes] = set()
    hit_tokens = prompt_tokens = 0
    for number, request in enumerate(trace.requests):
        full = request.block_hashes[: request.prompt_tokens // trace.block_tokens]
        if number >= first:
            hits = next((n for n, key in enumerate(full) if key not in cached), len(full))
            hit_tokens += hits * trace.block_tokens
            prompt_tokens += request.prompt_tokens
        cached.update(full)
    return hit_tokens / prompt_tokens


def test_mooncake_counts(mooncake: Trace) -> None:
    """The counts are those its publishers and others found."""
    assert (mooncake.format, mooncake.block_tokens) == ("mooncake", 512)
    assert len(mooncake.requests) == 12_031
    assert mooncake.num_block_references == 288_500
    assert mooncake.num_distinct_blocks == 182_790
    assert mooncake.reuse_ratio == pytest.approx(0.366, abs=5e-4)


def test_mooncake_hit_ceiling(mooncake: Trace) -> None:
    """An infinite cache hits 39.8 % of the tokens of the last half, as another simulator says."""
    half = len(mooncake.requests) // 2
    assert infinite_cache_token_hit_rate(mooncake, half) == pytest.approx(0.398, abs=5e-4)


def test_mooncake_ids_have_one_parent_already(mooncake: Trace) -> None:
    """Chaining adds no hash: there are as many distinct blocks as ids in the file."""
    assert mooncake.requests[0].req_id == "mooncake-1"
    assert len({request.block_hashes[0] for request in mooncake.requests}) == 1
    assert mooncake.max_blocks == 247


def test_mooncake_limit(mooncake: Trace, recorded_traces: Path) -> None:
    """A limited trace is the beginning of the whole one."""
    assert read_trace(recorded_traces / "mooncake", limit=500).requests == mooncake.requests[:500]


def test_ragpulse_counts(ragpulse: Trace) -> None:
    """Every request is read, every section has its length."""
    assert (ragpulse.format, ragpulse.block_tokens) == ("ragpulse", 64)
    assert len(ragpulse.requests) == 7_106
    assert ragpulse.num_block_references == 330_347
    assert ragpulse.num_distinct_blocks == 227_659
    assert ragpulse.requests[0].prompt_tokens == 3_112


def test_ragpulse_runs_for_two_weeks(ragpulse: Trace) -> None:
    """The order of the file is the order of time, across the restart of the clock."""
    assert [request.req_id for request in ragpulse.requests] == [
        f"ragpulse-{line}" for line in range(1, 7_107)
    ]
    assert ragpulse.requests[0].arrival_s == 82
    assert ragpulse.requests[-1].arrival_s == 604_800 + 604_603


def test_claude_code_counts(claude_code: Trace) -> None:
    """Twelve sessions with most of their blocks repeated."""
    assert (claude_code.format, claude_code.block_tokens) == ("claude-code", 64)
    sessions = {request.req_id.partition("/")[0] for request in claude_code.requests}
    assert len(sessions) == 12
    assert len(claude_code.requests) == 487
    assert claude_code.reuse_ratio == pytest.approx(0.9416, abs=5e-5)


def test_claude_code_tokens_of_one_session(recorded_traces: Path) -> None:
    """The prompt and output tokens of a session sum to the totals that its file states."""
    trace = read_trace(recorded_traces / "claude-code" / "trace_0001.json")
    assert sum(request.prompt_tokens for request in trace.requests) == 4_873_373
    assert sum(request.output_tokens for request in trace.requests) == 27_119


@pytest.mark.parametrize("name", ["mooncake", "ragpulse", "claude-code"])
def test_hash_has_one_parent(
    recorded_traces: Path, assert_one_parent: Callable[[Trace], None], name: str
) -> None:
    """Equal hashes mean equal prefixes in every format."""
    assert detect_format(recorded_traces / name) == name
    assert_one_parent(read_trace(recorded_traces / name))
