"""Says to vLLM whether a tier is to be given a store, where vLLM asks.

vLLM's word for this is back-pressure, and it counts what was not given under that name. Versions
that do not ask give every store, and the tier's fence refuses it then.

Used by the thread that drives vLLM's tiering manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_core.tiering import TierMode
from kv_core.vllm import _compat

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.tiering import SingleTier

__all__ = ["store_gate"]

_Detector: Final[Any] = _compat.BackpressureDetector or object


def store_gate(tier: Callable[[], SingleTier], detector: Any) -> Any:
    """Return a ``BackpressureDetector``, or ``None`` for a version of vLLM that has none.

    Args:
        tier: Returns the tier; not asked before vLLM has a store for it.
        detector: What the user configured of vLLM's own, or ``None``. It has to agree.
    """
    return None if _compat.BackpressureDetector is None else _StoreGate(tier, detector)


@final
class _StoreGate(_Detector):  # type: ignore[misc]  # vLLM is optional
    def __init__(self, tier: Callable[[], SingleTier], detector: Any) -> None:
        super().__init__(None if detector is None else detector.policy)
        self._tier = tier
        self._inner = detector

    @override
    def should_store(self, num_blocks: int) -> bool:
        if self._inner is not None and not self._inner.should_store(num_blocks):
            return False
        tier = self._tier()
        if tier.admits(num_blocks):
            return True
        if tier.guard.options.mode is not TierMode.READ_ONLY:
            self.policy.on_store_skipped(num_blocks)
        return False

    @override
    def update(self, submit_time: float, num_bytes: int) -> None:
        if self._inner is not None:
            self._inner.update(submit_time, num_bytes)

    @override
    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """Nothing: the tier's fence has its own measure, and the inner one is updated."""

    def on_store_failed(self) -> None:
        # From 0.33 on.
        if hasattr(self._inner, "on_store_failed"):
            self._inner.on_store_failed()

    @override
    def is_under_pressure(self) -> bool:
        if self._inner is not None and self._inner.is_under_pressure():
            return True
        return self._tier().guard.pressure.drop_rate() > 0

    @override
    def reset(self) -> None:
        if self._inner is not None:
            self._inner.reset()

    @property
    @override
    def stats(self) -> dict[str, float]:
        if self._inner is not None and self._inner.stats:
            return dict(self._inner.stats)
        return {"store_latency_ema": self._tier().guard.pressure.seconds_per_mib()}
