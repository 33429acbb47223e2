"""The values that cross the boundaries engine, scheduler side, worker side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_core.engine import TransferSpec

__all__ = [
    "ConnectorMetadata",
    "ConnectorOutput",
    "KVRequest",
    "ScheduledRequest",
    "StepSchedule",
    "Transfer",
]


class KVRequest(Protocol):
    """A request, as far as its KV cache is concerned. The engine's own object will do."""

    @property
    def req_id(self) -> str:
        """Unique among live requests."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the full hash blocks so far; grows with the output."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        """What the client sent along; often empty."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step.

    Attributes:
        request: The request.
        num_computed_tokens: Tokens whose KV existed before the step, loaded ones included.
        num_scheduled_tokens: Tokens that the step computes.
        block_ids: The whole block table, per KV cache group: entry i holds the GPU block of
            the group's i-th block of tokens; 0 is the null block.
    """

    request: KVRequest
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """What the engine decided for one step.

    Attributes:
        scheduled: Requests that compute in this step.
        new_req_ids: Those scheduled for the first time.
        preempted_req_ids: Requests that lost their GPU blocks.
        allocated_block_ids: GPU blocks handed out in this step, to loads as well; what was in
            them before is overwritten.
    """

    scheduled: Sequence[ScheduledRequest] = ()
    new_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] = frozenset()
    allocated_block_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy for the worker.

    Attributes:
        job_id: Unique for the life of the connector.
        req_id: The request it is for.
        spec: Source and destination.
    """

    job_id: int
    req_id: str
    spec: TransferSpec


@dataclass(frozen=True, slots=True)
class ConnectorMetadata:
    """Orders for the workers of one step, identical for all of them.

    Attributes:
        loads: CPU to GPU, to start before the step's forward pass.
        stores: GPU to CPU, to start at the beginning of the *next* step, when the forward pass
            has written their source; those in ``flush_job_ids`` at once.
        flush_job_ids: Stores of this or earlier steps and loads of earlier ones that must have
            ended before the step's loads and forward pass, which overwrite their GPU blocks.
    """

    loads: tuple[Transfer, ...] = ()
    stores: tuple[Transfer, ...] = ()
    flush_job_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class ConnectorOutput:
    """What workers report after a step.

    Attributes:
        finished: For each job that ended, how many workers report it; complete at world size.
        failed: Jobs that failed on at least one worker.
    """

    finished: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def aggregate(self, other: ConnectorOutput) -> ConnectorOutput:
        """Return the union of two workers' reports."""
        counts = dict(self.finished)
        for job_id, count in other.finished.items():
            counts[job_id] = counts.get(job_id, 0) + count
        return ConnectorOutput(counts, self.failed | other.failed)
