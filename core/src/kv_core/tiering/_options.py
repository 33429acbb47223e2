"""What a user says of one configured tier, beside the tier's own settings."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["TierMode", "TierOptions"]


class TierMode(str, enum.Enum):
    """Whether blocks are stored in a tier."""

    READ_WRITE = "read_write"
    READ_ONLY = "read_only"


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Options of one configured tier.

    Attributes:
        mode: ``READ_ONLY`` tiers are asked and loaded from, and never stored to.
        fill_on_promotion: Whether a block that a tier further down provides is stored here too.
    """

    mode: TierMode = TierMode.READ_WRITE
    fill_on_promotion: bool = False
