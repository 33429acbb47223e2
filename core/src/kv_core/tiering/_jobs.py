"""Makes jobs: ids that are never reused, times, deadlines."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_core.contract import JobId, JobMetadata
from kv_core.tiering._guard import TierJob

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kv_core.contract import Clock, ReqContext
    from kv_core.keys import OffloadKey
    from kv_core.tiering._config import TieringConfig

__all__ = ["JobFactory", "split_keys"]


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
        context: ReqContext,
    ) -> TierJob:
        """Make a promotion."""
        metadata = self._metadata(keys, block_ids, context, is_promotion=True)
        deadline = metadata.submit_time + self._promotion_deadline_s
        return TierJob(metadata, deadline, generations)

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


def split_keys(length: int, max_keys: int | None) -> list[slice]:
    """Cut ``length`` keys into ranges of at most ``max_keys``; no range for no keys."""
    step = max_keys or length or 1
    return [slice(start, start + step) for start in range(0, length, step)]
