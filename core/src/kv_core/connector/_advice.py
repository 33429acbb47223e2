"""What is allowed and probably not meant: advice on a configuration.

Everything here follows from the settings and from what the tiers declare; nothing is opened and
nothing asked of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_core.tiering import TieringConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kv_core.connector._settings import OffloadingSettings
    from kv_core.plugins import CheckedTier

__all__ = ["Advice", "config_advice"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Something to reconsider.

    Attributes:
        setting: Dotted name of the setting it is about.
        message: What will happen and what to do instead.
    """

    setting: str
    message: str


def config_advice(settings: OffloadingSettings, tiers: Sequence[CheckedTier]) -> tuple[Advice, ...]:
    """Return what to reconsider about a configuration, the weightiest first.

    Args:
        settings: What the user wrote.
        tiers: Those of its secondary tiers that could be checked.
    """
    return (
        *_tier_modes(settings),
        *_same_storage(tiers),
        *_deadlines(settings),
        *_tier_deadlines(settings, tiers),
        *_without_effect(settings),
    )


def _tier_modes(settings: OffloadingSettings) -> Iterator[Advice]:
    entries = settings.secondary_tiers
    for entry in entries:
        if entry.read_only and entry.fill_on_promotion:
            yield Advice(
                f"{entry.name}.fill_on_promotion",
                f"tier {entry.name!r} is 'read_only', so its 'fill_on_promotion' has no effect; "
                "drop one of the two",
            )
    if entries and all(entry.read_only for entry in entries):
        yield Advice(
            "secondary_tiers",
            "every secondary tier is 'read_only': no block of this engine outlives the primary "
            "tier; set 'mode' to 'read_write' for at least one if that is not meant",
        )
    if entries and entries[-1].fill_on_promotion and not entries[-1].read_only:
        yield Advice(
            f"{entries[-1].name}.fill_on_promotion",
            f"tier {entries[-1].name!r} is the last one, so there is none below it to fill it "
            "from, and its 'fill_on_promotion' has no effect; list slower tiers after it or drop "
            "the setting",
        )


def _same_storage(tiers: Sequence[CheckedTier]) -> Iterator[Advice]:
    for index, tier in enumerate(tiers):
        for earlier in tiers[:index]:
            if earlier.spec.type == tier.spec.type and earlier.config == tier.config:
                yield Advice(
                    tier.name,
                    f"tiers {earlier.name!r} and {tier.name!r} have the same type and settings: "
                    "if that is one storage, every block is written there twice for nothing; "
                    "remove one or give it storage of its own",
                )


def _deadlines(settings: OffloadingSettings) -> Iterator[Advice]:
    if settings.promotion_deadline_s > settings.request_lookup_deadline_s:
        yield Advice(
            "promotion_deadline_s",
            f"'promotion_deadline_s' ({settings.promotion_deadline_s:g}) is longer than "
            f"'request_lookup_deadline_s' ({settings.request_lookup_deadline_s:g}): requests give "
            "up before their loads do, so slow loads occupy memory for nobody; make it shorter",
        )
    if settings.lease_deadline_s < settings.request_lookup_deadline_s:
        yield Advice(
            "lease_deadline_s",
            f"'lease_deadline_s' ({settings.lease_deadline_s:g}) is shorter than "
            f"'request_lookup_deadline_s' ({settings.request_lookup_deadline_s:g}): blocks that a "
            "request waits with may be evicted before it stops waiting; make it longer",
        )
    if settings.degraded_backoff_s > settings.degraded_backoff_max_s:
        yield Advice(
            "degraded_backoff_max_s",
            f"'degraded_backoff_s' ({settings.degraded_backoff_s:g}) is longer than "
            f"'degraded_backoff_max_s' ({settings.degraded_backoff_max_s:g}): the first pause "
            "would be the longest; swap them",
        )


def _tier_deadlines(settings: OffloadingSettings, tiers: Iterable[CheckedTier]) -> Iterator[Advice]:
    for tier in tiers:
        limits = tier.limits
        # A load between the two deadlines is given up and its slot quarantined: so be it. Longer
        # than a request ever waits is another matter.
        longest = max(settings.promotion_deadline_s, settings.request_lookup_deadline_s)
        if limits.job_deadline_s > longest:
            yield Advice(
                f"{tier.name}.job_deadline_s",
                f"tier {tier.name!r} may take {limits.job_deadline_s:g} s for a job, but loads "
                f"are given up after 'promotion_deadline_s' ({settings.promotion_deadline_s:g} "
                "s): a load in between counts as stalled and its slot stays blocked until the "
                "tier reports; shorten the tier's deadline or lengthen the engine's",
            )
        if limits.job_deadline_s > settings.store_deadline_s:
            yield Advice(
                f"{tier.name}.job_deadline_s",
                f"tier {tier.name!r} may take {limits.job_deadline_s:g} s for a job, but stores "
                f"count as stalled after 'store_deadline_s' ({settings.store_deadline_s:g} s), "
                "which degrades the tier; shorten the tier's deadline or lengthen the engine's",
            )
        if limits.lookup_deadline_s > settings.request_lookup_deadline_s:
            yield Advice(
                f"{tier.name}.lookup_deadline_s",
                f"tier {tier.name!r} may take {limits.lookup_deadline_s:g} s for a lookup, but "
                "requests wait 'request_lookup_deadline_s' "
                f"({settings.request_lookup_deadline_s:g} s) at most: slow answers come too late "
                "for the request that asked; shorten the tier's deadline",
            )


def _without_effect(settings: OffloadingSettings) -> Iterator[Advice]:
    given = settings.model_fields_set
    if settings.spec_name == "CPUOffloadingSpec":
        for name in sorted(given & TieringConfig.model_fields.keys() - {"engine_reset"}):
            yield Advice(
                name,
                f"{name!r} has no effect with CPUOffloadingSpec, which has no secondary tiers; "
                'set "spec_name": "TieringOffloadingSpec" or drop it',
            )
    elif settings.spec_name == "TieringOffloadingSpec" and not settings.secondary_tiers:
        yield Advice(
            "secondary_tiers",
            "TieringOffloadingSpec without 'secondary_tiers' is a plain CPU cache; list the tiers "
            "below it",
        )
    if settings.reuse_filter is None:
        if settings.store_threshold:
            yield Advice(
                "store_threshold",
                "'store_threshold' 1 is the same as 0: every block is stored at its first offer; "
                "set 2 or more to filter",
            )
        if "max_tracker_size" in given:
            yield Advice(
                "max_tracker_size",
                "'max_tracker_size' has no effect without a 'store_threshold' of at least 2",
            )
