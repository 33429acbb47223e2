"""Definitions of the measurements a tier adds to those every tier has."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["MetricDefinition", "MetricKind"]


class MetricKind(enum.Enum):
    """How values of a metric combine."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric that a tier reports through its metrics sink or ``get_stats``.

    Attributes:
        name: Name in the sink, snake case, unit last (``read_bytes``, ``read_seconds``).
        kind: How values combine.
        help: One sentence for the dashboard.
    """

    name: str
    kind: MetricKind
    help: str
