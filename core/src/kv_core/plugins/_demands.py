"""What the engine demands of a tier's declarations before it opens the tier.

Whoever opens tiers and whoever only checks a configuration ask the same functions, so that the
check and the start agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_core.contract import Capability
from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from kv_core.plugins._check import CheckedTier

__all__ = ["require_block_size", "require_space_limit"]

_FLOOR_SETTING: Final = "min_free_bytes"


def require_block_size(tier: CheckedTier, block_bytes: int) -> None:
    """Refuse blocks that are larger than a tier takes.

    Raises:
        ConfigError: They are.
    """
    most = tier.limits.max_block_bytes
    if most is not None and block_bytes > most:
        raise ConfigError(
            f"tier {tier.name!r} takes blocks of at most {most} bytes, but a block has "
            f"{block_bytes}. Offload smaller blocks (set a lower 'blocks_per_chunk' or "
            "'block_size') or use another tier",
            setting="blocks_per_chunk",
        )


def require_space_limit(tier: CheckedTier, *, read_only: bool) -> None:
    """Refuse a tier that would store until its storage is full, and whatever shares it.

    A tier either keeps to a capacity (``BOUNDED``) or declines stores below a floor of free space
    (``TierLimits.min_free_bytes``). One that is only read needs neither.

    Raises:
        ConfigError: The tier declares neither.
    """
    if read_only or Capability.BOUNDED in tier.spec.capabilities or tier.limits.min_free_bytes > 0:
        return
    remedy = (
        f"Set its {_FLOOR_SETTING!r} to the bytes that must stay free"
        if _FLOOR_SETTING in type(tier.config).model_fields
        else "Use a tier that declares one of the two"
    )
    raise ConfigError(
        f"tier {tier.name!r} has no limit of capacity (capability 'bounded') and no floor of free "
        f"space (limit {_FLOOR_SETTING!r}): it would store until its storage is full. {remedy}; "
        "or set 'mode' to 'read_only', so that nothing is stored to it",
        setting=f"{tier.name}.{_FLOOR_SETTING}",
    )
