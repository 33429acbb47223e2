"""What a bucket counts: errors by kind, and lookups that were not asked.

**Who owns what.** The tier's loop counts; the engine's thread reads. All names are there from the
beginning, so that reading never meets a dictionary that grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from kv_core.contract import MetricDefinition, MetricKind
from kv_tier_s3._errors import S3ErrorKind

if TYPE_CHECKING:
    from kv_core.contract import MetricsSink

__all__ = ["METRIC_DEFINITIONS", "ErrorCounts"]

_NOT_ASKED: Final = "s3_lookups_not_asked"


def _name_of(kind: S3ErrorKind) -> str:
    return f"s3_errors_{kind.value}"


METRIC_DEFINITIONS: Final = (
    *(
        MetricDefinition(
            _name_of(kind),
            MetricKind.COUNTER,
            f"Requests to the store that ended in an error of the kind '{kind.value}'.",
        )
        for kind in S3ErrorKind
    ),
    MetricDefinition(
        _NOT_ASKED,
        MetricKind.COUNTER,
        "Lookups that were answered 'absent' without asking a store that answers nothing.",
    ),
)
"""What :class:`ErrorCounts` counts."""


@final
class ErrorCounts:
    """Counters of one tier.

    Args:
        metrics: Hears of everything that is counted, too.
    """

    def __init__(self, metrics: MetricsSink) -> None:
        self._metrics = metrics
        self._counts = dict.fromkeys((known.name for known in METRIC_DEFINITIONS), 0)

    def note(self, kind: S3ErrorKind) -> None:
        """Count an error."""
        self._add(_name_of(kind))

    def note_not_asked(self) -> None:
        """Count a lookup that was not asked."""
        self._add(_NOT_ASKED)

    def stats(self) -> dict[str, float]:
        """Return all counters. Thread-safe."""
        return {name: float(count) for name, count in self._counts.items()}

    def _add(self, name: str) -> None:
        self._counts[name] += 1
        self._metrics.add(name)
