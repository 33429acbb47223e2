"""The share of the primary tier that promotions and waiting requests may take.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.cpu import CPUPrimaryTierOffloadingManager
    from kv_core.keys import OffloadKey
    from kv_core.tiering._requests import RequestState, RequestTable

__all__ = ["PrimaryShare"]


@final
class PrimaryShare:
    """Counts reservations, leases and quarantined slots, and owns the leases.

    Attributes:
        limit: Most slots that the three may take together.
        reserved: Slots of promotions under way.
        leased: Slots pinned for waiting requests.
        quarantined: Slots of promotions that were given up and may still be written to.
        revoked: Leases taken from younger requests so far.
    """

    def __init__(
        self,
        limit: int,
        primary: CPUPrimaryTierOffloadingManager,
        requests: RequestTable,
    ) -> None:
        self.limit = limit
        self.reserved = 0
        self.leased = 0
        self.quarantined = 0
        self.revoked = 0
        self._primary = primary
        self._requests = requests

    @property
    def used(self) -> int:
        """Slots in use."""
        return self.reserved + self.leased + self.quarantined

    def has_room(self, state: RequestState) -> bool:
        """Say whether one more slot fits, after taking a younger request's lease if need be."""
        return self.used < self.limit or self.revoke_younger(state)

    def revoke_younger(self, state: RequestState) -> bool:
        """Take one lease from the youngest of the requests that are younger than another.

        The block stays in the primary tier as long as nothing evicts it.

        Returns:
            Whether there was a lease to take.
        """
        if not self.leased:
            return False
        for younger in self._requests.youngest_first(state):
            if younger.leases:
                # The tail of the prefix goes first: the head is of use without it.
                _, block_id = younger.leases.popitem()
                self._primary.complete_read((block_id,))
                self.leased -= 1
                self.revoked += 1
                return True
        return False

    def lease(self, state: RequestState, keys: Sequence[OffloadKey], now: float) -> None:
        """Pin readable blocks for a request, the leading ones that fit the share."""
        fresh = [key for key in dict.fromkeys(keys) if key not in state.leases]
        fresh = fresh[: max(0, self.limit - self.used)]
        if not fresh:
            return
        if not state.leases:
            state.leased_at = now
        block_ids = self._primary.prepare_read(fresh).tolist()
        state.leases.update(zip(fresh, block_ids, strict=True))
        self.leased += len(fresh)

    def end_leases(self, state: RequestState) -> None:
        """Unpin all blocks of a request."""
        if state.leases:
            self._primary.complete_read(state.leases.values())
            self.leased -= len(state.leases)
            state.leases.clear()
