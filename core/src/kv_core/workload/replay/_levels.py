"""What a replay has below its pool of GPU blocks: the same to the engine in every mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from kv_core.connector import KVRequest, StepSchedule

__all__ = ["LowerLevels", "StepEnd"]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What a step has brought.

    Attributes:
        loaded_req_ids: Requests whose load has ended well.
        failed_req_ids: Requests whose load has failed.
        any_finished: Whether any transfer between GPU and CPU has ended.
    """

    loaded_req_ids: AbstractSet[str] = field(default_factory=frozenset)
    failed_req_ids: AbstractSet[str] = field(default_factory=frozenset)
    any_finished: bool = False


class LowerLevels(Protocol):
    """The offloading engine and its workers, over the pages of the GPU pool.

    Within a step: the first two methods for requests that are considered, then
    :meth:`end_scheduling` and :meth:`run_step` once each.
    """

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the GPU pool of each worker is."""

    @property
    def stores_declined(self) -> int:
        """Offers of blocks that found no room so far."""

    @property
    def num_transfers_in_flight(self) -> int:
        """Transfers between GPU and CPU that have not ended."""

    @property
    def num_jobs_in_flight(self) -> int:
        """Jobs of tiers that have not ended."""

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens beyond those on the GPU can be loaded; ``None`` to ask again."""

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Begin a load, or not, now that GPU blocks are allocated."""

    def hit_levels(self, request: KVRequest) -> list[str]:
        """Name the level of each block of a request's load in flight, in load order."""

    def end_scheduling(self, schedule: StepSchedule) -> None:
        """Decide what the step loads and stores."""

    def run_step(self, poison: Sequence[int], fill: Sequence[tuple[int, bytes]]) -> StepEnd:
        """Run the step on all workers.

        Args:
            poison: GPU blocks that the step hands out.
            fill: What the forward pass writes: GPU block and key of its content.
        """

    def count_wrong_bytes(self, blocks: Sequence[tuple[int, bytes]]) -> list[list[int]]:
        """Compare GPU blocks with what their keys demand; for each worker, bytes per block."""

    def request_finished(self, request: KVRequest) -> bool:
        """Take note of a request's end."""

    def has_pending_work(self) -> bool:
        """Say whether steps are needed although no request can run."""

    def get_stats(self) -> Mapping[str, float]:
        """Return the counters of the offloading engine."""

    def shutdown(self) -> None:
        """Release workers, tiers and memory. Idempotent."""
