"""The values that cross the boundary between scheduler and workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NO_EVENT", "SimpleCPUOffloadMetadata", "SimpleCPUOffloadWorkerMetadata"]

NO_EVENT: Final = -1
"""Stands for "nothing to transfer in this step"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCPUOffloadMetadata:
    """Orders for the workers of one step, identical for all of them.

    One event stands for all transfers of one direction and step. Events of a direction increase.
    The i-th GPU block and the i-th CPU block of a direction belong together.

    Attributes:
        load_event: Event of the loads, or :data:`NO_EVENT`.
        load_gpu_blocks: Where loads go.
        load_cpu_blocks: Where they come from.
        load_event_to_reqs: The requests that wait for the load event, by event.
        store_event: Event of the stores, or :data:`NO_EVENT`.
        store_gpu_blocks: Where stores come from.
        store_cpu_blocks: Where they go.
        need_flush: Whether transfers of earlier steps must have ended before this step's forward
            pass, because GPU blocks ran short and transfers hold some.
    """

    load_event: int = NO_EVENT
    load_gpu_blocks: tuple[int, ...] = ()
    load_cpu_blocks: tuple[int, ...] = ()
    load_event_to_reqs: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    store_event: int = NO_EVENT
    store_gpu_blocks: tuple[int, ...] = ()
    store_cpu_blocks: tuple[int, ...] = ()
    need_flush: bool = False


@dataclass(slots=True)
class SimpleCPUOffloadWorkerMetadata:
    """What workers report after a step; complete for an event at world size.

    Attributes:
        completed_store_events: For each store event that ended, how many workers report it.
        completed_load_events: The same for load events.
        failed_store_events: Store events that failed on at least one worker.
        failed_load_events: The same for load events.
    """

    completed_store_events: dict[int, int] = field(default_factory=dict)
    completed_load_events: dict[int, int] = field(default_factory=dict)
    failed_store_events: set[int] = field(default_factory=set)
    failed_load_events: set[int] = field(default_factory=set)

    def aggregate(self, other: SimpleCPUOffloadWorkerMetadata) -> SimpleCPUOffloadWorkerMetadata:
        """Return the sum of two reports, of different workers or of different steps."""
        return SimpleCPUOffloadWorkerMetadata(
            _summed(self.completed_store_events, other.completed_store_events),
            _summed(self.completed_load_events, other.completed_load_events),
            self.failed_store_events | other.failed_store_events,
            self.failed_load_events | other.failed_load_events,
        )


def _summed(first: Mapping[int, int], second: Mapping[int, int]) -> dict[int, int]:
    counts = dict(first)
    for event, count in second.items():
        counts[event] = counts.get(event, 0) + count
    return counts
