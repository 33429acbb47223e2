"""What a tier is given at construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

from typing_extensions import override

if TYPE_CHECKING:
    from kv_core.contract._config import TierConfig
    from kv_core.contract._primary import PrimaryView
    from kv_core.keys import Namespace

__all__ = ["Clock", "MetricsSink", "NullMetrics", "TierContext"]

Clock = Callable[[], float]
"""Monotonic seconds. A tier measures its deadlines with this clock only, so tests can turn it."""


class MetricsSink(Protocol):
    """Where a tier reports its own measurements. Every method is thread-safe and cheap."""

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter."""

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""

    def observe(self, name: str, value: float) -> None:
        """Record one value of a distribution."""


@final
class NullMetrics:
    """A sink that keeps nothing."""

    def add(self, name: str, amount: float = 1.0) -> None:
        """Ignore the amount."""

    def set(self, name: str, value: float) -> None:
        """Ignore the value."""

    def observe(self, name: str, value: float) -> None:
        """Ignore the value."""

    @override
    def __repr__(self) -> str:
        return "NullMetrics()"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierContext:
    """Everything a tier needs to know about its surroundings.

    A frozen value object, not the engine: a tier never reaches back into the engine. Later
    minor versions of the contract may add fields; a tier written for an earlier one keeps
    working because it never receives keyword arguments.

    Attributes:
        namespace: Fingerprint of everything that makes bytes interchangeable. Blocks of
            different namespaces must never be found in each other's place.
        block_bytes: Payload bytes of one block.
        num_blocks: Number of slots in the primary tier.
        primary: The shared memory of the primary tier. Usable until ``shutdown()`` returns.
        tier_type: The tier's type, as in its :class:`~kv_core.contract.TierSpec`.
        tier_name: Unique name of this instance in its engine; default the type.
        config: Validated settings, an instance of the tier's own configuration model.
        clock: Monotonic seconds.
        metrics: Where to report measurements beyond those of ``get_stats``.
    """

    namespace: Namespace
    block_bytes: int
    num_blocks: int
    primary: PrimaryView
    tier_type: str
    tier_name: str
    config: TierConfig
    clock: Clock
    metrics: MetricsSink
