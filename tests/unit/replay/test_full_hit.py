"""A prompt that ends with a block is found whole, and its last token is computed all the same."""

from __future__ import annotations

import hashlib

from kv_core.workload import Trace, TraceRequest
from kv_core.workload.replay import ReplayConfig, replay_trace

BLOCK_TOKENS = 16


def _trace(prompt_tokens: int, repeats: int, gap: int) -> Trace:
    """The same prompt again and again, with other prompts between that push it off the GPU."""

    def request(name: str, number: int) -> TraceRequest:
        count = -(-prompt_tokens // BLOCK_TOKENS)
        hashes = tuple(hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(count))
        return TraceRequest(f"r{number}", float(number), prompt_tokens, 0, hashes)

    names = []
    for repeat in range(repeats):
        names += ["same", *(f"other-{repeat}-{i}" for i in range(gap))]
    requests = [request(name, number) for number, name in enumerate(names)]
    return Trace("full hit", "test", BLOCK_TOKENS, requests)


def test_a_prompt_of_whole_blocks_is_loaded_whole() -> None:
    """Each repetition loads and verifies all three blocks and saves all tokens but the last."""
    trace = _trace(3 * BLOCK_TOKENS, repeats=3, gap=4)
    report = replay_trace(trace, ReplayConfig(gpu_blocks=5, max_seqs=1))
    assert report.problems() == []
    assert report.hits == {"gpu": 0, "cpu": 6}
    assert (report.blocks_verified, report.misses) == (6, 13 * 3)
    assert report.tokens_saved == 2 * (3 * BLOCK_TOKENS - 1)


def test_a_partial_last_block_is_computed() -> None:
    """One token more than three blocks: the three are loaded, the fourth is not."""
    trace = _trace(3 * BLOCK_TOKENS + 1, repeats=3, gap=4)
    report = replay_trace(trace, ReplayConfig(gpu_blocks=6, max_seqs=1))
    assert report.problems() == []
    assert report.hits == {"gpu": 0, "cpu": 6}
    assert report.misses == 15 * 4 - 6
    assert report.tokens_saved == 2 * 3 * BLOCK_TOKENS
