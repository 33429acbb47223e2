"""Tests of the trace values."""

from __future__ import annotations

import dataclasses

import pytest

from kv_core.workload import HASH_BYTES, Trace, TraceRequest

A, B, C = (bytes([number]) * HASH_BYTES for number in range(3))


def request(req_id: str, arrival_s: float, tokens: int, hashes: tuple[bytes, ...]) -> TraceRequest:
    """Return a request with one token of output."""
    return TraceRequest(req_id, arrival_s, tokens, 1, hashes)


def trace(*requests: TraceRequest) -> Trace:
    """Return a trace with blocks of 16 tokens."""
    return Trace("name", "test", 16, requests)


def test_counts_of_a_small_trace() -> None:
    """References count repetitions, distinct blocks do not."""
    found = trace(request("a", 0, 32, (A, B)), request("b", 1, 33, (A, B, C)))
    assert found.num_block_references == 5
    assert found.num_distinct_blocks == 3
    assert found.reuse_ratio == pytest.approx(2 / 5)
    assert found.max_blocks == 3
    assert found.duration_s == 1
    assert found.requests[1].num_blocks == 3


def test_counts_of_an_empty_trace() -> None:
    """A trace without requests has zeros everywhere."""
    found = trace()
    assert (found.num_block_references, found.num_distinct_blocks, found.max_blocks) == (0, 0, 0)
    assert found.reuse_ratio == 0
    assert found.duration_s == 0


def test_equal_arrivals_are_in_order() -> None:
    """Requests may arrive together."""
    assert len(trace(request("a", 1, 1, (A,)), request("b", 1, 1, (A,))).requests) == 2


def test_refuses_requests_out_of_order() -> None:
    """The order of the requests is the order of their arrival."""
    with pytest.raises(ValueError, match=r"'b' arrives at 0 s, after one that arrives at 1 s"):
        trace(request("a", 1, 1, (A,)), request("b", 0, 1, (A,)))


@pytest.mark.parametrize(
    ("tokens", "hashes"), [(16, ()), (16, (A, B)), (17, (A,)), (1, ()), (32, (A, B, C))]
)
def test_refuses_a_wrong_number_of_hashes(tokens: int, hashes: tuple[bytes, ...]) -> None:
    """Every block of the prompt has one hash, the partial last one included."""
    with pytest.raises(ValueError, match=f"'a' has {len(hashes)} block hashes"):
        trace(request("a", 0, tokens, hashes))


def test_values_are_frozen() -> None:
    """A trace that is being replayed cannot change."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        request("a", 0, 16, (A,)).prompt_tokens = 1  # type: ignore[misc]
