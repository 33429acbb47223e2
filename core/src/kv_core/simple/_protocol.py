"""What the simple mode wants of the inference engine. The engine's own objects will do.

The values of a step in :mod:`kv_core.connector` satisfy the protocols below as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from kv_core.keys import OffloadKey

__all__ = ["GpuBlockPoolView", "SimpleRequest", "SimpleStep", "SimpleStepRequest"]


class GpuBlockPoolView(Protocol):
    """The engine's pool of GPU blocks: which are free, what they hold, who uses them.

    A free block keeps its content, and can be found by its hash, until it is handed out again.
    The free queue has the block that is handed out next at its head. All calls come from the
    scheduler's thread.
    """

    @property
    def num_free(self) -> int:
        """Blocks in the free queue."""

    def first_free(self) -> int | None:
        """Return the head of the free queue; ``None`` when it is empty."""

    def next_free(self, block_id: int) -> int | None:
        """Return the block behind one that is in the free queue; ``None`` at the end."""

    def is_free(self, block_id: int) -> bool:
        """Say whether a block is in the free queue."""

    def block_key(self, block_id: int) -> OffloadKey | None:
        """Return what can be found in a block, or ``None`` when its content has no name."""

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add a user to each block. A free block leaves the queue and keeps its content."""

    def release(self, block_ids: Sequence[int], *, to_front: bool = False) -> None:
        """Take a user away from each block. A block without users is free.

        Args:
            block_ids: Blocks in prefix order: the last is handed out before the first.
            to_front: Put them before all free blocks and not behind them: they are as close to
                being handed out as before :meth:`acquire`.
        """


class SimpleRequest(Protocol):
    """A request, as far as its KV cache is concerned."""

    @property
    def req_id(self) -> str:
        """Unique among live requests."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the full hash blocks so far; grows with the output."""


class SimpleStepRequest(Protocol):
    """One request's part of a step."""

    @property
    def request(self) -> SimpleRequest:
        """The request."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV existed before the step, loaded ones included."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""

    @property
    def block_ids(self) -> Sequence[Sequence[int]]:
        """The whole block table, per KV cache group; 0 is the null block."""


class SimpleStep(Protocol):
    """What the engine decided for one step."""

    @property
    def scheduled(self) -> Sequence[SimpleStepRequest]:
        """Requests that compute in this step."""

    @property
    def preempted_req_ids(self) -> AbstractSet[str]:
        """Requests that lost their GPU blocks."""

    @property
    def allocated_block_ids(self) -> AbstractSet[int]:
        """GPU blocks handed out in this step; what was in them before is overwritten."""
