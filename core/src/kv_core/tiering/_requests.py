"""What the tiering manager remembers of live requests.

All state belongs to the thread that drives the manager.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kv_core.contract import ReqContext
    from kv_core.keys import OffloadKey

__all__ = ["PARAMS_KEY", "RequestState", "RequestTable"]

_LOGGER: Final = logging.getLogger(__name__)

PARAMS_KEY: Final = "kv_core"
"""Entry of a request's ``kv_transfer_params`` that is ours: ``{"load": false, "store": false}``."""


@dataclass(slots=True)
class RequestState:
    """One live request.

    Attributes:
        context: The request.
        sequence: Order of arrival; smaller is older.
        may_load: Whether the client lets the request load blocks.
        may_store: Whether the client lets the request's blocks be stored.
        waiting: Whether its last lookups were left without a final answer.
        first_unknown_at: When it was first left waiting, seconds on the engine's clock.
        gave_up: Whether it has waited past its deadline: it is told yes or no from then on.
        unknown_since: When a tier (by index) was first asked for a key and did not know.
        step_hits: Hits of this step, to be leased should the request have to wait.
        leases: Blocks held for the request, with their slots (pinned).
        leased_at: When the first of them was leased.
        promoted: Blocks that were promoted on its behalf, with the tier they came from.
        failed: Promotions that failed, by key and tier; not tried again for this request.
        resolved: Keys whose lookup counts already, by tier.
        request_level_tiers: Tiers (by index) that want every block of the request.
    """

    context: ReqContext
    sequence: int
    may_load: bool = True
    may_store: bool = True
    waiting: bool = False
    first_unknown_at: float | None = None
    gave_up: bool = False
    unknown_since: dict[tuple[OffloadKey, int], float] = field(default_factory=dict)
    step_hits: list[OffloadKey] = field(default_factory=list)
    leases: dict[OffloadKey, int] = field(default_factory=dict)
    leased_at: float = 0.0
    promoted: dict[OffloadKey, str] = field(default_factory=dict)
    failed: set[tuple[OffloadKey, int]] = field(default_factory=set)
    resolved: set[tuple[OffloadKey, int]] = field(default_factory=set)
    request_level_tiers: frozenset[int] = frozenset()


@final
class RequestTable:
    """Live requests by id, and which of them wait."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._waiting: dict[str, RequestState] = {}
        self._next_sequence = 0
        self._warned_of_params = False

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    @property
    def waiting(self) -> Mapping[str, RequestState]:
        """Requests that were left without a final answer."""
        return self._waiting

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
        self._states.pop(req_id, None)
        self._waiting.pop(req_id, None)

    def wait(self, state: RequestState, now: float) -> None:
        """Leave a request waiting."""
        if state.first_unknown_at is None:
            state.first_unknown_at = now
        if not state.waiting:
            state.waiting = True
            self._waiting[state.context.req_id] = state

    def stop_waiting(self, state: RequestState) -> None:
        """End a request's wait: it loads, runs without, or is gone."""
        state.first_unknown_at = None
        state.gave_up = False
        state.unknown_since.clear()
        state.step_hits.clear()
        if state.waiting:
            state.waiting = False
            del self._waiting[state.context.req_id]

    def is_oldest_waiting(self, state: RequestState) -> bool:
        """Say whether no older request waits."""
        return all(other.sequence >= state.sequence for other in self._waiting.values())

    def oldest_first(self) -> list[RequestState]:
        """Return waiting requests by age."""
        return sorted(self._waiting.values(), key=_sequence)

    def youngest_first(self, younger_than: RequestState) -> Iterable[RequestState]:
        """Return waiting requests that are younger than one, the youngest first."""
        younger = [s for s in self._waiting.values() if s.sequence > younger_than.sequence]
        return sorted(younger, key=_sequence, reverse=True)

    def _read_params(self, state: RequestState, params: Mapping[str, Any]) -> None:
        """Read a client's wishes; what is not understood is ignored, not an error."""
        ours = params.get(PARAMS_KEY)
        if ours is None:
            return
        wishes = ours if isinstance(ours, Mapping) else {}
        load, store = wishes.get("load", True), wishes.get("store", True)
        understood = isinstance(ours, Mapping) and wishes.keys() <= {"load", "store"}
        if not (understood and isinstance(load, bool) and isinstance(store, bool)):
            if not self._warned_of_params:
                self._warned_of_params = True
                _LOGGER.warning(
                    "kv_transfer_params[%r] of request %s is not understood; expected "
                    '{"load": true|false, "store": true|false}. Further ones are ignored silently',
                    PARAMS_KEY,
                    state.context.req_id,
                )
            return
        state.may_load, state.may_store = load, store


def _sequence(state: RequestState) -> int:
    return state.sequence
