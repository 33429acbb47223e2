"""Settings that every tier made with the kit shares."""

from __future__ import annotations

from pydantic import Field

from kv_core.contract import TierConfig, TierLimits

__all__ = ["TierKitConfig"]


class TierKitConfig(TierConfig):
    """Base of the configuration of a tier made with the kit. Add the tier's own settings."""

    io_threads: int = Field(default=8, ge=2, le=256)
    """Transfers that run at the same time. At least two, so that one is always free of stores."""
    job_deadline_s: float = Field(default=30.0, gt=0, le=3600, allow_inf_nan=False)
    """A job is reported within this many seconds."""
    lookup_deadline_s: float = Field(default=5.0, gt=0, le=600, allow_inf_nan=False)
    """A lookup resolves within this many seconds."""
    error_backoff_s: float = Field(default=1.0, gt=0, le=600, allow_inf_nan=False)
    """How long the tier may answer "absent" after an error of the backend."""

    def limits(
        self,
        *,
        open_deadline_s: float = 30.0,
        visibility_delay_s: float = 0.0,
        min_retained_blocks: int = 1,
        max_block_bytes: int | None = None,
        max_job_keys: int | None = None,
        staging_bytes: int = 0,
        min_free_bytes: int = 0,
    ) -> TierLimits:
        """Return the limits for the tier's ``TierSpec``: these settings plus what is given."""
        return TierLimits(
            job_deadline_s=self.job_deadline_s,
            lookup_deadline_s=self.lookup_deadline_s,
            error_backoff_s=self.error_backoff_s,
            open_deadline_s=open_deadline_s,
            visibility_delay_s=visibility_delay_s,
            min_retained_blocks=min_retained_blocks,
            max_block_bytes=max_block_bytes,
            max_job_keys=max_job_keys,
            staging_bytes=staging_bytes,
            min_free_bytes=min_free_bytes,
        )
