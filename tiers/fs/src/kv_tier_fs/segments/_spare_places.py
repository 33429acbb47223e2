"""Further places of blocks that are in several: stored by several processes, or being moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, final

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey
    from kv_tier_fs.segments._segment import Segment

__all__ = ["Place", "SparePlaces"]

Place: TypeAlias = "tuple[Segment, int, int]"
"""Where a block is: segment, slot, checksum. A plain tuple, for every block of every load."""


@final
class SparePlaces:
    """For each key, its places besides the current one. Belongs to one thread."""

    def __init__(self) -> None:
        # The latest is the last.
        self._places: dict[OffloadKey, list[Place]] = {}
        self._keys_in: dict[Segment, set[OffloadKey]] = {}

    def __len__(self) -> int:
        """Return the number of keys that have such places."""
        return len(self._places)

    def add(self, key: OffloadKey, place: Place) -> None:
        """Note a place, as the latest."""
        self._places.setdefault(key, []).append(place)
        self._keys_in.setdefault(place[0], set()).add(key)

    def of(self, key: OffloadKey) -> list[Place]:
        """Return the places of a key that are not gone, the latest first."""
        return [place for place in reversed(self._places.get(key, ())) if not place[0].gone]

    def remove(self, key: OffloadKey, segment: Segment, slot: int) -> None:
        """Forget a place, if it is one."""
        places = self._places.get(key)
        if places is None:
            return
        kept = [place for place in places if place[0] is not segment or place[1] != slot]
        self._keep(key, kept)
        if all(place[0] is not segment for place in kept):
            keys = self._keys_in.get(segment, set())
            keys.discard(key)
            if not keys:
                self._keys_in.pop(segment, None)

    def take(self, key: OffloadKey) -> Place | None:
        """Return the latest place that is not gone, as one no more."""
        for place in self.of(key):
            self.remove(key, place[0], place[1])
            return place
        return None

    def drop(self, segment: Segment) -> None:
        """Forget all places in a segment."""
        for key in self._keys_in.pop(segment, ()):
            self._keep(key, [place for place in self._places[key] if place[0] is not segment])

    def _keep(self, key: OffloadKey, places: list[Place]) -> None:
        if places:
            self._places[key] = places
        else:
            del self._places[key]
