"""Settings of the tiering engine itself, as opposed to those of one tier."""

from __future__ import annotations

import enum

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["EngineReset", "TieringConfig"]


class EngineReset(str, enum.Enum):
    """What the inference engine's "reset the prefix cache" call does below the GPU."""

    CACHE = "cache"
    """Empties the primary tier; secondary tiers keep their blocks, which stay valid."""
    EPOCH = "epoch"
    """Also re-opens every tier under a new namespace: for new weights under the same name."""


class TieringConfig(BaseModel):
    """How the engine shares the primary tier, how long it waits, and what it puts up with.

    ``docs/configuration.md`` gives the reason for each value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    # -- promotions and waiting requests --------------------------------------------------------

    lease_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description=(
            "Share of the primary tier that reserved promotions, leases of waiting requests and "
            "quarantined slots may take together. The rest is for stores of running requests."
        ),
    )
    request_lookup_deadline_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description=(
            "Seconds from a request's first unknown answer after which it is only told yes or no."
        ),
    )
    promotion_deadline_s: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=False,
        description=(
            "Seconds after which a load is given up: its waiters see a miss, its slot is "
            "quarantined until the tier reports."
        ),
    )
    lease_deadline_s: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which blocks held for a waiting request may be evicted again.",
    )

    # -- stores ---------------------------------------------------------------------------------

    store_deadline_s: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a store counts as stalled, which degrades its tier.",
    )
    max_inflight_store_bytes: int = Field(
        default=2**30,
        ge=1,
        description="Most bytes on their way to one tier; what exceeds it is stored later or not.",
    )
    store_seconds_per_mib: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=False,
        description=(
            "Average seconds per MiB of a tier's stores, queueing included, from which on stores "
            "are dropped: none at this value, all at three times it."
        ),
    )
    shutdown_flush_s: float = Field(
        default=30.0,
        ge=0,
        allow_inf_nan=False,
        description="Most seconds that a shutdown waits for stores on their way to the tiers.",
    )

    # -- health ---------------------------------------------------------------------------------

    degrade_after_failures: int = Field(
        default=3,
        ge=1,
        description="Failures in a row after which a tier is degraded: skipped, and probed.",
    )
    degraded_backoff_s: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds until the first probe of a degraded tier; doubled by each failure.",
    )
    degraded_backoff_max_s: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Longest time between two probes of a degraded tier.",
    )
    quarantine_grace_s: float = Field(
        default=5.0,
        ge=0,
        allow_inf_nan=False,
        description=(
            "Seconds past its deadline after which a job no longer keeps an idle engine stepping."
        ),
    )

    # -- resets ---------------------------------------------------------------------------------

    engine_reset: EngineReset = Field(
        default=EngineReset.CACHE,
        description=(
            "What the engine's reset call means: 'cache' empties the primary tier, 'epoch' also "
            "makes everything stored so far unreachable (use it with weight updates)."
        ),
    )

    def lease_blocks(self, num_blocks: int) -> int:
        """Return the slots that ``lease_share`` comes to in a primary tier of this many."""
        return max(1, int(num_blocks * self.lease_share))

    def overdue_blocks(self, num_blocks: int, num_tiers: int) -> int:
        """Return the blocks of overdue jobs with which a tier gets no more work.

        So much of the share that however many tiers lose their jobs, a part of it is left.
        """
        return max(1, self.lease_blocks(num_blocks) // (num_tiers + 1))
