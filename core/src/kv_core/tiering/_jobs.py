"""Makes jobs: ids that are never reused, times, deadlines, and how many keys to a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_core.contract import JobId, JobMetadata
from kv_core.tiering._guard import TierJob
from kv_core.tiering._health import HealthState

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from kv_core.contract import Clock, ReqContext
    from kv_core.keys import OffloadKey
    from kv_core.tiering._config import TieringConfig
    from kv_core.tiering._guard import GuardedTier
    from kv_core.tiering._requests import RequestState

__all__ = ["JobFactory", "job_ranges"]


@final
class JobFactory:
    """Numbers the jobs of one engine."""

    def __init__(self, config: TieringConfig, clock: Clock) -> None:
        self._promotion_deadline_s = config.promotion_deadline_s
        self._store_deadline_s = config.store_deadline_s
        self._clock = clock
        self._next_id = 0

    def load(
        self,
        keys: tuple[OffloadKey, ...],
        block_ids: npt.NDArray[np.int32],
        generations: tuple[int, ...],
        state: RequestState,
    ) -> TierJob:
        """Make a promotion."""
        metadata = self._metadata(keys, block_ids, state.context, is_promotion=True)
        deadline = metadata.submit_time + self._promotion_deadline_s
        return TierJob(metadata, deadline, generations, state)

    def store(
        self,
        keys: tuple[OffloadKey, ...],
        block_ids: npt.NDArray[np.int32],
        context: ReqContext,
    ) -> TierJob:
        """Make a store."""
        metadata = self._metadata(keys, block_ids, context, is_promotion=False)
        return TierJob(metadata, metadata.submit_time + self._store_deadline_s)

    def _metadata(
        self,
        keys: tuple[OffloadKey, ...],
        block_ids: npt.NDArray[np.int32],
        context: ReqContext,
        *,
        is_promotion: bool,
    ) -> JobMetadata:
        job_id = JobId(self._next_id)
        self._next_id += 1
        return JobMetadata(job_id, keys, block_ids, is_promotion, context, self._clock())


def job_ranges(tier: GuardedTier, length: int) -> Iterator[slice]:
    """Cut keys into the ranges for which a tier may be given jobs now.

    Submit the job of a range before asking for the next one: a tier that refuses jobs is not
    given the rest, and one that is on probation gets one job of one block.

    Args:
        tier: The tier.
        length: Number of keys; no range for no keys.
    """
    start = 0
    while start < length and tier.may_use():
        is_probe = tier.health.state is HealthState.DEGRADED
        stop = min(length, start + (1 if is_probe else tier.limits.max_job_keys or length))
        yield slice(start, stop)
        start = stop
