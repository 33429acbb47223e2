"""Tests of synthetic workloads."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, get_args

import pytest

from kv_core.errors import ConfigError
from kv_core.workload import HASH_BYTES, SyntheticKind, SyntheticShape, synthetic_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.workload import Trace

KINDS = get_args(SyntheticKind)
kinds = pytest.mark.parametrize("kind", KINDS)


def digest(trace: Trace) -> str:
    """Return a short digest over all hashes of a trace, in order."""
    hashes = itertools.chain.from_iterable(request.block_hashes for request in trace.requests)
    return hashlib.sha256(b"".join(hashes)).hexdigest()[:16]


@pytest.mark.parametrize(
    ("kind", "arrival_s", "prompt_tokens", "output_tokens", "references", "distinct", "hashes"),
    [
        ("chat", 89.211401, 1843, 200, 1133, 344, "5f010dda843f817d"),
        ("shared-prefix", 21.037691, 1626, 349, 795, 435, "17783eeeabcd4c71"),
        ("rag", 21.741399, 2069, 488, 1666, 1246, "24ca5cf5f6d67d85"),
        ("mixed", 32.441297, 797, 14, 1233, 901, "0f033e5251adb418"),
    ],
)
def test_seed_has_fixed_values(
    kind: SyntheticKind,
    arrival_s: float,
    prompt_tokens: int,
    output_tokens: int,
    references: int,
    distinct: int,
    hashes: str,
) -> None:
    """A seed means the same workload in every version and on every machine."""
    trace = synthetic_trace(kind, seed=7, num_requests=40)
    last = trace.requests[-1]
    assert last.req_id == f"{kind}-39"
    assert (last.arrival_s, last.prompt_tokens, last.output_tokens) == (
        arrival_s,
        prompt_tokens,
        output_tokens,
    )
    assert (trace.num_block_references, trace.num_distinct_blocks) == (references, distinct)
    assert digest(trace) == hashes


def test_other_process_makes_the_same_trace() -> None:
    """Nothing depends on the hash seed of the process."""
    code = (
        "import hashlib\n"
        "from kv_core.workload import synthetic_trace\n"
        "trace = synthetic_trace('mixed', seed=7, num_requests=40)\n"
        "hashes = b''.join(h for r in trace.requests for h in r.block_hashes)\n"
        "print(hashlib.sha256(hashes).hexdigest()[:16])\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "0f033e5251adb418"


@kinds
def test_hash_has_one_parent(
    kind: SyntheticKind, assert_one_parent: Callable[[Trace], None]
) -> None:
    """Equal hashes mean equal prefixes."""
    trace = synthetic_trace(kind, seed=3, num_requests=300)
    assert_one_parent(trace)
    assert {len(h) for r in trace.requests for h in r.block_hashes} == {HASH_BYTES}


@kinds
def test_longer_trace_starts_with_the_shorter(kind: SyntheticKind) -> None:
    """The number of requests cuts a stream and changes nothing before the cut."""
    short = synthetic_trace(kind, seed=5, num_requests=50)
    assert synthetic_trace(kind, seed=5, num_requests=120).requests[:50] == short.requests


@kinds
def test_seeds_share_nothing(kind: SyntheticKind) -> None:
    """Two seeds are two workloads, in their blocks as in their times."""
    one, two = (synthetic_trace(kind, seed=seed, num_requests=50) for seed in (1, 2))
    blocks = [{h for r in trace.requests for h in r.block_hashes} for trace in (one, two)]
    assert not blocks[0] & blocks[1]
    assert [r.arrival_s for r in one.requests] != [r.arrival_s for r in two.requests]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("chat", 0.8, 0.92), ("shared-prefix", 0.78, 0.9), ("rag", 0.38, 0.52), ("mixed", 0.55, 0.72)],
)
def test_reuse_is_what_the_kind_is_for(
    kind: SyntheticKind, least: float, most: float, seed: int
) -> None:
    """The reuse of each kind stays in its range, whatever the seed."""
    assert least < synthetic_trace(kind, seed=seed, num_requests=1000).reuse_ratio < most


@kinds
def test_rate_is_the_one_asked_for(kind: SyntheticKind) -> None:
    """Requests arrive at about the mean rate, once conversations have got going."""
    shape = SyntheticShape(requests_per_second=20.0, think_seconds=1.0)
    trace = synthetic_trace(kind, seed=1, num_requests=4000, shape=shape)
    assert 4000 / trace.duration_s == pytest.approx(20, rel=0.15)


def test_chat_turn_extends_an_earlier_prompt() -> None:
    """Most requests continue a conversation: all full blocks of an earlier prompt come first."""
    trace = synthetic_trace("chat", seed=4, num_requests=400, block_tokens=16)
    earlier: set[tuple[bytes, ...]] = set()
    continued = 0
    for request in trace.requests:
        full = request.block_hashes[: request.prompt_tokens // 16]
        prefixes = (full[:length] for length in range(len(full), 0, -1))
        continued += any(prefix in earlier for prefix in prefixes)
        earlier.add(full)
    assert 0.75 < continued / 400 < 0.9


def test_chat_ends_before_its_prompt_gets_too_long() -> None:
    """No prompt after the first turn exceeds the limit."""
    shape = SyntheticShape(
        max_prompt_tokens=2500, turns_per_chat=100.0, shared_prompt_tokens=400, num_shared_prompts=1
    )
    trace = synthetic_trace("chat", seed=4, num_requests=500, shape=shape)
    assert 2000 < max(request.prompt_tokens for request in trace.requests) <= 2500


def test_popularity_is_skewed() -> None:
    """The first system prompt is asked for far more often than the last, and evenly at skew 0."""
    counts: dict[float, list[int]] = {}
    for skew in (0.0, 1.2):
        shape = SyntheticShape(popularity_skew=skew, num_shared_prompts=8)
        trace = synthetic_trace("shared-prefix", seed=9, num_requests=800, shape=shape)
        firsts = Counter(request.block_hashes[0] for request in trace.requests)
        counts[skew] = sorted(firsts.values(), reverse=True)
    assert len(counts[0.0]) == 8
    assert counts[0.0][0] < 2 * counts[0.0][-1]
    assert counts[1.2][0] > 8 * counts[1.2][-1]


def test_rag_passages_of_one_request_differ() -> None:
    """Even when nearly all passages are asked for, none comes twice."""
    shape = SyntheticShape(
        num_passages=5, passages_per_request=5, passage_tokens=64, popularity_skew=3.0
    )
    trace = synthetic_trace("rag", seed=2, num_requests=60, block_tokens=1, shape=shape)
    # Instructions, five passages, one question of its own: with one token a block, the tokens
    # before the question are the sum of the lengths of one instruction and all passages.
    for request in trace.requests:
        assert len(set(request.block_hashes)) == request.prompt_tokens


def test_mixed_holds_all_three_kinds() -> None:
    """The mix draws a third of its requests from each stream, with the blocks of that stream."""
    mixed = {r.block_hashes[0] for r in synthetic_trace("mixed", seed=1, num_requests=300).requests}
    for kind in ("chat", "shared-prefix", "rag"):
        alone = synthetic_trace(kind, seed=1, num_requests=300)
        assert {r.block_hashes[0] for r in alone.requests} & mixed


@pytest.mark.parametrize("block_tokens", [1, 16, 100])
def test_block_length_can_be_chosen(block_tokens: int) -> None:
    """Lengths and times do not depend on the length of a block."""
    small = synthetic_trace("rag", seed=1, num_requests=20, block_tokens=block_tokens)
    usual = synthetic_trace("rag", seed=1, num_requests=20)
    assert small.block_tokens == block_tokens
    assert [(r.arrival_s, r.prompt_tokens) for r in small.requests] == [
        (r.arrival_s, r.prompt_tokens) for r in usual.requests
    ]


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"kind": "batch"}, "kind"),
        ({"num_requests": -1}, "num_requests"),
        ({"num_requests": 1.5}, "num_requests"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"seed": "7"}, "seed"),
        ({"seed": True}, "seed"),
    ],
)
def test_refuses_arguments_out_of_range(arguments: dict[str, Any], setting: str) -> None:
    """The error names the argument."""
    usual: dict[str, Any] = {"kind": "chat", "seed": 1, "num_requests": 1}
    with pytest.raises(ConfigError, match=setting) as caught:
        synthetic_trace(**{**usual, **arguments})
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"requests_per_second": 0}, "requests_per_second"),
        ({"requests_per_second": float("nan")}, "requests_per_second"),
        ({"think_seconds": float("inf")}, "think_seconds"),
        ({"turn_tokens": 0}, "turn_tokens"),
        ({"passage_tokens": 1.5}, "passage_tokens"),
        ({"popularity_skew": -1}, "popularity_skew"),
        ({"turns_per_chat": 0.5}, "turns_per_chat"),
        ({"num_passages": 3, "passages_per_request": 4}, "passages_per_request"),
    ],
)
def test_refuses_shapes_out_of_range(arguments: dict[str, Any], setting: str) -> None:
    """The error names the field."""
    with pytest.raises(ConfigError, match=setting) as caught:
        SyntheticShape(**arguments)
    assert caught.value.setting == setting


def test_no_requests_is_an_empty_trace() -> None:
    """Zero requests are allowed."""
    assert synthetic_trace("chat", seed=1, num_requests=0).requests == ()
