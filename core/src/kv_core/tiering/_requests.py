"""What the tiering manager remembers of live requests.

All state belongs to the thread that drives the manager.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_core.contract import ReqContext
    from kv_core.keys import OffloadKey
    from kv_core.tiering._guard import GuardedTier

__all__ = ["PARAMS_KEY", "RequestState", "RequestTable"]

_LOGGER: Final = logging.getLogger(__name__)

PARAMS_KEY: Final = "kv_core"
"""Entry of a request's ``kv_transfer_params`` that is ours.

``{"load": false, "store": false, "tiers": false}``, all true by default.
"""

_WISHES: Final = frozenset({"load", "store", "tiers"})


@dataclass(slots=True, eq=False)
class RequestState:
    """One live request.

    Attributes:
        context: The request.
        sequence: Order of arrival; smaller is older.
        may_load: Whether the client lets the request load blocks.
        may_store: Whether the client lets the request's blocks be stored.
        may_promote: Whether the client lets blocks come from the tiers below.
        waiting: Whether its last lookups were left without a final answer.
        first_unknown_at: When it was first left waiting, seconds on the engine's clock.
        gave_up: Whether it has waited past its deadline: it is told yes or no from then on.
        unknown_since: When a tier was first asked for a key and did not know.
        step_hits: Hits of this step, to be leased should the request have to wait.
        leases: Blocks held for the request, with their slots (pinned).
        leased_at: When the first of them was leased.
        lease_expired: Whether they have ended by their deadline; there are none for this wait.
        reserved: Slots of its promotions under way.
        promoted: Blocks that were promoted on its behalf, with the tier they came from.
        failed: Promotions that failed, by key and tier; not tried again for this request.
        resolved: By tier, the keys whose lookup counts already.
        request_level_tiers: Tiers (by index) that want every block of the request.
    """

    context: ReqContext
    sequence: int
    may_load: bool = True
    may_store: bool = True
    may_promote: bool = True
    waiting: bool = False
    first_unknown_at: float | None = None
    gave_up: bool = False
    unknown_since: dict[tuple[OffloadKey, GuardedTier], float] = field(default_factory=dict)
    step_hits: list[OffloadKey] = field(default_factory=list)
    leases: dict[OffloadKey, int] = field(default_factory=dict)
    leased_at: float = 0.0
    lease_expired: bool = False
    reserved: int = 0
    promoted: dict[OffloadKey, str] = field(default_factory=dict)
    failed: set[tuple[OffloadKey, GuardedTier]] = field(default_factory=set)
    resolved: dict[GuardedTier, set[OffloadKey]] = field(default_factory=dict)
    request_level_tiers: frozenset[int] = frozenset()


@final
class RequestTable:
    """Live requests by id, and which of them wait.

    Attributes:
        answered: Requests that were answered with a hit in this step, in that order; may hold
            one twice.
    """

    def __init__(self) -> None:
        self.answered: list[RequestState] = []
        self._states: dict[str, RequestState] = {}
        # Ages of waiting requests, sorted: thousands may wait, and each asks in every step.
        self._waiting: list[int] = []
        self._next_sequence = 0
        self._warned_of_params = False
        self.has_wishes = False
        """Whether any request so far had wishes of its own: without, they need no look."""

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    @property
    def num_waiting(self) -> int:
        """Requests that were left without a final answer."""
        return len(self._waiting)

    def find(self, req_id: str) -> RequestState | None:
        """Return a request that is known."""
        return self._states.get(req_id)

    def state(self, context: ReqContext) -> RequestState:
        """Return a request, making it known at its first call."""
        state = self._states.get(context.req_id)
        if state is None:
            state = RequestState(context, self._next_sequence)
            self._next_sequence += 1
            self._states[context.req_id] = state
            if context.kv_transfer_params:
                self._read_params(state, context.kv_transfer_params)
        return state

    def remove(self, req_id: str) -> None:
        """Forget a request."""
        state = self._states.pop(req_id, None)
        if state is not None:
            self.stop_waiting(state)

    def note_hit(self, state: RequestState, key: OffloadKey) -> None:
        """Note a block that a request was told it can load."""
        if not state.step_hits:
            self.answered.append(state)
        state.step_hits.append(key)

    def take_answered(self) -> list[RequestState]:
        """Return the requests with hits in the step that ends, oldest first."""
        answered, self.answered = self.answered, []
        return sorted(answered, key=_sequence)

    def wait(self, state: RequestState, now: float) -> None:
        """Leave a request waiting."""
        if state.first_unknown_at is None:
            state.first_unknown_at = now
        if not state.waiting:
            state.waiting = True
            insort(self._waiting, state.sequence)

    def stop_waiting(self, state: RequestState) -> None:
        """End a request's wait: it loads, runs without, or is gone."""
        state.first_unknown_at = None
        state.gave_up = False
        state.lease_expired = False
        state.unknown_since.clear()
        state.step_hits.clear()
        if state.waiting:
            state.waiting = False
            del self._waiting[bisect_left(self._waiting, state.sequence)]

    def is_oldest_waiting(self, state: RequestState) -> bool:
        """Say whether no older request waits."""
        return not self._waiting or state.sequence <= self._waiting[0]

    def _read_params(self, state: RequestState, params: Mapping[str, Any]) -> None:
        """Read a client's wishes.

        What is not understood keeps the request out of the cache altogether: that costs a
        recompute, and the other reading could keep content that must not be kept.
        """
        ours = params.get(PARAMS_KEY)
        if ours is None:
            return
        wishes = ours if isinstance(ours, Mapping) else {}
        load, store = wishes.get("load", True), wishes.get("store", True)
        promote = wishes.get("tiers", True)
        understood = isinstance(ours, Mapping) and wishes.keys() <= _WISHES
        if not (understood and all(isinstance(wish, bool) for wish in (load, store, promote))):
            if not self._warned_of_params:
                self._warned_of_params = True
                _LOGGER.warning(
                    "kv_transfer_params[%r] of request %s is not understood; expected "
                    '{"load": true|false, "store": true|false, "tiers": true|false}. It is kept '
                    "out of the cache, as is any further one, without a word",
                    PARAMS_KEY,
                    state.context.req_id,
                )
            load = store = False
        state.may_load, state.may_store, state.may_promote = load, store, promote
        self.has_wishes = True


def _sequence(state: RequestState) -> int:
    return state.sequence
