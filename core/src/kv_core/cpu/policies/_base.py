"""What an eviction policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from kv_core.keys import OffloadKey

__all__ = ["CachePolicy"]


class CachePolicy(ABC):
    """Maps the keys in the primary tier to their slots, and says which of them goes next.

    A policy is the index of the tier: a key is present exactly when :meth:`get` knows it. State
    of the slots is not its business; it reads :attr:`ref_counts`, which the manager keeps up to
    date. All calls come from one thread at a time.

    A policy is installed by an entry point of the group ``kv_core.cache_policies`` that names the
    class; it is built with the two arguments below and must not keep others.

    Attributes:
        num_blocks: Slots of the tier: no more keys are ever present.
        ref_counts: State by slot id, live and not to be written: -1 while the slot is being
            written, 0 when it may be evicted, above 0 while it is pinned.
    """

    def __init__(self, num_blocks: int, ref_counts: Sequence[int]) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = ref_counts

    @abstractmethod
    def get(self, key: OffloadKey) -> int | None:
        """Return the slot of a key, or ``None`` when it is not present. Changes nothing."""

    def getter(self) -> Callable[[OffloadKey], int | None]:
        """Return a function that answers as :meth:`get` does, for as long as the policy lives.

        A policy whose index is one mapping returns that mapping's own method: the manager asks
        several times for every block, and a call into Python each time is most of the cost.
        """
        return self.get

    @abstractmethod
    def insert(self, key: OffloadKey, block_id: int) -> None:
        """Add a key that is not present. Its slot is being written."""

    @abstractmethod
    def remove(self, key: OffloadKey) -> None:
        """Drop a present key whose store failed, as if it had never been inserted."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note one use of each key.

        Args:
            keys: Distinct, in prefix order: the first must outlive the last. Keys that are not
                present may be known from before their eviction; others are ignored.
        """

    @abstractmethod
    def evict(
        self, count: int, protected: Collection[OffloadKey]
    ) -> list[tuple[OffloadKey, int]] | None:
        """Choose victims and drop them.

        Args:
            count: How many keys must go.
            protected: Keys that must stay. Supports ``in`` at constant cost.

        Returns:
            Exactly ``count`` pairs of key and slot, all with a reference count of 0 and not
            protected; or ``None`` when there are fewer, and then nothing has changed.
        """

    @abstractmethod
    def items(self) -> Iterator[tuple[OffloadKey, int]]:
        """Iterate over all present keys and their slots, in any order."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of present keys."""
