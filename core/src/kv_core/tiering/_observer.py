"""A window onto finished jobs, for replay, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kv_core.contract import JobError

__all__ = ["JobObserver", "JobReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One finished job between the primary tier and a secondary tier.

    Attributes:
        tier: Name of the tier.
        is_promotion: ``True`` for loads, ``False`` for stores.
        blocks: Blocks of the job.
        blocks_succeeded: Blocks that were stored or loaded.
        seconds: From submission to the poll that saw the result.
        error: Why blocks failed, or ``None``.
    """

    tier: str
    is_promotion: bool
    blocks: int
    blocks_succeeded: int
    seconds: float
    error: JobError | None


class JobObserver(Protocol):
    """Called on the scheduler's thread for every finished job. Must be quick and not raise."""

    def job_finished(self, report: JobReport) -> None:
        """Take note of a finished job."""
