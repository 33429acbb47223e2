"""What the tiering manager remembers of one live request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_core.contract import ReqContext
    from kv_core.keys import OffloadKey

__all__ = ["RequestState"]


@dataclass(slots=True)
class RequestState:
    """One live request.

    Attributes:
        context: The request.
        sequence: Order of arrival; smaller is older.
        waiting: Whether its last lookups were left without a final answer.
        first_unknown_at: When it was first left waiting, seconds on the engine's clock.
        gave_up: Whether it has waited past its deadline: it is told yes or no from then on.
        leases: Promoted blocks held for the request, with their slots (pinned).
        promoted: Blocks that were promoted on its behalf, with the tier they came from.
        failed: Promotions that failed; not tried again for this request.
    """

    context: ReqContext
    sequence: int
    waiting: bool = False
    first_unknown_at: float | None = None
    gave_up: bool = False
    leases: dict[OffloadKey, int] = field(default_factory=dict)
    promoted: dict[OffloadKey, str] = field(default_factory=dict)
    failed: set[tuple[OffloadKey, int]] = field(default_factory=set)
