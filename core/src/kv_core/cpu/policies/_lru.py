"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from kv_core.cpu.policies._base import CachePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from kv_core.keys import OffloadKey

__all__ = ["LRUCachePolicy"]

# Blocks that are in use for long, such as those a stalled tier reads, gather at the cold end. So
# many may stay there; more are moved away, or every eviction would have to pass all of them.
_MOST_IN_USE_AT_COLD_END: Final = 128


@final
class LRUCachePolicy(CachePolicy):
    """Evicts the key whose last use is longest ago.

    A batch is touched from its end, so that the head of a prefix is more recent than its tail:
    a prefix without its head is useless, one without its tail is only shorter.
    """

    def __init__(self, num_blocks: int, ref_counts: Sequence[int]) -> None:
        super().__init__(num_blocks, ref_counts)
        # Cold end first.
        self._blocks: OrderedDict[OffloadKey, int] = OrderedDict()

    @override
    def get(self, key: OffloadKey) -> int | None:
        return self._blocks.get(key)

    @override
    def getter(self) -> Callable[[OffloadKey], int | None]:
        return self._blocks.get

    @override
    def insert(self, key: OffloadKey, block_id: int) -> None:
        self._blocks[key] = block_id

    @override
    def remove(self, key: OffloadKey) -> None:
        del self._blocks[key]

    @override
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        blocks = self._blocks
        move_to_end = blocks.move_to_end
        for key in reversed(keys):
            if key in blocks:
                move_to_end(key)

    @override
    def evict(
        self, count: int, protected: Collection[OffloadKey]
    ) -> list[tuple[OffloadKey, int]] | None:
        blocks, ref_counts = self._blocks, self.ref_counts
        victims: list[tuple[OffloadKey, int]] = []
        in_use: list[OffloadKey] = []
        if count > len(blocks):
            return None
        if count > 0:
            for item in blocks.items():
                if ref_counts[item[1]] != 0:
                    in_use.append(item[0])
                elif item[0] not in protected:
                    victims.append(item)
                    if len(victims) == count:
                        break
            else:
                return None
        for key, _ in victims:
            del blocks[key]
        if len(in_use) > _MOST_IN_USE_AT_COLD_END:
            for key in in_use:
                blocks.move_to_end(key)
        return victims

    @override
    def items(self) -> Iterator[tuple[OffloadKey, int]]:
        return iter(self._blocks.items())

    @override
    def __len__(self) -> int:
        return len(self._blocks)
