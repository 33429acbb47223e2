"""What is measured of one tier, in the form in which vLLM collects and publishes it.

vLLM asks for measurements in every step, adds up what it gets of a counter, and keeps the last of a
gauge. It refuses names that were not declared, so everything is in the tables below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from kv_core.vllm import _compat

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TIER_COUNTERS", "TIER_GAUGES", "TIER_VALUES", "TierReport", "tier_definitions"]

TIER_COUNTERS: Final = {
    "engine_errors": (
        "vllm:kv_core_tier_lookup_errors",
        "Blocks that a tier was asked for and did not deliver because of an error.",
    ),
    "engine_blocks_stored": ("vllm:kv_core_tier_stored_blocks", "Blocks that a tier has taken."),
    "engine_blocks_failed": (
        "vllm:kv_core_tier_failed_blocks",
        "Blocks that a tier failed to store.",
    ),
    "engine_blocks_declined": (
        "vllm:kv_core_tier_declined_blocks",
        "Blocks that a tier declined to store.",
    ),
    "engine_blocks_throttled": (
        "vllm:kv_core_tier_throttled_blocks",
        "Blocks that were not given to a tier because too much is on its way there.",
    ),
    "engine_blocks_skipped": (
        "vllm:kv_core_tier_skipped_blocks",
        "Blocks that were not given to a tier because it is not healthy.",
    ),
    "engine_jobs_stalled": (
        "vllm:kv_core_tier_stalled_jobs",
        "Jobs that a tier did not end in time.",
    ),
    "contained_exceptions": (
        "vllm:kv_core_tier_exceptions",
        "Exceptions of a tier that were contained.",
    ),
    "ignored_results": (
        "vllm:kv_core_tier_ignored_results",
        "Results of a tier that made no sense.",
    ),
}
"""Name in our measurements of a tier: name in vLLM's, what it counts. Labelled by tier."""

TIER_GAUGES: Final = {
    "health": (
        "vllm:kv_core_tier_health",
        "Health of a tier: 0 in use, 1 degraded (skipped and probed), 2 detached.",
    ),
    "jobs_in_flight": ("vllm:kv_core_tier_jobs", "Jobs that a tier has not reported."),
    "inflight_store_bytes": (
        "vllm:kv_core_tier_inflight_store_bytes",
        "Bytes on their way to a tier.",
    ),
    "overdue_blocks": (
        "vllm:kv_core_tier_overdue_blocks",
        "Slots of the primary tier that overdue jobs of a tier keep out of use.",
    ),
    "store_drop_rate": (
        "vllm:kv_core_tier_store_drop_rate",
        "Share of the stores that are not given to a tier because they take too long.",
    ),
}

TIER_VALUES: Final = "vllm:kv_core_tier_value"
"""Whatever a tier measures itself, by name."""

# vLLM feeds these itself in the tier mode.
_OF_VLLM: Final = frozenset(
    {"engine_queries", "engine_hits", "engine_misses", "engine_blocks_dropped"}
)


def tier_definitions() -> dict[str, Any]:
    """Return the declarations of everything that is measured of a tier."""
    counter, gauge = _compat.OffloadingCounterMetadata, _compat.OffloadingGaugeMetadata
    tier = ("tier",)
    return {
        **{name: counter(text, tier) for name, text in TIER_COUNTERS.values()},
        **{name: gauge(text, tier) for name, text in TIER_GAUGES.values()},
        TIER_VALUES: gauge("What a tier measures itself.", ("tier", "name")),
    }


@final
class TierReport:
    """Reports the totals of one tier: of a counter, what was added since."""

    def __init__(self, label: str) -> None:
        """Start at zero.

        Args:
            label: vLLM's label of the tier.
        """
        self._label = (label,)
        self._totals: dict[str, float] = {}

    def add_to(self, stats: Any, totals: Mapping[str, float]) -> None:
        """Add measurements to those that vLLM is given.

        Args:
            stats: vLLM's ``OffloadingConnectorStats``.
            totals: Ours of the tier, by name.
        """
        for ours, value in totals.items():
            if ours in TIER_COUNTERS:
                self._increase(stats, TIER_COUNTERS[ours][0], value)
            elif ours in TIER_GAUGES:
                stats.set_gauge(TIER_GAUGES[ours][0], value, self._label)
            elif ours not in _OF_VLLM:
                stats.set_gauge(TIER_VALUES, value, (*self._label, ours))

    def _increase(self, stats: Any, name: str, total: float) -> None:
        before = self._totals.get(name, 0)
        self._totals[name] = total
        # After a restart of the count, all of it.
        added = total - before if total >= before else total
        if added:
            stats.increase_counter(name, added, self._label)
