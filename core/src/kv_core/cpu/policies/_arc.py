"""Adaptive replacement: balances recency against frequency by its own mistakes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from kv_core.cpu.policies._base import CachePolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Sequence

    from kv_core.keys import OffloadKey

__all__ = ["ARCCachePolicy"]

_LEAST_STEP: Final = 1.0


@final
class ARCCachePolicy(CachePolicy):
    """Evicts from the keys used once or from those used again, whichever it regrets less.

    Present keys are in T1 (used once) or T2 (used again). Keys that were evicted leave a ghost
    in B1 or B2, a key without a slot. A use of a ghost in B1 says that T1 was too small, one in
    B2 that it was too large; the target size of T1 moves accordingly, by the ratio of the ghost
    lists and at least by one.

    A block enters T1 also when it has a ghost: the second use that counts is one of the bytes,
    not of the name.

    Attributes:
        target_t1_size: Size that T1 should have, 0 to ``num_blocks``. Compared as an integer.
    """

    def __init__(self, num_blocks: int, ref_counts: Sequence[int]) -> None:
        super().__init__(num_blocks, ref_counts)
        self.target_t1_size: float = 0.0
        # Cold end first, in all four.
        self._t1: OrderedDict[OffloadKey, int] = OrderedDict()
        self._t2: OrderedDict[OffloadKey, int] = OrderedDict()
        self._b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self._b2: OrderedDict[OffloadKey, None] = OrderedDict()

    @override
    def get(self, key: OffloadKey) -> int | None:
        block_id = self._t1.get(key)
        return self._t2.get(key) if block_id is None else block_id

    @override
    def insert(self, key: OffloadKey, block_id: int) -> None:
        self._t1[key] = block_id
        self._b1.pop(key, None)
        self._b2.pop(key, None)

    @override
    def remove(self, key: OffloadKey) -> None:
        if key in self._t1:
            del self._t1[key]
        else:
            del self._t2[key]

    @override
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        t1, t2, b1, b2, ref_counts = self._t1, self._t2, self._b1, self._b2, self.ref_counts
        slot_in_t1, move_in_t2 = t1.get, t2.move_to_end
        for key in reversed(keys):
            block_id = slot_in_t1(key)
            if block_id is not None:
                if ref_counts[block_id] < 0:
                    # Nobody can have used bytes that are not there yet.
                    t1.move_to_end(key)
                else:
                    del t1[key]
                    t2[key] = block_id
            elif key in t2:
                move_in_t2(key)
            elif key in b1:
                step = max(_LEAST_STEP, len(b2) / len(b1))
                self.target_t1_size = min(float(self.num_blocks), self.target_t1_size + step)
                b1.move_to_end(key)
            elif key in b2:
                step = max(_LEAST_STEP, len(b1) / len(b2))
                self.target_t1_size = max(0.0, self.target_t1_size - step)
                b2.move_to_end(key)

    @override
    def evict(
        self, count: int, protected: Collection[OffloadKey]
    ) -> list[tuple[OffloadKey, int]] | None:
        once = self._candidates(self._t1, protected)
        again = self._candidates(self._t2, protected)
        target = int(self.target_t1_size)
        t1_size = len(self._t1)
        victims: list[tuple[OffloadKey, int]] = []
        from_t1: list[bool] = []
        # Only chosen here: too few candidates must leave everything as it is.
        for _ in range(count):
            prefer_t1 = t1_size >= target
            victim = next(once if prefer_t1 else again, None)
            is_in_t1 = prefer_t1
            if victim is None:
                victim = next(again if prefer_t1 else once, None)
                is_in_t1 = not prefer_t1
                if victim is None:
                    return None
            t1_size -= is_in_t1
            victims.append(victim)
            from_t1.append(is_in_t1)
        once.close()
        again.close()
        for (key, _), is_in_t1 in zip(victims, from_t1, strict=True):
            if is_in_t1:
                del self._t1[key]
                self._b1[key] = None
            else:
                del self._t2[key]
                self._b2[key] = None
        for ghosts in (self._b1, self._b2):
            while len(ghosts) > self.num_blocks:
                ghosts.popitem(last=False)
        return victims

    def _candidates(
        self, blocks: OrderedDict[OffloadKey, int], protected: Collection[OffloadKey]
    ) -> Generator[tuple[OffloadKey, int], None, None]:
        ref_counts = self.ref_counts
        for item in blocks.items():
            if ref_counts[item[1]] == 0 and item[0] not in protected:
                yield item

    @override
    def items(self) -> Iterator[tuple[OffloadKey, int]]:
        yield from self._t1.items()
        yield from self._t2.items()

    @override
    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)
