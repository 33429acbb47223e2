"""A request trace: when each request came, how long it was, and which prefix blocks it needs.

Block hashes are chained: a hash stands for its block *and everything before it*. So two requests
share a prefix exactly as far as their hashes are equal, and one hash never has two parents. The
last block of a prompt may be partial; its hash then differs from that of the full block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HASH_BYTES", "Trace", "TraceRequest"]

HASH_BYTES: Final = 32
"""Length of every block hash."""


@final
@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        req_id: Unique within the trace.
        arrival_s: Seconds since the trace's own zero; not negative, not always 0 for the first.
        prompt_tokens: Tokens of the prompt, at least 1.
        output_tokens: Tokens of the answer, at least 0.
        block_hashes: One chained hash of :data:`HASH_BYTES` bytes for each block of the prompt,
            the partial last block included: ``ceil(prompt_tokens / block_tokens)`` of them.
    """

    req_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[bytes, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt, the partial last one included."""
        return len(self.block_hashes)


@final
@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        name: Where the requests come from, for reports: a file or folder name, or the recipe of
            a synthetic trace.
        format: Kind of the source, for example ``"mooncake"``.
        block_tokens: Tokens that one block hash covers.
        requests: Ordered by ``arrival_s``; equal times keep the order of the source.

    Raises:
        ValueError: Requests are out of order, or a request has too few or too many hashes.
    """

    name: str
    format: str
    block_tokens: int
    requests: Sequence[TraceRequest]

    def __post_init__(self) -> None:
        previous_s = -math.inf
        for request in self.requests:
            if request.arrival_s < previous_s:
                raise ValueError(
                    f"request {request.req_id!r} arrives at {request.arrival_s} s, after one that "
                    f"arrives at {previous_s} s; order the requests by arrival_s"
                )
            previous_s = request.arrival_s
            expected = -(-request.prompt_tokens // self.block_tokens)
            if len(request.block_hashes) != expected:
                raise ValueError(
                    f"request {request.req_id!r} has {len(request.block_hashes)} block hashes, "
                    f"but {request.prompt_tokens} prompt tokens in blocks of {self.block_tokens} "
                    f"need {expected}"
                )

    @property
    def max_blocks(self) -> int:
        """Blocks of the largest prompt; 0 for a trace without requests."""
        return max((len(request.block_hashes) for request in self.requests), default=0)

    @property
    def num_block_references(self) -> int:
        """Blocks of all prompts together, each counted as often as it is asked for."""
        return sum(len(request.block_hashes) for request in self.requests)

    @property
    def num_distinct_blocks(self) -> int:
        """Blocks that are not equal to one another. Linear in the references: keep the result."""
        return len({key for request in self.requests for key in request.block_hashes})

    @property
    def reuse_ratio(self) -> float:
        """Share of references that repeat an earlier one: the hit rate of an infinite cache."""
        references = self.num_block_references
        return 1 - self.num_distinct_blocks / references if references else 0.0

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last; 0 for a trace without requests."""
        if not self.requests:
            return 0.0
        return self.requests[-1].arrival_s - self.requests[0].arrival_s
