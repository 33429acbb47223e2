"""A request of the trace on its way through the replay."""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_core.workload._trace import TraceRequest

__all__ = ["ReplayRequest", "Status"]

_NO_PARAMS: Final[Mapping[str, Any]] = MappingProxyType({})


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    FINISHED = "finished"


@final
class ReplayRequest:
    """One request; implements ``kv_core.connector.KVRequest``.

    Attributes:
        req_id: Unique within the replay.
        num_prompt_tokens: Tokens of the prompt.
        num_output_tokens: Tokens of the output when it is complete.
        num_blocks: Blocks of the prompt, a partial last one included.
        block_hashes: Hashes of the full blocks of the prompt.
        kv_transfer_params: Empty.
        status: Where it stands.
        block_ids: Its block table.
        computed_tokens: Tokens whose KV is in its blocks.
        output_tokens: Output tokens generated so far.
        hits: Hits by level, counted at the first admission.
        was_admitted: Whether hits and misses were counted.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "computed_tokens",
        "hits",
        "kv_transfer_params",
        "num_blocks",
        "num_output_tokens",
        "num_prompt_tokens",
        "output_tokens",
        "req_id",
        "status",
        "was_admitted",
    )

    def __init__(self, request: TraceRequest, block_tokens: int, max_output_tokens: int) -> None:
        self.req_id = request.req_id
        self.num_prompt_tokens = request.prompt_tokens
        self.num_output_tokens = min(request.output_tokens, max_output_tokens)
        self.num_blocks = request.num_blocks
        # An engine caches full blocks only.
        self.block_hashes = request.block_hashes[: request.prompt_tokens // block_tokens]
        self.kv_transfer_params = _NO_PARAMS
        self.status = Status.WAITING
        self.block_ids: list[int] = []
        self.computed_tokens = 0
        self.output_tokens = 0
        self.hits: dict[str, int] = {}
        self.was_admitted = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return self.num_prompt_tokens + self.output_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the whole output was generated."""
        return (
            self.output_tokens >= self.num_output_tokens
            and self.computed_tokens >= self.num_prompt_tokens
        )
