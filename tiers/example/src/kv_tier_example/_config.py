"""Settings of the tutorial tier."""

from __future__ import annotations

from pydantic import Field

from kv_core.tierkit import TierKitConfig

__all__ = ["ExampleConfig"]


class ExampleConfig(TierKitConfig):
    """What an operator can set."""

    max_blocks: int = Field(default=1024, ge=1)
    """Most blocks kept; the least recently used goes first."""
    simulate_async: bool = False
    """Answer lookups the way a tier does that has to ask a server: unknown first, the answer in a
    later step.
    """
