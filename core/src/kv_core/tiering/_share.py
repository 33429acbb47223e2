"""The share of the primary tier that promotions and waiting requests may take.

All state belongs to the thread that drives the tiering manager.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.cpu import CPUPrimaryTierOffloadingManager
    from kv_core.keys import OffloadKey
    from kv_core.tiering._requests import RequestState

__all__ = ["PrimaryShare"]


@final
class PrimaryShare:
    """Counts reservations, leased slots and quarantined slots, and owns the leases.

    A slot that several requests lease counts once, or a prefix that many of them share would
    fill the share by itself.

    Attributes:
        limit: Most slots that the three may take together.
        reserved: Slots of promotions under way.
        quarantined: Slots of promotions that were given up and may still be written to.
        revoked: Leases taken from younger requests so far.
    """

    def __init__(
        self, limit: int, lease_deadline_s: float, primary: CPUPrimaryTierOffloadingManager
    ) -> None:
        self.limit = limit
        self.reserved = 0
        self.quarantined = 0
        self.revoked = 0
        self._lease_deadline_s = lease_deadline_s
        self._primary = primary
        # Leased slots, and by how many requests.
        self._leases_of: dict[int, int] = {}
        # Requests with leases by age, in the order in which their leases began; and the ages.
        self._holders: OrderedDict[int, RequestState] = OrderedDict()
        self._ages: list[int] = []

    @property
    def leased(self) -> int:
        """Slots that are pinned for waiting requests."""
        return len(self._leases_of)

    @property
    def used(self) -> int:
        """Slots in use."""
        return self.reserved + len(self._leases_of) + self.quarantined

    def has_room(self, state: RequestState) -> bool:
        """Say whether one more slot fits, after taking leases from younger requests if need be."""
        # As `used` is, which many lookups in a row would notice.
        while self.reserved + len(self._leases_of) + self.quarantined >= self.limit:
            if not self.revoke_younger(state):
                return False
        return True

    def is_filled_by(self, state: RequestState) -> bool:
        """Say whether waiting is in vain: there is no room even once all others are done."""
        return state.reserved + len(state.leases) + self.quarantined >= self.limit

    def revoke_younger(self, state: RequestState, *, spare_answered: bool = False) -> bool:
        """Take one lease from the youngest of the requests that are younger than another.

        Args:
            state: The older request.
            spare_answered: Whether a request that was answered in this step keeps its leases.
                Its blocks cannot be evicted within the step anyway.

        Returns:
            Whether there was a lease to take. It frees a slot unless others lease it, too.
        """
        if not self._ages or self._ages[-1] <= state.sequence:
            return False
        younger = self._holders[self._ages[-1]]
        if spare_answered and younger.step_hits:
            return False
        # The tail of the prefix goes first: the head is of use without it.
        _, block_id = younger.leases.popitem()
        self._primary.complete_read((block_id,))
        self._uncount(block_id)
        if not younger.leases:
            self._remove_holder(younger)
        self.revoked += 1
        return True

    def lease(self, state: RequestState, keys: Sequence[OffloadKey], now: float) -> None:
        """Pin readable blocks for a request, the leading ones that fit the share.

        A request whose leases have ended by their deadline gets no new ones for this wait.
        """
        if state.lease_expired:
            return
        fresh = [key for key in dict.fromkeys(keys) if key not in state.leases]
        room = max(0, self.limit - self.used)
        if fresh[:room]:
            self._pin(state, fresh[:room], now)
        for key in fresh[room:]:
            is_leased = self._primary.block_id_of(key) in self._leases_of
            if not is_leased and not self.has_room(state):
                break
            self._pin(state, (key,), now)

    def _pin(self, state: RequestState, keys: Sequence[OffloadKey], now: float) -> None:
        if not state.leases:
            state.leased_at = now
            self._holders[state.sequence] = state
            insort(self._ages, state.sequence)
        # A use, of which its load makes no second one. Held but cold blocks would gather where
        # evictions begin to look.
        self._primary.touch(keys, state.context)
        block_ids = self._primary.pin(keys)
        state.leases.update(zip(keys, block_ids, strict=True))
        leases_of = self._leases_of
        for block_id in block_ids:
            leases_of[block_id] = leases_of.get(block_id, 0) + 1

    def end_leases(self, state: RequestState) -> None:
        """Unpin all blocks of a request."""
        if state.leases:
            self._primary.complete_read(state.leases.values())
            for block_id in state.leases.values():
                self._uncount(block_id)
            state.leases.clear()
            self._remove_holder(state)

    def expire(self, now: float) -> None:
        """End the leases of requests that have held some for too long."""
        while self._holders:
            state = next(iter(self._holders.values()))
            if now - state.leased_at <= self._lease_deadline_s:
                break
            state.lease_expired = True
            self.end_leases(state)

    def _uncount(self, block_id: int) -> None:
        count = self._leases_of.pop(block_id) - 1
        if count:
            self._leases_of[block_id] = count

    def _remove_holder(self, state: RequestState) -> None:
        del self._holders[state.sequence]
        del self._ages[bisect_left(self._ages, state.sequence)]
