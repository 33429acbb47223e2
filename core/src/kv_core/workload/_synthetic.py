"""Synthetic workloads: seeded, and the same on every machine and Python version.

Only ``random.Random.random()`` is drawn from (the one method whose sequence Python promises to
keep), and hashes come from SHA-256. Every kind is an endless stream of drafts in time order; a
trace is the first ``num_requests`` of it, so a longer trace starts with the shorter one.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import random
from bisect import bisect_right
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal, final, get_args

from kv_core.errors import ConfigError
from kv_core.workload._chain import SectionChain, root_hash
from kv_core.workload._trace import Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SyntheticKind", "SyntheticShape", "synthetic_trace"]

SyntheticKind = Literal["chat", "shared-prefix", "rag", "mixed"]
"""Kinds of synthetic workload, see :func:`synthetic_trace`."""

_SHARED: Final = b"s"
_PASSAGE: Final = b"p"
_TURN: Final = b"t"
_ANSWER: Final = b"a"


@final
@dataclass(frozen=True, slots=True)
class SyntheticShape:
    """Sizes and rates of a synthetic workload. All numbers are positive.

    Attributes:
        requests_per_second: Mean arrival rate of requests (Poisson).
        turn_tokens: Mean length of what a user writes in one turn (exponential).
        output_tokens: Mean length of an answer (exponential).
        num_shared_prompts: System prompts or instructions to choose from.
        shared_prompt_tokens: Mean length of one; each has its own, half to one and a half times.
        popularity_skew: Exponent of the Zipf law that system prompts and passages are chosen by;
            0 makes all equally likely.
        turns_per_chat: Mean number of turns in a conversation (geometric).
        think_seconds: Mean time between two turns of a conversation (exponential).
        max_prompt_tokens: A conversation whose next prompt would be longer ends instead.
        num_passages: Passages in the document store.
        passage_tokens: Mean length of one; each has its own, half to one and a half times.
        passages_per_request: Different passages put before each question.
    """

    requests_per_second: float = 2.0
    turn_tokens: int = 120
    output_tokens: int = 200
    num_shared_prompts: int = 32
    shared_prompt_tokens: int = 1200
    popularity_skew: float = 1.0
    turns_per_chat: float = 6.0
    think_seconds: float = 30.0
    max_prompt_tokens: int = 32_768
    num_passages: int = 2_000
    passage_tokens: int = 400
    passages_per_request: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int, float) if field.type == "float" else (int,)
            least = 0 if field.name == "popularity_skew" else 1 if kinds == (int,) else 1e-6
            if type(value) not in kinds or not least <= value < math.inf:
                noun = "a number" if len(kinds) == 2 else "an integer"
                raise ConfigError(
                    f"{field.name} must be {noun} of at least {least}, found {value!r}",
                    setting=field.name,
                )
        if self.turns_per_chat < 1:
            raise ConfigError(
                f"turns_per_chat must be at least 1, found {self.turns_per_chat!r}",
                setting="turns_per_chat",
            )
        if self.passages_per_request > self.num_passages:
            raise ConfigError(
                f"passages_per_request ({self.passages_per_request}) exceeds num_passages "
                f"({self.num_passages}); the passages of one request are all different",
                setting="passages_per_request",
            )


def synthetic_trace(
    kind: SyntheticKind,
    *,
    seed: int,
    num_requests: int,
    block_tokens: int = 64,
    shape: SyntheticShape | None = None,
) -> Trace:
    """Generate a workload.

    * ``"chat"``: conversations that begin with a shared system prompt; each prompt is the last
      one, its answer and a new turn.
    * ``"shared-prefix"``: a shared system prompt, chosen by popularity, and a question of its
      own. Nothing is asked twice.
    * ``"rag"``: one of a few shared instructions, passages chosen by popularity, a question.
    * ``"mixed"``: the three above at once, each at a third of the rate, sharing nothing.

    Args:
        kind: One of the above.
        seed: Any integer; equal arguments give equal traces everywhere.
        num_requests: Length of the trace.
        block_tokens: Tokens in a block.
        shape: Sizes and rates; ``None`` for the defaults.

    Raises:
        ConfigError: The kind is unknown or a number is out of range.
    """
    if kind not in get_args(SyntheticKind):
        kinds = ", ".join(get_args(SyntheticKind))
        raise ConfigError(f"unknown kind of workload {kind!r}; kinds: {kinds}", setting="kind")
    for name, value, least in (
        ("num_requests", num_requests, 0),
        ("block_tokens", block_tokens, 1),
    ):
        if type(value) is not int or value < least:
            raise ConfigError(
                f"{name} must be an integer of at least {least}, found {value!r}", setting=name
            )
    if type(seed) is not int:
        raise ConfigError(f"seed must be an integer, found {seed!r}", setting="seed")
    shape = shape or SyntheticShape()
    stream: Iterator[_Draft]
    if kind == "mixed":
        streams = [_stream(part, seed, block_tokens, shape, 1 / 3) for part in _STREAMS]
        stream = heapq.merge(*streams, key=attrgetter("arrival_s"))
    else:
        stream = _stream(kind, seed, block_tokens, shape, 1.0)
    requests = tuple(
        TraceRequest(
            req_id=f"{kind}-{number}",
            arrival_s=draft.arrival_s,
            prompt_tokens=draft.prompt_tokens,
            output_tokens=draft.output_tokens,
            block_hashes=draft.block_hashes,
        )
        for number, draft in enumerate(itertools.islice(stream, num_requests))
    )
    return Trace(
        name=f"{kind} (seed {seed})",
        format="synthetic",
        block_tokens=block_tokens,
        requests=requests,
    )


@final
@dataclass(frozen=True, slots=True)
class _Draft:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[bytes, ...]


@final
class _Draws:
    """Random numbers of one stream, all made of ``random()``."""

    def __init__(self, seed: int, kind: str) -> None:
        digest = hashlib.sha256(f"{kind} {seed}".encode()).digest()
        self._random = random.Random(int.from_bytes(digest, "big"))

    def seconds(self, mean: float) -> float:
        return -math.log(1 - self._random.random()) * mean

    def tokens(self, mean: int) -> int:
        return 1 + int(-math.log(1 - self._random.random()) * (mean - 0.5))

    def tokens_around(self, mean: int) -> int:
        return max(1, int(mean * (0.5 + self._random.random())))

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def rank(self, cumulative: list[float]) -> int:
        position = bisect_right(cumulative, self._random.random() * cumulative[-1])
        return min(position, len(cumulative) - 1)


@final
class _Store:
    """Texts that many requests share: each of fixed length, chosen by popularity."""

    def __init__(self, draws: _Draws, count: int, mean_tokens: int, skew: float) -> None:
        self._draws = draws
        self._lengths = [draws.tokens_around(mean_tokens) for _ in range(count)]
        self._cumulative = list(itertools.accumulate((rank + 1) ** -skew for rank in range(count)))

    def choose(self) -> tuple[int, int]:
        """Return (id, tokens) of one text."""
        number = self._draws.rank(self._cumulative)
        return number, self._lengths[number]

    def choose_different(self, count: int) -> list[tuple[int, int]]:
        """Return ``count`` different texts, in the order they were drawn."""
        chosen: dict[int, int] = {}
        # A skewed law repeats itself for ever when nearly all of the store is asked for; after
        # some tries the most popular texts that are left complete the choice.
        for _ in range(8 * count):
            number, tokens = self.choose()
            chosen.setdefault(number, tokens)
            if len(chosen) == count:
                break
        for number, tokens in enumerate(self._lengths):
            if len(chosen) == count:
                break
            chosen.setdefault(number, tokens)
        return list(chosen.items())


def _stream(
    kind: str, seed: int, block_tokens: int, shape: SyntheticShape, share: float
) -> Iterator[_Draft]:
    root = root_hash("synthetic", kind, str(seed), str(block_tokens))
    rate = shape.requests_per_second * share
    return _STREAMS[kind](_Draws(seed, kind), root, block_tokens, shape, rate)


def _shared_prefix(
    draws: _Draws, root: bytes, block_tokens: int, shape: SyntheticShape, rate: float
) -> Iterator[_Draft]:
    prompts = _prompts(draws, shape)
    clock_s = 0.0
    for number in itertools.count():
        clock_s += draws.seconds(1 / rate)
        chain = SectionChain(root, block_tokens)
        chain.append(_SHARED, *prompts.choose())
        chain.append(_TURN, number, draws.tokens(shape.turn_tokens))
        yield _draft(clock_s, chain, draws.tokens(shape.output_tokens))


def _rag(
    draws: _Draws, root: bytes, block_tokens: int, shape: SyntheticShape, rate: float
) -> Iterator[_Draft]:
    prompts = _prompts(draws, shape)
    passages = _Store(draws, shape.num_passages, shape.passage_tokens, shape.popularity_skew)
    clock_s = 0.0
    for number in itertools.count():
        clock_s += draws.seconds(1 / rate)
        chain = SectionChain(root, block_tokens)
        chain.append(_SHARED, *prompts.choose())
        for passage in passages.choose_different(shape.passages_per_request):
            chain.append(_PASSAGE, *passage)
        chain.append(_TURN, number, draws.tokens(shape.turn_tokens))
        yield _draft(clock_s, chain, draws.tokens(shape.output_tokens))


def _chat(
    draws: _Draws, root: bytes, block_tokens: int, shape: SyntheticShape, rate: float
) -> Iterator[_Draft]:
    prompts = _prompts(draws, shape)
    mean_gap_s = shape.turns_per_chat / rate
    next_chat_s = 0.0
    turn_numbers = itertools.count()
    # (time of the next turn, number that breaks ties, its length, the conversation before it)
    active: list[tuple[float, int, int, SectionChain]] = []
    while True:
        if not active or next_chat_s <= active[0][0]:
            clock_s = next_chat_s
            next_chat_s += draws.seconds(mean_gap_s)
            chain = SectionChain(root, block_tokens)
            chain.append(_SHARED, *prompts.choose())
            turn_tokens = draws.tokens(shape.turn_tokens)
        else:
            clock_s, _, turn_tokens, chain = heapq.heappop(active)
        number = next(turn_numbers)
        chain.append(_TURN, number, turn_tokens)
        output_tokens = draws.tokens(shape.output_tokens)
        yield _draft(clock_s, chain, output_tokens)
        chain.append(_ANSWER, number, output_tokens)
        goes_on = draws.chance(1 - 1 / shape.turns_per_chat)
        turn_tokens = draws.tokens(shape.turn_tokens)
        if goes_on and chain.num_tokens + turn_tokens <= shape.max_prompt_tokens:
            next_turn_s = clock_s + draws.seconds(shape.think_seconds)
            heapq.heappush(active, (next_turn_s, number, turn_tokens, chain))


def _prompts(draws: _Draws, shape: SyntheticShape) -> _Store:
    return _Store(
        draws, shape.num_shared_prompts, shape.shared_prompt_tokens, shape.popularity_skew
    )


def _draft(clock_s: float, chain: SectionChain, output_tokens: int) -> _Draft:
    # Rounded: the last bit of a logarithm may differ between C libraries.
    return _Draft(round(clock_s, 6), chain.num_tokens, output_tokens, chain.block_hashes())


_STREAMS: Final = {"chat": _chat, "shared-prefix": _shared_prefix, "rag": _rag}
