"""Measurements of the engine mode, in the form in which vLLM collects and publishes them.

vLLM asks for measurements in every step, adds up what it gets of a counter, and keeps the last of
a gauge. It refuses names that were not declared, so everything is in the tables below. What vLLM's
own tiering publishes keeps its name; what is ours begins with ``vllm:kv_core_``, for vLLM shows its
users no metric without its own name in front.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_core.tiering import JobObserver, JobReport
from kv_core.vllm import _compat
from kv_core.vllm._tier_metrics import TierReport, tier_definitions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_core.contract import Clock

__all__ = ["StatsFeed", "metric_definitions"]

_PERIOD_S: Final = 0.25

# vLLM's own, fed from the jobs of tiers.
_READ_BYTES: Final = "vllm:kv_offload_tiering_read_bytes"
_READ_TIME: Final = "vllm:kv_offload_tiering_read_time"
_WRITE_BYTES: Final = "vllm:kv_offload_tiering_write_bytes"
_WRITE_TIME: Final = "vllm:kv_offload_tiering_write_time"
_PROMOTION_FAILURES: Final = "vllm:kv_offload_tiering_promotion_job_failures"
_CASCADE_FAILURES: Final = "vllm:kv_offload_tiering_cascade_job_failures"
_OF_JOBS: Final = {
    _READ_BYTES: "Bytes read from a tier into the primary tier.",
    _READ_TIME: "Seconds that reads from a tier took, summed over jobs.",
    _WRITE_BYTES: "Bytes written from the primary tier to a tier.",
    _WRITE_TIME: "Seconds that writes to a tier took, summed over jobs.",
    _PROMOTION_FAILURES: "Jobs that read from a tier and failed in whole or in part.",
    _CASCADE_FAILURES: "Jobs that wrote to a tier and failed in whole or in part.",
}

# Name in our manager's measurements: name here, what it counts.
_COUNTERS: Final = {
    "blocks_evicted": ("vllm:kv_core_evicted_blocks", "Blocks evicted from the primary tier."),
    "stores_declined": (
        "vllm:kv_core_declined_stores",
        "Offers that found no room in the primary tier and are made again.",
    ),
    "stores_failed": (
        "vllm:kv_core_failed_store_blocks",
        "Blocks whose copy to the primary tier failed.",
    ),
    "promotions": ("vllm:kv_core_promoted_blocks", "Blocks that were read from a tier."),
    "promotions_failed": (
        "vllm:kv_core_failed_promotion_blocks",
        "Blocks that a tier had promised and could not deliver.",
    ),
    "promotions_abandoned": (
        "vllm:kv_core_abandoned_promotion_blocks",
        "Blocks that a tier did not deliver in time.",
    ),
    "promotions_without_room": (
        "vllm:kv_core_promotions_without_room",
        "Times a block of a tier found no room in the primary tier.",
    ),
    "leases_revoked": (
        "vllm:kv_core_revoked_leases",
        "Blocks taken from younger waiting requests.",
    ),
    "lookup_deadlines_passed": (
        "vllm:kv_core_lookup_deadlines_passed",
        "Requests that were told to go on without what they waited for.",
    ),
}

_GAUGES: Final = {
    "requests_waiting": ("vllm:kv_core_waiting_requests", "Requests that wait for tiers."),
    "share_blocks_used": (
        "vllm:kv_core_reserved_blocks",
        "Slots of the primary tier held for promotions and waiting requests.",
    ),
    "blocks_missed_by_tiers": (
        "vllm:kv_core_missed_blocks",
        "Blocks of the primary tier that some tier should have and has not.",
    ),
}

_STATES: Final = ("free", "evictable", "pinned", "writing", "orphaned")
_BLOCKS: Final = "vllm:kv_core_primary_blocks"
_HIT_BLOCKS: Final = "vllm:kv_core_hit_blocks"

# vLLM's own as well, which our tier mode leaves to vLLM.
_TIER_COUNTERS: Final = {
    "engine_queries": (
        "vllm:kv_offload_tiering_chunk_queries",
        "Blocks that a tier was asked for and has answered.",
    ),
    "engine_hits": (
        "vllm:kv_offload_tiering_chunk_hits",
        "Blocks that a tier was asked for and delivered.",
    ),
    "engine_blocks_dropped": (
        "vllm:kv_offload_tiering_backpressure_blocks_dropped",
        "Blocks that were not given to a tier because its stores take too long.",
    ),
}


def metric_definitions() -> dict[str, Any]:
    """Return the declarations of everything that :class:`StatsFeed` reports."""
    counter, gauge = _compat.OffloadingCounterMetadata, _compat.OffloadingGaugeMetadata
    tier = ("tier",)
    return {
        **{name: counter(text, tier) for name, text in _OF_JOBS.items()},
        **{name: counter(text) for name, text in _COUNTERS.values()},
        **{name: gauge(text) for name, text in _GAUGES.values()},
        **{name: counter(text, tier) for name, text in _TIER_COUNTERS.values()},
        **tier_definitions(),
        _BLOCKS: gauge("Slots of the primary tier by state.", ("state",)),
        _HIT_BLOCKS: counter(
            "Blocks delivered to the GPU by the level they came from.", ("level",)
        ),
    }


@final
class StatsFeed(JobObserver):
    """Collects what happened since vLLM asked last.

    Our measurements are totals, and reading all of them takes longer than vLLM's other work of a
    step. So they are read a few times a second only, and what was added since is reported.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, float]],
        tiers: Sequence[str],
        block_bytes: int,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """Start at zero.

        Args:
            read: Returns the manager's totals, with ``tier.NAME.X`` for each tier.
            tiers: Names of the tiers, in lookup order.
            block_bytes: Bytes of one block.
            clock: Monotonic seconds.
        """
        self._read = read
        # As vLLM labels tiers: their place, with the primary tier as number 0, and what they are.
        self._labels = {name: (f"{place}:{name}",) for place, name in enumerate(tiers, start=1)}
        self._reports = {name: TierReport(label) for name, (label,) in self._labels.items()}
        self._block_bytes = block_bytes
        self._clock = clock
        self._read_at = clock()
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._of_jobs: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)

    @override
    def job_finished(self, report: JobReport) -> None:
        label = self._labels[report.tier]
        of_jobs = self._of_jobs
        num_bytes = report.blocks_succeeded * self._block_bytes
        if report.is_promotion:
            names = (_READ_BYTES, _READ_TIME, _PROMOTION_FAILURES)
        else:
            names = (_WRITE_BYTES, _WRITE_TIME, _CASCADE_FAILURES)
        of_jobs[names[0], label] += num_bytes
        of_jobs[names[1], label] += report.seconds
        if report.blocks_succeeded < report.blocks:
            of_jobs[names[2], label] += 1

    def take(self) -> Any:
        """Return what is to be reported now; ``None`` for nothing."""
        now = self._clock()
        if now - self._read_at < _PERIOD_S:
            return None
        self._read_at = now
        stats = _compat.new_stats()
        for (name, label), value in self._of_jobs.items():
            stats.increase_counter(name, value, label)
        self._of_jobs.clear()
        totals = self._read()
        for ours, (name, _) in _COUNTERS.items():
            self._increase(stats, name, totals.get(ours, 0), ())
        for ours, (name, _) in _GAUGES.items():
            stats.set_gauge(name, totals.get(ours, 0))
        for state in _STATES:
            stats.set_gauge(_BLOCKS, totals.get(f"blocks_{state}", 0), (state,))
        for level in ("cpu", *self._labels):
            self._increase(stats, _HIT_BLOCKS, totals.get(f"hits.{level}", 0), (level,))
        for tier, label in self._labels.items():
            prefix = f"tier.{tier}."
            of_tier = {
                name[len(prefix) :]: value
                for name, value in totals.items()
                if name.startswith(prefix)
            }
            for ours, (name, _) in _TIER_COUNTERS.items():
                self._increase(stats, name, of_tier.get(ours, 0), label)
            self._reports[tier].add_to(stats, of_tier)
        return stats

    def _increase(self, stats: Any, name: str, total: float, label: tuple[str, ...]) -> None:
        """Report what was added to a total; after a restart of its count, all of it."""
        before = self._totals.get((name, label), 0)
        self._totals[name, label] = total
        added = total - before if total >= before else total
        if added:
            stats.increase_counter(name, added, label)
