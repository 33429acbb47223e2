"""What the scheduler of a replay and its worker processes say to each other.

The scheduler sends a :class:`WorkerStart` and gets a :class:`WorkerReady`; then it sends
:class:`StepOrders` or a :class:`BlockCheck`, and gets a :class:`StepOutcome` or the counts. Instead
of any answer a worker may send a :class:`WorkerFailure`, and ends. The end of the connection tells
a worker to stop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from kv_core.connector import RegionRole
    from kv_core.engine import OffloadingConfig
    from kv_core.workload.replay._config import ReplayConfig

__all__ = ["BlockCheck", "WorkerFailure", "WorkerReady", "WorkerStart"]


@final
@dataclass(frozen=True, slots=True)
class WorkerStart:
    """All that a worker process has to know.

    Attributes:
        offloading: As the scheduler's, without tiers: those are the scheduler's alone, and their
            settings may hold secrets.
        role: The worker's role.
        rank: Its rank.
        gpu_blocks: Blocks of its GPU pool.
        block_bytes: Bytes of one of them.
    """

    offloading: OffloadingConfig
    role: RegionRole
    rank: int
    gpu_blocks: int
    block_bytes: int

    @classmethod
    def for_each(
        cls,
        config: ReplayConfig,
        offloading: OffloadingConfig,
        role: RegionRole,
        *,
        deadline_s: float,
    ) -> list[WorkerStart]:
        """Return what to tell each worker.

        Args:
            config: Sizes of the replay.
            offloading: As the scheduler's.
            role: The scheduler's role.
            deadline_s: Seconds that a worker waits for the primary tier.
        """
        extra_config = {**offloading.extra_config, "secondary_tiers": []}
        return [
            cls(
                offloading=replace(offloading, extra_config=extra_config),
                role=role.of_worker(rank, deadline_s=deadline_s),
                rank=rank,
                gpu_blocks=config.gpu_blocks,
                block_bytes=config.block_bytes,
            )
            for rank in range(config.workers)
        ]


@final
@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker is attached and has its pool.

    Attributes:
        device: Where the pool is.
    """

    device: str


@final
@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """The worker cannot go on.

    Attributes:
        reason: Why, for people.
    """

    reason: str


@final
@dataclass(frozen=True, slots=True)
class BlockCheck:
    """An order to compare GPU blocks with what their keys demand.

    Attributes:
        blocks: GPU block and key.
    """

    blocks: tuple[tuple[int, bytes], ...]
