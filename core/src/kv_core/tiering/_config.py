"""Settings of the tiering engine itself, as opposed to those of one tier."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["TieringConfig"]


class TieringConfig(BaseModel):
    """How the tiering engine shares the primary tier and how long it lets requests wait."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    lease_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description=(
            "Share of the primary tier that reserved promotions and promoted blocks not yet "
            "loaded may take together. The rest stays free for stores of running requests."
        ),
    )
    request_lookup_deadline_s: float = Field(
        default=30.0,
        gt=0,
        description=(
            "Seconds from a request's first unknown answer after which it is only told yes or "
            "no, so that no tier can keep it waiting."
        ),
    )
