"""Prompts for models without words."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Prompts"]


@final
class Prompts:
    """Makes prompts; the same ones in every run, and different ones for each name."""

    def __call__(self, name: str, *lengths: int, stem: Sequence[int] = ()) -> list[list[int]]:
        """Return one prompt for each length, all of which begin with ``stem``."""
        dice = random.Random(name)
        return [
            [*stem, *(dice.randrange(2, 512) for _ in range(length - len(stem)))]
            for length in lengths
        ]
