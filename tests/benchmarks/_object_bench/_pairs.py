"""Who is compared with whom: each engine of each tier with its library alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from _object_bench._bare import BareObstore, BareS3fs
from _object_bench._bare_nixl import BareNixl
from _object_bench._contenders import TierContender

from kv_tier_obj import kv_core_register_tier as obj_tier
from kv_tier_s3 import Engine, kv_core_register_tier

if TYPE_CHECKING:
    from _fs_bench._memory import Memory
    from _object_bench._contenders import Contender
    from _object_bench._place import Place

__all__ = ["Pair", "all_pairs"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A tier and what it is built on.

    Attributes:
        tier: The tier.
        bare: The same work without it.
    """

    tier: TierContender
    bare: Contender


_NIXL_THREADS: Final = 8


def all_pairs(place: Place, memory: Memory, only: str = "") -> list[Pair]:
    """Return all pairs whose tier has a name that begins with ``only``."""
    # On a machine that is busy with something else, late is not lost.
    patience = {"lookup_deadline_s": 120.0, "job_deadline_s": 600.0}
    settings = {**place.access.settings(place.bucket), **patience}
    pairs = [
        Pair(
            TierContender(
                f"s3 {engine.value}",
                kv_core_register_tier(),
                {**settings, "engine": engine.value},
                memory,
            ),
            bare(engine.value, place, memory),
        )
        for engine, bare in ((Engine.S3FS, BareS3fs), (Engine.OBSTORE, BareObstore))
    ]
    pairs.append(
        Pair(
            TierContender("obj", obj_tier(), {**settings, "threads": _NIXL_THREADS}, memory),
            BareNixl("nixl", place, memory, _NIXL_THREADS),
        )
    )
    return [pair for pair in pairs if pair.tier.name.startswith(only)]
