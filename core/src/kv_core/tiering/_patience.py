"""How long lookups may stay without an answer, and who is to blame when they do.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_core.tiering._health import Activity, HealthState

if TYPE_CHECKING:
    from kv_core.contract import Clock
    from kv_core.keys import OffloadKey
    from kv_core.tiering._config import TieringConfig
    from kv_core.tiering._guard import GuardedTier
    from kv_core.tiering._requests import RequestState

__all__ = ["LookupPatience"]


@final
class LookupPatience:
    """Holds tiers to the deadline they declare, and every wait to that of the configuration.

    Attributes:
        deadlines_passed: Requests that have waited to the end of the engine's patience.
    """

    def __init__(self, config: TieringConfig, clock: Clock) -> None:
        self.deadlines_passed = 0
        self._deadline_s = config.request_lookup_deadline_s
        self._clock = clock

    def may_still_know(self, key: OffloadKey, tier: GuardedTier, state: RequestState) -> bool:
        """Say whether a tier that does not know yet has time left; then the block is absent."""
        now = self._clock()
        since = state.unknown_since.setdefault((key, tier), now)
        if now - since <= tier.limits.lookup_deadline_s:
            return True
        if not tier.has_resolved(key, state):
            tier.resolve(key, state, "errors")
            tier.health.failed(Activity.CALL, "a lookup was not answered by its deadline")
        state.failed.add((key, tier))
        return False

    def is_exhausted(self, state: RequestState) -> bool:
        """Say whether a request has waited too long: it is told yes or no from then on."""
        if state.first_unknown_at is None or state.gave_up:
            return state.gave_up
        if self._clock() - state.first_unknown_at > self._deadline_s:
            state.gave_up = True
            self.deadlines_passed += 1
            self._note_silence(state)
        return state.gave_up

    def _note_silence(self, state: RequestState) -> None:
        """Hold it against tiers that a request has waited for their answers in vain.

        A tier may declare a longer deadline for its lookups than requests wait. One that never
        answers would make every request wait to the end, and stay healthy.
        """
        asked_before = self._clock() - self._deadline_s / 2
        silent: set[GuardedTier] = set()
        for (key, tier), since in state.unknown_since.items():
            if since > asked_before or tier.has_resolved(key, state):
                continue
            if tier.health.state is not HealthState.DETACHED:
                tier.resolve(key, state, "errors")
                silent.add(tier)
        for tier in silent:
            tier.health.failed(Activity.CALL, "a request's lookups were not answered in its time")
